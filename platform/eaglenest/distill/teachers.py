"""Teachers: they run the target over documents and hand out its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglenest.distill.features import Document, Features
from eaglenest.errors import TargetError
from eaglenest.targets.head import load_final_norm


class Teacher(Protocol):
    """Anything that turns documents into the target's hidden states."""

    def features(self, documents: Sequence[Document]) -> list[Features]:
        """The states of each document, in order."""
        ...


class TransformersTeacher:
    """A teacher on `transformers`: any causal LM with a list of decoder layers and a final norm.

    Args:
        path: the target's folder.
        aux_layer_ids: residual streams to hand out, ascending; id k is the stream after k layers.
        dtype: of the target's arithmetic. device: where it runs.

    Raises:
        TargetError: the model's layers or final norm cannot be found, the norm is not the one `TargetHead` computes,
            or an id lies outside of the model.
    """

    def __init__(
        self, path: Path, aux_layer_ids: Sequence[int], dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        from transformers import AutoModel

        self._model: Any = AutoModel.from_pretrained(str(path), dtype=dtype).to(device).eval()
        base = getattr(self._model, "language_model", self._model)
        layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
        if layers is None or norm is None:
            raise TargetError(
                f"{type(self._model).__name__} has no `layers` and `norm`",
                "a decoder-only LM built like Llama",
                "use another target",
            )
        if not all(0 <= i <= len(layers) for i in aux_layer_ids):
            raise TargetError(f"aux layer ids {tuple(aux_layer_ids)}", f"ids from 0 to {len(layers)}")
        _check_norm(path, norm, self._model.device, dtype)
        self._ids = tuple(aux_layer_ids)
        self._taken: dict[int, Tensor] = {}
        self._depth = len(layers)
        for depth in {i for i in self._ids if i < self._depth}:
            layers[depth].register_forward_pre_hook(self._keep(depth), with_kwargs=True)
        # the stream after the last layer is what the final norm reads; output_hidden_states would give it normed
        norm.register_forward_pre_hook(self._keep(self._depth), with_kwargs=True)

    def _keep(self, depth: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._taken[depth] = args[0] if args else kwargs["hidden_states"]

        return hook

    @torch.no_grad()
    def features(self, documents: Sequence[Document]) -> list[Features]:
        """States of each document: aux [n, n_aux*Ht] and last [n, Ht], bfloat16 on the CPU.

        Documents are padded on the right: in a causal model what follows cannot change what was before.
        """
        longest = max(len(d.ids) for d in documents)
        device = self._model.device
        ids = torch.zeros(len(documents), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, document in enumerate(documents):
            ids[row, : len(document.ids)] = torch.tensor(document.ids)
            mask[row, : len(document.ids)] = 1
        self._model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        aux = torch.cat([self._taken[i] for i in self._ids], dim=-1)
        last = self._taken[self._depth]
        self._taken.clear()
        out = []
        for row, document in enumerate(documents):
            n = len(document.ids)
            pieces = (t[row, :n].to("cpu", torch.bfloat16).clone() for t in (aux, last))
            out.append(Features(*pieces))
        return out


@torch.no_grad()
def _check_norm(path: Path, norm: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Labels are made from the states by `TargetHead`: its norm must be the model's, or every label is wrong."""
    weight, eps = load_final_norm(path)
    probe = torch.linspace(-1, 3, weight.shape[0])  # its mean is not zero: a LayerNorm would show
    wanted = F.rms_norm(probe, weight.shape, weight, eps)
    found = norm(probe.to(device, dtype)).float().cpu()
    if float((found - wanted).abs().max()) > 0.03 * float(wanted.abs().max()):
        raise TargetError(
            f"the final norm of {path} ({type(norm).__name__}) is none that the labels can be made with",
            "an RMSNorm that multiplies by w, or by 1 + w in the families of eaglenest.targets.head.ONE_PLUS",
            "use another target",
        )
