"""The drafter against a plain sequential drafter with a growing key-value cache, as an engine runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.drafters.reference import SequentialDrafter
from tests.tiny import tiny_drafter
from torch import Tensor

from eaglenest.drafters.attention import Span
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter, Pack
from eaglenest.drafters.weights import expected_tensors
from eaglenest.errors import CheckpointError

EAGLE_31 = {"fc_norm": True, "norm_output": True}
EAGLE_3 = {"fc_norm": False, "norm_output": False}


def pack_of(documents: list[tuple[list[int], Tensor]], rows: list[list[int]]) -> Pack:
    """Documents of tokens x[1..T] and aux states, with loss on some rows of each."""
    spans: list[Span] = []
    start = queries = 0
    all_rows: list[int] = []
    for (tokens, _), mine in zip(documents, rows, strict=True):
        spans.append(Span(start, start + len(tokens), queries, queries + len(mine)))
        all_rows += [start + p for p in mine]
        start, queries = start + len(tokens), queries + len(mine)
    return Pack(
        tokens=torch.tensor([t for tokens, _ in documents for t in tokens]),
        positions=torch.cat([torch.arange(len(tokens)) for tokens, _ in documents]),
        aux=torch.cat([aux for _, aux in documents]),
        rows=torch.tensor(all_rows),
        reach=torch.zeros(len(all_rows), dtype=torch.int64),  # the module does not read it
        spans=spans,
    )


def text(length: int, num_aux: int = 3, width: int = 16) -> tuple[list[int], Tensor]:
    return torch.randint(0, 40, (length,)).tolist(), torch.randn(length, num_aux * width, dtype=torch.float64)


def logits_of(drafter: Eagle3Drafter, pack: Pack, steps: int) -> Tensor:
    """[steps, R, V_draft]."""
    return torch.stack([drafter.lm_head(normed) for normed in drafter.ttt_steps(pack, steps)])


# norms and softmax run in float32
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


@pytest.mark.parametrize("version", [EAGLE_31, EAGLE_3, {"fc_norm": True, "norm_output": False}])
@pytest.mark.parametrize("ids", [(1, 2), (1, 2, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("shape", [{}, {"hidden_size": 24, "num_attention_heads": 6}, {"attention_bias": True}])
def test_drafts_as_an_engine_does(version: dict[str, bool], ids: tuple[int, ...], shape: dict[str, Any]) -> None:
    drafter = tiny_drafter(aux_layer_ids=ids, **version, **shape)
    torch.manual_seed(1)
    tokens, aux = text(6, len(ids))
    chosen, logits = drafter.draft(torch.tensor(tokens), aux, 4)
    expected = SequentialDrafter(drafter).draft(tokens, aux, 4)
    torch.testing.assert_close(logits, torch.stack(expected), **CLOSE)
    # draft id i stands for target id 2i + 1 here
    assert chosen.tolist() == [2 * int(e.argmax()) + 1 for e in expected]


@pytest.mark.parametrize("version", [EAGLE_31, EAGLE_3])
def test_every_row_of_a_pack_is_what_an_engine_would_draft_there(version: dict[str, bool]) -> None:
    drafter, steps = tiny_drafter(**version), 3
    torch.manual_seed(2)
    documents = [text(5), text(7), text(1)]
    rows = [[1, 3, 4], [0, 4, 5, 6], [0]]  # the last K rows of a document too: their first steps have labels
    ours = logits_of(drafter, pack_of(documents, rows), steps)
    reference, column = SequentialDrafter(drafter), 0
    for (tokens, aux), mine in zip(documents, rows, strict=True):
        for p in mine:
            inside = min(steps, len(tokens) - p)  # steps that read a token of the document
            expected = reference.draft(tokens[: p + 1], aux[: p + 1], inside, forced=tokens[p + 1 :])
            torch.testing.assert_close(ours[:inside, column], torch.stack(expected), **CLOSE)
            column += 1


def test_teacher_forcing_with_the_right_tokens_gives_what_free_drafting_gives() -> None:
    drafter = tiny_drafter()
    tokens, aux = text(5)
    chosen, logits = drafter.draft(torch.tensor(tokens), aux, 3)
    continued = (tokens + chosen[:2].tolist(), torch.cat([aux, torch.randn(2, 48, dtype=torch.float64)]))
    forced = logits_of(drafter, pack_of([continued], [[2, 3, 4]]), 3)[:, 2]
    torch.testing.assert_close(forced, logits, atol=1e-5, rtol=1e-5)


def test_a_row_depends_on_its_own_past_and_the_tokens_it_reads_and_on_nothing_else() -> None:
    drafter, steps = tiny_drafter(), 3
    documents = [text(6), text(6)]
    rows = [[2, 4], [1, 3]]

    def outputs(document: int | None = None, token: int | None = None, state: int | None = None) -> Tensor:
        changed = [(list(tokens), aux.clone()) for tokens, aux in documents]
        if document is not None and token is not None:
            changed[document][0][token] = (changed[document][0][token] + 1) % 40
        if document is not None and state is not None:
            changed[document][1][state] += 1.0
        return logits_of(drafter, pack_of(changed, rows), steps)

    before = outputs()
    flat = [(d, p) for d, mine in enumerate(rows) for p in mine]
    for document in range(2):
        for place in range(6):
            by_token, by_state = outputs(document, token=place), outputs(document, state=place)
            for column, (owner, p) in enumerate(flat):
                for k in range(min(steps, 6 - p)):  # beyond the document's end a step has no label
                    same = owner == document
                    reads = same and place <= p + k  # step k reads the tokens of rows up to p + k
                    assert torch.equal(before[k, column], by_token[k, column]) is not reads
                    # states are read up to row p only, at every step
                    assert torch.equal(before[k, column], by_state[k, column]) is not (same and place <= p)


def test_only_differences_of_positions_matter_however_far_they_lie() -> None:
    drafter = tiny_drafter()
    pack = pack_of([text(6)], [[2, 4]])
    moved = Pack(**(vars(pack) | {"positions": pack.positions + 3000}))
    near, far = logits_of(drafter, pack, 3), logits_of(drafter, moved, 3)
    torch.testing.assert_close(far, near, atol=2e-3, rtol=2e-3)
    bent = Pack(**(vars(pack) | {"positions": pack.positions * 2}))
    assert not torch.allclose(logits_of(drafter, bent, 3), near, atol=2e-3)


def test_norm_output_decides_what_is_fed_back_and_adds_no_weight() -> None:
    new, old = tiny_drafter(norm_output=True), tiny_drafter(norm_output=False)
    assert set(new.state_dict()) == set(old.state_dict())
    old.load_state_dict(new.state_dict())
    tokens, aux = text(5)
    a, b = (d.draft(torch.tensor(tokens), aux, 2)[1] for d in (new, old))
    torch.testing.assert_close(a[0], b[0])
    assert not torch.allclose(a[1], b[1])
    assert new.config.signature() != old.config.signature()


def test_norm_output_keeps_the_next_step_blind_to_the_magnitude_of_the_last() -> None:
    """EAGLE 3.1's purpose: what is fed back does not grow. Doubling the layer's output leaves a normed one as it is."""
    for norm_output in (True, False):
        drafter = tiny_drafter(norm_output=norm_output)
        drafter.midlayer.hidden_norm.weight.data.fill_(1.0)
        fed: list[Tensor] = []
        drafter.midlayer.hidden_norm.register_forward_pre_hook(lambda _, args, fed=fed: fed.append(args[0]))
        pack = pack_of([text(4)], [[3]])
        for scale in (1.0, 2.0):
            drafter.fc.weight.data *= scale  # residual and layer output follow it
            drafter.midlayer.mlp.down_proj.weight.data *= scale
            drafter.midlayer.self_attn.o_proj.weight.data *= scale
            list(drafter.ttt_steps(pack, 2))
        small, large = fed[1], fed[3]  # step 1's input, before and after
        factor = float((large.norm() / small.norm()).detach())
        assert factor == pytest.approx(1.0 if norm_output else 2.0, rel=1e-3)


@pytest.mark.parametrize("changes", [EAGLE_31, EAGLE_3, {"attention_bias": True}, {"hidden_size": 24}])
def test_a_drafters_tensors_are_those_of_a_checkpoint(changes: dict[str, Any]) -> None:
    drafter = tiny_drafter(**changes)
    expected = {name: shape for name, (shape, _) in expected_tensors(drafter.config).items()}
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == expected
    assert ("embed_tokens.weight" in expected) is ("hidden_size" in changes)
    assert not any("embed" in name for name, _ in drafter.named_parameters())


@pytest.mark.parametrize(
    "foreign",
    [
        {"hidden_act": "gelu"},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        {"eagle_aux_hidden_state_layer_ids": [3, 1, 2]},
    ],
)
def test_a_config_that_this_drafter_cannot_be_is_refused(foreign: dict[str, Any]) -> None:
    good = tiny_drafter().config
    assert DrafterConfig.from_hf(good.to_hf()) == good
    with pytest.raises(CheckpointError):
        DrafterConfig.from_hf(good.to_hf() | foreign)
