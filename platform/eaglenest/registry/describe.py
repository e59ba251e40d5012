"""What a version shows on MLflow's page: tags to search by, and a description to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from eaglenest.drafters.checkpoint import Manifest
from eaglenest.drafters.config import DrafterConfig
from eaglenest.errors import BadInput

FIGURES = "figures"
NO_GATE = "not run"
_TITLES = {
    "accept_len_by_category": "served acceptance length, by category",
    "accept_by_position": "served: draft accepted, if all before it were",
    "simulated_by_category": "simulated acceptance length, by category",
    "simulated_by_position": "simulated: draft and all before it accepted, of all steps",
}
# columns of MLflow's SQL schema; sqlite does not mind longer ones, PostgreSQL does
_MAX_DESCRIPTION = 5000
_MAX_TAG = 5000


def provenance_tags(manifest: Manifest, manifest_sha256: str, config: DrafterConfig) -> dict[str, str]:
    """What the version is: fixed at registration."""
    tags = {
        "target": manifest.target_name,
        "target_fingerprint": manifest.target_fingerprint,
        "drafter": "EAGLE 3.1" if config.fc_norm and config.norm_output else "EAGLE 3",
        "drafter_sha256": manifest.drafter_sha256,
        "manifest_sha256": manifest_sha256,
        "architecture": manifest.architecture_signature,
        "d2t_sha256": manifest.d2t_sha256,
        "prompts_digest": manifest.prompts_digest,
        "eaglenest_version": manifest.eaglenest_version,
    }
    if manifest.parent_version is not None:
        tags["parent_version"] = str(manifest.parent_version)
    return tags


def figure_tags(figures: Mapping[str, Any], taken: Mapping[str, str]) -> dict[str, str]:
    """Figures as tags: each single value under its own name, and everything as JSON under `figures`.

    Args:
        taken: provenance tags, which no figure may replace.

    Raises:
        BadInput: a figure has the name of a provenance tag, or the figures are too many for a tag.
    """
    if clash := sorted(set(figures) & {*taken, FIGURES}):
        raise BadInput(f"figures {clash} have the names of provenance tags", "other names")
    text = json.dumps(figures, sort_keys=True)
    if len(text) > _MAX_TAG:
        raise BadInput(
            f"the figures take {len(text)} characters", f"at most {_MAX_TAG}", "log long series as metrics of the run"
        )
    tags = {name: _value(value) for name, value in figures.items() if isinstance(value, str | int | float)}
    return {"gate": NO_GATE, **tags, FIGURES: text}


def description(version: int, tags: Mapping[str, str], run_url: str | None) -> str:
    """Markdown for a version's page, from its tags."""
    figures: dict[str, Any] = json.loads(tags.get(FIGURES, "{}"))
    parent = tags.get("parent_version")
    origin = f"distilled further from version {parent}" if parent else "distilled from nothing"
    run_name = tags.get("run_name", "open")
    foot = [
        "",
        f"- Gate: {tags.get('gate', NO_GATE)}",
        f"- Parent: {f'version {parent}' if parent else 'none'}",
        f"- Run: {f'[{run_name}]({run_url})' if run_url else 'none'}"
        + (", with plots among its artifacts" if run_url else ""),
        f"- Prompts: `{tags.get('prompts_digest', '')[:12]}`, target: `{tags.get('target_fingerprint', '')[:12]}`, "
        f"weights: `{tags.get('drafter_sha256', '')[:12]}`",
        f"- Put into service: `eaglenest promote {version}`",
        "- Roll back: `eaglenest rollback`",
    ]
    head = [f"**{tags.get('drafter', 'EAGLE')} drafter of {_cell(tags.get('target', '?'))}**, {origin}."]
    room = _MAX_DESCRIPTION - len("\n".join([*head, *foot])) - 100
    body = []
    for line in _tables(figures):
        if (room := room - len(line) - 1) < 0:
            body.append("\n(more in the tag `figures`)")
            break
        body.append(line)
    return "\n".join([*head, *body, *foot])


def _tables(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from _table("figure", {k: v for k, v in figures.items() if not isinstance(v, dict | list)})
    for name, value in figures.items():
        title = _TITLES.get(name, name)
        if isinstance(value, dict):
            yield from _table(title, value)
        elif isinstance(value, list):
            yield from _table(title, dict(enumerate(value, 1)))


def _table(title: str, rows: Mapping[Any, Any]) -> Iterator[str]:
    if rows:
        yield from ("", f"| {_cell(title)} | |", "|---|---|")
        yield from (f"| {_cell(str(name))} | {_cell(_value(value))} |" for name, value in rows.items())


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
