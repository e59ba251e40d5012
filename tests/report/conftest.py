"""A report like a real run's, computed from made-up rows by the same functions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from eaglenest.bench.figures import point_figures, pool_acceptance
from eaglenest.bench.models import (
    Acceptance,
    BenchResult,
    Configuration,
    Dtype,
    Equality,
    Measurement,
    Plan,
    RequestRow,
    SpecSteps,
    SwapPlan,
    SwapTimes,
)
from eaglenest.bench.run import compare
from eaglenest.bench.swap_load import summarise
from eaglenest.report import Command, DrafterReport, Report, Stage, TrainPoint

CATEGORIES = (
    "chat",
    "coding",
    "extraction",
    "mathematics",
    "multi-turn",
    "question-answering",
    "retrieval-grounded",
    "summarising",
    "translation",
    "writing",
)


def make_rows(
    random_: random.Random, *, concurrency: int, count: int, step_s: float, accept: float, origin: float = 0.0
) -> list[RequestRow]:
    """A closed loop, replayed: streams of 40 tokens, each step accepting up to three drafts with chance `accept`."""
    free, rows = [origin] * concurrency, []
    for index in range(count):
        slot = free.index(min(free))
        at, chunks, tokens, histogram = free[slot] + 4 * step_s, [], [], [0, 0, 0, 0]
        while sum(tokens) < 40:
            chunks.append(at)
            accepted = 0
            while tokens and accept and accepted < 3 and random_.random() < accept / (1 + 0.3 * accepted):
                accepted += 1
            histogram[accepted] += bool(tokens)
            tokens.append(1 + accepted)
            at += step_s * random_.uniform(0.9, 1.3)
        rows.append(
            RequestRow(
                prompt_id=f"p{concurrency}-{index}",
                category=CATEGORIES[index % len(CATEGORIES)],
                concurrency=concurrency,
                index=index,
                start_s=free[slot],
                end_s=chunks[-1],
                chunk_s=chunks,
                chunk_tokens=tokens,
                token_ids=list(range(40)),
                prompt_token_ids=[1],
                finish_reason="length",
                spec=SpecSteps(histogram=histogram, drafted=3 * sum(histogram)) if accept else None,
            )
        )
        free[slot] = chunks[-1]
    return rows


def make_measurement(name: str, dtype: Dtype, step_s: float, accept: float) -> Measurement:
    random_ = random.Random(name)
    rows: list[RequestRow] = []
    points = []
    for concurrency in (1, 2, 4, 8):
        window = make_rows(
            random_,
            concurrency=concurrency,
            count=max(6, 3 * concurrency),
            step_s=step_s * (1 + 0.12 * (concurrency - 1)),
            accept=accept,
        )
        points.append(point_figures(window, concurrency))
        rows += window
    return Measurement(
        name=name,
        model="smollm2-135m-instruct",
        plan=Plan(max_tokens=40),
        configuration=Configuration(name=name, dtype=dtype, speculation=bool(accept), eager=True),
        points=points,
        acceptance=pool_acceptance(rows),
        rows=rows,
    )


def make_bench() -> BenchResult:
    return compare(
        [
            make_measurement("plain float32", "float32", 0.085, 0.0),
            make_measurement("plain bfloat16", "bfloat16", 0.065, 0.0),
            make_measurement("speculative float32", "float32", 0.098, 0.45),
        ],
        [Equality(compared=54, equal=53, near_ties=1, changed=0)],
    )


def make_history(seconds: float, start: float) -> list[TrainPoint]:
    def at(i: int) -> TrainPoint:
        done = (i + 1) / 30
        return TrainPoint(
            seconds=seconds * done,
            tokens=int(60_000 * done),
            loss=start * (1 - 0.6 * done**0.5),
            accuracy=[0.5 * done**0.4 * 0.8**k for k in range(4)],
            sim_accept_len=1 + (6 - start) * 0.2 * done**0.5 if i % 5 == 4 else None,
            tokens_per_s=210.0,
        )

    return [at(i) for i in range(30)]


def make_drafter(version: int, accept: float) -> DrafterReport:
    random_ = random.Random(version)
    rows = make_rows(random_, concurrency=8, count=50, step_s=0.1, accept=accept)
    served = pool_acceptance(rows)
    assert isinstance(served, Acceptance)
    return DrafterReport.of(
        version,
        served,
        train_tokens=12_400 * version,
        train_s=250.0,
        parent_version=1 if version > 1 else None,
        sim_accept_len=served.accept_len + 0.02,
        history=make_history(250.0, 5.2 - 0.9 * version),
    )


def make_swap_rows() -> tuple[list[RequestRow], list[RequestRow], Sequence[SwapTimes]]:
    """A run of 56 requests without swaps, and the same with six that hold all streams up by 0.2 s."""
    still = make_rows(random.Random(7), concurrency=8, count=56, step_s=0.15, accept=0.4)
    begins = [3.0 + 4 * i for i in range(6)]

    def late(at: float) -> float:
        return at + 0.2 * sum(at > begin + 0.6 for begin in begins)

    swaps = [SwapTimes(staging=late(b), done=late(b + 0.7), version=f"v{2 - i % 2}") for i, b in enumerate(begins)]

    moving = [
        row.model_copy(
            update={
                "start_s": late(row.start_s),
                "end_s": late(row.end_s),
                "chunk_s": [late(at) for at in row.chunk_s],
            }
        )
        for row in still
    ]
    return still, moving, swaps


@pytest.fixture(scope="session")
def report() -> Report:
    return make_report()


def make_report() -> Report:
    still, moving, swaps = make_swap_rows()
    equality = Equality(compared=56, equal=56, near_ties=0, changed=0)
    return Report(
        created_at=datetime(2026, 3, 1, 12, 30, tzinfo=UTC),
        wall_s=1512.0,
        peak_memory_gib=7.4,
        machine={"cores": 2, "memory_gib": 24.0, "cpu": "AMD EPYC 7B12", "gpu": None, "platform": "Linux x86_64"},
        versions={"eaglenest": "0.1.0", "ray": "2.60.0", "vllm": "0.32.0", "torch": "2.13.0+cpu", "mlflow": "3.17.2"},
        target={
            "name": "smollm2-135m-instruct",
            "fingerprint": "9f2c" * 16,
            "hidden_size": 576,
            "num_layers": 30,
            "aux_layer_ids": [2, 15, 27],
        },
        settings={"num_speculative_tokens": 3, "max_tokens": 40, "dtype": "float32"},
        stages=[
            Stage(name="environment", seconds=12, reused=True),
            Stage(name="services", seconds=31),
            Stage(name="distill v1", seconds=301),
            Stage(name="bench", seconds=340),
        ],
        drafters=[make_drafter(1, 0.28), make_drafter(2, 0.42)],
        bench=make_bench(),
        swap=summarise(still, moving, swaps, equality, SwapPlan(max_tokens=40, plain_step_ms=120.0)),
        commands=[
            Command(text="Serve the champion again.", command="eaglenest up"),
            Command(
                text="Ask it something.",
                command="curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d "
                '\'{"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}]}\'',
            ),
        ],
    )


if __name__ == "__main__":  # python tests/report/conftest.py FOLDER: write the sample report, to look at it
    import sys
    from pathlib import Path

    from rich.console import Console

    from eaglenest.report import render_terminal, write_report

    sample = make_report()
    Console(width=120).print(render_terminal(sample))
    print(write_report(sample, Path(sys.argv[1])))
