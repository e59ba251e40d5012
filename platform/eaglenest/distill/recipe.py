"""Settings of a distillation run."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Recipe(BaseModel):
    """How a drafter is trained. Every field goes into the manifest and the MLflow run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eagle: Literal["3.1", "3"] | None = Field(
        default=None, description="3.1: fc_norm and norm_output; None: the parent's, 3.1 from nothing"
    )
    draft_vocab_size: int | None = Field(default=None, ge=64, description="None: the parent's, 8192 from nothing")
    aux_layer_ids: tuple[int, ...] | None = Field(default=None, description="None: the target's default")
    ttt_steps: int = Field(default=3, ge=1, le=16, description="training-time test steps; best the K that serves")
    step_decay: float = Field(default=0.8, gt=0, le=1, description="weight of step k: step_decay ** k")
    passes: int = Field(default=12, ge=1, description="most passes over the documents")
    max_seconds: float | None = Field(default=None, gt=0, description="training time; the schedule follows it")
    learning_rate: float = Field(default=1e-3, gt=0)
    muon_factor: float = Field(default=3.0, gt=0, description="Muon's learning rate over AdamW's")
    prompt_weight: float = Field(
        default=1.0, ge=0, description="weight of prompt rows beside answer rows; 0: no loss there"
    )
    warmup: float = Field(default=0.05, ge=0, lt=1, description="share of the run")
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)
    pack_tokens: int = Field(default=512, ge=32, description="tokens of one optimiser step, per worker")
    max_length: int = Field(default=1024, ge=16, description="longer documents are cut at their end")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of the matrix products; auto: bfloat16 where the hardware is fast at it"
    )
    train_lm_head: bool = True
    seed: int = 0
