"""Attention drift, against the attention it looks at and against plain means."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.drafters.test_module import EAGLE_3, EAGLE_31, pack_of, text
from tests.tiny import tiny_drafter

from eaglenest.drafters.attention import ttt_attention, ttt_weights
from eaglenest.drafters.drift import SINKS, attention_drift
from eaglenest.drafters.module import Pack


def two_texts() -> Pack:
    torch.manual_seed(0)
    pack = pack_of([text(9), text(12)], [[5, 6, 7, 8], [10, 11]])
    return dataclasses.replace(pack, reach=torch.full((6,), 5))


def test_the_weights_are_those_that_attention_mixes_values_with() -> None:
    torch.manual_seed(0)
    pack = two_texts()
    query, keys, values = torch.randn(6, 4, 8), torch.randn(21, 2, 8), torch.randn(21, 2, 8)
    own = [torch.randn(6, 2, 8) for _ in range(2)]
    mixed = ttt_attention(query, keys, values, own, own, pack.rows, pack.spans)
    for span, base, later in ttt_weights(query, keys, own, pack.rows, pack.spans):
        part = slice(span.query_start, span.query_end)
        torch.testing.assert_close(base.sum(-1) + later.sum(-1), torch.ones(base.shape[:2]))
        for head in range(4):
            expected = base[head] @ values[span.start : span.end, head // 2]
            expected = expected + torch.einsum("rj,jrd->rd", later[head], torch.stack(own)[:, part, head // 2])
            torch.testing.assert_close(mixed[part, head], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("version", [EAGLE_31, EAGLE_3])
def test_the_first_draft_sees_no_draft_and_reads_the_fused_states(version: dict[str, bool]) -> None:
    drafter, pack = tiny_drafter(**version), two_texts()
    drift = attention_drift(drafter, [pack], 4)
    assert drift.own[0] == 0
    assert all(0 < own < 1 for own in drift.own[1:])
    fused = drafter.fuse(pack.aux)[pack.rows]
    assert drift.magnitude[0] == pytest.approx(float(fused.detach().pow(2).mean(-1).sqrt().mean()), rel=1e-3)


def test_a_drafter_that_looks_everywhere_alike_gives_the_sink_its_share_of_the_rows() -> None:
    drafter, pack = tiny_drafter(), two_texts()
    with torch.no_grad():
        drafter.midlayer.self_attn.q_proj.weight.zero_()
    drift = attention_drift(drafter, [pack], 3)
    seen = torch.tensor([6.0, 7, 8, 9, 11, 12])  # step-0 keys of each loss row
    for depth in range(3):
        assert drift.sink[depth] == pytest.approx(float((SINKS / (seen + depth)).mean()), rel=1e-3)
        assert drift.own[depth] == pytest.approx(float((depth / (seen + depth)).mean()), rel=1e-3)


def test_the_state_grows_with_depth_unless_it_is_normed() -> None:
    pack = two_texts()

    def growth(version: dict[str, bool]) -> float:
        drafter = tiny_drafter(**version)
        with torch.no_grad():
            drafter.norm.weight.fill_(1.0)
        magnitude = attention_drift(drafter, [pack], 5).magnitude
        return magnitude[-1] / magnitude[1]

    assert growth(EAGLE_31) == pytest.approx(1.0, rel=1e-3)
    assert growth(EAGLE_3) > 1.2


def test_rows_count_as_deep_as_they_reach() -> None:
    drafter, pack = tiny_drafter(), two_texts()
    short = dataclasses.replace(pack, reach=torch.tensor([2, 0, 0, 0, 0, 0]))
    alone = dataclasses.replace(pack_of([text(9)], [[5]]), reach=torch.tensor([2]))
    torch.manual_seed(0)
    alone = dataclasses.replace(alone, tokens=pack.tokens[:9], aux=pack.aux[:9])
    one, other = attention_drift(drafter, [short], 3), attention_drift(drafter, [alone], 3)
    assert one.sink[:2] == pytest.approx(other.sink[:2], rel=1e-3)
    assert one.sink[2] == one.own[2] == one.magnitude[2] == 0
