"""Teachers: they run the target over documents and hand out its hidden states."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from eaglenest.distill.answers import Answer, AnswerSettings, EngineAnswerer
from eaglenest.distill.features import Document, Features
from eaglenest.distill.prompts import Prompt
from eaglenest.errors import EngineError, TargetError
from eaglenest.targets.head import load_final_norm, load_target_tensor

PATIENCE_S = 30.0
"""How long the engine may take for the step that reads the states of what it has answered."""


class Teacher(Protocol):
    """Anything that turns documents into the target's hidden states."""

    def features(self, documents: Sequence[Document]) -> list[Features]:
        """The states of each document, in order."""
        ...


class EngineTeacher(EngineAnswerer):
    """A teacher on vLLM, which also writes answers and hands over their states in the same pass.

    Runs inside a process with `engine_env()`. States of a document come from a prefill; what the prefix cache holds is
    not computed again. See `engine.capture`.

    Args:
        path: the target's folder. aux_layer_ids, dtype: as of `TransformersTeacher`.
        max_length: of a document, in tokens. ranks: tensor-parallel size.

    Raises:
        TargetError: as `TransformersTeacher`. EngineError: vLLM does not start with this target.
    """

    def __init__(
        self,
        path: Path,
        aux_layer_ids: Sequence[int],
        dtype: str = "auto",
        max_length: int = 2048,
        ranks: int = 1,
    ) -> None:
        depth = _check_target(path, aux_layer_ids)
        streams = sorted({*aux_layer_ids, depth})  # vLLM hands each out once
        self._columns = [streams.index(i) for i in aux_layer_ids]
        super().__init__(path, dtype, max_length + 1, capture=streams, ranks=ranks)

    def features(self, documents: Sequence[Document]) -> list[Features]:
        """States of each document; see `Features`."""
        from vllm import SamplingParams

        keys = [uuid.uuid4().hex for _ in documents]
        sampling = [SamplingParams(temperature=0, max_tokens=1, extra_args=_wanted(key)) for key in keys]
        self._engine.generate([{"prompt_token_ids": list(d.ids)} for d in documents], sampling, use_tqdm=False)
        return self._features(keys)

    def answer_and_features(self, prompts: Sequence[Prompt], settings: AnswerSettings) -> list[tuple[Answer, Features]]:
        """Answers, each with the states of its document: those of all tokens but the last, whose row is zeros.

        Nothing reads that row: the last token is never fed to the target before another one follows it.

        Raises:
            BadInput: a prompt leaves no room for an answer.
        """
        keys = [uuid.uuid4().hex for _ in prompts]
        answers = self._answer(prompts, settings, [_wanted(key) for key in keys])
        padded = (Features(F.pad(f.aux, (0, 0, 0, 1)), F.pad(f.last, (0, 0, 0, 1))) for f in self._features(keys))
        return list(zip(answers, padded, strict=True))

    def _features(self, keys: list[str]) -> list[Features]:
        taken: dict[str, tuple[bytes, list[int]]] = {}
        until = time.monotonic() + PATIENCE_S
        # states are read in the step after a request's last one, and its answer may be here before that step
        while missing := [key for key in keys if key not in taken]:
            for rank in self._engine.collective_rpc("take_states", args=(missing,)):
                taken |= rank
            if time.monotonic() > until:
                break
        if missing:
            raise EngineError(
                f"the engine kept no states of {len(missing)} of {len(keys)} documents",
                "states of every request that asked for them",
                "use the teacher on transformers (--teacher transformers)",
            )
        found = []
        for key in keys:
            data, shape = taken[key]
            states = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(shape)
            found.append(Features(states[:, self._columns].flatten(1), states[:, -1].contiguous()))
        return found


def _wanted(key: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"states": key}}


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
        layers, norm = _parts(self._model, aux_layer_ids)
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


def _parts(model: Any, aux_layer_ids: Sequence[int]) -> tuple[Any, Any]:
    """The decoder layers and the final norm of a transformers model, which must have the streams asked for."""
    base = getattr(model, "language_model", model)
    layers, norm = getattr(base, "layers", None), getattr(base, "norm", None)
    if layers is None or norm is None:
        raise TargetError(
            f"{type(model).__name__} has no `layers` and `norm`",
            "a decoder-only LM built like Llama",
            "use another target",
        )
    if not all(0 <= i <= len(layers) for i in aux_layer_ids):
        raise TargetError(f"aux layer ids {tuple(aux_layer_ids)}", f"ids from 0 to {len(layers)}")
    return layers, norm


def _check_target(path: Path, aux_layer_ids: Sequence[int]) -> int:
    """Check a target without loading it, but for its final norm; returns the number of its layers."""
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(str(path)))
    layers, norm = _parts(model, aux_layer_ids)
    weight = load_target_tensor(path, ("model.norm.weight", "model.language_model.norm.weight"))
    if weight is None:
        raise TargetError(f"{path} has no model.norm.weight", "a decoder-only LM with a final norm")
    norm.to_empty(device="cpu").load_state_dict({"weight": weight}, strict=False)
    _check_norm(path, norm, torch.device("cpu"), torch.float32)
    return len(layers)


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
