"""The Ray Serve application: one deployment, whose replicas hold one vLLM engine each.

    serve run serve_configs/1-one-replica.yaml
    serve run eaglenest.serving.app:build drafter=none max_model_len=1024

Every route is vLLM's own, through Serve's late-bound ASGI app, but `GET /eaglenest/status`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray import serve

from eaglenest.engine.arguments import resolve_dtype
from eaglenest.engine.environment import engine_env, on_cpu, take_normal_priority
from eaglenest.engine.swapper import DrafterSwapper
from eaglenest.errors import EngineError, SwapRefused
from eaglenest.serving.args import DEPLOYMENT, AppArgs
from eaglenest.serving.drafter_source import DrafterSource, Start, contract_of, from_folder
from eaglenest.serving.reconciler import Reconciler
from eaglenest.serving.status import ReplicaStatus
from eaglenest.settings import get_settings
from eaglenest.targets.embedded import EMBEDDED

logger = logging.getLogger(__name__)

# An engine batches; Serve's own limits (5 running, endless waiting) are made for one request at a time. A request
# counts as waiting until Serve has chosen its replica, so the second limit has to hold a whole burst.
RUNNING_PER_SEQUENCE, WAITING_PER_SEQUENCE = 2, 4


@serve.ingress()
class EagleNest:
    """A replica: a target with the champion drafter, and the reconciler that keeps it the champion.

    Args:
        args: `AppArgs` as a dictionary.
    """

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        from eaglenest.engine.launch import start_engine
        from eaglenest.targets import resolve_target

        self._args = AppArgs.model_validate(args)
        if not take_normal_priority():
            logger.warning("the engine runs with Ray's niceness: start Ray with RAY_worker_niceness=0")
        settings = get_settings()
        target = await asyncio.to_thread(resolve_target, self._args.target, settings)
        self._source: DrafterSource | None = None
        start: Start | None = None
        if self._args.drafter == "registry":
            self._source = _source(self._args, target.fingerprint)
            start = await asyncio.to_thread(self._source.at_start)
        elif self._args.speculates:
            start = await asyncio.to_thread(from_folder, Path(self._args.drafter), target.fingerprint)
        self._spec = self._args.engine_spec(target, start.folder if start else None)
        self._engine = start_engine(self._spec, stat_loggers=_stat_loggers())
        self._status = ReplicaStatus(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            desired_version=start.desired if start else None,
            actual_version=start.version if start else None,
            since=datetime.now(UTC).isoformat(timespec="milliseconds"),
            last_error=start.note if start else None,
            dtype=resolve_dtype(self._spec.dtype),
            k=self._spec.num_speculative_tokens if start else 0,
        )
        self._reconciler = await self._make_reconciler(start)
        self._polling: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """vLLM's application; Serve calls this once, when the replica is up."""
        from eaglenest.serving.openai import openai_app

        app = await openai_app(self._engine, self._spec)
        app.add_api_route("/eaglenest/status", self._status_route, methods=["GET"])
        if self._reconciler is not None:
            self._polling = asyncio.create_task(self._reconciler.run())
        return app

    async def reconcile(self) -> dict[str, Any]:
        """Look at the registry now; for a broadcast. Answers with the status afterwards."""
        if self._reconciler is not None:
            await self._reconciler.reconcile()
        return await self.drafter_status()

    async def drafter_status(self) -> dict[str, Any]:
        """This replica's `ReplicaStatus`; for a broadcast."""
        return self._now().model_dump()

    async def check_health(self) -> None:
        """Healthy as long as the engine runs and its drafter is known."""
        await self._engine.check_health()
        if self._reconciler is not None and self._reconciler.broken:
            raise EngineError(self._reconciler.broken, "a drafter that is known", "Serve replaces this replica")

    def __del__(self) -> None:
        if polling := getattr(self, "_polling", None):
            polling.cancel()
        if reconciler := getattr(self, "_reconciler", None):
            reconciler.close()
        if engine := getattr(self, "_engine", None):
            engine.shutdown()

    async def _status_route(self) -> list[dict[str, Any]]:
        return [await self.drafter_status()]

    def _now(self) -> ReplicaStatus:
        return self._reconciler.status if self._reconciler is not None else self._status

    async def _make_reconciler(self, start: Start | None) -> Reconciler | None:
        if self._source is None or start is None:
            return None
        from eaglenest.serving.replica_metrics import ReplicaMetrics

        if start.version is not None:
            self._source.remember(start.version, start.folder)
        swapper = DrafterSwapper(self._engine)
        try:
            await swapper.rehearse(start.folder)
        except SwapRefused as error:  # it serves what it has, and says why it will take nothing else
            self._status = self._status.model_copy(update={"last_error": f"this engine cannot swap: {error}"})
            return None
        return Reconciler(
            self._source,
            contract_of(start),
            swapper,
            self._status,
            poll_interval_s=self._args.poll_interval_s,
            observer=ReplicaMetrics(),
        )


def build(args: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and for `import_path` in a config file.

    Args:
        args: see `AppArgs`; unknown keys are refused.
    """
    checked = args if isinstance(args, AppArgs) else AppArgs.model_validate(args)
    if checked.drafter not in ("registry", "none"):
        checked = checked.model_copy(update={"drafter": str(Path(checked.drafter).expanduser().resolve())})
    deployment = serve.deployment(
        EagleNest,
        name=DEPLOYMENT,
        max_ongoing_requests=RUNNING_PER_SEQUENCE * checked.max_num_seqs,
        max_queued_requests=WAITING_PER_SEQUENCE * checked.max_num_seqs,
        backpressure_config={"status_code": 429, "retry_after_s": 1},
        graceful_shutdown_timeout_s=600,  # a long answer may take minutes
        health_check_period_s=10,
        health_check_timeout_s=60,  # a busy engine answers late, not never
        ray_actor_options={
            # The engine's threads are vLLM's to place. Asking for whole cores on a small machine, whose cores Ray has
            # given away already, would wait for ever without a word.
            "num_cpus": 0,
            "num_gpus": 0 if on_cpu() else checked.tensor_parallel_size,
            "runtime_env": {"env_vars": _environment(checked)},
        },
    )
    return deployment.bind(checked.model_dump())


def _environment(args: AppArgs) -> dict[str, str]:
    """What the replica's process must find at its start. Secrets are left to the cluster's own environment."""
    local = args.target in EMBEDDED or Path(args.target).expanduser().exists()
    ours = {name: value for name, value in os.environ.items() if name.startswith("EAGLENEST_")}
    return ours | engine_env(local_target=local)


def _source(args: AppArgs, fingerprint: str) -> DrafterSource:
    from eaglenest.registry import Registry

    registry = Registry(args.tracking_uri, args.model_name)
    return DrafterSource(registry, args.alias, get_settings().cache_dir / "drafters", fingerprint)


def _stat_loggers() -> list[Any]:
    """vLLM's figures twice: on its own `/metrics`, and through Ray.

    Ray's logger alone would leave `/metrics` empty; made second, it would empty it, too.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger, PrometheusStatLogger]
