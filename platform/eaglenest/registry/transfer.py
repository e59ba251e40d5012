"""Bytes to the registry and back: a checkpoint becomes a logged model and a version, a version becomes a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eaglenest.drafters.checkpoint import CONFIG, MANIFEST, MAX_BYTES, sha256_of, verify_checkpoint
from eaglenest.drafters.config import DrafterConfig
from eaglenest.errors import CheckpointError, RegistryError
from eaglenest.registry.client import talking_to
from eaglenest.registry.describe import figure_tags, provenance_tags
from eaglenest.registry.flavor import CHECKPOINT, save_model
from eaglenest.settings import shown


def upload_version(
    tracking_uri: str,
    model_name: str,
    checkpoint_dir: Path,
    *,
    run_id: str,
    figures: Mapping[str, Any],
    parent_version: int | None,
    plots: Iterable[Path],
    extra_tags: Mapping[str, str],
) -> int:
    """Verify a checkpoint, log it as a model of the run, and make it the next version. See `Registry.register`."""
    manifest = verify_checkpoint(checkpoint_dir)
    if parent_version is None:
        parent_version = manifest.parent_version
    config = DrafterConfig.from_hf(json.loads((checkpoint_dir / CONFIG).read_text(encoding="utf-8")))
    provenance = provenance_tags(manifest, sha256_of(checkpoint_dir / MANIFEST), config)
    if parent_version is not None:
        provenance["parent_version"] = str(parent_version)
    figures = {**manifest.figures, **figures}
    tags = {**extra_tags, **figure_tags(figures, {**extra_tags, **provenance}), **provenance}
    plots = [Path(plot) for plot in plots]
    if absent := [str(plot) for plot in plots if not plot.is_file()]:
        raise RegistryError(f"plots {absent} are not there", "files")

    missing = RegistryError(f"{shown(tracking_uri)} has no run {run_id}", None, "open a run with `TrackedRun` first")
    with talking_to(tracking_uri, f"find run {run_id}", missing=missing) as client:
        run = client.get_run(run_id)
        tags["run_name"] = run.info.run_name
    if parent_version is not None:
        missing = RegistryError(f"{model_name} has no version {parent_version} to be the parent")
        with talking_to(tracking_uri, f"find parent {parent_version}", missing=missing) as client:
            client.get_model_version(model_name, str(parent_version))
    with talking_to(tracking_uri, f"register {checkpoint_dir.name}") as client:
        model_id = _log_model(client, run, model_name, checkpoint_dir, tags, figures)
        for plot in plots:
            client.log_artifact(run_id, str(plot), "plots")
        _ensure_registered_model(client, model_name, manifest.target_name)
        version = client.create_model_version(
            model_name, f"models:/{model_id}", run_id, tags=tags, model_id=model_id, await_creation_for=0
        )
        return int(version.version)


def fetch_version(tracking_uri: str, model_name: str, version: int, model_id: str, digest: str, dest: Path) -> None:
    """Bring a version's checkpoint to `dest`, whole and verified. See `Registry.download`.

    Args:
        digest: sha256 of its manifest, from the registry's database: a changed artifact store cannot change that.
    """
    if dest.exists():
        try:
            return _verify(dest, digest)
        except CheckpointError:
            shutil.rmtree(dest)
    part = dest.parent / f".{dest.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        part.mkdir(parents=True)
        _download(tracking_uri, model_name, version, model_id, part)
        _verify(part / CHECKPOINT, digest)
        os.rename(part / CHECKPOINT, dest)
    except OSError as error:
        if not dest.exists():  # else another process on this machine was first
            raise CheckpointError(f"{dest} could not be written: {error}", "a writable folder with room") from error
        _verify(dest, digest)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _verify(folder: Path, digest: str) -> None:
    verify_checkpoint(folder)
    if (found := sha256_of(folder / MANIFEST)) != digest:
        raise CheckpointError(
            f"{folder / MANIFEST} has sha256 {found}",
            f"{digest}, as registered",
            "the artifact store was altered: do not serve this version, register it again from its origin",
        )


def _download(tracking_uri: str, model_name: str, version: int, model_id: str, part: Path) -> None:
    with talking_to(tracking_uri, f"download version {version}") as client:
        from mlflow.artifacts import download_artifacts

        listed = client.list_logged_model_artifacts(model_id, CHECKPOINT)
        need = sum(entry.file_size or 0 for entry in listed)
        free = shutil.disk_usage(part).free
        if need > min(MAX_BYTES, free):
            raise CheckpointError(
                f"version {version} needs {need} bytes, {free} are free", f"at most {MAX_BYTES}, and room for them"
            )
        uri = client.get_model_version_download_uri(model_name, str(version))
        download_artifacts(artifact_uri=f"{uri}/{CHECKPOINT}", dst_path=str(part), tracking_uri=tracking_uri)


def _log_model(
    client: Any, run: Any, model_name: str, checkpoint_dir: Path, tags: Mapping[str, str], figures: Mapping[str, Any]
) -> str:
    """The steps of MLflow's `Model.log`, which itself would use the process's global server and active run."""
    from mlflow.entities import LoggedModelOutput, Metric
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    run_id = run.info.run_id
    logged = client.create_logged_model(
        run.info.experiment_id,
        name=model_name,
        source_run_id=run_id,
        tags={key: tags[key] for key in ("target", "drafter", "drafter_sha256", "architecture")},
        params=dict(run.data.params),
        model_type="drafter",
    )
    try:
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
        with tempfile.TemporaryDirectory(prefix="eaglenest-") as folder:
            model = Model(
                artifact_path=logged.artifact_location,
                model_uuid=logged.model_id,
                run_id=run_id,
                model_id=logged.model_id,
            )
            save_model(checkpoint_dir, Path(folder) / "model", mlflow_model=model)
            client.log_model_artifacts(logged.model_id, str(Path(folder) / "model"))
        now = int(time.time() * 1000)
        numbers = {k: float(v) for k, v in figures.items() if isinstance(v, int | float)}
        metrics = [
            Metric(key, value, now, 0, model_id=logged.model_id, run_id=run_id) for key, value in numbers.items()
        ]
        client.log_batch(run_id, metrics=metrics)
    except BaseException:
        with contextlib.suppress(MlflowException):  # the first error is the one to report
            client.finalize_logged_model(logged.model_id, "FAILED")
        raise
    client.finalize_logged_model(logged.model_id, "READY")
    return str(logged.model_id)


def _ensure_registered_model(client: Any, model_name: str, target_name: str) -> None:
    from mlflow.exceptions import MlflowException

    text = (
        f"Drafters of {target_name}. `champion` is served, `challenger` is the newest, `previous_champion` is what "
        "`eaglenest rollback` returns to."
    )
    try:
        client.create_registered_model(model_name, description=text)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
