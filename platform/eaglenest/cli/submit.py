"""The arguments of `eaglenest distill`: checked here, then sent to `jobs/distill.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from eaglenest.cli.distill_job import app as job_app

_PATH_OPTIONS = ("--prompts", "--heldout", "--config", "--target")


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
