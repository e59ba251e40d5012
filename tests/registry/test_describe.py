"""A version's page: figures as tables, within what MLflow's columns hold."""

from __future__ import annotations

import json

import pytest

from eaglenest.errors import BadInput
from eaglenest.registry.describe import description, figure_tags


def test_single_figures_become_tags_and_tables_stay_together() -> None:
    figures = {"accept_len": 1.23456, "steps": 3, "gate": "passed", "by_category": {"chat": 1.5}}
    assert figure_tags(figures, {}) == {
        "accept_len": "1.235",
        "steps": "3",
        "gate": "passed",
        "figures": json.dumps(figures, sort_keys=True),
    }


def test_too_many_figures_for_a_tag_are_refused() -> None:
    with pytest.raises(BadInput, match="at most 5000"):
        figure_tags({"loss": list(range(2000))}, {})


def test_a_long_description_is_cut_between_rows() -> None:
    figures = {f"figure {i}": i for i in range(600)}
    text = description(2, {"figures": json.dumps(figures)}, None)
    assert len(text) <= 5000
    assert "(more in the tag `figures`)" in text
    assert text.endswith("`eaglenest rollback`")
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))


def test_names_cannot_break_the_page() -> None:
    text = description(1, {"target": "a|b\n# c", "figures": json.dumps({"x\n| y": "1 | 2"})}, None)
    assert "| x \\| y | 1 \\| 2 |" in text
    assert "\n# c" not in text
