"""Drafter checkpoints without training, written straight in the format's names: the tests' own reading of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eaglenest.drafters.checkpoint import save_checkpoint
from eaglenest.drafters.config import DrafterConfig
from eaglenest.targets import Target

Change = Callable[[dict[str, Tensor]], None]


def drafter_config(target: Target, *, draft_vocab_size: int = 8192, norm_output: bool = True) -> DrafterConfig:
    """A small EAGLE 3.1 drafter for SmolLM2-135M."""
    raw = json.loads((target.path / "config.json").read_text())
    return DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=raw["num_attention_heads"],
        num_key_value_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=target.aux_layer_ids,
        norm_output=norm_output,
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=100000.0,
        max_position_embeddings=2048,
    )


def random_weights(config: DrafterConfig, seed: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint; draft id i stands for target id 6 i + 5, as far as the vocabulary reaches."""
    rng = torch.Generator().manual_seed(seed)
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "fc.weight": (h, config.num_aux * config.target_hidden_size),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "lm_head.weight": (config.draft_vocab_size, h),
    }
    tensors = {name: torch.randn(shape, generator=rng) * shape[1] ** -0.5 for name, shape in shapes.items()}
    norms = ["norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm"]
    norms += [f"fc_norm.{i}" for i in range(config.num_aux)]
    for name in norms:
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(h, generator=rng)
    stride = config.vocab_size // config.draft_vocab_size
    ids = torch.arange(config.draft_vocab_size) * stride + stride - 1
    tensors["d2t"] = ids - torch.arange(config.draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    tensors["t2d"][ids] = True
    return tensors


def zero(*names: str) -> Change:
    """A change that zeroes the named tensors."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = torch.zeros_like(tensors[name])

    return change


MUTE: dict[str, tuple[str, ...]] = {
    # With these at zero every draft logit is 0, so the drafter proposes draft id 0 whatever it reads: a whole drafter
    # whose layers are told apart by what is *accepted* when the target is held to that one token.
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


def save_drafter(
    folder: Path, target: Target, seed: int, *, config: DrafterConfig | None = None, change: Change | None = None
) -> Path:
    """A sound checkpoint with a manifest."""
    config = config or drafter_config(target)
    tensors = random_weights(config, seed)
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
