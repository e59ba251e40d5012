"""States that the engine reads a step later than it answers: the step is forced late by an engine that is not real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eaglenest.distill import teachers
from eaglenest.distill.features import Features
from eaglenest.distill.teachers import EngineTeacher
from eaglenest.errors import EngineError

KEYS = ["a", "b", "c"]


class LateEngine:
    """Hands over the states of one more request each time it is asked."""

    def __init__(self, never: str | None = None) -> None:
        self.never, self.asked = never, 0

    def collective_rpc(self, method: str, args: tuple[list[str]]) -> list[dict[str, Any]]:
        assert method == "take_states"
        self.asked += 1
        row = torch.full((2, 2, 4), float(self.asked), dtype=torch.bfloat16)
        data = (row.view(torch.uint8).numpy().tobytes(), list(row.shape))
        return [{key: data for key in args[0][-1:] if key != self.never}]


def features_from(engine: LateEngine) -> list[Features]:
    teacher: Any = SimpleNamespace(_engine=engine, _columns=[0])
    return EngineTeacher._features(teacher, KEYS)


def test_what_comes_a_step_late_is_waited_for_and_keeps_its_order() -> None:
    engine = LateEngine()
    found = features_from(engine)
    assert engine.asked == len(KEYS)
    assert [float(f.last[0, 0]) for f in found] == [3.0, 2.0, 1.0]
    assert [f.aux.shape for f in found] == [(2, 4)] * 3


def test_what_never_comes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "PATIENCE_S", 0.05)
    with pytest.raises(EngineError, match="kept no states of 3 of 3 documents"):
        features_from(LateEngine(never="c"))
