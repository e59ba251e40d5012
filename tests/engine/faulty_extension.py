"""The drafter extension with faults to order: vLLM's workers import it by name."""

from __future__ import annotations

from eaglenest.engine.extension import Answer
from eaglenest.engine.worker import WorkerExtension


class FaultyExtension(WorkerExtension):
    """Fails an exchange midway, or leaves one layer as it was."""

    def drafter_fail_before(self, part: str | None) -> Answer:
        """Raise when the exchange reaches this part; None: no more."""
        self.__dict__["_fail_before"] = part
        return {"ok": True}

    def drafter_skip(self, part: str | None) -> Answer:
        """Quietly put this part's old layer back after the exchange, as an engine with a stale copy would."""
        self.__dict__["_skip"] = part
        return {"ok": True}

    def drafter_commit(self, version: str) -> Answer:
        answer = super().drafter_commit(version)
        if skipped := self.__dict__.get("_skip"):
            part = self.__dict__["_eaglenest_drafter"]._shadow.parts[skipped]
            for key in part.attributes:
                part.live.__dict__[key] = part.shadow.__dict__[key]
        return answer

    def _drafter_before_part(self, path: str) -> None:
        if path == self.__dict__.get("_fail_before"):
            raise RuntimeError("out of memory, say")
