"""The replicas of a running application, seen and nudged from outside, through Ray."""

from __future__ import annotations

import logging
import os
from typing import Any

from eaglenest.errors import ServiceError
from eaglenest.serving.args import APP_NAME, DEPLOYMENT
from eaglenest.serving.status import ReplicaStatus
from eaglenest.settings import get_settings


class ServeReplicas:
    """All replicas of one application, by broadcast: routing and traffic notice nothing.

    Args:
        app_name: as in the Serve config.
        ray_address: of the Ray cluster; None: RAY_ADDRESS, or the local one on the settings' port.
    """

    def __init__(self, app_name: str = APP_NAME, ray_address: str | None = None) -> None:
        self._app_name = app_name
        settings = get_settings()
        self._address = ray_address or os.environ.get("RAY_ADDRESS") or f"{settings.host}:{settings.ray_port}"

    def status(self, timeout_s: float = 30.0) -> list[ReplicaStatus]:
        """What each replica says of its drafter.

        Raises:
            ServiceError: Ray or the application is not running, or a replica does not answer in time.
        """
        return self._broadcast("drafter_status", timeout_s)

    def nudge(self, timeout_s: float = 120.0) -> list[ReplicaStatus]:
        """Let each replica look at the registry at once; returns when all of them have acted on it.

        Raises:
            ServiceError: as `status`.
        """
        return self._broadcast("reconcile", timeout_s)

    def _broadcast(self, method: str, timeout_s: float) -> list[ReplicaStatus]:
        handle = self._handle()
        try:
            answers = handle.broadcast(method).results(timeout_s=timeout_s)
        except Exception as error:
            raise ServiceError(
                f"the replicas of {self._app_name} did not answer {method} ({type(error).__name__}: {error})",
                f"an answer from each within {timeout_s:g} s",
                "`serve status` shows their state; a replica that is starting answers when its engine is up",
            ) from error
        found = [ReplicaStatus.model_validate(answer) for answer in answers]
        return sorted(found, key=lambda status: status.replica_id)

    def _handle(self) -> Any:
        import ray
        from ray import serve

        try:
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
            if not ray.is_initialized():
                ray.init(self._address, namespace="serve", log_to_driver=False, logging_level="ERROR")
            return serve.get_deployment_handle(DEPLOYMENT, self._app_name)
        except Exception as error:
            raise ServiceError(
                f"no application {self._app_name} on the Ray cluster at {self._address} ({type(error).__name__})",
                "a running Ray with the Serve application",
                "start it with `eaglenest up`, or set RAY_ADDRESS",
            ) from error
