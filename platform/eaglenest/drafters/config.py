"""The drafter's configuration and its Hugging Face form, as vLLM and SGLang read it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eaglenest.errors import CheckpointError

ARCHITECTURE = "LlamaForCausalLMEagle3"


class DrafterConfig(BaseModel):
    """Shapes and switches of an EAGLE 3 or 3.1 drafter.

    EAGLE 3.1 is `fc_norm` and `norm_output` on; EAGLE 3 has both off.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: int = Field(gt=0, description="H, of the drafter's layer")
    target_hidden_size: int = Field(gt=0, description="Ht, of the target's residual stream")
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0, description="of the target")
    draft_vocab_size: int = Field(gt=0)
    aux_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="ascending; id k is the target's residual stream after k layers"
    )
    fc_norm: bool = True
    norm_output: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = Field(default=2048, gt=0)
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        if list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids)):
            raise ValueError(f"aux_layer_ids must ascend without repeats (vLLM sorts them): {self.aux_layer_ids}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError("draft_vocab_size cannot exceed vocab_size")
        return self

    @property
    def num_aux(self) -> int:
        """How many target hidden states are fused."""
        return len(self.aux_layer_ids)

    @property
    def shares_embedding(self) -> bool:
        """Whether the target's embedding serves as the drafter's: only when the hidden sizes agree."""
        return self.hidden_size == self.target_hidden_size

    def signature(self) -> str:
        """Digest of everything an engine fixes at start, so that two drafters with equal ones may be swapped.

        `norm_output` adds no weight: comparing names and shapes would miss it, this does not.
        """
        fixed = self.model_dump(exclude={"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"})
        return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]

    def to_hf(self) -> dict[str, Any]:
        """The flat `config.json`. Switches with reader-dependent defaults are written out."""
        ids = list(self.aux_layer_ids)
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "num_aux_hidden_states": self.num_aux,
            "eagle_aux_hidden_state_layer_ids": ids,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": self.hidden_act,
            "attention_bias": self.attention_bias,
            "tie_word_embeddings": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> DrafterConfig:
        """Read a `config.json`, ours or a published EAGLE 3 checkpoint's.

        Raises:
            CheckpointError: the file describes something this drafter cannot be.
        """
        for key in ("norm_before_residual", "norm_before_fc"):
            if raw.get(key):
                raise CheckpointError(f"config.json has {key}: true", "false", "use a drafter without that variant")
        eagle = raw.get("eagle_config") or {}
        ids = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            raise CheckpointError(
                "config.json names no eagle_aux_hidden_state_layer_ids",
                "the target layers whose hidden states are fused",
                "add them at top level and inside eagle_config",
            )
        rope = raw.get("rope_parameters") or {}
        scaling = raw.get("rope_scaling") or rope
        if (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
            raise CheckpointError(
                f"config.json scales the rotary positions ({kind})",
                "rope_type: default",
                "use a drafter without rope scaling",
            )
        try:
            return cls(
                hidden_size=raw["hidden_size"],
                target_hidden_size=raw.get("target_hidden_size", raw["hidden_size"]),
                intermediate_size=raw["intermediate_size"],
                num_attention_heads=raw["num_attention_heads"],
                num_key_value_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
                head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
                vocab_size=raw["vocab_size"],
                draft_vocab_size=raw.get("draft_vocab_size") or raw["vocab_size"],
                aux_layer_ids=tuple(ids),
                fc_norm=bool(raw.get("fc_norm", False)),
                norm_output=bool(raw.get("norm_output", False)),
                rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
                rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10000.0)),
                max_position_embeddings=raw.get("max_position_embeddings", 2048),
                hidden_act=raw.get("hidden_act", "silu"),
                attention_bias=bool(raw.get("attention_bias", False)),
                bos_token_id=raw.get("bos_token_id"),
                eos_token_id=raw.get("eos_token_id"),
                pad_token_id=raw.get("pad_token_id"),
            )
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"config.json cannot be read as an EAGLE 3 drafter: {error}",
                "the keys of a Llama EAGLE 3 or 3.1 checkpoint",
                "compare it with docs/registry.md",
            ) from error
