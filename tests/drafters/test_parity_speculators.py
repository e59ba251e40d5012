"""Parity with `speculators`: same weights, same states, then the same loss and gradients of each TTT step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.peer import LOSS, peer_inputs, peer_of
from tests.tiny import VOCAB, tiny_drafter, tiny_target
from torch import Tensor

from eaglenest.distill.features import Batch, Document, Features, collate
from eaglenest.drafters.losses import ttt_loss
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.targets.head import TargetHead

STEPS = 4


def our_losses(drafter: Eagle3Drafter, head: TargetHead, batch: Batch) -> list[Tensor]:
    """Mean KL of each TTT step."""
    hidden = torch.stack(list(drafter.ttt_steps(batch.pack, STEPS)))
    at = (batch.pack.rows + torch.arange(STEPS)[:, None]).clamp(max=batch.labels.shape[0] - 1)
    valid = batch.pack.reach > torch.arange(STEPS)[:, None]
    losses = []
    for step in range(STEPS):
        weights = torch.zeros(at.shape)
        weights[step] = valid[step] / valid[step].sum()
        p = head(batch.labels[at[step]]).softmax(-1)
        entropy = -((p * p.clamp(min=1e-30).log()).sum(-1) * weights[step]).sum()
        cross, _ = ttt_loss(
            hidden, drafter.lm_head.weight, lambda which: head(batch.labels[which]).softmax(-1), at, weights
        )
        losses.append(cross - entropy)
    return losses


@pytest.mark.parametrize("version", [{"fc_norm": True, "norm_output": True}, {"fc_norm": False, "norm_output": False}])
@pytest.mark.parametrize("ids", [(1, 3), (1, 2, 3), (0, 1, 2, 3, 4)])
def test_loss_and_gradients_of_each_step_equal_the_peers(
    tmp_path: Path, version: dict[str, bool], ids: tuple[int, ...]
) -> None:
    tiny_target(tmp_path)
    sizes = {"hidden_size": 64, "target_hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": VOCAB}
    drafter = tiny_drafter(dtype=torch.float32, aux_layer_ids=ids, **sizes, **version)
    with torch.no_grad():  # small weights: large ones would make rounding the topic
        for parameter in drafter.parameters():
            parameter.mul_(0.3)
    drafter.lm_head.weight.requires_grad_(False)
    head = TargetHead.load(tmp_path, drafter.t2d.nonzero()[:, 0].tolist())
    document = Document("d", "chat", tuple(torch.randint(0, VOCAB, (23,)).tolist()), 1)
    features = Features(torch.randn(23, 64 * len(ids)), torch.randn(23, 64))
    batch = collate([(document, features)], STEPS, torch.float32, prompt_weight=1.0)
    peer = peer_of(drafter, tmp_path)
    ours, names = our_losses(drafter, head, batch), dict(drafter.named_parameters())
    trained = {name: p for name, p in names.items() if p.requires_grad}
    peers = dict(peer.named_parameters())
    before = {name: torch.zeros_like(p) for name, p in trained.items()}
    for step in range(STEPS):
        peer.zero_grad()
        _, loss, metrics = peer(**peer_inputs(batch), ttt_steps=step + 1, loss_config=LOSS)
        loss.backward()  # of the steps up to this one: the earlier ones' gradients are taken off
        torch.testing.assert_close(ours[step], metrics[f"loss_{step}_sum"], atol=1e-5, rtol=1e-4)
        gradients = torch.autograd.grad(ours[step], list(trained.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(trained, gradients, strict=True):
            total = peers[name.replace("midlayer.", "layers.0.")].grad
            mine = torch.zeros_like(total) if gradient is None else gradient
            torch.testing.assert_close(mine, total - before[name], atol=2e-5, rtol=1e-3)
            before[name] = total.clone()
