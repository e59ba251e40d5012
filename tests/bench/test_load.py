"""Streams with known timings and faults: what the client makes of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from eaglenest.bench.load import Ask, closed_loop, data_lines, open_client, served_model, stream_chat
from eaglenest.bench.models import RequestRow
from eaglenest.errors import BenchError

MODEL = "fake-target"


def one(endpoint: Any, prompt: Any, max_tokens: int = 9, **ask: Any) -> RequestRow:
    async def call() -> RequestRow:
        async with open_client(endpoint.url) as client:
            return await stream_chat(client, Ask(MODEL, max_tokens, **ask), prompt, origin=time.monotonic())

    return asyncio.run(call())


def test_a_stream_is_timed_by_chunk_and_counted_by_token(endpoint: Any, make_prompts: Any) -> None:
    endpoint.first_s, endpoint.step_s = 0.1, 0.05
    row = one(endpoint, make_prompts(1)[0])
    assert row.error is None
    assert row.chunk_tokens == [1, 2, 2, 2, 2]
    assert row.tokens == 9
    assert row.token_ids == endpoint.answer("p0", 9)
    assert row.prompt_token_ids == [1, 2, 3]
    assert 0.1 <= row.chunk_s[0] - row.start_s < 0.2
    gaps = [b - a for a, b in zip(row.chunk_s, row.chunk_s[1:], strict=False)]
    assert all(0.045 < gap < 0.15 for gap in gaps)
    assert row.spec is not None
    assert (row.spec.steps, row.spec.accepted) == (4, 4)


def test_a_request_is_greedy_seeded_and_asks_for_token_ids_and_usage(endpoint: Any, make_prompts: Any) -> None:
    one(endpoint, make_prompts(1)[0], seed=5, cache_salt="salt")
    body = endpoint.bodies[0]
    assert (body["temperature"], body["seed"], body["cache_salt"], body["max_tokens"]) == (0.0, 5, "salt", 9)
    assert body["return_token_ids"]
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("429", "http 429"),
        ("503", "http 503"),
        ("dropped", "dropped"),
        ("no done", "dropped"),
        ("no reason", "dropped"),
        ("malformed", "malformed"),
        ("no event", "malformed"),
        ("error", "server error"),
    ],
)
def test_a_fault_becomes_a_failed_row_of_its_kind(endpoint: Any, make_prompts: Any, fault: str, kind: str) -> None:
    endpoint.faults["p0"] = fault
    row = one(endpoint, make_prompts(1)[0])
    assert row.error == kind
    assert row.detail


def test_an_endpoint_without_token_ids_cannot_be_counted(endpoint: Any, make_prompts: Any) -> None:
    endpoint.token_ids = False
    assert one(endpoint, make_prompts(1)[0]).error == "no token ids"


def test_missing_metrics_are_no_failure(endpoint: Any, make_prompts: Any) -> None:
    endpoint.per_request = False
    row = one(endpoint, make_prompts(1)[0])
    assert row.error is None
    assert row.spec is None


def test_an_endpoint_that_is_gone_fails_the_row(make_prompts: Any) -> None:
    class Gone:
        url = "http://127.0.0.1:9"  # the discard port: nobody listens

    assert one(Gone, make_prompts(1)[0]).error == "unreachable"


def test_the_loop_keeps_just_as_many_requests_in_flight_as_asked(endpoint: Any, make_prompts: Any) -> None:
    async def call() -> list[RequestRow]:
        async with open_client(endpoint.url) as client:
            return await closed_loop(client, Ask(MODEL, 9), make_prompts(10), 3)

    rows = asyncio.run(call())
    assert endpoint.most_in_flight == 3
    assert [row.index for row in rows] == list(range(10))
    assert [row.prompt_id for row in rows] == [f"p{i}" for i in range(10)]
    # At any start but the first three, one request had just ended.
    ends = sorted(row.end_s for row in rows)
    for place, row in enumerate(sorted(rows, key=lambda r: r.start_s)[3:]):
        assert row.start_s >= ends[place]


def test_a_time_limit_ends_the_loop_but_not_its_streams(endpoint: Any, make_prompts: Any) -> None:
    endpoint.step_s = 0.01

    async def call() -> list[RequestRow]:
        async with open_client(endpoint.url) as client:
            return await closed_loop(client, Ask(MODEL, 9), make_prompts(100), 2, seconds=0.2)

    rows = asyncio.run(call())
    assert 2 <= len(rows) < 60
    assert all(row.error is None and row.tokens == 9 for row in rows)


def test_the_served_model_is_found_and_a_wrong_one_refused(endpoint: Any) -> None:
    async def call(url: str, model: str | None) -> str:
        async with open_client(url) as client:
            return await served_model(client, model)

    assert asyncio.run(call(endpoint.url, None)) == MODEL
    assert asyncio.run(call(endpoint.url, MODEL)) == MODEL
    with pytest.raises(BenchError, match="does not serve 'other'"):
        asyncio.run(call(endpoint.url, "other"))
    with pytest.raises(BenchError, match="no OpenAI-compatible endpoint"):
        asyncio.run(call("http://127.0.0.1:9", None))


def test_comments_and_other_fields_of_server_sent_events_are_skipped() -> None:
    text = ': keep-alive\n\nevent: message\nid: 7\ndata: {"a": 1}\n\ndata:{"b": 2}\n\ndata: [DONE]\n\n'

    async def call() -> list[str]:
        return [payload async for payload, _ in data_lines(httpx.Response(200, text=text))]

    assert asyncio.run(call()) == ['{"a": 1}', '{"b": 2}']
