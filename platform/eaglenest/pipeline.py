"""The stages strung together: what a distillation job does from its prompts to a registered version."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eaglenest.distill.prompts import load_prompts, prompts_digest
from eaglenest.distill.run import Distilled, DistillJob, distill
from eaglenest.errors import RegistryError
from eaglenest.registry import DrafterVersion, Registry
from eaglenest.registry.runs import RunLogger, TrackedRun
from eaglenest.report.training_plots import plot_drift, plot_training
from eaglenest.settings import Settings

logger = logging.getLogger("eaglenest.pipeline")

EXPERIMENT = "eaglenest-distill"
JOB_TAG = "job"


def raise_drafter(
    job: DistillJob, settings: Settings, *, parent: str | int | None, say: Callable[[str], None] = logger.info
) -> DrafterVersion:
    """Distill a drafter inside a tracked run and register it as the challenger.

    Needs a running Ray, which this process has joined.

    Args:
        parent: version or alias to start from, or the path of a checkpoint folder (ours, or a published EAGLE 3 one);
            None: from nothing.

    Raises:
        EagleNestError: with what is wrong; the run then ends as FAILED, and nothing is registered.
    """
    registry = Registry(settings.tracking_uri, settings.model_name)
    registry.ensure_ready()
    start, folder = None, None
    if isinstance(parent, str) and os.sep in parent:
        folder = Path(parent).expanduser()
    elif parent is not None:
        start = registry.resolve(parent)
        folder = registry.download(start, settings.cache_dir / "versions")
    with TrackedRun(
        settings.tracking_uri,
        EXPERIMENT,
        run_name=job.name,
        params=_flat(job.model_dump(mode="json")) | {"parent": str(start.version if start else folder or "none")},
        tags={JOB_TAG: job.name},
    ) as run:
        say(f"MLflow run {run.url}")
        _name_data(run, job)
        result = distill(
            job,
            settings,
            parent=folder,
            parent_version=start.version if start else None,
            log=RunLogger(settings.tracking_uri, run.run_id),
            say=say,
        )
        return _register(registry, run, result, job, start)


def find_by_job(registry: Registry, name: str) -> DrafterVersion | None:
    """The newest version that the job of this name registered, or None."""
    try:
        found = [v for v in registry.versions() if v.tags.get(JOB_TAG) == name]
    except RegistryError:
        return None
    return max(found, key=lambda v: v.version, default=None)


def _register(
    registry: Registry, run: TrackedRun, result: Distilled, job: DistillJob, parent: DrafterVersion | None
) -> DrafterVersion:
    with tempfile.TemporaryDirectory() as folder:
        plots = [*plot_training(result.history, Path(folder)), *plot_drift(result.figures, Path(folder))]
        version = registry.register(
            result.checkpoint,
            run_id=run.run_id,
            figures=result.figures,
            parent_version=parent.version if parent else None,
            plots=plots,
            extra_tags={JOB_TAG: job.name},
        )
    run.metrics({k: v for k, v in result.figures.items() if isinstance(v, int | float)}, step=0)
    return version


def _name_data(run: TrackedRun, job: DistillJob) -> None:
    for source, context in ((job.prompts, "training"), (job.heldout, "held-out")):
        if source is not None:
            prompts = load_prompts(source)
            run.log_data(source, prompts_digest(prompts), source, context=context)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as `a.b`: value."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[prefix + name] = value
    return out
