"""One engine with a random drafter, and what tests do with it."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)  # vLLM's worker processes inherit it, to import `faulty_extension` by name

PROMPTS = [
    "Question: why is the sky blue? Answer:",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The capital of France is Paris. The capital of Italy is",
    "List three fruits and three vegetables:",
    "Dear Sir or Madam, I am writing to",
    "12 + 30 = 42. 7 * 6 =",
    "Translate to French: good morning, my friend.",
]


@dataclass
class Stream:
    """One request's answer: its tokens, the engine steps that made them and when each came."""

    tokens: list[int]
    times: list[float]

    @property
    def steps(self) -> int:
        return len(self.times)


class Bench:
    """An engine, its event loop and its swapper."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Any, root: Path, target: Any) -> None:
        from eaglenest.engine.swapper import DrafterSwapper

        self.loop, self.engine, self.root, self.target = loop, engine, root, target
        self.swapper = DrafterSwapper(engine)
        self.first = root / "first"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def ask(self, prompt: str, tokens: int = 48, **sampling: Any) -> Stream:
        """One streamed request, greedy unless told otherwise; it does not stop before `tokens`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        options = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | sampling
        stream = Stream([], [])
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **options)
        async for output in self.engine.generate(prompt, params, request_id=uuid.uuid4().hex):
            stream.tokens += output.outputs[0].token_ids
            stream.times.append(time.perf_counter())
        assert len(stream.tokens) == tokens
        return stream

    async def ask_all(self, prompts: Sequence[str] = PROMPTS, tokens: int = 48, **sampling: Any) -> list[Stream]:
        return list(await asyncio.gather(*(self.ask(p, tokens, **sampling) for p in prompts)))

    async def version(self) -> str | None:
        (state,) = await self.swapper.state()
        assert state["staging"] is None
        version: str | None = state["version"]
        return version


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The default target with a random drafter, eager, K=3, on an extension with faults to order."""
    from sample_drafters import save_drafter

    from eaglenest.engine.arguments import EngineSpec
    from eaglenest.engine.launch import start_engine
    from eaglenest.targets import resolve_target

    root, target = tmp_path_factory.mktemp("drafters"), resolve_target()
    save_drafter(root / "first", target, seed=1)
    spec = EngineSpec(
        target=target.path,
        drafter=root / "first",
        max_model_len=512,
        enforce_eager=True,
        extension="faulty_extension.FaultyExtension",
    )
    loop = asyncio.new_event_loop()

    async def start() -> Any:
        return start_engine(spec)

    engine = loop.run_until_complete(start())
    try:
        yield Bench(loop, engine, root, target)
    finally:
        engine.shutdown()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
