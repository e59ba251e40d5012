"""Teachers on tiny targets: which state is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eaglenest.distill.features import Document
from eaglenest.distill.teachers import TransformersTeacher
from eaglenest.errors import TargetError
from eaglenest.targets.head import TargetHead

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}


def target(folder: Path, kind: str) -> Any:
    """A tiny random target of a family, saved to `folder`."""
    import transformers as t

    torch.manual_seed(0)
    made = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES)),
        "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(**SIZES, final_logit_softcapping=3.0)),
    }[kind]().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(folder)
    return made


DOCUMENTS = [Document("a", "x", tuple(range(3, 20)), 5), Document("b", "x", (7, 9, 11, 2), 2)]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_states_are_the_residual_stream_and_the_head_gives_the_targets_logits(kind: str, tmp_path: Path) -> None:
    model = target(tmp_path, kind)
    features = TransformersTeacher(tmp_path, (1, 2, 3)).features(DOCUMENTS)
    head = TargetHead.load(tmp_path, range(60))
    for document, found in zip(DOCUMENTS, features, strict=True):
        with torch.no_grad():
            out = model(torch.tensor([document.ids]), output_hidden_states=True)
        wanted = torch.cat([out.hidden_states[k][0] for k in (1, 2, 3)], dim=-1)
        torch.testing.assert_close(found.aux.float(), wanted, atol=0.05, rtol=0.02)  # the trip in bfloat16
        torch.testing.assert_close(head(found.last), out.logits[0].float(), atol=0.08, rtol=0.05)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    target(tmp_path, "llama")
    teacher = TransformersTeacher(tmp_path, (0, 4))
    together, alone = teacher.features(DOCUMENTS)[1], teacher.features(DOCUMENTS[1:])[0]
    torch.testing.assert_close(together.aux, alone.aux, atol=0.02, rtol=0.02)
    assert together.aux.shape == (4, 64)
    assert together.last.shape == (4, 32)


def test_an_id_beyond_the_last_layer_is_refused(tmp_path: Path) -> None:
    target(tmp_path, "llama")
    with pytest.raises(TargetError, match="0 to 4"):
        TransformersTeacher(tmp_path, (1, 5))
