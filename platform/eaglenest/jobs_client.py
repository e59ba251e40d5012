"""Our jobs through Ray's Jobs API, exactly as `ray job submit` sends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from eaglenest.errors import EagleNestError, ServiceError
from eaglenest.services import access
from eaglenest.services.processes import undisturbed
from eaglenest.settings import Settings

JOB = Path("jobs/distill.py")
RUNTIME_ENV = Path("jobs/runtime_env.yaml")
_NOISE = re.compile(
    r"^(\[?\d{4}-|\[rank|\(|(DEBUG|INFO|WARNING|ERROR) \d\d-|Loading |Writing |Attempted to load|Training|\s*$)"
)
"""How lines begin that Ray, vLLM and transformers log."""

_STOP_S = 40.0  # the job has RAY_JOB_STOP_WAIT_TIME_S to close its run


def project_root() -> Path:
    """The checkout, which holds `jobs/` and `serve_configs/`.

    Raises:
        ServiceError: this is an installation without them.
    """
    for folder in (Path(__file__).resolve().parents[2], Path.cwd()):
        if (folder / RUNTIME_ENV).exists():
            return folder
    raise ServiceError(
        f"{JOB} is not beside this installation",
        "a clone of EagleNest, installed with `make setup`",
        f"from a clone: ray job submit --working-dir . --runtime-env {RUNTIME_ENV} -- python {JOB} ...",
    )


def runtime_env(root: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The jobs' runtime environment as the file has it, the source tree as its working directory.

    Args:
        env: environment variables to add.
    """
    raw: dict[str, Any] = yaml.safe_load((root / RUNTIME_ENV).read_text())
    modules = [str(root / module) for module in raw.get("py_modules", [])]
    variables = {**raw.get("env_vars", {}), **(env or {})}
    # Ray takes an empty list of modules for one without a name, and fails the job
    found = {k: v for k, v in raw.items() if k not in ("py_modules", "env_vars")} | {"working_dir": str(root)}
    if modules:
        found["py_modules"] = modules
    if variables:
        found["env_vars"] = variables
    return found


def telling(line: str) -> str | None:
    """A line of a job's log as a person wants it, without the prefix of Ray's workers; None for what libraries say."""
    prefix, _, rest = line.rpartition("\x1b[0m ")
    if (prefix and not rest.startswith(("pass ", "goes on "))) or _NOISE.match(line):
        return None
    return rest


def run_distill_job(settings: Settings, arguments: Sequence[str], on_line: Callable[[str], None]) -> str:
    """Submit `python jobs/distill.py ...`, follow its log, and return when it has succeeded. Ctrl-C stops the job too.

    Args:
        on_line: given each line of the log.

    Returns:
        The job's id.

    Raises:
        ServiceError: there is no source tree to submit from, Ray does not answer, or refuses the job.
        EagleNestError: the job failed.
    """
    access.adopt(settings)
    logging.getLogger("ray").setLevel(logging.WARNING)
    environment = runtime_env(project_root())
    client = _client(settings)
    try:
        job_id = str(client.submit_job(entrypoint=f"python {JOB} {shlex.join(arguments)}", runtime_env=environment))
    except RuntimeError as error:
        raise ServiceError(f"Ray refuses the job: {_first_line(error)}", None, "`eaglenest doctor`") from error
    told: list[str] = []

    def keep(line: str) -> None:
        if line.startswith("error: "):
            told.append(line.removeprefix("error: "))
        on_line(line)

    try:
        asyncio.run(_follow(client, job_id, keep))
        status = _final_status(client, job_id)
    except KeyboardInterrupt:
        with undisturbed():
            _stop(client, job_id)
        raise
    if status != "SUCCEEDED":
        told = told or [_message(client, job_id)]
        raise EagleNestError(
            f"job {job_id} ended as {status}" + (f": {told[-1]}" if told[-1] else ""),
            None,
            "its log above says why; the same --name goes on where it stopped",
        )
    return job_id


def _stop(client: Any, job_id: str) -> None:
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


async def _follow(client: Any, job_id: str, on_line: Callable[[str], None]) -> None:
    rest = ""
    async for chunk in client.tail_job_logs(job_id):
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            on_line(line)
    if rest:
        on_line(rest)


def _final_status(client: Any, job_id: str) -> str:
    """The log may end a moment before the job does, or break off while it runs on."""
    while not (status := client.get_job_status(job_id)).is_terminal():
        time.sleep(0.5)
    return str(status.value)


def _message(client: Any, job_id: str) -> str:
    """What Ray says of a job that ended, in one line: it may have failed before it wrote anything."""
    with contextlib.suppress(RuntimeError):
        return " ".join(str(client.get_job_info(job_id).message or "").split())[-600:]
    return ""


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
