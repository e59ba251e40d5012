"""Submit our jobs through Ray's Jobs API and follow them, as `ray job submit` does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from eaglenest.errors import EagleNestError, ServiceError
from eaglenest.services import access
from eaglenest.services.kinds import settings_env
from eaglenest.settings import Settings

RUNTIME_ENV = Path("jobs") / "runtime_env.yaml"


def project_root() -> Path:
    """The checkout: where `jobs/` and `serve_configs/` lie.

    Raises:
        ServiceError: this is an installation without them.
    """
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / RUNTIME_ENV).exists():
            return folder
    raise ServiceError(
        f"no {RUNTIME_ENV} here", "a checkout of EagleNest", "run the command in the folder that holds jobs/"
    )


def runtime_env(root: Path, env: dict[str, str]) -> dict[str, Any]:
    """The runtime environment of our jobs, with paths made absolute and environment variables added."""
    raw: dict[str, Any] = yaml.safe_load((root / RUNTIME_ENV).read_text())
    modules = [str(root / module) for module in raw.get("py_modules", [])]
    return {**raw, "working_dir": str(root), "py_modules": modules, "env_vars": {**raw.get("env_vars", {}), **env}}


def run_distill_job(
    settings: Settings, arguments: Sequence[str], *, say: Callable[[str], None], stop_on_interrupt: bool = True
) -> None:
    """Submit `python jobs/distill.py ...`, hand its output to `say` line by line, and return when it has succeeded.

    Args:
        stop_on_interrupt: Ctrl-C stops the job too.

    Raises:
        ServiceError: Ray does not answer, or the job failed.
    """
    access.adopt(settings)
    from ray.job_submission import JobStatus, JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.WARNING)
    root = project_root()
    entrypoint = shlex.join(["python", "jobs/distill.py", *arguments])
    try:
        client = JobSubmissionClient(settings.dashboard_url, headers=access.headers(settings))
        job = client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env(root, settings_env(settings)))
    except (ConnectionError, RuntimeError) as error:
        raise ServiceError(
            f"Ray at {settings.dashboard_url} takes no job ({error})", "a running Ray", "`eaglenest up --no-serve`"
        ) from error
    last: list[str] = []

    async def follow() -> None:
        rest = ""
        async for chunk in client.tail_job_logs(job):
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                last[:] = [*last[-30:], line]
                say(line)
        if rest:
            say(rest)

    try:
        asyncio.run(follow())
        status = client.get_job_status(job)
    except KeyboardInterrupt:
        if stop_on_interrupt:
            with contextlib.suppress(Exception):  # the interrupt itself matters more
                client.stop_job(job)
        raise
    if status != JobStatus.SUCCEEDED:
        told = [line for line in last if line.startswith("error: ")]
        detail = told[-1].removeprefix("error: ") if told else "\n".join(last[-12:])
        raise _failed(job, str(status), detail)


def _failed(job: str, status: str, detail: str) -> EagleNestError:
    return ServiceError(f"job {job} ended as {status}: {detail}", None, f"`ray job logs {job}` has all it said")
