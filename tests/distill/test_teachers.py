"""Teachers on tiny targets: which state is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import VOCAB, tiny_target

from eaglenest.distill.features import Document
from eaglenest.distill.teachers import TransformersTeacher
from eaglenest.errors import TargetError
from eaglenest.targets import head as head_module
from eaglenest.targets.head import TargetHead

DOCUMENTS = [Document("a", "x", tuple(range(3, 20)), 5), Document("b", "x", (7, 9, 11, 2), 2)]
ULP = 2**-8
"""Relative spacing of bfloat16, in which states travel."""


def run(model: Any, document: Document) -> Any:
    with torch.no_grad():
        return model(torch.tensor([document.ids]), output_hidden_states=True)


# 1 + w in the norm: gemma2, qwen3_next; not: gemma4. Soft cap: gemma2. Scaled logits: granite.
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma4_text", "granite", "qwen3_next"])
def test_states_are_the_residual_stream_and_the_head_gives_the_targets_logits(kind: str, tmp_path: Path) -> None:
    model = tiny_target(tmp_path, kind)
    found = TransformersTeacher(tmp_path, (0, 1, 2, 3)).features(DOCUMENTS)
    head = TargetHead.load(tmp_path, range(VOCAB))
    for document, features in zip(DOCUMENTS, found, strict=True):
        out = run(model, document)
        assert features.aux.dtype == features.last.dtype == torch.bfloat16
        assert features.aux.shape == (len(document.ids), 4 * 64)
        for k, state in enumerate(features.aux.float().chunk(4, dim=-1)):
            torch.testing.assert_close(state, out.hidden_states[k][0], atol=1e-4, rtol=ULP)
            assert not torch.allclose(state, out.hidden_states[k + 1][0], atol=1e-2)  # one layer off would show
        spread = float(out.logits.std())
        torch.testing.assert_close(head(features.last), out.logits[0], atol=0.05 * spread, rtol=0.02)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_last_state_is_taken_before_the_final_norm(kind: str, tmp_path: Path) -> None:
    model = tiny_target(tmp_path, kind)
    features = TransformersTeacher(tmp_path, (4,)).features(DOCUMENTS[:1])[0]
    assert torch.equal(features.aux, features.last)  # id L is the same stream
    out = run(model, DOCUMENTS[0])
    assert not torch.allclose(features.last.float(), out.hidden_states[-1][0], atol=0.1)
    normed = model.model.norm(features.last.float())
    torch.testing.assert_close(normed, out.hidden_states[-1][0], atol=0.02, rtol=0.02)


def test_a_head_of_some_tokens_is_those_rows_of_the_whole_one(tmp_path: Path) -> None:
    tiny_target(tmp_path, "qwen3")
    some = [3, 50, 200]
    last = torch.randn(5, 64)
    whole, part = TargetHead.load(tmp_path, range(VOCAB)), TargetHead.load(tmp_path, some)
    torch.testing.assert_close(part(last), whole(last)[:, some])


def test_neither_padding_nor_neighbours_change_a_document(tmp_path: Path) -> None:
    tiny_target(tmp_path)
    teacher = TransformersTeacher(tmp_path, (0, 2, 4))
    together, alone = teacher.features(DOCUMENTS)[1], teacher.features(DOCUMENTS[1:])[0]
    swapped = teacher.features(DOCUMENTS[::-1])[0]
    for other in (alone, swapped):
        for a, b in ((together.aux, other.aux), (together.last, other.last)):
            # sums in another order: at most the next bfloat16
            torch.testing.assert_close(a.float(), b.float(), atol=1e-5, rtol=2 * ULP)


@pytest.mark.parametrize("ids", [(1, 5), (-1, 2)])
def test_an_id_outside_the_target_is_refused(ids: tuple[int, ...], tmp_path: Path) -> None:
    tiny_target(tmp_path)
    with pytest.raises(TargetError, match="0 to 4"):
        TransformersTeacher(tmp_path, ids)


@pytest.mark.parametrize("kind", ["cohere", "stablelm"])
def test_a_target_without_rms_norm_is_refused(kind: str, tmp_path: Path) -> None:
    tiny_target(tmp_path, kind)
    with pytest.raises(TargetError, match="no RMSNorm"):
        TransformersTeacher(tmp_path, (1, 2))
    with pytest.raises(TargetError, match="no RMSNorm"):
        TargetHead.load(tmp_path, range(VOCAB))


def test_a_family_whose_norm_we_misjudge_is_refused_before_any_label_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_target(tmp_path, "qwen3_next")
    monkeypatch.setattr(head_module, "ONE_PLUS", frozenset())
    with pytest.raises(TargetError, match="final norm"):
        TransformersTeacher(tmp_path, (1, 2))
