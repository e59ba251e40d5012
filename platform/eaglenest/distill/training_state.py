"""What a killed trainer needs to go on, as safetensors and JSON: no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, PROGRESS = "training.safetensors", "progress.json"


@dataclass
class Progress:
    """Where a run stands: passes finished, documents of this pass used, updates, seconds, answer tokens seen."""

    passes: int = 0
    used: int = 0
    updates: int = 0
    seconds: float = 0.0
    tokens: int = 0


def save_training_state(folder: Path, state: dict[str, Any], progress: Progress) -> None:
    """Write a learner's state and the progress into a folder."""
    tensors: dict[str, Tensor] = {f"drafter/{k}": v for k, v in state["drafter"].items()}
    tensors["rng"] = state["rng"]
    for optimiser, saved in state["optimisers"].items():
        for number, moments in saved["state"].items():
            for name, value in moments.items():
                tensors[f"optimiser/{optimiser}/{number}/{name}"] = torch.as_tensor(value)
    save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / TENSORS)
    (folder / PROGRESS).write_text(json.dumps(asdict(progress)))


def load_training_state(
    folder: Path, optimisers: Mapping[str, torch.optim.Optimizer]
) -> tuple[dict[str, Any], Progress]:
    """The inverse; the optimisers lend their parameter groups."""
    tensors = load_file(folder / TENSORS)
    progress = Progress(**json.loads((folder / PROGRESS).read_text()))
    moments: dict[str, dict[int, dict[str, Tensor]]] = {name: {} for name in optimisers}
    for name, value in tensors.items():
        if name.startswith("optimiser/"):
            _, optimiser, number, key = name.split("/")
            moments[optimiser].setdefault(int(number), {})[key] = value
    state = {
        "drafter": drafter_tensors(tensors),
        "optimisers": {
            name: {"state": moments[name], "param_groups": o.state_dict()["param_groups"]}
            for name, o in optimisers.items()
        },
        "updates": progress.updates,
        "rng": tensors["rng"],
    }
    return state, progress


def drafter_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The drafter's part of a training state."""
    return {k.removeprefix("drafter/"): v for k, v in tensors.items() if k.startswith("drafter/")}
