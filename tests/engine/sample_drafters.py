"""Drafter checkpoints without training, for SmolLM2-135M's shapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eaglenest.drafters.checkpoint import save_checkpoint
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.vocabulary import vocabulary_maps
from eaglenest.drafters.weights import expected_tensors
from eaglenest.targets import Target

FIRST_DRAFT_ID = 260
"""Target id of draft id 0: " the"."""

Change = Callable[[dict[str, Tensor]], None]

MUTE: dict[str, tuple[str, ...]] = {
    # With these at zero every draft logit is 0, so the drafter proposes draft id 0 whatever it reads. When the target
    # is held to that one token, all drafts are accepted if and only if the zeroed layers are what the engine executes.
    "lm_head": ("lm_head.weight",),
    "norm": ("norm.weight",),
    "o_proj, down_proj, fc": ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight", "fc.weight"),
    "v_proj, gate_proj, fc": ("midlayer.self_attn.v_proj.weight", "midlayer.mlp.gate_proj.weight", "fc.weight"),
    "o_proj, up_proj, fc_norm": (
        "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.up_proj.weight",
        "fc_norm.0.weight",
        "fc_norm.1.weight",
        "fc_norm.2.weight",
    ),
}


def drafter_config(target: Target, **changes: object) -> DrafterConfig:
    """An EAGLE 3.1 drafter of the target's own layer sizes."""
    raw = json.loads((target.path / "config.json").read_text())
    sizes = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": raw["intermediate_size"],
        "num_attention_heads": raw["num_attention_heads"],
        "num_key_value_heads": raw["num_key_value_heads"],
        "head_dim": target.hidden_size // raw["num_attention_heads"],
        "vocab_size": target.vocab_size,
        "draft_vocab_size": 8192,
        "aux_layer_ids": target.aux_layer_ids,
        "rms_norm_eps": raw["rms_norm_eps"],
    }
    return DrafterConfig.model_validate(sizes | changes)


def random_weights(config: DrafterConfig, seed: int, first_id: int = FIRST_DRAFT_ID) -> dict[str, Tensor]:
    """Every tensor of a checkpoint; draft id i stands for target id first_id + 5 i."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, _) in expected_tensors(config).items():
        noise = torch.randn(shape, generator=rng)
        tensors[name] = noise * shape[1] ** -0.5 if len(shape) == 2 else 1 + 0.1 * noise
    ids = [first_id + 5 * i for i in range(config.draft_vocab_size)]
    tensors["d2t"], tensors["t2d"] = vocabulary_maps(ids, config.vocab_size)
    return tensors


def zero(*names: str) -> Change:
    """A change that zeroes the named tensors."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = torch.zeros_like(tensors[name])

    return change


def save_drafter(
    folder: Path,
    target: Target,
    seed: int,
    *,
    config: DrafterConfig | None = None,
    change: Change | None = None,
    first_id: int = FIRST_DRAFT_ID,
) -> Path:
    """A sound checkpoint with a manifest."""
    config = config or drafter_config(target)
    tensors = random_weights(config, seed, first_id)
    if change:
        change(tensors)
    save_checkpoint(
        folder,
        config=config,
        state=tensors,
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        prompts_digest="0" * 64,
    )
    return folder


def save_unchecked(folder: Path, config: DrafterConfig, tensors: dict[str, Tensor], drop: Iterable[str] = ()) -> Path:
    """A folder with config.json and model.safetensors that nobody verified."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    kept = {name: t if t.dtype in (torch.int64, torch.bool) else t.bfloat16() for name, t in tensors.items()}
    save_file({name: t for name, t in kept.items() if name not in set(drop)}, folder / "model.safetensors")
    return folder
