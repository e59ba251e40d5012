"""The swap, compiled or eager: is every layer executed, is any token changed, how long is the pause?

    python benchmarks/swap_compiled.py --quick            compiled: the first compile takes minutes
    python benchmarks/swap_compiled.py --quick --eager
    python benchmarks/swap_compiled.py --json out.json    more swaps

No training is needed. A *mute* drafter has some layers at zero and so proposes one known token, whatever it reads:
held to that token, a request takes K + 1 tokens a step if and only if the zeroed layers are what the engine executes.
The pause is that of docs/measuring.md. The last lines each name a goal, its bar, what was measured, whether it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engine"))

import sample_drafters as samples

from eaglenest.bench.pauses import floor_gap, largest_gap, swap_span
from eaglenest.engine.arguments import EngineSpec
from eaglenest.engine.launch import start_engine
from eaglenest.engine.swapper import DrafterSwapper
from eaglenest.targets import Target, resolve_target

K = 3
STREAMS = 8
STEPS_ALLOWED = 2.0


@dataclass
class Stream:
    """One answer: its tokens and when each step's came, in seconds on one clock."""

    tokens: list[int]
    times: list[float]


async def ask(engine: Any, prompt: str, tokens: int, **sampling: Any) -> Stream:
    """One greedy streamed request of exactly `tokens` tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stream = Stream([], [])
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **sampling
    )
    async for output in engine.generate(prompt, params, request_id=uuid.uuid4().hex):
        stream.tokens += output.outputs[0].token_ids
        stream.times.append(time.perf_counter())
    return stream


async def load(engine: Any, tokens: int) -> list[Stream]:
    """The same eight prompts at once."""
    prompts = [f"Topic {i}: tell me everything about it." for i in range(STREAMS)]
    return list(await asyncio.gather(*(ask(engine, p, tokens) for p in prompts)))


async def executed(engine: Any, swapper: DrafterSwapper, first: Path, mutes: dict[str, Path]) -> dict[str, bool]:
    """For each mute drafter: one token a step before it, K + 1 with it, one after it."""
    held = {"allowed_token_ids": [samples.FIRST_DRAFT_ID]}
    tokens = 8 * (K + 1) + 1
    found = {}
    for name, folder in mutes.items():
        steps = []
        for swap_to in (None, folder, first):
            if swap_to is not None:
                await swapper.swap(swap_to, swap_to.name)
            steps.append(len((await ask(engine, f"{name} {len(steps)}:", tokens, **held)).times))
        found[name] = steps == [tokens, 9, tokens]
        print(f"executed: {name}: steps {steps}", flush=True)
    return found


async def swaps_under_load(
    engine: Any, swapper: DrafterSwapper, folders: Sequence[Path], count: int
) -> tuple[list[float], int, float, list[float]]:
    """Pauses in seconds, streams whose tokens changed, the floor in seconds, and what the workers saw of each swap."""
    length = 96
    await load(engine, length)
    quiet = await load(engine, length)
    reference = [s.tokens for s in quiet]
    runs: list[tuple[list[list[float]], list[tuple[float, float]]]] = [([s.times for s in quiet], [])]
    spans: list[tuple[int, tuple[float, float]]] = []
    changed, worker = 0, []
    while len(spans) < count:
        job = asyncio.create_task(load(engine, length))
        await asyncio.sleep(0.5)
        pending = []
        while len(spans) + len(pending) < count and not job.done():
            folder = folders[(len(spans) + len(pending)) % len(folders)]
            began = time.perf_counter()
            report = await swapper.swap(folder, folder.name)
            ended = time.perf_counter()
            if not job.done():
                pending.append((began, ended))
                worker.append(report.longest_call_s)
        streams = await job
        changed += sum(s.tokens != r for s, r in zip(streams, reference, strict=True))
        times = [s.times for s in streams]
        busy = [swap_span(times, *p) for p in pending]
        runs.append((times, busy))
        spans += [(len(runs) - 1, span) for span in busy]
    length_s = statistics.median(b - a for _, (a, b) in spans)
    floor = floor_gap(runs, length_s)
    assert floor is not None, "no span without a swap to compare with"
    gaps = [largest_gap(runs[run][0], span) or 0.0 for run, span in spans]
    return [gap - floor for gap in gaps], changed, floor, worker


async def plain_step(spec: EngineSpec) -> float:
    """Median seconds between two tokens of one request, in a plain engine of the same mode."""
    engine = start_engine(spec.model_copy(update={"drafter": None}))
    try:
        await ask(engine, "Warm up", 16)
        times = (await ask(engine, "Tell me a story about a fox.", 96)).times
    finally:
        engine.shutdown()
    return statistics.median(b - a for a, b in pairwise(times))


async def measure(target: Target, root: Path, *, eager: bool, swaps: int) -> dict[str, Any]:
    first, second = (samples.save_drafter(root / name, target, seed) for name, seed in (("a", 1), ("b", 2)))
    mutes = {
        name: samples.save_drafter(root / f"mute{i}", target, 10 + i, change=samples.zero(*layers))
        for i, (name, layers) in enumerate(samples.MUTE.items())
    }
    spec = EngineSpec(
        target=target.path, drafter=first, num_speculative_tokens=K, max_model_len=512, enforce_eager=eager
    )
    began = time.perf_counter()
    engine = start_engine(spec)
    started = time.perf_counter() - began
    try:
        swapper = DrafterSwapper(engine)
        await swapper.rehearse(first)
        done = await executed(engine, swapper, first, mutes)
        pauses, changed, floor, worker = await swaps_under_load(engine, swapper, (second, first), swaps)
    finally:
        engine.shutdown()
    step = await plain_step(spec)
    ranked = sorted(pauses)
    return {
        "mode": "eager" if eager else "compiled",
        "engine_start_s": round(started, 1),
        "layers_executed": done,
        "swaps": len(pauses),
        "changed_streams": changed,
        "plain_step_ms": round(step * 1e3, 2),
        "floor_ms": round(floor * 1e3, 2),
        "pause_ms_p50": round(statistics.median(pauses) * 1e3, 2),
        "pause_ms_p99": round(ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))] * 1e3, 2),
        "worker_longest_call_ms": round(max(worker) * 1e3, 2),
    }


def goals(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Name, bar, measured, holds."""
    steps = found["pause_ms_p99"] / found["plain_step_ms"]
    layers = found["layers_executed"]
    return [
        (
            "layers-executed",
            str(len(layers)),
            f"{sum(layers.values())}",
            all(layers.values()),
        ),
        ("streams-changed", "0", str(found["changed_streams"]), found["changed_streams"] == 0),
        (f"swap-pause-p99-steps-{found['mode']}", f"<={STEPS_ALLOWED}", f"{steps:.2f}", steps <= STEPS_ALLOWED),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--quick", action="store_true", help="6 swaps instead of 40")
    parser.add_argument("--eager", action="store_true", help="without compilation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        target = resolve_target()
        found = asyncio.run(measure(target, Path(root), eager=args.eager, swaps=6 if args.quick else 40))
    lines = goals(found)
    found["goals"] = [{"goal": g, "bar": b, "measured": m, "holds": h} for g, b, m, h in lines]
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    for goal, bar, measured, holds in lines:
        print(f"goal {goal} {measured} {bar} {'met' if holds else 'short'}")
    return 0 if all(holds for *_, holds in lines) else 1


if __name__ == "__main__":
    raise SystemExit(main())
