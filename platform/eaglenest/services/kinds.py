"""The two servers that we start as processes, Ray's head and MLflow: command, environment, ports, sign of health."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eaglenest.errors import ServiceError
from eaglenest.services import access
from eaglenest.services.http import answers, request
from eaglenest.services.processes import free_port
from eaglenest.services.state import MLFLOW, RAY
from eaglenest.settings import Settings

OBJECT_STORE_BYTES = 1 << 30
# Ray puts unix sockets some 70 characters below its folder, and the kernel allows 107 for the whole path.
_SHORT_TEMP = 36


@dataclass(frozen=True)
class Kind:
    """A server to start: what `local` needs to know of it."""

    name: str
    title: str
    command: list[str]
    env: Mapping[str, str]
    ports: Mapping[str, int]  # by the name of the setting that moves it
    healthy: Callable[[], bool]
    prepare: Callable[[], None]
    patience_s: float = field(default=120.0)


def settings_env(settings: Settings) -> dict[str, str]:
    """The settings as environment variables, paths absolute: for processes that run in another folder.

    The MLflow server in use goes along as MLFLOW_TRACKING_URI.
    """
    env = {
        f"EAGLENEST_{name.upper()}": str(value)
        for name, value in settings.model_dump().items()
        if name != "mlflow_tracking_uri"
    }
    env["EAGLENEST_CACHE_DIR"] = str(settings.cache_dir.resolve())
    env["EAGLENEST_RUNS_DIR"] = str(settings.runs_dir.resolve())
    if (target := Path(settings.target)).exists():
        env["EAGLENEST_TARGET"] = str(target.resolve())
    return env | {"MLFLOW_TRACKING_URI": settings.tracking_uri}


def ray_head(settings: Settings) -> Kind:
    """Ray's head node: one machine, loopback only, every port that nobody has to know chosen by the kernel.

    `--block` keeps one process above all others, so ending it ends the node.
    """
    folder = ray_folder(settings)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--log-color", "false"),
        *("--node-ip-address", settings.host, "--port", str(settings.ray_port)),
        *("--include-dashboard", "true", "--dashboard-host", settings.host),
        *("--dashboard-port", str(settings.ray_dashboard_port)),
        *("--num-cpus", str(len(os.sched_getaffinity(0)))),
        *("--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", str(folder)),
        *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0", "--max-worker-port", "0"),
        # which can neither be left out nor be given 0
        *("--ray-client-server-port", str(free_port(settings.host))),
    ]
    env = {
        **os.environ,
        **settings_env(settings),
        **access.auth_env(settings),
        # jobs are started as `python ...`: that must be this one
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # one node: there is nowhere to drain to
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's workers would yield to everything else on this machine (nice 15): a serving engine must not
        "RAY_worker_niceness": "0",
        "PYTHONUNBUFFERED": "1",
    }

    def prepare() -> None:
        _fresh_folder(folder)
        access.make_token(settings)

    return Kind(
        RAY,
        "Ray",
        command,
        env,
        {"ray_port": settings.ray_port, "ray_dashboard_port": settings.ray_dashboard_port},
        healthy=lambda: ray_answers(settings),
        prepare=prepare,
    )


def ray_answers(settings: Settings) -> bool:
    """Whether our Ray's dashboard answers, and takes jobs."""
    return answers(f"{settings.dashboard_url}/api/jobs/", timeout_s=10, headers=access.headers(settings))


def ray_folder(settings: Settings) -> Path:
    """Where Ray keeps its sockets and session logs: a short path, one per runs_dir."""
    base = tempfile.gettempdir()
    if len(base) > _SHORT_TEMP:
        base = "/tmp"
    digest = hashlib.sha256(str(settings.runs_dir.resolve()).encode()).hexdigest()[:8]
    return Path(base) / f"eaglenest-{os.getuid()}-{digest}"


def mlflow_answers(uri: str) -> bool:
    """Whether an MLflow server answers there: other programs have a page /health, too, and say other things on it."""
    response = request("GET", f"{uri.rstrip('/')}/health")
    return response is not None and response.status_code == 200 and response.text.strip() == "OK"


def mlflow_server(settings: Settings) -> Kind:
    """MLflow on sqlite and a folder, artifacts through the server, so that clients need no path of this machine."""
    home = settings.runs_dir.resolve() / "mlflow"
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
        *("--host", settings.host, "--port", str(settings.mlflow_port)),
        *("--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"),
        *("--serve-artifacts", "--artifacts-destination", str(home / "artifacts")),
    ]
    env = {
        **os.environ,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its job runner is several processes that we have no use for
        "PYTHONUNBUFFERED": "1",
    }
    return Kind(
        MLFLOW,
        "MLflow",
        command,
        env,
        {"mlflow_port": settings.mlflow_port},
        healthy=lambda: mlflow_answers(settings.local_tracking_uri),
        prepare=lambda: (home / "artifacts").mkdir(parents=True, exist_ok=True),
    )


def _fresh_folder(folder: Path) -> None:
    """An empty folder of ours only. Ray does not run now, so what is in it is left over from an earlier session."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and not folder.is_symlink():
            return
    except OSError:
        pass
    raise ServiceError(f"{folder} is not ours to use", "a folder that we can make", "remove it, or set TMPDIR")
