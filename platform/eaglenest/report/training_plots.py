"""Training curves as files: artifacts of an MLflow run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eaglenest.report.models import TrainPoint

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours: told apart by colour-blind readers too."""


def plot_training(history: Sequence[TrainPoint | Mapping[str, Any]], dest: Path) -> list[Path]:
    """Draw loss, accuracy by step and simulated acceptance length over training time.

    Args:
        history: `TrainPoint`s, or mappings of their fields.
        dest: folder for `training.svg` and `training.png`; made if missing.

    Returns:
        The two paths; nothing when there is no history.

    Raises:
        pydantic.ValidationError: a mapping is no `TrainPoint`.
    """
    points = [point if isinstance(point, TrainPoint) else TrainPoint.model_validate(point) for point in history]
    if not points:
        return []
    # Figure, not pyplot: no global state and no display, so it works in any worker and thread.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), layout="constrained")
    loss, accuracy, length = figure.subplots(1, 3)
    seconds = [point.seconds for point in points]
    loss.plot(seconds, [point.loss for point in points], color=COLOURS[0])
    for k in range(max(len(point.accuracy) for point in points)):
        known = [(p.seconds, p.accuracy[k]) for p in points if k < len(p.accuracy)]
        accuracy.plot(*zip(*known, strict=True), color=COLOURS[k % len(COLOURS)], label=f"step {k + 1}")
    known = [(p.seconds, p.sim_accept_len) for p in points if p.sim_accept_len is not None]
    if known:
        length.plot(*zip(*known, strict=True), color=COLOURS[0], marker="o")
    for axes, title in (
        (loss, "Loss, nats"),
        (accuracy, "Accuracy by step"),
        (length, "Simulated acceptance length"),
    ):
        axes.set_title(title)
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.3)
    if accuracy.lines:
        accuracy.legend()
    return _save(figure, dest, "training")


def plot_drift(figures: Mapping[str, Any], dest: Path) -> list[Path]:
    """Draw attention drift by depth: shares on sink and own drafts, size of the state.

    Args:
        figures: of a version: `sink_attention_by_depth` and the like (`distill.loop`).
        dest: folder for `drift.svg` and `drift.png`; made if missing.

    Returns:
        The two paths; nothing when the figures know no drift.
    """
    if not figures.get("sink_attention_by_depth"):
        return []
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    shares, size = figure.subplots(1, 2)
    for name, label, colour in (("sink", "on the first tokens", 0), ("own", "on its own drafts", 1)):
        values = figures[f"{name}_attention_by_depth"]
        shares.plot(range(1, len(values) + 1), values, color=COLOURS[colour], marker="o", label=label)
    values = figures["state_rms_by_depth"]
    size.plot(range(1, len(values) + 1), values, color=COLOURS[0], marker="o")
    shares.legend()
    for axes, title in ((shares, "Share of attention"), (size, "Root mean square of the state")):
        axes.set_title(title)
        axes.set_xlabel("draft")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    return _save(figure, dest, "drift")


def _save(figure: Any, dest: Path, name: str) -> list[Path]:
    dest.mkdir(parents=True, exist_ok=True)
    paths = [dest / f"{name}.svg", dest / f"{name}.png"]
    for path in paths:
        figure.savefig(path, dpi=130)
    return paths
