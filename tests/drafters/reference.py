"""A drafter written down a second time, plainly: one token at a time with a growing key-value cache, as an engine runs.

It shares no code with `eaglenest.drafters.module`, only the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglenest.drafters.module import Eagle3Drafter


class SequentialDrafter:
    """The serving side's view of a drafter's weights, in float64."""

    def __init__(self, drafter: Eagle3Drafter) -> None:
        self.config = drafter.config
        self.weights = {k: v.double() if v.is_floating_point() else v for k, v in drafter.state_dict().items()}
        self.embedding = drafter.embed_tokens.weight.double()
        self.cache: list[tuple[Tensor, Tensor]] = []

    def draft(self, tokens: Sequence[int], aux: Tensor, steps: int, forced: Sequence[int] = ()) -> list[Tensor]:
        """Logits of each of K draft steps after a text.

        Args:
            tokens: x[1..T]. aux: [T, n_aux*Ht], at positions 0..T-1.
            forced: what steps 1, 2, ... read instead of the drafter's own best tokens.
        """
        self.cache = []
        for position, token in enumerate(tokens):
            logits, hidden = self._layer(token, self._fuse(aux[position].double()), position)
        out = [logits]
        for step in range(1, steps):
            best = int(out[-1].argmax())
            token = forced[step - 1] if len(forced) >= step else best + int(self.weights["d2t"][best])
            logits, hidden = self._layer(token, hidden, len(tokens) - 1 + step)
            out.append(logits)
        return out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.config.rms_norm_eps) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _rotate(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angle = position * self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def _fuse(self, aux: Tensor) -> Tensor:
        parts = aux.split(self.config.target_hidden_size)
        if self.config.fc_norm:
            parts = tuple(self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts))
        return self._linear(torch.cat(parts), "fc")

    def _layer(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Logits, and what the next step is fed."""
        embedded = self._norm(self.embedding[token], "midlayer.input_layernorm")
        x = torch.cat([embedded, self._norm(hidden, "midlayer.hidden_norm")])
        q, k, v = (
            self._linear(x, f"midlayer.self_attn.{n}_proj").view(-1, self.config.head_dim) for n in ("q", "k", "v")
        )
        self.cache.append((self._rotate(k, position), v))
        q = self._rotate(q, position)
        heads = []
        for head in range(q.shape[0]):
            kv = head * k.shape[0] // q.shape[0]
            scores = torch.stack([q[head] @ key[kv] for key, _ in self.cache]) / self.config.head_dim**0.5
            heads.append(sum(w * value[kv] for w, (_, value) in zip(scores.softmax(0), self.cache, strict=True)))
        h = hidden + self._linear(torch.cat(heads), "midlayer.self_attn.o_proj")
        y = self._norm(h, "midlayer.post_attention_layernorm")
        gated = F.silu(self._linear(y, "midlayer.mlp.gate_proj")) * self._linear(y, "midlayer.mlp.up_proj")
        raw = h + self._linear(gated, "midlayer.mlp.down_proj")
        normed = self._norm(raw, "norm")
        return self._linear(normed, "lm_head"), normed if self.config.norm_output else raw
