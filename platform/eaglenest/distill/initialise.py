"""The first weights of a drafter: from the target, or from a parent version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.vocabulary import draft_ids, vocabulary_maps
from eaglenest.errors import BadInput, CheckpointError
from eaglenest.targets.head import load_embedding, load_final_norm, load_target_tensor, read_text_config
from eaglenest.targets.resolve import Target

# Small beside what the target's own lm_head and norm expect, so that the first distributions are flat: measured against
# unit-variance outputs, 1.31 against 1.26 simulated acceptance length after the same 150 updates.
INITIAL_STD = 0.02
DRAFT_VOCAB_SIZE = 8192


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


def reshaped(parent: DrafterConfig, eagle: str | None, draft_vocab_size: int | None) -> DrafterConfig:
    """A parent's config with another version of EAGLE, or another size of draft vocabulary; None: the parent's.

    Raises:
        BadInput: EAGLE 3 from a 3.1 parent, whose weights have learnt to do with normed states.
    """
    is_newer = parent.fc_norm and parent.norm_output
    if eagle == "3" and is_newer:
        raise BadInput("EAGLE 3 was asked for, from a parent of EAGLE 3.1", "3.1, or a start from nothing")
    changes: dict[str, object] = {"fc_norm": True, "norm_output": True} if eagle == "3.1" else {}
    if draft_vocab_size is not None:
        changes["draft_vocab_size"] = min(draft_vocab_size, parent.vocab_size - 1)
    return parent.model_copy(update=changes)


def differences(parent: DrafterConfig, child: DrafterConfig) -> list[str]:
    """What a start from `parent` initialises anew, a line each; none when the child can be swapped in for it."""
    lines = []
    if child.fc_norm and not parent.fc_norm:
        lines.append("from EAGLE 3 to 3.1: fc_norm is new, and starts at the size of the target's states (fc is kept)")
    if child.norm_output and not parent.norm_output:
        lines.append("from EAGLE 3 to 3.1: later steps are fed normed states, which the layer has yet to learn")
    if child.draft_vocab_size != parent.draft_vocab_size:
        lines.append(
            f"a draft vocabulary of {child.draft_vocab_size} instead of {parent.draft_vocab_size} tokens: rows of "
            "lm_head are kept where both have the token, others start as the target's (at zero where sizes differ)"
        )
    if lines:
        lines.append("this starts a new line of versions: replicas that serve the parent have to be restarted for it")
    return lines


def aux_scale(aux: Tensor, num_aux: int) -> list[float]:
    """Root mean square of each of the target's states: aux [n, n_aux*Ht] -> n_aux numbers."""
    return [float(part.float().pow(2).mean().sqrt()) for part in aux.chunk(num_aux, dim=-1)]


def adapted(
    target: Target,
    state: Mapping[str, Tensor],
    parent: DrafterConfig,
    config: DrafterConfig,
    vocabulary: Sequence[int],
    scale: Sequence[float],
) -> dict[str, Tensor]:
    """A parent's tensors in the shape of `config`: see `differences`.

    Args:
        vocabulary: target ids of the draft vocabulary, ascending. scale: see `aux_scale`.
    """
    new = dict(state)
    if config.fc_norm and not parent.fc_norm:
        new |= {f"fc_norm.{i}.weight": torch.full((config.target_hidden_size,), s) for i, s in enumerate(scale)}
    if config.draft_vocab_size != parent.draft_vocab_size:
        parents = state["lm_head.weight"]
        rows = torch.zeros(len(vocabulary), config.hidden_size, dtype=parents.dtype)
        if config.hidden_size == config.target_hidden_size:
            rows.copy_(_target_rows(target)[torch.tensor(vocabulary)])
        old = {token: row for row, token in enumerate(draft_ids(state["d2t"]).tolist())}
        kept = [(i, old[token]) for i, token in enumerate(vocabulary) if token in old]
        here, there = (torch.tensor(column) for column in zip(*kept, strict=True))
        rows[here] = parents[there]
        new["lm_head.weight"] = rows
        new["d2t"], new["t2d"] = vocabulary_maps(vocabulary, config.vocab_size)
    return new


def _target_rows(target: Target) -> Tensor:
    """The target's lm_head [vocab, Ht]; the embedding where it is tied."""
    head = load_target_tensor(target.path, ("lm_head.weight",))
    return load_embedding(target.path) if head is None else head


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
    rows = _target_rows(target).float()[draft_ids(d2t)]
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
