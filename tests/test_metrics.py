"""Metric names: complete, well formed, and still what the pinned vLLM calls its own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from eaglenest import metrics
from eaglenest.metrics import EAGLENEST_METRICS, VLLM_METRICS, Metric

ALL = EAGLENEST_METRICS + VLLM_METRICS


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_every_metric_says_what_it_is(metric: Metric) -> None:
    assert metric.unit
    assert metric.help.endswith(".")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_seconds") == (metric.unit == "seconds")


def test_names_are_unique() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)


@pytest.mark.parametrize("metric", EAGLENEST_METRICS, ids=lambda metric: metric.name)
def test_ours_can_be_made_by_ray_serve(metric: Metric) -> None:
    assert re.fullmatch(r"eaglenest_[a-z_]+", metric.name)
    assert not set(metric.labels) & set(metrics.SERVE_LABELS), "Ray Serve refuses its own labels as tags"
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_a_histogram_is_asked_for_by_its_three_series() -> None:
    pause = metrics.SWAP_PAUSE_SECONDS
    assert pause.series(pause.ray_name) == (
        "ray_eaglenest_swap_pause_seconds_bucket",
        "ray_eaglenest_swap_pause_seconds_sum",
        "ray_eaglenest_swap_pause_seconds_count",
    )
    assert set(pause.series(pause.ray_name)) <= metrics.known_series()


def test_vllm_names_are_known_by_both_ways_of_scraping() -> None:
    known = metrics.known_series()
    assert {"vllm:num_requests_running", "ray_vllm_num_requests_running"} <= known
    assert "eaglenest_drafter_version" not in known, "ours are scraped through Ray only, with its prefix"


@pytest.mark.parametrize("metric", VLLM_METRICS, ids=lambda metric: metric.name)
def test_the_installed_vllm_has_the_metric(metric: Metric) -> None:
    spec = importlib.util.find_spec("vllm")  # finds the package without running it
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    source = "".join((package / f).read_text() for f in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"))
    assert f'"{metric.name.removesuffix("_total")}"' in source
