"""The peer: the EAGLE 3 draft model of `speculators`, with our weights and our packs, for parity and for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from speculators.losses.eager import kl_div_loss
from speculators.models import Eagle3DraftModel
from torch import Tensor
from transformers import LlamaConfig

from eaglenest.distill.features import Batch
from eaglenest.drafters.module import Eagle3Drafter

LOSS = {"kl_div": (kl_div_loss, 1.0)}
"""The peer's own forward KL; its fused one needs a GPU compiler."""


def peer_of(drafter: Eagle3Drafter, target: Path, attention: str = "sdpa", *, weights: bool = True) -> Any:
    """The peer's model of a drafter's shape, float32.

    Args:
        drafter: hidden size as the target's.
        target: the target's folder, from which the peer takes its labels' head and norm.
        attention: `sdpa` or `eager`: what a CPU can run.
        weights: the drafter's; without, the peer's own first ones.
    """
    config = drafter.config
    layer = LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        max_position_embeddings=config.max_position_embeddings,
    )
    model = Eagle3DraftModel.from_training_args(
        layer,
        drafter.t2d,
        drafter.d2t,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=False,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        target_layer_ids=list(config.aux_layer_ids),
        verifier_name_or_path=str(target),
        draft_attn_impl=attention,
        ttt_steps=3,
    ).float()
    if not weights:
        return model
    ours = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in drafter.state_dict().items()}
    ours["embed_tokens.weight"] = drafter.embed_tokens.weight
    missing, unknown = model.load_state_dict(ours, strict=False)
    assert not unknown, f"the peer knows nothing of {unknown}"
    assert all(name.startswith("verifier") for name in missing), f"the peer also wants {missing}"
    return model


def peer_inputs(batch: Batch) -> dict[str, Tensor]:
    """Arguments of the peer's forward for a batch, each [1, N, ...]; loss on every row that has its first label."""
    pack = batch.pack
    documents = torch.zeros_like(pack.tokens)
    mask = torch.zeros_like(pack.tokens, dtype=torch.bool)
    for number, span in enumerate(pack.spans):
        documents[span.start : span.end] = number
    mask[pack.rows] = True
    return {
        "hidden_states": pack.aux[None],
        "input_ids": pack.tokens[None],
        "document_ids": documents[None],
        "loss_mask": mask[None],
        "position_ids": pack.positions[None],
        "verifier_last_hidden_states": batch.labels[None],
    }
