"""What runs, written down: `<runs_dir>/services.json`, and the lock that lets one command at a time change it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eaglenest.errors import ServiceError
from eaglenest.services.processes import ProcessRecord
from eaglenest.settings import Settings

RAY, MLFLOW = "ray", "mlflow"

Say = Callable[[str], None]


def silent(message: str) -> None:
    """A `Say` that says nothing."""


class State(BaseModel):
    """The services that were started and not yet stopped."""

    model_config = ConfigDict(extra="forbid")

    services: dict[str, ProcessRecord] = Field(default_factory=dict)
    serve_digest: str | None = None  # of the Serve config last deployed


def state_path(settings: Settings) -> Path:
    return settings.runs_dir.resolve() / "services.json"


def load(settings: Settings) -> State:
    """The state; an empty one where nothing was started.

    Raises:
        ServiceError: the file is damaged.
    """
    path = state_path(settings)
    try:
        return State.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return State()
    except ValidationError as error:
        raise ServiceError(
            f"{path} is not readable as the state of our services ({error.error_count()} errors)",
            None,
            f"end what `ps aux | grep eaglenest` shows, then remove {path}",
        ) from error


def save(settings: Settings, state: State) -> None:
    """Write the state whole or not at all."""
    path = state_path(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(state.model_dump_json(indent=2) + "\n")
    os.replace(partial, path)


@contextlib.contextmanager
def locked(settings: Settings, say: Say = silent) -> Iterator[None]:
    """Only one command at a time starts or stops services of one runs_dir; the next waits for it."""
    path = state_path(settings).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another eaglenest command is starting or stopping services; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
