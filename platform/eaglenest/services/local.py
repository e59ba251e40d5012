"""Ray, MLflow and the Serve application of one machine: up, down, status."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from eaglenest.errors import BadInput, EagleNestError, ServiceError
from eaglenest.services import access, processes, serve_app
from eaglenest.services.kinds import Kind, mlflow_answers, mlflow_server, ray_head
from eaglenest.services.memory import resident_bytes
from eaglenest.services.serve_app import delete_serve, deploy_serve
from eaglenest.services.state import MLFLOW, RAY, Say, load, locked, save, silent
from eaglenest.settings import Settings, shown

if TYPE_CHECKING:
    from eaglenest.bench.models import Configuration

__all__ = [
    "DEFAULT_CONFIG",
    "Services",
    "delete_serve",
    "deploy_serve",
    "down",
    "engines",
    "our_processes",
    "start_mlflow",
    "start_ray",
    "status",
    "up",
]

DEFAULT_CONFIG = Path("serve_configs/1-one-replica.yaml")
# How long `down` lets replicas end their engines before it ends Ray under them.
_SERVE_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Services:
    """What runs, and where."""

    ray_address: str
    dashboard_url: str
    tracking_uri: str
    serve_url: str | None  # None: Serve was not asked for
    started: tuple[str, ...]  # those that this call started or replaced; the others ran already


def up(settings: Settings, *, serve: bool = True, config: Path | None = None, say: Say = silent) -> Services:
    """Start what does not run yet, replace what died, keep what is healthy.

    A local MLflow is started unless MLFLOW_TRACKING_URI names another. Interrupted or failed, it ends what it started.

    Args:
        serve: deploy a Serve application too.
        config: its Serve config; None: `serve_configs/1-one-replica.yaml`.
        say: told of progress, a line each.

    Raises:
        BadInput: the config cannot be used.
        ServiceError: a service cannot be started, its port is taken, or a foreign MLflow does not answer.
    """
    rendered = serve_app.render(settings, config or _default_config()) if serve else None
    kinds = [ray_head(settings)]
    if not _foreign_mlflow(settings):
        kinds.insert(0, mlflow_server(settings))
    elif not mlflow_answers(settings.tracking_uri):
        raise ServiceError(
            f"no MLflow server answers at {shown(settings.tracking_uri)}",
            "the server that MLFLOW_TRACKING_URI names",
            "start it, or unset MLFLOW_TRACKING_URI to use a local one",
        )
    with locked(settings, say):
        started = _start(settings, kinds, say)
        try:
            if rendered is not None and _deploy(settings, rendered, say):
                started.append("serve")
        except BaseException:
            with processes.undisturbed():
                _stop(settings, [name for name in started if name in (RAY, MLFLOW)])
            raise
    return Services(
        ray_address=f"{settings.host}:{settings.ray_port}",
        dashboard_url=settings.dashboard_url,
        tracking_uri=shown(settings.tracking_uri),
        serve_url=settings.serve_url if serve else None,
        started=tuple(started),
    )


def start_ray(settings: Settings, *, say: Say = silent) -> bool:
    """Start Ray's head, or keep a healthy one. Returns whether it was started. Raises ServiceError."""
    with locked(settings, say):
        return bool(_start(settings, [ray_head(settings)], say))


def start_mlflow(settings: Settings, *, say: Say = silent) -> bool:
    """Start the local MLflow server, or keep a healthy one. Returns whether it was started. Raises ServiceError."""
    with locked(settings, say):
        return bool(_start(settings, [mlflow_server(settings)], say))


def down(settings: Settings, *, say: Say = silent) -> dict[str, int]:
    """End everything that `up` started, and nothing else. Fine where nothing runs.

    Returns:
        For each service ended, of how many processes.
    """
    with locked(settings, say), processes.undisturbed():
        state = load(settings)
        if RAY in state.services and processes.root_of(state.services[RAY]):
            # Engines that end by themselves free their shared memory; those that do not are ended with Ray.
            with contextlib.suppress(EagleNestError):
                if serve_app.applications(settings):
                    delete_serve(settings, say=say, timeout_s=_SERVE_PATIENCE_S)
        return _stop(settings, [name for name in (RAY, MLFLOW) if name in state.services], say)


def engines(settings: Settings, *, say: Say = silent) -> Callable[[Configuration], AbstractContextManager[str]]:
    """For `eaglenest.bench.run_bench`: each configuration deployed in its turn, one engine at a time, Ray being up.

    The engine of a configuration with speculation takes the registry's champion.
    """

    def deploy(configuration: Configuration) -> AbstractContextManager[str]:
        args = {
            "drafter": "registry" if configuration.speculation else "none",
            "dtype": configuration.dtype,
            "enforce_eager": configuration.eager,
        }
        say(f"deploying {configuration.name}")
        return serve_app.deployed(settings, _default_config(), args, say=say)

    return deploy


def _foreign_mlflow(settings: Settings) -> bool:
    """Whether MLFLOW_TRACKING_URI names a server that is not ours to start.

    `eaglenest env` exports the address of ours, so that alone makes it no other's.
    """
    if settings.mlflow_tracking_uri is None:
        return False
    if settings.tracking_uri.rstrip("/") != settings.local_tracking_uri:
        return True
    return MLFLOW not in load(settings).services and mlflow_answers(settings.local_tracking_uri)


def status(settings: Settings) -> dict[str, dict[str, Any]]:
    """How each service is: `{"ray": {"state": "running"|"stopped"|"dead"|"silent", "url", "pid", ...}, ...}`.

    Raises:
        ServiceError: the state file is damaged.
    """
    found: dict[str, dict[str, Any]] = {}
    records = load(settings).services
    for kind, url in (
        (ray_head(settings), settings.dashboard_url),
        (mlflow_server(settings), shown(settings.tracking_uri)),
    ):
        found[kind.name] = {"state": "stopped", "url": url, "pid": None, "log": None, "memory_mib": None}
        if record := records.get(kind.name):
            alive = processes.root_of(record) is not None
            found[kind.name]["state"] = ("running" if kind.healthy() else "silent") if alive else "dead"
            found[kind.name] |= {"pid": record.pid if alive else None, "log": str(record.log)}
            found[kind.name]["memory_mib"] = resident_bytes(processes.processes_of(record)) >> 20
    if _foreign_mlflow(settings):
        reached = mlflow_answers(settings.tracking_uri)
        found[MLFLOW] |= {"state": "running (not ours)" if reached else "unreachable"}
    found["serve"] = {"state": "stopped", "url": settings.serve_url, "applications": {}}
    if found[RAY]["state"] == "running":
        states = {name: app["status"] for name, app in serve_app.applications(settings).items()}
        if states:
            alike = set(states.values()) == {"RUNNING"}
            found["serve"] |= {"state": "running" if alike else "not ready", "applications": states}
    return found


def our_processes(settings: Settings) -> list[psutil.Process]:
    """Every process of the services that run: for watching their memory."""
    return [process for record in load(settings).services.values() for process in processes.processes_of(record)]


def _start(settings: Settings, kinds: list[Kind], say: Say) -> list[str]:
    """Start those that do not run; wait until all answer. On any exception end those started here."""
    state = load(settings)
    begun: list[Kind] = []
    try:
        for kind in kinds:
            if _keep(settings, kind, say):
                continue
            _require_ports(settings, kind)
            kind.prepare()
            say(f"starting {kind.title}")
            log = settings.runs_dir.resolve() / "logs" / f"{kind.name}.log"
            log.unlink(missing_ok=True)
            state = load(settings)
            state.services[kind.name] = processes.ProcessRecord(mark=uuid.uuid4().hex, log=log)
            begun.append(kind)
            save(settings, state)  # before it starts: should we die here, `down` finds it by its mark
            with processes.undisturbed():
                state.services[kind.name] = processes.start(kind.command, kind.env, state.services[kind.name])
                save(settings, state)
        for kind in begun:
            began = time.monotonic()
            processes.wait_until(kind.healthy, state.services[kind.name], kind.title, kind.patience_s)
            say(f"{kind.title} answers after {time.monotonic() - began:.0f} s")
        access.adopt(settings)
    except BaseException:
        with processes.undisturbed():
            _stop(settings, [kind.name for kind in begun])
        raise
    return [kind.name for kind in begun]


def _keep(settings: Settings, kind: Kind, say: Say) -> bool:
    """Whether a service runs and is healthy; one that is not is ended, to be started again."""
    record = load(settings).services.get(kind.name)
    if record is None:
        return False
    if processes.root_of(record) and kind.healthy():
        say(f"{kind.title} runs already")
        return True
    say(f"{kind.title} is not well: starting it again")
    _stop(settings, [kind.name])
    return False


def _require_ports(settings: Settings, kind: Kind) -> None:
    for name, port in kind.ports.items():
        if not processes.port_is_free(settings.host, port):
            raise ServiceError(
                f"port {port} for {kind.title} is taken by {processes.port_holder(port)}",
                None,
                f"end that program, or choose another port with EAGLENEST_{name.upper()}",
            )


def _stop(settings: Settings, names: list[str], say: Say = silent) -> dict[str, int]:
    counts = {}
    for name in names:
        state = load(settings)
        if record := state.services.get(name):
            say(f"stopping {name}")
            counts[name] = processes.end(record)
            del state.services[name]
            if name == RAY:
                state.serve_digest = None
                access.remove_token(settings)
            save(settings, state)
    return counts


def _deploy(settings: Settings, rendered: dict[str, Any], say: Say) -> bool:
    """Deploy the config unless it is what runs. Returns whether it was deployed."""
    wanted = serve_app.digest(rendered)
    if load(settings).serve_digest == wanted and serve_app.running(settings):
        say("Serve runs already")
        return False
    say("deploying the Serve application: its engine takes about a minute")
    deploy_serve(settings, rendered, say=say)
    state = load(settings)
    state.serve_digest = wanted
    save(settings, state)
    return True


def _default_config() -> Path:
    """Beside the source tree it belongs to, wherever the command is called from."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (path := root / DEFAULT_CONFIG).exists():
            return path
    raise BadInput(f"{DEFAULT_CONFIG} is not here", "EagleNest's own folder", "name a Serve config with --config")
