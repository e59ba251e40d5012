"""A small streaming endpoint that speaks vLLM's dialect of the OpenAI API, with known timings and faults on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from eaglenest.distill.prompts import Message, Prompt

MODEL = "fake-target"


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[Prompt]]:
    """`make_prompts(count, categories=2)`: prompts p0, p1, ... of the categories c0, c1, ... in turn."""

    def make(count: int, categories: int = 2) -> list[Prompt]:
        return [
            Prompt(id=f"p{i}", category=f"c{i % categories}", messages=(Message(role="user", content=f"p{i}"),))
            for i in range(count)
        ]

    return make


@dataclass
class FakeEndpoint:
    """The server and its knobs. Answers are `answer(prompt)`; a step takes `step_s` and accepts `accepted` drafts."""

    url: str = ""
    step_s: float = 0.002
    first_s: float = 0.004
    accepted: int = 1
    k: int = 3
    speculative: bool = True
    per_request: bool = True
    token_ids: bool = True
    faults: dict[str, str] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)  # prompt -> place from which another token is given
    top: dict[str, float] = field(default_factory=lambda: {"token_id:1": -0.1, "token_id:2": -5.0})
    stalled_until: float = 0.0
    in_flight: int = 0
    most_in_flight: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=lambda: {"drafts": 0.0, "draft_tokens": 0.0, "accepted": 0.0})

    def answer(self, prompt: str, length: int) -> list[int]:
        tokens = [(hash_of(prompt) + 7 * i) % 1000 + 10 for i in range(length)]
        if prompt in self.changed:
            tokens[self.changed[prompt]] += 5000
        return tokens

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": MODEL}]})

    async def metrics(self, _request: Request) -> Response:
        lines = ['vllm:num_requests_running{engine="0"} ' + str(float(self.in_flight))]
        if self.speculative:
            c = self.counters
            lines += [
                "# TYPE vllm:spec_decode_num_drafts counter",
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {c["drafts"]}',
                "# TYPE vllm:spec_decode_num_draft_tokens counter",
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {c["draft_tokens"]}',
                "# TYPE vllm:spec_decode_num_accepted_tokens counter",
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {c["accepted"]}',
                "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter",
            ]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} '
                f"{c['drafts'] if k < self.accepted else 0.0}"
                for k in range(self.k)
            ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def completions(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return JSONResponse({"choices": [{"logprobs": {"top_logprobs": [self.top]}}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["messages"][-1]["content"]
        fault = self.faults.get(prompt, "")
        if fault.isdigit():
            return JSONResponse({"error": {"message": "too many requests"}}, status_code=int(fault))
        return StreamingResponse(self._stream(prompt, body["max_tokens"], fault), media_type="text/event-stream")

    async def _stream(self, prompt: str, length: int, fault: str) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async for message in self._messages(prompt, length, fault):
                yield message
        finally:
            self.in_flight -= 1

    async def _messages(self, prompt: str, length: int, fault: str) -> AsyncIterator[str]:
        tokens, steps = self.answer(prompt, length), 0
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2, 3]})
        await asyncio.sleep(self.first_s)
        sent = 0
        while sent < length:
            width = 1 if sent == 0 or not self.speculative else 1 + self.accepted
            chunk = tokens[sent : sent + width]
            sent += len(chunk)
            choice: dict[str, Any] = {"delta": {"content": "x"}, "finish_reason": "length" if sent >= length else None}
            if self.token_ids:
                choice["token_ids"] = chunk
            yield event({"choices": [choice]})
            if fault == "malformed":
                yield "data: {not json\n\n"
            if fault == "no event":
                yield "<html>bad gateway</html>\n\n"
            if fault == "error":
                yield event({"error": {"message": "engine died"}})
            if fault == "dropped":
                raise RuntimeError("the connection is cut in mid-stream")
            if fault == "no reason":
                yield "data: [DONE]\n\n"
                return
            steps += sent > 1
            if sent < length:
                await asyncio.sleep(self.step_s)
                while (left := self.stalled_until - time.monotonic()) > 0:
                    await asyncio.sleep(left)
        self._count(steps)
        final: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": length}}
        if self.speculative and self.per_request:
            histogram = [0] * (self.k + 1)
            histogram[self.accepted] = steps
            final["metrics"] = {
                "speculative_decoding": {
                    "mean_acceptance_length": 1 + self.accepted,
                    "acceptance_histogram": histogram,
                    "num_draft_tokens": self.k * steps,
                }
            }
        yield event(final)
        if fault != "no done":
            yield "data: [DONE]\n\n"

    def _count(self, steps: int) -> None:
        self.counters["drafts"] += steps
        self.counters["draft_tokens"] += self.k * steps
        self.counters["accepted"] += self.accepted * steps


def event(message: dict[str, Any]) -> str:
    return f"data: {json.dumps(message)}\n\n"


def hash_of(text: str) -> int:
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    """A fresh fake endpoint on a free port of the loopback address."""
    with serve_fake() as fake:
        yield fake


@pytest.fixture(scope="module")
def shared_endpoint() -> Iterator[FakeEndpoint]:
    """One for a whole module: for what is measured once and looked at by several tests."""
    with serve_fake() as fake:
        yield fake


@contextmanager
def serve_fake() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    app = Starlette(
        routes=[
            Route("/v1/models", fake.models),
            Route("/metrics", fake.metrics),
            Route("/v1/chat/completions", fake.chat, methods=["POST"]),
            Route("/v1/completions", fake.completions, methods=["POST"]),
        ]
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
