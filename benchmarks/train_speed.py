"""Training speed: tokens/s and peak memory of our step against the EAGLE 3 model of `speculators`, on the same packs.

    python benchmarks/train_speed.py --quick              T = 256 and 1024, K = 3
    python benchmarks/train_speed.py --json out.json      T up to 16384, K = 3, 5, 7

A step is forward, backward and optimiser on one document of T tokens with loss on every row, lm_head frozen on both
sides (the peer cannot train it), in the shape of the embedded target, on random states: speed does not depend on
them. The peer is given what it is fastest with on this processor: of float32 and bfloat16 products, and of its
attention implementations for a CPU, the best by a trial at each T. Ours runs as a distillation does. Every cell is a
process of its own, so that peak memory (resident, at most --limit-gib) is the cell's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTHS, STEPS = (256, 1024, 4096, 16384), (3, 5, 7)
PEER = [(attention, precision) for attention in ("sdpa", "eager") for precision in ("float32", "bfloat16")]
DRAFT_VOCABULARY = 8192


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short documents and K = 3 only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell there")
    parser.add_argument("--seconds", type=float, default=15.0, help="of measuring per cell, two steps at least")
    parser.add_argument("--limit-gib", type=float, default=14.0, help="memory a cell may take; above it `does not fit`")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run every cell in turn; exit code 1 when a goal is missed."""
    given = _arguments()
    if given.cell:
        print(json.dumps(_cell(json.loads(given.cell), given.seconds, given.limit_gib)))
        return 0
    lengths, steps = ((256, 1024), (3,)) if given.quick else (LENGTHS, STEPS)
    rows: list[dict[str, Any]] = []
    print(f"{'T':>6} {'K':>2}  {'':28} {'tokens/s':>9} {'spread':>15} {'peak GiB':>9}")
    for length in lengths:
        best: tuple[str, str] | None = None
        for k in steps:
            settings = PEER if best is None else [best]
            cells = [_run("peer", length, k, a, p, given) for a, p in settings]
            fitting = [cell for cell in cells if cell["tokens_per_s"]]
            if fitting and best is None:
                winner = max(fitting, key=lambda cell: cell["tokens_per_s"])
                best = (winner["attention"], winner["precision"])
            ours = [_run("ours", length, k, "blocks", precision, given) for precision in ("float32", "auto")]
            for cell in [*cells, *ours]:
                rows.append(cell)
                _print(cell)
        rows.append(_run("causal", length, steps[0], "sdpa", "float32", given))
    goals = _goals(rows)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows, "goals": goals, "threads": os.cpu_count()}, indent=2))
    for goal in goals:
        print(f"goal {goal['name']} {goal['measured']} {goal['wanted']} {'met' if goal['met'] else 'short'}")
    return 0 if all(goal["met"] for goal in goals) else 1


def _run(who: str, length: int, k: int, attention: str, precision: str, given: argparse.Namespace) -> dict[str, Any]:
    cell = {"who": who, "T": length, "K": k, "attention": attention, "precision": precision}
    from eaglenest.engine.environment import preload_libraries

    environment = os.environ | {"LD_PRELOAD": ":".join(map(str, preload_libraries()))}
    command = [sys.executable, __file__, "--cell", json.dumps(cell), "--seconds", str(given.seconds)]
    command += ["--limit-gib", str(given.limit_gib)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return cell | {"tokens_per_s": None, "error": (done.stderr.strip().splitlines() or ["ended by the system"])[-1]}
    return cell | dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _print(cell: dict[str, Any]) -> None:
    name = f"{cell['who']} {cell['attention']} {cell['precision']}"
    if cell["tokens_per_s"] is None:
        print(f"{cell['T']:>6} {cell['K']:>2}  {name:28} does not fit: {cell['error'][:60]}", flush=True)
        return
    spread = f"{cell['slowest']:.0f} to {cell['fastest']:.0f}"
    print(
        f"{cell['T']:>6} {cell['K']:>2}  {name:28} {cell['tokens_per_s']:>9.0f} {spread:>15} {cell['peak_gib']:>9.2f}",
        flush=True,
    )


def _goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours at its default precision against the peer's best, at each T and K."""
    goals = []

    def goal(name: str, measured: float | None, wanted: float, at_most: bool = False) -> None:
        met = measured is not None and (measured <= wanted if at_most else measured >= wanted)
        shown = "-" if measured is None else f"{measured:.2f}"
        goals.append({"name": name, "measured": shown, "wanted": f"{'<=' if at_most else '>='}{wanted}", "met": met})

    def of(who: str, length: int, k: int | None = None) -> dict[str, Any] | None:
        found = [
            r
            for r in rows
            if (r["who"], r["T"]) == (who, length) and k in (None, r["K"]) and r["tokens_per_s"]
            if who != "ours" or r["precision"] == "auto"
        ]
        return max(found, key=lambda r: r["tokens_per_s"]) if found else None

    for length, k in sorted({(r["T"], r["K"]) for r in rows if r["who"] == "ours"}):
        ours, peer = of("ours", length, k), of("peer", length, k)
        if ours and peer:
            goal(f"speed_T{length}_K{k}", ours["tokens_per_s"] / peer["tokens_per_s"], 1.5 if length <= 1024 else 4.0)
            if length >= 4096:
                goal(f"memory_T{length}_K{k}", ours["peak_gib"] / peer["peak_gib"], 0.33, at_most=True)
    long = sorted({r["T"] for r in rows if r["T"] >= 4096})
    if len(long) > 1:
        k = min(r["K"] for r in rows if r["who"] == "ours")

        def growth(who: str) -> float | None:
            """Seconds per token at the longest length, less those at the shortest of these."""
            short, longest = of(who, long[0], k), of(who, long[-1], k)
            return 1 / longest["tokens_per_s"] - 1 / short["tokens_per_s"] if short and longest else None

        ours, causal = growth("ours"), growth("causal")
        measured = ours / causal if ours is not None and causal else None
        goal(f"growth_against_causal_T{long[0]}_to_{long[-1]}", measured, 1.0, at_most=True)
    return goals


# One cell, in a process of its own.


def _cell(cell: dict[str, Any], seconds: float, limit_gib: float) -> dict[str, Any]:
    import torch

    # address space, not resident memory, is what can be limited: leave room for libraries
    resource.setrlimit(resource.RLIMIT_AS, (int((limit_gib + 6) * 2**30), resource.RLIM_INFINITY))
    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    step = {"ours": _our_step, "peer": _peer_step, "causal": _causal_step}[cell["who"]](cell)
    step()  # first touch of all memory
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    length = cell["T"]
    return {
        "tokens_per_s": length / statistics.median(times),
        "slowest": length / max(times),
        "fastest": length / min(times),
        "steps": len(times),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _case(cell: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Target, drafter, learner and batch of a cell."""
    import torch

    from eaglenest.distill.features import Document, Features, collate
    from eaglenest.distill.initialise import drafter_config, from_target
    from eaglenest.distill.learner import Learner
    from eaglenest.distill.recipe import Recipe
    from eaglenest.targets import resolve_target
    from eaglenest.targets.head import TargetHead

    target = resolve_target()
    recipe = Recipe(ttt_steps=cell["K"], train_lm_head=False, max_length=max(LENGTHS), precision=cell["precision"])
    config = drafter_config(target, draft_vocab_size=DRAFT_VOCABULARY, eagle="3.1")
    vocabulary = list(range(DRAFT_VOCABULARY))
    drafter = from_target(target, config, vocabulary, 0)
    head = TargetHead.load(target.path, vocabulary)
    size = cell["T"] + 1  # a document of n tokens has n - 1 rows
    document = Document("benchmark", "chat", tuple(torch.randint(0, DRAFT_VOCABULARY, (size,)).tolist()), 1)
    width = target.hidden_size
    features = Features(
        torch.randn(size, width * config.num_aux, dtype=torch.bfloat16), torch.randn(size, width, dtype=torch.bfloat16)
    )
    batch = collate([(document, features)], cell["K"], torch.float32, prompt_weight=1.0)
    return target, drafter, Learner(drafter, head, recipe), batch


def _our_step(cell: dict[str, Any]) -> Any:
    _, _, learner, batch = _case(cell)
    return lambda: learner.step(batch, 0.5)


def _peer_step(cell: dict[str, Any]) -> Any:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.peer import LOSS, peer_inputs, peer_of

    target, drafter, _, batch = _case(cell | {"precision": "float32"})
    model = peer_of(drafter, target.path, cell["attention"])
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    inputs = peer_inputs(batch)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=cell["precision"] == "bfloat16"):
            _, loss, _ = model(**inputs, ttt_steps=cell["K"], ttt_step_loss_decay=0.8, loss_config=LOSS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()

    return step


def _causal_step(cell: dict[str, Any]) -> Any:
    """Plain causal attention alone, K times forward and backward, by torch's own kernel."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from eaglenest.distill.initialise import drafter_config
    from eaglenest.targets import resolve_target

    config = drafter_config(resolve_target(), draft_vocab_size=DRAFT_VOCABULARY, eagle="3.1")
    shape = (1, config.num_attention_heads, cell["T"], config.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))

    def step() -> None:
        for _ in range(cell["K"]):
            scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return step


if __name__ == "__main__":
    sys.exit(main())
