"""Every error a user can meet: what is wrong, what was expected, what to do."""

from __future__ import annotations

import errno


class EagleNestError(Exception):
    """An error with a message made for its reader.

    Args:
        what: what is wrong, with the offending value.
        expected: what was expected instead.
        fix: what the reader can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, expected: str | None = None, fix: str | None = None) -> None:
        self.what, self.expected, self.fix = what, expected, fix
        parts = [what.rstrip(".")]
        if expected:
            parts.append(f"expected: {expected.rstrip('.')}")
        if fix:
            parts.append(f"to mend it: {fix.rstrip('.')}")
        super().__init__(". ".join(parts) + ".")

    def __reduce__(self) -> tuple[type[EagleNestError], tuple[str, str | None, str | None]]:
        # Ray carries exceptions between processes: rebuild from the parts, not from the joined message.
        return type(self), (self.what, self.expected, self.fix)


def of_system(error: OSError) -> EagleNestError:
    """What the operating system refused, told like every other error: a full disk, a folder that may not be written."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno is None or (error.filename is None and error.errno != errno.ENOSPC):
        return EagleNestError(f"{where}{error.strerror or error}", None, "--debug shows where it came from")
    return EagleNestError(
        f"{where}{error.strerror}",
        "files and folders that this user may read and write, with room on the disk",
        "mend that, or set EAGLENEST_RUNS_DIR or EAGLENEST_CACHE_DIR to another folder",
    )


class BadInput(EagleNestError):
    """A prompt file, setting or argument that cannot be used."""

    exit_code = 2


class TargetError(EagleNestError):
    """A target that is missing, unsupported or not the one expected."""

    exit_code = 3


class CheckpointError(EagleNestError):
    """A drafter checkpoint that is incomplete, corrupt or of the wrong kind."""

    exit_code = 4


class RegistryError(EagleNestError):
    """The model registry is unreachable, or has no such version or alias."""

    exit_code = 5


class ServiceError(EagleNestError):
    """A local service (Ray, MLflow, Serve) that cannot be started, reached or stopped."""

    exit_code = 6


class EngineError(EagleNestError):
    """The vLLM engine cannot be started or used as asked."""

    exit_code = 7


class SwapRefused(EagleNestError):
    """A drafter version was not put into service; the old one is still serving."""

    exit_code = 8


class BenchError(EagleNestError):
    """A measurement that cannot be taken, or whose result would mislead."""

    exit_code = 9
