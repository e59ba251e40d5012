"""Acceptance from the server's counters: parsed, subtracted, and refused where it would mislead."""

from __future__ import annotations

import pytest

from eaglenest.bench.coarse import acceptance_from_counts, coarse_acceptance, parse_counters

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 240.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 90.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.7e+09
"""


def test_counters_are_summed_over_engines_and_timestamps_left_out() -> None:
    assert parse_counters(PAGE) == {
        "busy": 0.0,
        "drafts": 120.0,
        "draft_tokens": 240.0,
        "accepted_tokens": 90.0,
        "pos:0": 60.0,
        "pos:1": 30.0,
    }


def test_a_page_without_speculation_has_no_counters() -> None:
    assert parse_counters("vllm:num_requests_running 0.0\n") is None
    assert parse_counters("") is None


def test_acceptance_lies_between_two_readings_and_is_marked_coarse() -> None:
    zero = {"busy": 0.0, "drafts": 20.0, "draft_tokens": 40.0, "accepted_tokens": 15.0, "pos:0": 10.0, "pos:1": 5.0}
    found = coarse_acceptance(zero, parse_counters(PAGE))
    assert found is not None
    assert found.coarse
    assert found.interval is None
    assert (found.steps, found.accepted, found.drafted) == (100, 75, 200)
    assert found.accept_len == pytest.approx(1.75)
    assert found.unconditional == pytest.approx([0.5, 0.25])
    assert found.conditional == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_busy_endpoint_gives_no_coarse_figures(side: str) -> None:
    before = {"drafts": 0.0, "draft_tokens": 0.0, "accepted_tokens": 0.0}
    after = {"drafts": 5.0, "draft_tokens": 15.0, "accepted_tokens": 5.0}
    assert coarse_acceptance(before, after) is not None
    (before if side == "before" else after)["busy"] = 1.0
    assert coarse_acceptance(before, after) is None


def test_no_step_gives_no_acceptance() -> None:
    assert acceptance_from_counts(steps=0, accepted=0, drafted=0, passed=[]) is None
    assert coarse_acceptance(None, {"drafts": 1.0}) is None
