"""The demo: a drafter raised, served, measured, improved and swapped under load, on this machine, in one go."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from eaglenest.bench import models
from eaglenest.bench.break_even import best_k
from eaglenest.bench.measure import measure
from eaglenest.bench.run import compare, outputs_equal
from eaglenest.bench.swap_load import measure_swaps
from eaglenest.distill.prompts import load_prompts
from eaglenest.errors import BenchError, ServiceError
from eaglenest.jobs_client import project_root, run_distill_job, telling
from eaglenest.pipeline import find_by_job
from eaglenest.registry import DrafterVersion, Registry
from eaglenest.report import Command, DrafterReport, Report, Stage, TrainPoint, write_report
from eaglenest.report.machine import machine, versions
from eaglenest.rollout import promote
from eaglenest.services import local, serve_app
from eaglenest.services.memory import PeakMemory, own_tree
from eaglenest.services.processes import sigterm_as_interrupt
from eaglenest.settings import Settings, shown
from eaglenest.targets import resolve_target

Say = Callable[[str], None]
M = TypeVar("M", bound=BaseModel)

SERVE_CONFIG = Path("serve_configs") / "1-one-replica.yaml"
SPECULATIVE = models.Configuration(name="speculative float32", dtype="float32", speculation=True, eager=True)
PLAIN = (
    models.Configuration(name="plain float32", dtype="float32", speculation=False, eager=True),
    models.Configuration(name="plain bfloat16", dtype="bfloat16", speculation=False, eager=True),
)


class DemoPlan(BaseModel):
    """How large the demo is. The defaults fit half an hour on two cores."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_answer_tokens: int = Field(default=8000, gt=0, description="answer tokens of the first drafter")
    answer_tokens: int = Field(default=25000, gt=0, description="answer tokens of the second, the first's among them")
    first_train_s: float = Field(default=70, gt=0)
    train_s: float = Field(default=360, gt=0)
    judged_requests: int = Field(default=80, ge=10, description="held-out requests that judge a drafter")
    max_tokens: int = Field(default=64, ge=8, description="tokens of each answer, of those to learn from too")
    bench_requests: dict[int, int] = Field(default={1: 20, 2: 12, 4: 16, 8: 24}, description="by concurrency")
    swaps: int = Field(default=5, ge=1, description="odd, so that the new drafter is in at the end")
    swap_requests: int = Field(default=96, ge=1)


class _State:
    """Results of finished stages in runs_dir/demo, so that an interrupted demo goes on where it stopped."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "state.json"
        self._values: dict[str, Any] = {}
        if self._file.exists():
            self._values = json.loads(self._file.read_text())

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def put(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._values))
        part.replace(self._file)

    def clear(self) -> None:
        self._values = {}
        self._file.unlink(missing_ok=True)


def run_demo(settings: Settings, say: Say, plan: DemoPlan | None = None) -> Report:
    """Run the demo, or go on with an interrupted one; leaves no process behind, however it ends.

    Returns:
        The report, written to runs_dir/demo too.

    Raises:
        EagleNestError: a stage failed; the next run goes on before it.
    """
    with sigterm_as_interrupt():
        demo = _Demo(settings, say, plan or DemoPlan())
        try:
            with PeakMemory(lambda: [*own_tree(), *local.our_processes(settings)]) as peak:
                demo.run()
            report = demo.report(peak.peak_bytes / 2**30)
        finally:
            local.down(settings, say=say)
        write_report(report, demo.folder)
        demo.state.clear()
        return report


class _Demo:
    def __init__(self, settings: Settings, say: Say, plan: DemoPlan) -> None:
        self.settings, self.say, self.plan = settings, say, plan
        self.folder = settings.runs_dir / "demo"
        self.state = _State(self.folder)
        if self.state.get("started") is None:
            self.state.put("started", datetime.now(UTC).strftime("%m%d-%H%M%S"))
            self.state.put("spent_s", 0.0)
        self.name = f"demo-{self.state.get('started')}"
        self.began = time.monotonic()
        self.registry = Registry(settings.tracking_uri, settings.model_name)
        self.config = project_root() / SERVE_CONFIG
        self.prompts = load_prompts("builtin:heldout")

    def run(self) -> None:
        """Every stage in turn; finished ones are only looked up."""
        with self._stage("services"):
            local.up(self.settings, serve=False, say=self.say)
        with self._stage("target"):
            target = resolve_target(self.settings.target, self.settings)
            self.say(f"{target.name}: {target.num_layers} layers, fingerprint {target.fingerprint[:12]}")
        first = self._raise("v1", self.plan.first_answer_tokens, self.plan.first_train_s)
        if not all(self.state.get(k) for k in ("judged v2", "swap", "bench speculative")):
            self._serve(first)
        for plain in PLAIN:
            self._measured(f"bench {plain.name}", plain.name, partial(self._bench_plain, plain))
        if (chosen := self._chosen()) is not None:
            self._measured("bench chosen", chosen.name, partial(self._bench_chosen, chosen))

    def _serve(self, first: DrafterVersion) -> None:
        """The part with the service up: judge v1, raise v2, swap, judge and measure v2."""
        with self._stage("serve v1"):
            second = find_by_job(self.registry, f"{self.name}-v2")
            ours = {v.version for v in (first, second) if v is not None}
            if self.registry.aliases().get("champion") not in ours:
                promote(self.registry, first.version, None)
            rendered = serve_app.render(self.settings, self.config, self._speculative())
            serve_app.deploy_serve(self.settings, rendered, say=self.say)
        url = self.settings.serve_url
        self._measured("judged v1", "measure v1", lambda: self._judge(url, first))
        second = self._raise("v2", self.plan.answer_tokens, self.plan.train_s, first)
        self._measured("swap", "swap under load", lambda: self._swaps(url, first, second))
        self._measured("judged v2", "measure v2", lambda: self._judge(url, second))
        self._measured("bench speculative", SPECULATIVE.name, lambda: self._bench(url, SPECULATIVE))
        with self._stage("stop serving"):
            serve_app.delete_serve(self.settings, say=self.say)

    def _raise(self, label: str, tokens: int, seconds: float, parent: DrafterVersion | None = None) -> DrafterVersion:
        job = f"{self.name}-{label}"
        with self._stage(f"distill {label}") as stage:
            found = find_by_job(self.registry, job)
            if found is not None:
                stage.reused = True
                self.state.put(label, found.version)
                return found
            start = ["--from-nothing"] if parent is None else ["--parent", str(parent.version)]
            options = ["--name", job, "--target", self.settings.target, "--answer-tokens", str(tokens)]
            options += ["--answer-length", str(self.plan.max_tokens), "--max-seconds", str(seconds)]
            options += ["--passes", "1000"]
            log = self.folder / f"{job}.log"
            with log.open("a") as file:
                run_distill_job(self.settings, [*options, *start], partial(_both, file, self.say))
            found = find_by_job(self.registry, job)
            if found is None:
                raise ServiceError(f"job {job} succeeded, but registered nothing", None, "look at MLflow's page")
            self.state.put(label, found.version)
            return found

    def _judge(self, url: str, version: DrafterVersion) -> models.Measurement:
        """Acceptance of the drafter in service, on every category of the held-out prompts."""
        plan = models.Plan(
            concurrencies=(8,), max_tokens=self.plan.max_tokens, requests_per_point=self.plan.judged_requests
        )
        found = measure(url, None, self.prompts, plan, name=f"v{version.version}", on_progress=self.say)
        if found.acceptance is None:
            raise BenchError(f"version {version.version} is served without speculation", "acceptance figures")
        served = {name: a.accept_len for name, a in found.acceptance.by_category.items()}
        figures = {
            "accept_len": found.acceptance.accept_len,
            "accept_len_by_category": served,
            "accept_by_position": found.acceptance.conditional,
        }
        self.registry.set_figures(version.version, figures)
        return found

    def _swaps(self, url: str, first: DrafterVersion, second: DrafterVersion) -> models.SwapResult:
        """Both versions in turn under streaming load, the second in the end."""
        from eaglenest.services import access
        from eaglenest.serving.control import ServeReplicas

        access.adopt(self.settings)
        replicas = ServeReplicas(ray_address=f"{self.settings.host}:{self.settings.ray_port}")
        promote(self.registry, first.version, replicas)
        turns = iter([second, first] * self.plan.swaps)

        def swap() -> models.SwapTimes:
            wanted = next(turns)
            begun = time.monotonic()
            promote(self.registry, wanted.version, replicas)
            return models.SwapTimes(staging=begun, done=time.monotonic(), version=f"v{wanted.version}")

        plan = models.SwapPlan(swaps=self.plan.swaps, requests=self.plan.swap_requests, max_tokens=self.plan.max_tokens)
        result = measure_swaps(url, None, self.prompts, swap, plan, on_progress=self.say)
        promote(self.registry, second.version, replicas)
        return result

    def _bench(
        self, url: str, configuration: models.Configuration, concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    ) -> models.Measurement:
        plan = models.Plan(
            concurrencies=concurrencies,
            max_tokens=self.plan.max_tokens,
            requests_per_point=self.plan.bench_requests,
        )
        return measure(
            url,
            None,
            self.prompts,
            plan,
            name=configuration.name,
            configuration=configuration,
            on_progress=self.say,
        )

    def _bench_plain(self, configuration: models.Configuration) -> models.Measurement:
        with serve_app.deployed(
            self.settings, self.config, {"drafter": "none", "dtype": configuration.dtype}, say=self.say
        ) as url:
            measured = self._bench(url, configuration)
            if configuration.same_mode(SPECULATIVE):  # while the target is up, to be asked for its logits
                speculative = self._result("bench speculative", models.Measurement)
                self.state.put("outputs", outputs_equal(url, measured, speculative).model_dump(mode="json"))
            return measured

    def _chosen(self) -> models.Configuration | None:
        """Speculation with the K that should pay best by what is measured; None: that is the K in service."""
        speculative = self._result("bench speculative", models.Measurement)
        k = best_k(self._result(f"bench {PLAIN[0].name}", models.Measurement), speculative)
        if k == self.settings.num_speculative_tokens:
            return None
        return SPECULATIVE.model_copy(update={"name": f"{SPECULATIVE.name}, K = {k}", "k": k})

    def _bench_chosen(self, configuration: models.Configuration) -> models.Measurement:
        args = self._speculative(num_speculative_tokens=configuration.k)
        with serve_app.deployed(self.settings, self.config, args, say=self.say) as url:
            measured = self._bench(url, configuration, (min(self.plan.bench_requests),))
            plain = self._result(f"bench {PLAIN[0].name}", models.Measurement)
            self.state.put("outputs chosen", outputs_equal(url, plain, measured).model_dump(mode="json"))
            return measured

    def _speculative(self, **changed: Any) -> dict[str, Any]:
        """Arguments of the application that serves the champion."""
        return {"drafter": "registry", "model_name": self.settings.model_name, "dtype": SPECULATIVE.dtype, **changed}

    def _measured(self, key: str, title: str, make: Callable[[], BaseModel]) -> None:
        """Run a measuring stage once; its result outlives an interruption."""
        with self._stage(title) as stage:
            if self.state.get(key) is not None:
                stage.reused = True
                return
            self.state.put(key, make().model_dump(mode="json"))

    def _result(self, key: str, kind: type[M]) -> M:
        return kind.model_validate(self.state.get(key))

    @contextmanager
    def _stage(self, name: str) -> Iterator[Stage]:
        self.say(f"== {name}")
        stage, began = Stage(name=name, seconds=0.0), time.monotonic()
        try:
            yield stage
        finally:
            stage.seconds = time.monotonic() - began
            now = time.monotonic()
            self.state.put("spent_s", self.state.get("spent_s") + now - self.began)
            self.began = now
        if not stage.reused:
            done = [s for s in self.state.get("stages") or [] if s["name"] != name]
            self.state.put("stages", [*done, stage.model_dump(mode="json")])

    def report(self, peak_gib: float) -> Report:
        """Everything the run measured."""
        peak = max(peak_gib, self.state.get("peak_gib") or 0.0)
        speculative = self._result("bench speculative", models.Measurement)
        plain = [self._result(f"bench {c.name}", models.Measurement) for c in PLAIN]
        swap = self._result("swap", models.SwapResult)
        step = next((p.tpot_ms for m in plain[:1] for p in m.points if p.concurrency == swap.plan.concurrency), None)
        if step is not None:
            swap = swap.model_copy(
                update={
                    "plan": swap.plan.model_copy(update={"plain_step_ms": step.p50}),
                    "pause_p99_plain_steps": swap.pause_ms_p99 / step.p50,
                }
            )
        outputs = [self._result("outputs", models.Equality)]
        measured = [*plain, speculative]
        if self.state.get("bench chosen") is not None:  # before the other: it is the one the headline is about
            measured = [*plain, self._result("bench chosen", models.Measurement), speculative]
            outputs.append(self._result("outputs chosen", models.Equality))
        bench = compare(measured, outputs)
        drafters = [self._drafter(label) for label in ("v1", "v2")]
        self._figures(drafters[-1], bench)
        target = resolve_target(self.settings.target, self.settings)
        return Report(
            created_at=datetime.now(UTC),
            wall_s=self.state.get("spent_s"),
            peak_memory_gib=peak,
            machine=machine(),
            versions=versions(),
            target={
                "name": target.name,
                "fingerprint": target.fingerprint,
                "aux_layer_ids": list(target.aux_layer_ids),
            },
            settings={**self.plan.model_dump(mode="json"), "K": self.settings.num_speculative_tokens},
            stages=[Stage.model_validate(s) for s in self.state.get("stages")],
            drafters=drafters,
            bench=bench,
            swap=swap,
            commands=_commands(self.settings),
        )

    def _drafter(self, label: str) -> DrafterReport:
        version = find_by_job(self.registry, f"{self.name}-{label}")
        served = self._result(f"judged {label}", models.Measurement).acceptance
        if version is None or served is None:
            raise ServiceError(f"{label} of this demo is not in the registry", None, "run the demo anew")
        figures = version.figures
        history = self.settings.runs_dir / "drafters" / f"{self.name}-{label}.history.json"
        points = [TrainPoint.model_validate(p) for p in json.loads(history.read_text())] if history.exists() else None
        parent = self.state.get("v1") if label == "v2" else None
        return DrafterReport.of(
            version.version,
            served,
            train_tokens=int(figures["train_answer_tokens"]),
            train_s=float(figures["train_s"]),
            parent_version=parent,
            sim_accept_len=float(figures["simulated_accept_len"]),
            history=points,
        )

    def _figures(self, drafter: DrafterReport, bench: models.BenchResult) -> None:
        if bench.speedup_c1 is not None:
            self.registry.set_figures(drafter.version, {"speedup": bench.speedup_c1})


def _both(file: TextIO, say: Say, line: str) -> None:
    """Every line of a job into its log, the telling ones to the terminal without the prefix of Ray's workers."""
    file.write(line + "\n")
    file.flush()
    if (rest := telling(line)) is not None:
        say("   " + rest)


def _commands(settings: Settings) -> list[Command]:
    mlflow = shown(settings.tracking_uri)
    return [
        Command(text="Serve the champion again, with Ray and MLflow", command="eaglenest up"),
        Command(text="See what runs, and which drafter each replica serves", command="eaglenest status"),
        Command(text=f"MLflow's page, once up: {mlflow}", command=f"open {mlflow}"),
        Command(text="Go back to the drafter before", command="eaglenest rollback"),
        Command(text="Stop everything", command="eaglenest down"),
    ]
