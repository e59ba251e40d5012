"""The first weights of a drafter: from the target, or from a parent version."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.vocabulary import draft_ids, vocabulary_maps
from eaglenest.errors import CheckpointError
from eaglenest.targets.head import load_embedding, load_final_norm, load_target_tensor, read_text_config
from eaglenest.targets.resolve import Target

# Small beside what the target's own lm_head and norm expect, so that the first distributions are flat: measured against
# unit-variance outputs, 1.31 against 1.26 simulated acceptance length after the same 150 updates.
INITIAL_STD = 0.02


def drafter_config(
    target: Target, *, draft_vocab_size: int, eagle: str, aux_layer_ids: Sequence[int] | None = None
) -> DrafterConfig:
    """A drafter in the shape of one of the target's own layers."""
    config = read_text_config(target.path)
    heads = int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    newer = eagle == "3.1"
    return DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or target.hidden_size // heads),
        vocab_size=target.vocab_size,
        # vLLM has no place for a map that names the whole vocabulary, and will not load a drafter with one
        draft_vocab_size=min(draft_vocab_size, target.vocab_size - 1),
        aux_layer_ids=tuple(sorted(set(aux_layer_ids or target.aux_layer_ids))),
        fc_norm=newer,
        norm_output=newer,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
    )


def from_target(target: Target, config: DrafterConfig, vocabulary: Sequence[int], seed: int) -> Eagle3Drafter:
    """A new drafter: the target's lm_head rows and final norm, a random layer.

    Args:
        vocabulary: target ids of the draft vocabulary, ascending.
    """
    torch.manual_seed(seed)
    embedding = load_embedding(target.path).float()
    drafter = Eagle3Drafter(config, embedding)
    for module in drafter.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=INITIAL_STD)
    d2t, t2d = vocabulary_maps(vocabulary, config.vocab_size)
    drafter.d2t.copy_(d2t)
    drafter.t2d.copy_(t2d)
    head = load_target_tensor(target.path, ("lm_head.weight",))
    rows = (embedding if head is None else head.float())[draft_ids(d2t)]
    norm, _ = load_final_norm(target.path)
    with torch.no_grad():
        if rows.shape[1] == config.hidden_size:
            drafter.lm_head.weight.copy_(rows)
            drafter.norm.weight.copy_(norm)
    return drafter


def from_state(target: Target, config: DrafterConfig, state: dict[str, Tensor]) -> Eagle3Drafter:
    """A drafter with a checkpoint's weights.

    Raises:
        CheckpointError: tensors are missing, unknown or of another shape.
    """
    own = None if config.shares_embedding else state.get("embed_tokens.weight")
    embedding = load_embedding(target.path) if own is None else own
    drafter = Eagle3Drafter(config, embedding.float())
    wanted = drafter.state_dict()
    if set(wanted) != set(state):
        odd = sorted(set(wanted) ^ set(state))
        raise CheckpointError(f"the parent's tensors differ in {', '.join(odd[:5])}", "the names of its own config")
    for name, tensor in state.items():
        if wanted[name].shape != tensor.shape:
            raise CheckpointError(f"{name} is {tuple(tensor.shape)}", f"{tuple(wanted[name].shape)}")
    drafter.load_state_dict({k: v.to(wanted[k].dtype) for k, v in state.items()})
    return drafter
