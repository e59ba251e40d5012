"""Configurations compared: plain against speculative decoding in one run, one engine at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from eaglenest.bench.equality import compare_outputs, endpoint_probe
from eaglenest.bench.figures import paired_speedup
from eaglenest.bench.load import open_client
from eaglenest.bench.measure import Progress, measure
from eaglenest.bench.models import (
    BenchResult,
    Configuration,
    Dtype,
    Equality,
    Measurement,
    Plan,
    Speedup,
)
from eaglenest.distill.prompts import Prompt
from eaglenest.errors import BenchError

Deploy = Callable[[Configuration], AbstractContextManager[str]]
"""Starts the engine of a configuration and yields the root URL of its endpoint; its end stops the engine."""


def default_configurations(*, dtype: Dtype = "float32", full: bool = False) -> list[Configuration]:
    """What `eaglenest bench` compares: plain in both precisions, speculation in `dtype`, eager; `full` adds compiled.

    The plain configuration of the same mode comes first: the others are compared with it.
    """
    other: Dtype = "bfloat16" if dtype == "float32" else "float32"
    chosen = [
        Configuration(name=f"plain {dtype}", dtype=dtype, speculation=False, eager=True),
        Configuration(name=f"plain {other}", dtype=other, speculation=False, eager=True),
        Configuration(name=f"speculative {dtype}", dtype=dtype, speculation=True, eager=True),
    ]
    if full:
        chosen += [
            Configuration(name=f"plain {dtype} compiled", dtype=dtype, speculation=False, eager=False),
            Configuration(name=f"speculative {dtype} compiled", dtype=dtype, speculation=True, eager=False),
        ]
    return chosen


def running(urls: Mapping[str, str]) -> Deploy:
    """A `deploy` for endpoints that already run: name of the configuration -> root URL."""

    @contextmanager
    def deploy(configuration: Configuration) -> Iterator[str]:
        if configuration.name not in urls:
            raise BenchError(f"no endpoint given for {configuration.name!r}", f"one of {sorted(urls)}")
        yield urls[configuration.name]

    return deploy


def run_bench(
    configurations: Sequence[Configuration],
    deploy: Deploy,
    prompts: Sequence[Prompt],
    plan: Plan | None = None,
    *,
    model: str | None = None,
    on_progress: Progress | None = None,
) -> BenchResult:
    """Deploy and measure each configuration in turn, with the same prompts in the same order, and compare them.

    Outputs of configurations in the same mode that differ in speculation are compared token by token, while the later
    of the two is still up (it is asked for its logits where they part).

    Args:
        configurations: see `default_configurations`.
        deploy: see `Deploy`; `running` wraps endpoints that are already up.
        plan: concurrencies, tokens and requests; default `Plan()`.

    Raises:
        BenchError: as `measure`; whatever `deploy` raises.
    """
    plan = plan or Plan()
    done: list[Measurement] = []
    outputs: list[Equality] = []
    for configuration in configurations:
        with deploy(configuration) as url:
            measured = measure(
                url,
                model,
                prompts,
                plan,
                name=configuration.name,
                configuration=configuration,
                on_progress=on_progress,
            )
            for earlier in done:
                if _same_outputs_expected(earlier, measured):
                    outputs.append(outputs_equal(url, earlier, measured))
        done.append(measured)
    return compare(done, outputs)


def _same_outputs_expected(earlier: Measurement, later: Measurement) -> bool:
    a, b = earlier.configuration, later.configuration
    return a is not None and b is not None and a.same_mode(b) and a.speculation != b.speculation


def outputs_equal(url: str, reference: Measurement, other: Measurement) -> Equality:
    """Compare the greedy outputs of two measurements with the same plan and mode, token by token (`compare_outputs`).

    Args:
        url: an endpoint of the same target and mode that is up, asked for its logits where two outputs part.
    """

    async def compare_rows() -> Equality:
        async with open_client(url) as client:
            return await compare_outputs(reference.rows, other.rows, endpoint_probe(client, other.model))

    return asyncio.run(compare_rows())


def compare(measurements: Sequence[Measurement], outputs: Sequence[Equality] = ()) -> BenchResult:
    """Every plain one of finished measurements, each with its `configuration`, against every speculative one."""
    plain = [m for m in measurements if m.configuration is not None and not m.configuration.speculation]
    speculative = [m for m in measurements if m.configuration is not None and m.configuration.speculation]
    speedups = [
        speedup
        for spec in speculative
        for base in plain
        for point in spec.points
        if (speedup := paired_speedup(base.rows, spec.rows, point.concurrency, names=(base.name, spec.name)))
    ]
    against, best = _headline(plain, speculative, speedups)
    return BenchResult(
        plain=plain,
        speculative=speculative,
        speedup_c1=against.ratio if against else None,
        speedup_c1_interval=against.interval if against else None,
        speedup_c1_against=against.plain if against else None,
        speedup_c1_vs_best_plain=best.ratio if best else None,
        speedup_c1_vs_best_plain_interval=best.interval if best else None,
        best_plain=best.plain if best else None,
        speedups=speedups,
        outputs=_merge(outputs),
    )


def _headline(
    plain: Sequence[Measurement], speculative: Sequence[Measurement], speedups: Sequence[Speedup]
) -> tuple[Speedup | None, Speedup | None]:
    """The first speculative one at the lowest concurrency: against the same mode, and against the fastest plain one."""
    if not plain or not speculative:
        return None, None
    spec = speculative[0]
    lowest = min(point.concurrency for point in spec.points)
    ratios = {s.plain: s for s in speedups if s.speculative == spec.name and s.concurrency == lowest}
    same = next(
        (m for m in plain if m.configuration and spec.configuration and m.configuration.same_mode(spec.configuration)),
        None,
    )
    speeds = {m.name: point.tokens_per_s for m in plain if (point := m.point(lowest)) is not None}
    fastest = max(speeds, key=lambda name: speeds[name], default=None)
    return ratios.get(same.name) if same else None, ratios.get(fastest) if fastest else None


def _merge(parts: Sequence[Equality]) -> Equality | None:
    if not parts:
        return None
    return Equality(
        compared=sum(part.compared for part in parts),
        equal=sum(part.equal for part in parts),
        near_ties=sum(part.near_ties for part in parts),
        changed=sum(part.changed for part in parts),
        differences=[difference for part in parts for difference in part.differences],
    )
