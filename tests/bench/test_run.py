"""Endpoints measured and configurations compared, on a fake endpoint whose speed and acceptance are known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from eaglenest.bench.figures import paired_speedup, point_figures, pool_acceptance
from eaglenest.bench.measure import interleave, measure, slices
from eaglenest.bench.models import BenchResult, Configuration, Measurement, Plan
from eaglenest.bench.run import compare, default_configurations, run_bench, running
from eaglenest.errors import BenchError

QUICK = Plan(concurrencies=(1, 2), max_tokens=9, requests_per_point={1: 4, 2: 6})
PLAIN = Configuration(name="plain", dtype="float32", speculation=False, eager=True)
OTHER = Configuration(name="plain bfloat16", dtype="bfloat16", speculation=False, eager=True)
FAST = Configuration(name="speculative", dtype="float32", speculation=True, eager=True)


def test_every_figure_follows_from_the_rows(endpoint: Any, make_prompts: Any) -> None:
    said: list[str] = []
    measured = measure(endpoint.url, None, make_prompts(8), QUICK, name="fake", on_progress=said.append)
    assert measured.model == "fake-target"
    assert [point.concurrency for point in measured.points] == [1, 2]
    assert [point.requests for point in measured.points] == [4, 6]
    for point in measured.points:
        rows = [row for row in measured.rows if row.concurrency == point.concurrency]
        assert point == point_figures(rows, point.concurrency)
    assert measured.acceptance == pool_acceptance(measured.rows)
    assert measured.acceptance is not None
    assert measured.acceptance.accept_len == pytest.approx(2.0)
    assert set(measured.acceptance.by_category) == {"c0", "c1"}
    assert len(said) == 2
    assert Measurement.model_validate_json(measured.model_dump_json()) == measured


def test_windows_share_no_prefix_cache_and_repeat_no_prompt(endpoint: Any, make_prompts: Any) -> None:
    measure(endpoint.url, None, make_prompts(10), QUICK)
    long = [body for body in endpoint.bodies if body["max_tokens"] == 9]
    asked = [body["messages"][0]["content"] for body in long]
    assert len(set(asked)) == len(asked) == 10
    assert len({body["cache_salt"] for body in endpoint.bodies}) == 4  # two warm-ups, two windows


def test_without_per_request_figures_the_counters_stand_in(endpoint: Any, make_prompts: Any) -> None:
    endpoint.per_request = False
    measured = measure(endpoint.url, None, make_prompts(8), QUICK)
    for found in (measured.acceptance, measured.points[0].acceptance):
        assert found is not None
        assert found.coarse
        assert found.accept_len == pytest.approx(2.0)
        assert found.unconditional == pytest.approx([1, 0, 0])
        assert found.by_category == {}
    assert measured.acceptance is not None
    assert measured.acceptance.steps == 10 * 4


def test_a_plain_endpoint_has_no_acceptance(endpoint: Any, make_prompts: Any) -> None:
    endpoint.speculative = False
    assert measure(endpoint.url, None, make_prompts(8), QUICK).acceptance is None


def test_failures_are_reported_and_a_window_of_nothing_else_refused(endpoint: Any, make_prompts: Any) -> None:
    endpoint.faults["p0"] = "429"
    measured = measure(endpoint.url, None, make_prompts(8), QUICK)
    assert measured.points[0].failures == {"http 429": 1}
    endpoint.faults |= {f"p{i}": "429" for i in range(8)}
    with pytest.raises(BenchError, match="every request at concurrency 1 failed"):
        measure(endpoint.url, None, make_prompts(8), QUICK)


def test_no_prompts_and_no_endpoint_are_refused(endpoint: Any, make_prompts: Any) -> None:
    with pytest.raises(BenchError, match="no prompts"):
        measure(endpoint.url, None, [], QUICK)
    with pytest.raises(BenchError, match="no OpenAI-compatible endpoint"):
        measure("http://127.0.0.1:9", None, make_prompts(2), QUICK)


def test_a_plan_with_unknown_or_senseless_settings_is_refused() -> None:
    for bad in ({"concurrencies": ()}, {"concurrencies": (0,)}, {"max_tokens": 1}, {"requests": 3}):
        with pytest.raises(ValueError, match="validation error"):
            Plan(**bad)  # type: ignore[arg-type]


def test_any_stretch_of_the_mixture_holds_every_category(make_prompts: Any) -> None:
    mixture = interleave(sorted(make_prompts(12, categories=4), key=lambda p: p.category))
    for start in (0, 4, 8):
        assert {p.category for p in mixture[start : start + 4]} == {"c0", "c1", "c2", "c3"}
    parts = slices(make_prompts(6), {1: 4, 8: 4})
    assert [p.id for p in parts[1]] + [p.id for p in parts[8]] == ["p0", "p1", "p2", "p3", "p4", "p5", "p0", "p1"]


@pytest.fixture(scope="module")
def bench(shared_endpoint: Any, make_prompts: Any) -> BenchResult:
    """One engine at a time on the same port: 10 ms steps; plain float32, plain bfloat16 (slower), speculative."""
    endpoint = shared_endpoint

    @contextmanager
    def deploy(configuration: Configuration) -> Iterator[str]:
        endpoint.speculative = configuration.speculation
        endpoint.step_s = 0.02 if configuration.dtype == "bfloat16" else 0.01
        yield endpoint.url

    endpoint.first_s = 0.01
    plan = Plan(concurrencies=(1, 2), max_tokens=17, requests_per_point=4)
    return run_bench([PLAIN, OTHER, FAST], deploy, make_prompts(8), plan)


def test_speedup_is_measured_against_the_same_mode_and_the_best_plain_one(bench: BenchResult) -> None:
    # 17 tokens: plain 1 + 16 steps of 10 ms, speculative 1 + 8. A loaded machine stretches both.
    assert bench.speedup_c1 == pytest.approx(17 / 9, rel=0.25)
    assert bench.speedup_c1_against == "plain"
    assert bench.best_plain == "plain"
    assert bench.speedup_c1_vs_best_plain == bench.speedup_c1
    assert bench.speedup_c1_interval is not None
    low, high = bench.speedup_c1_interval
    assert low <= bench.speedup_c1 <= high
    assert {(s.plain, s.concurrency) for s in bench.speedups} == {
        (name, c) for name in ("plain", "plain bfloat16") for c in (1, 2)
    }
    assert [m.name for m in bench.plain] == ["plain", "plain bfloat16"]


def test_outputs_of_the_same_mode_are_compared(bench: BenchResult) -> None:
    assert bench.outputs is not None
    assert (bench.outputs.compared, bench.outputs.equal, bench.outputs.changed) == (8, 8, 0)


def test_headline_ratios_are_recomputed_from_rows(bench: BenchResult) -> None:
    base, fast = bench.plain[0], bench.speculative[0]
    expected = paired_speedup(base.rows, fast.rows, 1)
    assert expected is not None
    assert bench.speedup_c1 == expected.ratio
    assert compare([*bench.plain, fast]).speedups == bench.speedups


def test_a_result_without_rows_keeps_its_figures_and_survives_json(bench: BenchResult) -> None:
    small = bench.without_rows()
    assert small.plain[0].rows == []
    assert bench.plain[0].rows
    assert small.plain[0].points == bench.plain[0].points
    assert BenchResult.model_validate_json(small.model_dump_json()) == small


def test_the_best_plain_one_may_be_of_another_mode(endpoint: Any, make_prompts: Any) -> None:
    @contextmanager
    def deploy(configuration: Configuration) -> Iterator[str]:
        endpoint.speculative = configuration.speculation
        endpoint.step_s = 0.002 if configuration.dtype == "bfloat16" else 0.01
        yield endpoint.url

    result = run_bench([PLAIN, OTHER, FAST], deploy, make_prompts(8), QUICK)
    assert result.best_plain == "plain bfloat16"
    assert result.speedup_c1 is not None
    assert result.speedup_c1_vs_best_plain is not None
    assert result.speedup_c1_vs_best_plain < result.speedup_c1


def test_changed_outputs_are_judged_by_the_engine_that_is_still_up(endpoint: Any, make_prompts: Any) -> None:
    @contextmanager
    def deploy(configuration: Configuration) -> Iterator[str]:
        endpoint.speculative = configuration.speculation
        if configuration.speculation:
            endpoint.changed = {"p0": 3, "p1": 2}
            right, wrong = endpoint.answer("p0", 9)[3] - 5000, endpoint.answer("p0", 9)[3]
            endpoint.top = {f"token_id:{right}": -0.5, f"token_id:{wrong}": -0.50002}
        yield endpoint.url

    result = run_bench([PLAIN, FAST], deploy, make_prompts(8), QUICK)
    assert result.outputs is not None
    changed = {difference.prompt_id: difference.near_tie for difference in result.outputs.differences}
    assert changed == {"p0": True, "p1": False}
    prefix = next(body["prompt"] for body in endpoint.bodies if len(body.get("prompt", [])) == 6)
    assert prefix == [1, 2, 3, *endpoint.answer("p0", 9)[:3]]


def test_two_running_endpoints_can_be_compared(endpoint: Any, make_prompts: Any) -> None:
    deploy = running({"plain": endpoint.url, "speculative": endpoint.url})
    result = run_bench([PLAIN, FAST], deploy, make_prompts(8), QUICK)
    assert result.speedup_c1 is not None
    with pytest.raises(BenchError, match="no endpoint given for 'plain bfloat16'"):
        run_bench([OTHER], deploy, make_prompts(8), QUICK)


def test_default_configurations_measure_the_same_mode_first_and_add_compiled_ones_on_request() -> None:
    names = [c.name for c in default_configurations()]
    assert names == ["plain float32", "plain bfloat16", "speculative float32"]
    full = default_configurations(full=True)
    assert [c.eager for c in full] == [True, True, True, False, False]
    assert sum(c.speculation for c in full) == 2


def test_importing_the_bench_is_light() -> None:
    code = (
        "import sys, eaglenest.bench.run, eaglenest.bench.swap_load, eaglenest.report;"
        "print([m for m in ('torch', 'ray', 'vllm', 'mlflow', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
