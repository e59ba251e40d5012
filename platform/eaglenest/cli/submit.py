"""`jobs/distill.py` through Ray's Jobs API, exactly as `ray job submit` sends it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from eaglenest.cli.common import say
from eaglenest.cli.distill_job import app as job_app
from eaglenest.errors import EagleNestError, ServiceError
from eaglenest.services.processes import undisturbed
from eaglenest.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
JOB = Path("jobs/distill.py")
RUNTIME_ENV = Path("jobs/runtime_env.yaml")
_PATH_OPTIONS = ("--prompts", "--heldout", "--config", "--target")
_STOP_S = 40.0  # the job has RAY_JOB_STOP_WAIT_TIME_S to close its run


def checked(arguments: Sequence[str]) -> list[str]:
    """The job's arguments, parsed once here, so that a mistake (or --help) is answered before anything starts.

    Paths become absolute: the job runs in another folder.
    """
    typer.main.get_command(job_app).make_context("eaglenest distill", list(arguments))
    changed, option = [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if option in _PATH_OPTIONS and Path(argument).exists():
            argument = str(Path(argument).resolve())
        elif equals and name in _PATH_OPTIONS and Path(value).exists():
            argument = f"{name}={Path(value).resolve()}"
        option = argument
        changed.append(argument)
    return changed


def run(settings: Settings, arguments: Sequence[str], *, quiet: bool = False) -> str:
    """Submit the job, print its log until it ends, stop it on Ctrl-C.

    Args:
        quiet: the log goes to stderr.

    Returns:
        The job's id.

    Raises:
        ServiceError: there is no source tree to submit from, Ray does not answer, or refuses the job.
        EagleNestError: the job failed.
    """
    client = _client(settings)
    try:
        job_id = str(client.submit_job(entrypoint=f"python {JOB} {shlex.join(arguments)}", runtime_env=_runtime_env()))
    except RuntimeError as error:
        raise ServiceError(f"Ray refuses the job: {_first_line(error)}", None, "`eaglenest doctor`") from error
    say(f"job {job_id}; its page: {settings.dashboard_url}/#/jobs")
    try:
        asyncio.run(_follow(client, job_id, sys.stderr if quiet else sys.stdout))
        status = _final_status(client, job_id)
    except KeyboardInterrupt:
        with undisturbed():
            say(f"stopping job {job_id}")
            stop(client, job_id)
        raise
    if status != "SUCCEEDED":
        raise EagleNestError(
            f"job {job_id} ended as {status}",
            None,
            "its log above says why; the same --name goes on where it stopped",
        )
    return job_id


def stop(client: Any, job_id: str) -> None:
    """Stop a job and wait until it is gone."""
    with contextlib.suppress(RuntimeError):
        client.stop_job(job_id)
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        with contextlib.suppress(RuntimeError):
            if client.get_job_status(job_id).is_terminal():
                return
        time.sleep(0.3)


def _client(settings: Settings) -> Any:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(settings.dashboard_url)
    except (ConnectionError, RuntimeError) as error:
        raise ServiceError(
            f"Ray's Jobs API does not answer at {settings.dashboard_url}: {_first_line(error)}",
            "a running Ray head",
            "start it with `eaglenest up`",
        ) from error


def _runtime_env() -> dict[str, Any]:
    """The job's runtime env as the file has it, the source tree as its working directory."""
    if not (ROOT / JOB).exists():
        raise ServiceError(
            f"{JOB} is not beside this installation",
            "a clone of EagleNest, installed with `make setup`",
            f"from a clone: ray job submit --working-dir . --runtime-env {RUNTIME_ENV} -- python {JOB} ...",
        )
    env: dict[str, Any] = yaml.safe_load((ROOT / RUNTIME_ENV).read_text())
    modules = [str(ROOT / module) for module in env.get("py_modules", [])]
    return {**env, "py_modules": modules, "working_dir": str(ROOT)}


async def _follow(client: Any, job_id: str, to: Any) -> None:
    async for lines in client.tail_job_logs(job_id):
        to.write(lines)
        to.flush()


def _final_status(client: Any, job_id: str) -> str:
    """The log may end a moment before the job does, or break off while it runs on."""
    while not (status := client.get_job_status(job_id)).is_terminal():
        time.sleep(0.5)
    return str(status.value)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
