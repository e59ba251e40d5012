"""MLflow runs without the fluent API: opened in the driver, closed for certain, logged to from anywhere by run id."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from eaglenest.errors import RegistryError
from eaglenest.registry.client import talking_to
from eaglenest.settings import shown

logger = logging.getLogger(__name__)

_PAUSE_AFTER_FAILURE_S = 30.0
_BATCH = 1000  # metrics that MLflow takes in one call


class RunLogger:
    """Logs metrics to a run, in the driver or in a worker: give it the URI and the run id.

    Training must not stop for its bookkeeping: metrics that cannot be delivered are kept and sent with the next ones.
    """

    def __init__(self, tracking_uri: str, run_id: str) -> None:
        self.tracking_uri, self.run_id = tracking_uri, run_id
        self._kept: list[tuple[str, float, int, int]] = []
        self._retry_at = 0.0

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step. Never raises for a server that does not answer: it warns, and tries again later."""
        now = int(time.time() * 1000)
        self._kept += [(name, float(value), now, step) for name, value in values.items()]
        if time.monotonic() >= self._retry_at:
            self.flush()

    def flush(self) -> bool:
        """Send what is kept; whether nothing is left."""
        try:
            with talking_to(self.tracking_uri, f"log metrics of run {self.run_id}") as client:
                from mlflow.entities import Metric

                while self._kept:
                    batch = self._kept[:_BATCH]
                    client.log_batch(self.run_id, metrics=[Metric(*entry) for entry in batch])
                    del self._kept[: len(batch)]
        except RegistryError as error:
            self._retry_at = time.monotonic() + _PAUSE_AFTER_FAILURE_S
            logger.warning("%d metrics are kept for later: %s", len(self._kept), error)
        return not self._kept


class TrackedRun:
    """A run of an experiment, as a context manager: FINISHED, FAILED or, when interrupted, KILLED.

    Args:
        tracking_uri: http(s) URI of the MLflow server.
        experiment: made when it is not there.
        params: settings to show; nested ones should be flattened by the caller.

    Raises:
        RegistryError: on entering, when the server cannot be reached. Later only by `log_data` and `log_file`.
    """

    def __init__(
        self,
        tracking_uri: str,
        experiment: str,
        *,
        run_name: str,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.tracking_uri = tracking_uri.rstrip("/")
        self._experiment, self._run_name = experiment, run_name
        self._params, self._tags = dict(params or {}), dict(tags or {})
        self.run_id = ""
        self.url = ""

    def __enter__(self) -> TrackedRun:
        with talking_to(self.tracking_uri, f"open run {self._run_name}") as client:
            from mlflow.entities import Param

            experiment_id = _experiment_id(client, self._experiment)
            self.run_id = client.create_run(experiment_id, run_name=self._run_name, tags=self._tags).info.run_id
            try:
                client.log_batch(self.run_id, params=[Param(k, str(v)) for k, v in self._params.items()])
            except BaseException:
                client.set_terminated(self.run_id, "FAILED")
                raise
        self.url = f"{shown(self.tracking_uri)}/#/experiments/{experiment_id}/runs/{self.run_id}"
        self._logger = RunLogger(self.tracking_uri, self.run_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit | GeneratorExit)
        status = "FINISHED" if kind is None else "KILLED" if stopped else "FAILED"
        self._logger.flush()
        try:
            with talking_to(self.tracking_uri, f"close run {self.run_id}") as client:
                client.set_terminated(self.run_id, status)
        except RegistryError as failure:  # the work is done, or has its own error to report
            logger.warning("run %s stays open, though it is %s: %s", self.run_id, status, failure)

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log values at a step; kept for later while the server does not answer."""
        self._logger.metrics(values, step)

    def log_data(self, name: str, digest: str, source: str, *, context: str, profile: str | None = None) -> None:
        """Name a data set that went into the run.

        Args:
            digest: of its content, 36 characters at most are kept.
            source: where it came from, for a reader.
            context: its use: "training", "held-out".
            profile: JSON with its size.
        """
        with talking_to(self.tracking_uri, f"log data set {name}") as client:
            from mlflow.entities import Dataset, DatasetInput, InputTag

            data = Dataset(name, digest[:36], "local", source, profile=profile)
            client.log_inputs(self.run_id, [DatasetInput(data, [InputTag("mlflow.data.context", context)])])

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Keep a file with the run."""
        with talking_to(self.tracking_uri, f"keep {path.name}") as client:
            client.log_artifact(self.run_id, str(path), folder)


def _experiment_id(client: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is not None:
        if found.lifecycle_stage == "deleted":
            raise RegistryError(f"experiment {name} was deleted", None, "restore it, or use another name")
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return str(client.get_experiment_by_name(name).experiment_id)  # another driver made it just now
