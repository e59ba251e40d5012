"""From the target's last residual stream to its distribution: final norm, lm_head, scale and soft cap."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from eaglenest.errors import TargetError

# Families whose RMSNorm multiplies by 1 + w. Gemma 3n and 4 are none of them.
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma")
_QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
ONE_PLUS = frozenset(_GEMMA + _QWEN)


def load_target_tensor(path: Path, names: Sequence[str]) -> Tensor | None:
    """The first of `names` found in a target folder's safetensors, or None."""
    index = path / "model.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    for name in names:
        files = [path / where[name]] if name in where else ([] if where else sorted(path.glob("*.safetensors")))
        for file in files:
            with safe_open(str(file), framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    return tensors.get_tensor(name)
    return None


def load_embedding(path: Path) -> Tensor:
    """The target's input embedding [vocab, Ht].

    Raises:
        TargetError: no tensor by a known name.
    """
    found = load_target_tensor(path, ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"))
    if found is None:
        raise TargetError(f"{path} has no model.embed_tokens.weight", "a Llama-like decoder-only LM in safetensors")
    return found


def load_final_norm(path: Path) -> tuple[Tensor, float]:
    """The target's final RMSNorm: what it multiplies by, [Ht] float32, and its eps.

    Raises:
        TargetError: no tensor by a known name, or the norm is no RMSNorm.
    """
    config = read_text_config(path)
    names = ("model.norm", "model.language_model.norm")
    weight = load_target_tensor(path, [f"{name}.weight" for name in names])
    if weight is None:
        raise TargetError(f"{path} has no model.norm.weight", "a decoder-only LM with a final norm")
    if "rms_norm_eps" not in config or load_target_tensor(path, [f"{name}.bias" for name in names]) is not None:
        raise TargetError(
            f"the final norm of {path} ({config.get('model_type')}) is no RMSNorm",
            "a decoder-only LM built like Llama, with rms_norm_eps in its config.json",
            "use another target",
        )
    weight = weight.float()
    return weight + 1 if config.get("model_type") in ONE_PLUS else weight, float(config["rms_norm_eps"])


def read_text_config(path: Path) -> dict[str, Any]:
    """The language model's part of a target's config.json."""
    raw = json.loads((path / "config.json").read_text())
    return dict(raw.get("text_config") or raw)


class TargetHead(nn.Module):
    """The target's distribution over some of its tokens: softmax(scale * cap(lm_head(norm(state L)))).

    Args:
        norm: [Ht], what the final norm multiplies by: `1 + w` where the family has it so. rows: [V, Ht] of lm_head.
        eps: of the norm. cap: final logit soft cap or None. scale: factor on the logits.
    """

    norm: Tensor
    rows: Tensor

    def __init__(self, norm: Tensor, rows: Tensor, eps: float, cap: float | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("norm", norm.float())
        self.register_buffer("rows", rows)
        self.eps, self.cap, self.scale = eps, cap, scale

    @classmethod
    def load(cls, path: Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> TargetHead:
        """Read the head of a target folder, for the given target ids only.

        Raises:
            TargetError: a tensor is missing, or the final norm is no RMSNorm.
        """
        config = read_text_config(path)
        norm, eps = load_final_norm(path)
        head = load_target_tensor(path, ("lm_head.weight",))
        if head is None:
            head = load_embedding(path)
        rows = head[torch.tensor(list(token_ids))].to(dtype)
        scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        return cls(norm, rows, eps, config.get("final_logit_softcapping"), scale)

    @torch.no_grad()
    def forward(self, last: Tensor) -> Tensor:
        """last: [N, Ht], the residual stream before the final norm -> logits [N, V] float32."""
        normed = F.rms_norm(last.float(), self.norm.shape, self.norm, self.eps).to(self.rows.dtype)
        logits = (normed @ self.rows.t()).float() * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)
