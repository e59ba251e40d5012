"""The drafter against a plain sequential drafter with a growing key-value cache, as an engine runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eaglenest.drafters.attention import Span
from eaglenest.drafters.config import DrafterConfig
from eaglenest.drafters.module import Eagle3Drafter, Pack


def make(seed: int = 0, **changes: Any) -> Eagle3Drafter:
    """A small drafter with random weights, norms included."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 40,
        "draft_vocab_size": 40,
        "aux_layer_ids": (1, 2, 3),
    }
    config = DrafterConfig(**(sizes | changes))
    torch.manual_seed(seed)
    drafter = Eagle3Drafter(config, torch.randn(config.vocab_size, config.hidden_size)).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return drafter


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def sequential(drafter: Eagle3Drafter, tokens: list[int], aux: Tensor, steps: int) -> list[Tensor]:
    """Logits of K draft steps after a prompt, one token at a time; drafts are the best tokens.

    tokens: x[1..T]; aux: [T, n_aux*Ht].
    """
    c, s = drafter.config, {k: v.double() if v.is_floating_point() else v for k, v in drafter.state_dict().items()}
    cache: list[tuple[Tensor, Tensor]] = []

    def layer(token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        embedded = norm(
            drafter.embed_tokens.weight[token].double(), s["midlayer.input_layernorm.weight"], c.rms_norm_eps
        )
        x = torch.cat([embedded, norm(hidden, s["midlayer.hidden_norm.weight"], c.rms_norm_eps)])
        q, k, v = ((s[f"midlayer.self_attn.{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in "qkv")
        q, k = rotate(q, position, c.rope_theta), rotate(k, position, c.rope_theta)
        cache.append((k, v))
        keys = torch.stack([a for a, _ in cache]).repeat_interleave(q.shape[0] // k.shape[0], 1)
        values = torch.stack([b for _, b in cache]).repeat_interleave(q.shape[0] // k.shape[0], 1)
        weights = (torch.einsum("hd,thd->ht", q, keys) / c.head_dim**0.5).softmax(-1)
        attended = torch.einsum("ht,thd->hd", weights, values).flatten()
        h = hidden + s["midlayer.self_attn.o_proj.weight"] @ attended
        y = norm(h, s["midlayer.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate = F.silu(s["midlayer.mlp.gate_proj.weight"] @ y) * (s["midlayer.mlp.up_proj.weight"] @ y)
        raw = h + s["midlayer.mlp.down_proj.weight"] @ gate
        normed = norm(raw, s["norm.weight"], c.rms_norm_eps)
        return s["lm_head.weight"] @ normed, normed if c.norm_output else raw

    for position, token in enumerate(tokens):
        parts = aux[position].split(c.target_hidden_size)
        if c.fc_norm:
            parts = tuple(norm(p, s[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, p in enumerate(parts))
        logits, hidden = layer(token, s["fc.weight"] @ torch.cat(parts), position)
    out = [logits]
    for step in range(1, steps):
        best = int(out[-1].argmax())
        logits, hidden = layer(best + int(drafter.d2t[best]), hidden, len(tokens) - 1 + step)
        out.append(logits)
    return out


@pytest.mark.parametrize("version", [{"fc_norm": True, "norm_output": True}, {"fc_norm": False, "norm_output": False}])
@pytest.mark.parametrize("ids", [(1, 2), (1, 2, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("hidden", [16, 24])
def test_drafts_as_an_engine_does(version: dict[str, bool], ids: tuple[int, ...], hidden: int) -> None:
    drafter = make(aux_layer_ids=ids, hidden_size=hidden, num_attention_heads=hidden // 4, **version)
    torch.manual_seed(1)
    tokens = torch.randint(0, 40, (6,))
    aux = torch.randn(6, len(ids) * 16, dtype=torch.float64)
    chosen, logits = drafter.draft(tokens, aux, 4)
    expected = sequential(drafter, tokens.tolist(), aux, 4)
    # norms and softmax run in float32
    torch.testing.assert_close(logits, torch.stack(expected), atol=2e-4, rtol=2e-4)
    assert chosen.tolist() == [int(e.argmax()) for e in expected]


def test_teacher_forcing_with_the_right_tokens_gives_what_free_drafting_gives() -> None:
    drafter = make()
    tokens, aux = torch.randint(0, 40, (5,)), torch.randn(5, 48, dtype=torch.float64)
    chosen, logits = drafter.draft(tokens, aux, 3)
    continued = torch.cat([tokens, chosen[:2]])
    pack = Pack(
        tokens=continued,
        positions=torch.arange(7),
        aux=torch.cat([aux, torch.randn(2, 48, dtype=torch.float64)]),
        rows=torch.tensor([2, 3, 4]),
        reach=torch.tensor([3, 3, 3]),
        spans=[Span(0, 7, 0, 3)],
    )
    forced = torch.stack([drafter.lm_head(n)[2] for n in drafter.ttt_steps(pack, 3)])
    torch.testing.assert_close(forced, logits, atol=1e-5, rtol=1e-5)


def test_norm_output_decides_what_is_fed_back_and_adds_no_weight() -> None:
    new, old = make(norm_output=True), make(norm_output=False)
    assert set(new.state_dict()) == set(old.state_dict())
    old.load_state_dict(new.state_dict())
    tokens, aux = torch.randint(0, 40, (5,)), torch.randn(5, 48, dtype=torch.float64)
    a, b = new.draft(tokens, aux, 2)[1], old.draft(tokens, aux, 2)[1]
    torch.testing.assert_close(a[0], b[0])
    assert not torch.allclose(a[1], b[1])
    assert new.config.signature() != old.config.signature()


def test_the_shared_embedding_is_neither_trained_nor_saved() -> None:
    drafter = make()
    assert "embed_tokens.weight" not in drafter.state_dict()
    assert not any("embed" in name for name, _ in drafter.named_parameters())
    assert "embed_tokens.weight" in make(hidden_size=24, num_attention_heads=6).state_dict()
