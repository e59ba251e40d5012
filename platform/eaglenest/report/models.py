"""What report.json holds. Only what a run measured is there: a part that was not run is absent, never invented."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from eaglenest.bench.models import Acceptance, BenchResult, Interval, SwapResult

Facts = dict[str, JsonValue]


class Part(BaseModel):
    """Base of the report's parts: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")


class TrainPoint(Part):
    """Training progress at one moment.

    `accuracy[k]`: share of rows whose draft at TTT step k equals the target's token. `sim_accept_len`: acceptance
    length by replaying draft steps along held-out answers.
    """

    seconds: float
    tokens: int
    loss: float
    accuracy: list[float] = Field(default_factory=list)
    sim_accept_len: float | None = None
    tokens_per_s: float | None = None


class DrafterReport(Part):
    """One drafter version: how it was raised, and what it did when it was served.

    `accept_by_position` is conditional acceptance: of the steps that accepted all before, how many accepted this one.
    """

    version: int
    parent_version: int | None = None
    accept_len: float
    accept_len_interval: Interval | None = None
    accept_len_by_category: dict[str, float]
    accept_by_position: list[float | None]
    train_tokens: int
    train_s: float
    sim_accept_len: float | None = None
    served: Acceptance | None = Field(default=None, description="the same acceptance in full, with its intervals")
    history: list[TrainPoint] = Field(default_factory=list)

    @classmethod
    def of(
        cls,
        version: int,
        served: Acceptance,
        *,
        train_tokens: int,
        train_s: float,
        parent_version: int | None = None,
        sim_accept_len: float | None = None,
        history: list[TrainPoint] | None = None,
    ) -> DrafterReport:
        """The report of a version from the acceptance that a measurement found (`Measurement.acceptance`)."""
        return cls(
            version=version,
            parent_version=parent_version,
            accept_len=served.accept_len,
            accept_len_interval=served.interval,
            accept_len_by_category={name: found.accept_len for name, found in served.by_category.items()},
            accept_by_position=served.conditional,
            train_tokens=train_tokens,
            train_s=train_s,
            sim_accept_len=sim_accept_len,
            served=served,
            history=history or [],
        )


class Stage(Part):
    """A stage of the run and how long it took, seconds; `reused`: its work was there already."""

    name: str
    seconds: float
    reused: bool = False


class Command(Part):
    """What to do next: a sentence and the command for it."""

    text: str
    command: str


class Report(Part):
    """Everything measured in one run. `machine`, `versions`, `target` and `settings` are plain facts."""

    title: str = "EagleNest demo"
    created_at: datetime
    wall_s: float
    peak_memory_gib: float | None = None
    machine: Facts
    versions: Facts
    target: Facts
    settings: Facts = Field(default_factory=dict)
    stages: list[Stage] = Field(default_factory=list)
    drafters: list[DrafterReport] = Field(default_factory=list)
    bench: BenchResult | None = None
    swap: SwapResult | None = None
    commands: list[Command] = Field(default_factory=list)
