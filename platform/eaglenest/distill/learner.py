"""One worker's training: a drafter, its optimiser and schedule. Knows nothing of Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eaglenest.distill.features import Batch, Document, Features, collate
from eaglenest.distill.recipe import Recipe
from eaglenest.drafters.acceptance import Acceptance, replay
from eaglenest.drafters.drift import Drift, attention_drift
from eaglenest.drafters.losses import ttt_loss
from eaglenest.drafters.module import Eagle3Drafter
from eaglenest.drafters.vocabulary import draft_ids
from eaglenest.targets.head import TargetHead


class Learner:
    """Trains a drafter by training-time test.

    Args:
        drafter: on its device. head: the target's distribution over the draft vocabulary, on the same device.
        recipe: the run's settings.
    """

    def __init__(self, drafter: Eagle3Drafter, head: TargetHead, recipe: Recipe) -> None:
        self.drafter, self.head, self.recipe = drafter, head, recipe
        drafter.lm_head.weight.requires_grad_(recipe.train_lm_head)
        self.device = drafter.fc.weight.device
        self._bfloat16 = recipe.precision == "bfloat16" or (recipe.precision == "auto" and fast_bfloat16(self.device))
        self.updates = 0
        self._ids = draft_ids(drafter.d2t)
        self.optimisers = _optimisers(drafter, recipe)
        self._peaks = [group["lr"] for group in self._parameter_groups()]

    def _parameter_groups(self) -> list[dict[str, Any]]:
        # asked anew each time: loading an optimiser's state replaces its groups
        return [group for optimiser in self.optimisers.values() for group in optimiser.param_groups]

    def rate(self, progress: float) -> float:
        """Factor on the learning rates at a share 0..1 of the run: linear warm-up, cosine to a fiftieth."""
        warmup = self.recipe.warmup
        if progress < warmup:
            return max(progress / warmup, 0.02)
        done = min(1.0, (progress - warmup) / (1 - warmup))
        return 0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2

    def step(self, batch: Batch, progress: float, *, judge: bool = True) -> dict[str, float | list[float]]:
        """One optimiser step.

        Args:
            progress: 0..1, how far the run is.
            judge: also compare drafts with the target's tokens; it costs another look at every logit.

        Returns:
            loss (KL + the target's entropy, nats, weighted mean), accuracy per step (share of answer rows whose
            draft equals the target's token; empty unless judged), grad_norm, learning_rate, rows.
        """
        rate = self.rate(progress)
        for group, peak in zip(self._parameter_groups(), self._peaks, strict=True):
            group["lr"] = peak * rate
        self.drafter.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bfloat16):
            loss, accuracy, rows = self._forward(batch, judge)
        loss.backward()
        parameters = [p for group in self._parameter_groups() for p in group["params"]]
        _average_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.recipe.clip_norm)
        for optimiser in self.optimisers.values():
            optimiser.step()
        self.updates += 1
        return {
            "loss": float(loss.detach()),
            "accuracy": accuracy.tolist(),
            "grad_norm": float(norm),
            "learning_rate": self.recipe.learning_rate * rate,
            "rows": float(rows),
        }

    def _forward(self, batch: Batch, judge: bool = True) -> tuple[Tensor, Tensor, int]:
        """Weighted mean loss, accuracy on answer rows by step [K], or [0] unless judged, and the number of rows."""
        pack = batch.pack
        steps = self.recipe.ttt_steps
        last = batch.labels.shape[0] - 1
        step = torch.arange(steps, device=self.device)[:, None]
        at = (pack.rows + step).clamp(max=last)
        valid = pack.reach > step
        weights = valid * batch.weights * self.recipe.step_decay**step
        hidden = torch.stack(list(self.drafter.ttt_steps(pack, steps)))
        total, best = ttt_loss(
            hidden,
            self.drafter.lm_head.weight,
            lambda which: self.head(batch.labels[which]).softmax(-1),
            at,
            weights,
            want_best=judge,
        )
        accuracy = total.new_zeros(0)
        if best is not None:
            judged = valid & batch.answers
            hits = (self._ids[best] == batch.nexts[at]) & judged
            accuracy = hits.sum(1) / judged.sum(1).clamp(min=1)
        return total / weights.sum().clamp(min=1.0), accuracy, pack.rows.shape[0]

    @torch.no_grad()
    def evaluate(
        self, items: Iterable[tuple[Document, Features]], steps: int
    ) -> tuple[Acceptance, dict[str, Acceptance]]:
        """Acceptance simulated by replaying each answer at K = `steps`: pooled, and by category."""
        pooled, categories = Acceptance(), dict[str, Acceptance]()
        for group in _groups(items, self.recipe.pack_tokens):
            batch = self.to_device(collate(group, steps, torch.float32))
            rows, reach = batch.pack.rows, batch.pack.reach.tolist()
            last = batch.nexts.shape[0] - 1
            columns = [
                self._ids[self.drafter.lm_head(normed).argmax(-1)] == batch.nexts[(rows + k).clamp(max=last)]
                for k, normed in enumerate(self.drafter.ttt_steps(batch.pack, steps))
            ]
            hits = [row[:far] for row, far in zip(torch.stack(columns, dim=1).tolist(), reach, strict=True)]
            for (document, _), span in zip(group, batch.pack.spans, strict=True):
                result = replay(hits[span.query_start : span.query_end], steps)
                pooled.add(result)
                categories.setdefault(document.category, Acceptance()).add(result)
        return pooled, categories

    def drift(self, items: Iterable[tuple[Document, Features]], depths: int) -> Drift:
        """Attention drift on answers, by depth."""
        packs = (
            self.to_device(collate(group, depths, torch.float32)).pack
            for group in _groups(items, self.recipe.pack_tokens)
        )
        return attention_drift(self.drafter, packs, depths)

    def batch(self, items: Sequence[tuple[Document, Features]]) -> Batch:
        """Documents as a batch on the training device."""
        return self.to_device(collate(items, self.recipe.ttt_steps, torch.float32, self.recipe.prompt_weight))

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the training device."""
        if self.device.type == "cpu":
            return batch
        moved: dict[str, Any] = {k: v.to(self.device) for k, v in vars(batch.pack).items() if isinstance(v, Tensor)}
        pack = replace(batch.pack, **moved)
        rest = {k: v.to(self.device) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        return Batch(pack=pack, **rest, answer_tokens=batch.answer_tokens)

    def state(self) -> dict[str, Any]:
        """What resuming needs, beside the recipe."""
        return {
            "drafter": self.drafter.state_dict(),
            "optimisers": {name: o.state_dict() for name, o in self.optimisers.items()},
            "updates": self.updates,
            "rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.drafter.load_state_dict(state["drafter"])
        for name, optimiser in self.optimisers.items():
            optimiser.load_state_dict(state["optimisers"][name])
        self.updates = state["updates"]
        torch.set_rng_state(state["rng"])


def fast_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 faster than float32: every GPU we serve on, and CPUs that say so."""
    if device.type != "cpu":
        return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text().split()


def _optimisers(drafter: Eagle3Drafter, recipe: Recipe) -> dict[str, torch.optim.Optimizer]:
    """Muon for the layer's matrices, AdamW for norms and lm_head, whose rows are the target's already."""
    inner: list[Tensor] = []
    outer: list[Tensor] = []
    norms: list[Tensor] = []
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            (norms if parameter.ndim == 1 else outer if name.startswith("lm_head") else inner).append(parameter)
    muon = torch.optim.Muon(
        inner,
        lr=recipe.learning_rate * recipe.muon_factor,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
        ns_steps=4,
    )
    groups = [{"params": outer, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
    return {"muon": muon, "adamw": adamw}


def _groups(items: Iterable[tuple[Document, Features]], tokens: int) -> Iterator[list[tuple[Document, Features]]]:
    """Neighbours together, up to so many tokens."""
    group: list[tuple[Document, Features]] = []
    for item in items:
        if group and sum(len(d.ids) for d, _ in group) + len(item[0].ids) > tokens:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _average_gradients(parameters: Sequence[Tensor]) -> None:
    """Mean gradient over the workers; nothing to do for one."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
