"""The EAGLE 3 / 3.1 drafter: one decoder layer that reads the target's hidden states and its own.

Its meaning is vLLM's `llama_eagle3.py`; `tests/drafters/test_parity_vllm.py` holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eaglenest.drafters.attention import Span, apply_rope, rope_tables, ttt_attention
from eaglenest.drafters.config import DrafterConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Embedding(nn.Module):
    """The target's frozen embedding, under its checkpoint name `embed_tokens.weight` when it must be saved."""

    weight: Tensor

    def __init__(self, weight: Tensor, saved: bool) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=saved)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]


class Attention(nn.Module):
    """Projections of the drafter's attention; queries, keys and values come from [embedding, hidden]: 2H."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.head_dim = dim
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * dim, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv * dim, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=bias)


class MLP(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The decoder layer, named as checkpoints name it."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


Watch = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], None]


@dataclass(frozen=True)
class Pack:
    """Documents laid end to end, already shifted: row p of a document carries token x[p+1] and aux states g[p].

    tokens: [N] int64, x[p+1]. positions: [N] int64, restarting at 0 in each document. aux: [N, n_aux*Ht].
    rows: [R] int64, the rows that carry loss at step 0, ascending. reach: [R] int64, how many steps of each such row
    have a label (its document ends after that). spans: the documents. blocks: `query_blocks` of them, where long ones
    are to be cut.
    """

    tokens: Tensor
    positions: Tensor
    aux: Tensor
    rows: Tensor
    reach: Tensor
    spans: list[Span]
    blocks: list[Span] = field(default_factory=list)


class Eagle3Drafter(nn.Module):
    """An EAGLE 3.1 drafter (or EAGLE 3, with `fc_norm` and `norm_output` off).

    Args:
        config: shapes and switches.
        embedding: [vocab, H], the target's; frozen, never saved when the hidden sizes agree.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        width = config.num_aux * config.target_hidden_size
        norms = config.num_aux if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(norms))
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.embed_tokens = Embedding(embedding, saved=not config.shares_embedding)
        self._rope: tuple[Tensor, Tensor] | None = None

    def fuse(self, aux: Tensor) -> Tensor:
        """aux [N, n_aux*Ht] -> the drafter's first hidden state [N, H]."""
        if len(self.fc_norm):
            parts = aux.split(self.config.target_hidden_size, dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """[N] and [N, H] -> what attention reads, [N, 2H]."""
        embedded = self.embed_tokens(tokens).to(hidden.dtype)
        return torch.cat((self.midlayer.input_layernorm(embedded), self.midlayer.hidden_norm(hidden)), dim=-1)

    def _heads(self, projection: nn.Linear, inputs: Tensor) -> Tensor:
        return projection(inputs).unflatten(-1, (-1, self.config.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        need = int(positions.max()) + 1 if positions.numel() else 1
        if self._rope is None or self._rope[0].shape[0] < need or self._rope[0].device != x.device:
            self._rope = rope_tables(self.config.head_dim, self.config.rope_theta, max(need, 1024), x.device)
        return apply_rope(x, positions, self._rope)

    def _finish(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """After attention: (what lm_head reads, what the next step is fed), each [N, H]."""
        hidden = residual + self.midlayer.self_attn.o_proj(attended.flatten(1))
        raw = hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        normed = self.norm(raw)
        return normed, normed if self.config.norm_output else raw

    def ttt_steps(self, pack: Pack, steps: int, watch: Watch | None = None) -> Iterator[Tensor]:
        """Run the training-time test; yields, step by step, what lm_head reads for the loss rows: [R, H].

        Step k reads token x[p+1+k] (teacher forced) and its own output of step k-1, at position p+k. Keys and values
        are made for every row once; everything else only where there is loss.

        Args:
            watch: shown each step's query [R, heads, head_dim], step-0 keys, own later keys and incoming state [R, H].
        """
        attention = self.midlayer.self_attn
        fused = self.fuse(pack.aux)
        inputs = self._inputs(pack.tokens, fused)
        keys = self._rotate(self._heads(attention.k_proj, inputs), pack.positions)
        values = self._heads(attention.v_proj, inputs)
        inputs, hidden, where = inputs[pack.rows], fused[pack.rows], pack.positions[pack.rows]
        last = pack.tokens.shape[0] - 1
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for step in range(steps):
            if step:
                # past a document's end there is no label: any token will do there
                inputs = self._inputs(pack.tokens[(pack.rows + step).clamp(max=last)], hidden)
                own_keys.append(self._rotate(self._heads(attention.k_proj, inputs), where + step))
                own_values.append(self._heads(attention.v_proj, inputs))
            query = self._rotate(self._heads(attention.q_proj, inputs), where + step)
            if watch is not None:
                watch(query, keys, own_keys, hidden)
            attended = ttt_attention(query, keys, values, own_keys, own_values, pack.rows, pack.blocks or pack.spans)
            normed, hidden = self._finish(attended, hidden)
            yield normed

    @torch.no_grad()
    def draft(self, tokens: Tensor, aux: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Draft greedily after the last row of one document, as serving does.

        Args:
            tokens: [T] int64, x[1..T] (the last one is the token just sampled).
            aux: [T, n_aux*Ht], the target's states at positions 0..T-1.
            steps: K.

        Returns:
            target token ids [K] int64 and draft logits [K, V_draft].
        """
        count = tokens.shape[0]
        device = tokens.device
        row = torch.tensor([count - 1], device=device)
        ids, logits = [], []
        current = tokens
        for step in range(steps):
            pack = Pack(
                tokens=current,
                positions=torch.arange(current.shape[0], device=device).clamp(max=count - 1),
                aux=torch.cat([aux, aux.new_zeros(step, aux.shape[1])]),
                rows=row,
                reach=torch.tensor([steps], device=device),
                spans=[Span(0, count, 0, 1)],
            )
            *_, normed = self.ttt_steps(pack, step + 1)
            logits.append(self.lm_head(normed)[0])
            best = logits[-1].argmax()
            ids.append(best + self.d2t[best])
            current = torch.cat([current, ids[-1][None]])
        return torch.stack(ids), torch.stack(logits)
