"""Closed-loop load on an OpenAI-compatible endpoint of vLLM's: streamed chat completions, timed chunk by chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import httpx

from eaglenest.bench.models import RequestRow, SpecSteps
from eaglenest.distill.prompts import Prompt
from eaglenest.errors import BenchError

STALL_S = 120.0
"""A stream that is silent for so long has failed."""


@dataclass(frozen=True)
class Ask:
    """What every request of a window has in common. Decoding is greedy.

    `cache_salt` keeps a window from finding its prompts in the prefix cache of an earlier one (vLLM's own field).
    """

    model: str
    max_tokens: int
    seed: int = 0
    cache_salt: str | None = None

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The chat completion request for one prompt; token ids are asked for, so that tokens can be counted."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [message.model_dump() for message in prompt.messages],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body


class StreamFault(Exception):
    """A stream that did not end as it should; `kind` is what failures are counted by."""

    def __init__(self, kind: str, detail: str = "") -> None:
        self.kind, self.detail = kind, detail[:300]
        super().__init__(f"{kind}: {detail}")


@dataclass
class _Stream:
    """One stream while it is read; times are of `time.monotonic`."""

    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    spec: SpecSteps | None = None

    def take(self, message: dict[str, Any], at: float) -> int:
        """Read one message that arrived at `at`; returns how many tokens it carried."""
        if "error" in message:
            raise StreamFault("server error", json.dumps(message["error"]))
        self.prompt_token_ids = message.get("prompt_token_ids") or self.prompt_token_ids
        speculative = (message.get("metrics") or {}).get("speculative_decoding")
        if speculative:
            self.spec = SpecSteps(
                histogram=speculative["acceptance_histogram"],
                drafted=speculative["num_draft_tokens"],
                per_step_accepted=speculative.get("per_step_accepted"),
                per_step_drafted=speculative.get("per_step_drafted"),
            )
        tokens: list[int] = []
        for choice in message.get("choices") or []:
            tokens = choice.get("token_ids") or []
            if not tokens and (choice.get("delta") or {}).get("content"):
                raise StreamFault("no token ids", "the endpoint ignores return_token_ids: tokens cannot be counted")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if tokens:
            self.chunk_s.append(at)
            self.chunk_tokens.append(len(tokens))
            self.token_ids.extend(tokens)
        return len(tokens)


def open_client(url: str) -> httpx.AsyncClient:
    """A client for `url` (root of the endpoint, without `/v1`). Proxies are left out for loopback addresses."""
    loopback = urlparse(url).hostname in {"127.0.0.1", "localhost", "::1"}
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=httpx.Timeout(STALL_S, connect=10.0),
        limits=httpx.Limits(max_connections=None),
        trust_env=not loopback,
    )


async def served_model(client: httpx.AsyncClient, model: str | None = None) -> str:
    """The model to ask for: `model` if the endpoint serves it, or the only one it serves.

    Raises:
        BenchError: nothing answers, or the model is not served there.
    """
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        names = [entry["id"] for entry in response.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise BenchError(
            f"no OpenAI-compatible endpoint answers at {client.base_url} ({type(error).__name__})",
            "an answer from GET /v1/models",
            "start the service (`eaglenest up`) or give the right --url",
        ) from error
    if model is None:
        model = next(iter(names), None)
    if model is None or model not in names:
        raise BenchError(f"{client.base_url} does not serve {model!r}", f"one of {names}", "give one of these names")
    return model


async def data_lines(response: httpx.Response) -> AsyncIterator[tuple[str, float]]:
    """Payload of every `data:` line with its arrival (time.monotonic), up to `[DONE]`.

    Raises:
        StreamFault: a line that is no server-sent event, or an end without `[DONE]`.
    """
    async for line in response.aiter_lines():
        at = time.monotonic()
        name, _, value = line.partition(":")
        if name == "data":
            if value.strip() == "[DONE]":
                return
            yield value.strip(), at
        elif line and name not in {"", "event", "id", "retry"}:
            raise StreamFault("malformed", line)
    raise StreamFault("dropped", "the stream ended without [DONE]")


async def stream_chat(
    client: httpx.AsyncClient,
    ask: Ask,
    prompt: Prompt,
    *,
    concurrency: int = 1,
    index: int = 0,
    origin: float = 0.0,
    on_tokens: Callable[[int], None] | None = None,
) -> RequestRow:
    """Stream one completion. A failure is a row with `error`, never an exception.

    Args:
        origin: `time.monotonic()` at the start of the window; the row's times are relative to it.
        on_tokens: called with the number of tokens of each chunk as it arrives.
    """
    stream = _Stream()
    start = time.monotonic()
    fault: StreamFault | None = None
    try:
        await _read(client, ask.body(prompt), stream, on_tokens)
    except StreamFault as error:
        fault = error
    except httpx.TimeoutException as error:
        fault = StreamFault("timeout", repr(error))
    except httpx.ConnectError as error:
        fault = StreamFault("unreachable", repr(error))
    except httpx.HTTPError as error:
        fault = StreamFault("dropped", repr(error))
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # bad JSON, or JSON of another shape
        fault = StreamFault("malformed", repr(error))
    return RequestRow(
        prompt_id=prompt.id,
        category=prompt.category,
        concurrency=concurrency,
        index=index,
        start_s=start - origin,
        end_s=time.monotonic() - origin,
        chunk_s=[at - origin for at in stream.chunk_s],
        chunk_tokens=stream.chunk_tokens,
        prompt_token_ids=stream.prompt_token_ids,
        token_ids=stream.token_ids,
        finish_reason=stream.finish_reason,
        spec=stream.spec,
        error=fault.kind if fault else None,
        detail=fault.detail if fault else None,
    )


async def _read(
    client: httpx.AsyncClient, body: dict[str, Any], stream: _Stream, on_tokens: Callable[[int], None] | None
) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise StreamFault(f"http {response.status_code}", (await response.aread()).decode(errors="replace"))
        async for payload, at in data_lines(response):
            count = stream.take(json.loads(payload), at)
            if count and on_tokens is not None:
                on_tokens(count)
    if stream.finish_reason is None:
        raise StreamFault("dropped", "the stream ended without a finish reason")


async def closed_loop(
    client: httpx.AsyncClient,
    ask: Ask,
    prompts: Sequence[Prompt],
    concurrency: int,
    *,
    seconds: float | None = None,
    origin: float | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[RequestRow]:
    """Send `prompts` in order, always `concurrency` at a time; returns their rows in that order.

    Args:
        seconds: hand out no further prompt after so long; what runs is finished.
        origin: zero of the rows' times (`time.monotonic()`); default: the call.
    """
    zero = time.monotonic() if origin is None else origin
    queue = iter(enumerate(prompts))
    rows: list[RequestRow] = []

    async def slot() -> None:
        for index, prompt in queue:  # one iterator for all slots: each takes the next prompt as it becomes free
            rows.append(
                await stream_chat(
                    client, ask, prompt, concurrency=concurrency, index=index, origin=zero, on_tokens=on_tokens
                )
            )
            if seconds is not None and time.monotonic() - zero >= seconds:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(slot())
    return sorted(rows, key=lambda row: row.index)
