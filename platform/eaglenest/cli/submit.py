"""The arguments of `eaglenest distill`: checked here, then sent to `jobs/distill.py`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from eaglenest.cli.distill_job import app as job_app

_PATH_OPTIONS = ("--prompts", "--heldout", "--config", "--target", "--parent")


def checked(arguments: Sequence[str]) -> list[str]:
    """The job's arguments, parsed once here, so that a mistake (or --help) is answered before anything starts.

    Paths become absolute: the job runs in another folder.
    """
    typer.main.get_command(job_app).make_context("eaglenest distill", list(arguments))
    changed, option = [], ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if option in _PATH_OPTIONS:
            argument = _absolute(option, argument)
        elif equals and name in _PATH_OPTIONS:
            argument = f"{name}={_absolute(name, value)}"
        option = argument
        changed.append(argument)
    return changed


def _absolute(option: str, value: str) -> str:
    """A path that is there, absolute; anything else as it is. A parent without a separator is a version or an alias."""
    if option == "--parent" and os.sep not in value:
        return value
    return str(Path(value).resolve()) if os.path.exists(value) else value
