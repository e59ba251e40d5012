"""What every command shares: settings read with a readable error, output for people and for machines."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from eaglenest.errors import BadInput
from eaglenest.settings import Settings, get_settings

PREFIX = "EAGLENEST_"

out = Console()
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON for a machine; progress goes to stderr")]


def load_settings() -> Settings:
    """The settings of this process; lets it talk to the Ray that `up` started.

    Raises:
        BadInput: an EAGLENEST_ variable is unknown or has a value that cannot be used.
    """
    known = {
        f"{PREFIX}{name.upper()}" for name, field in Settings.model_fields.items() if field.validation_alias is None
    }
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise BadInput(
                f"{name} is no setting",
                f"one of {', '.join(sorted(known))}",
                f"unset it; did you mean {close[0]}?" if close else "unset it",
            )
    try:
        settings = get_settings()
    except ValidationError as error:
        raise _bad_setting(error) from error
    from eaglenest.services.access import adopt

    adopt(settings)
    return settings


def _bad_setting(error: ValidationError) -> BadInput:
    first = error.errors()[0]
    place = str(first["loc"][0])
    name = place if place.isupper() else f"{PREFIX}{place.upper()}"
    problem = first["msg"][0].lower() + first["msg"][1:]
    return BadInput(f"{name}={first['input']!r} cannot be used", problem, f"set {name} to another value, or unset it")


def print_json(value: Any) -> None:
    """The only thing on stdout: pipes and redirects keep it whole."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def say(message: str) -> None:
    """A line of progress, on stderr."""
    err.print(Text(message, style="dim"), soft_wrap=True)


@contextmanager
def progress(title: str) -> Iterator[Any]:
    """A spinner with the latest line where stderr is a terminal, plain lines elsewhere. Yields the `say` to use."""
    if not err.is_terminal:
        yield say
        return
    with err.status(title) as status:
        yield lambda message: status.update(Text(message))


def pairs(values: Mapping[str, str]) -> None:
    """Name and value, a line each, aligned."""
    width = max(map(len, values), default=0)
    for name, value in values.items():
        out.print(Text.assemble((f"{name:<{width}}  ", "bold"), value), soft_wrap=True)
