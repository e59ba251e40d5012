"""A second set of weights for a live drafter, built beside it in small pieces and exchanged with it in one.

Runs inside a vLLM worker. A *part* is one layer that owns weights (vLLM fuses q, k, v into one layer, gate and up into
another). A *slice* is one piece of work short enough to fit between two engine steps: loading one tensor of the
checkpoint, or packing one part into the form its kernel executes. Nothing the engine executes changes before
`exchange`, and a second `exchange` undoes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from eaglenest.engine import vllm_internals
from eaglenest.errors import SwapRefused

IGNORED = frozenset({"t2d"})
"""Tensors of a checkpoint that vLLM does not read."""

PROBE_ROWS = 2
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference of a probe's output, relative to its largest value."""

_TORCH_STATE = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


@dataclass
class Part:
    """One layer: the live one, its shadow, and what proves the exchange.

    tensors: checkpoint tensors that feed it, in loading order. loaded: its own tensors that they fill. attributes: what
    vLLM sets on a layer beside its tensors when packing it. expected: output of the staged weights on the probe,
    [PROBE_ROWS, out]. digests: sha256 of each tensor that is executed as it stands.
    """

    path: str
    live: nn.Module
    shadow: nn.Module
    tensors: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    attributes: list[str] = field(default_factory=list)
    expected: Tensor | None = None
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """One piece of staging: `load` a checkpoint tensor into its part, or `pack` a part."""

    action: Literal["load", "pack"]
    part: str
    tensor: str | None
    nbytes: int


class Shadow:
    """The shadow of one live draft model.

    Args:
        live: vLLM's draft model.
        target: vLLM's target model, whose modules are never touched.
        empty: the new checkpoint's tensors by name, as meta tensors of their shapes and dtypes.
        read: reads one of them.
        vllm_config: the worker's.
        device: where the drafter lives.

    Raises:
        SwapRefused: the checkpoint holds a tensor of the target's, one vLLM has no place for, or lacks one it needs.
    """

    def __init__(
        self,
        live: nn.Module,
        target: nn.Module,
        empty: Mapping[str, Tensor],
        read: Callable[[str], Tensor],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        self._read = read
        self._vllm_config = vllm_config
        self._device = device
        self._shared = {id(module) for module in target.modules()}
        self._all: dict[str, Part] = {}
        self._root = self._clone(live, "")
        self._route(empty)
        self.parts = {path: part for path, part in self._all.items() if part.tensors}
        self._require_complete()
        self.slices = list(self._plan())
        self._done = [False] * len(self.slices)
        self.exchanged = False

    # ---- building

    def _clone(self, live: nn.Module, path: str) -> nn.Module:
        clone = vllm_internals.clone_structure(live)
        self._all[path] = Part(path, live, clone)
        for name, child in live.named_children():
            # what the target owns has no shadow: vLLM's loader finds no place for a tensor of that name
            inside = f"{path}.{name}" if path else name
            clone.add_module(name, nn.Module() if id(child) in self._shared else self._clone(child, inside))
        return clone

    def _route(self, empty: Mapping[str, Tensor]) -> None:
        """Load empty tensors, to learn from vLLM's own loaders which layer each one feeds."""
        current = ""

        def recorder(part: Part, own: str, loader: Callable[..., None]) -> Callable[..., None]:
            def record(*args: Any, **kwargs: Any) -> None:
                loader(*args, **kwargs)
                part.loaded.add(own)
                if current not in part.tensors:
                    part.tensors.append(current)

            return record

        wrapped: list[tuple[Any, Any]] = []
        for part in self._all.values():
            for own, tensor in _tensors(part.shadow).items():
                holder: Any = tensor
                wrapped.append((holder, getattr(holder, "weight_loader", None)))
                holder.weight_loader = recorder(part, own, _loader_of(holder))
        for current, tensor in empty.items():  # the recorders read `current`
            self._load_into_place(current, tensor)
        for holder, loader in wrapped:
            if loader is None:
                del holder.weight_loader
            else:
                holder.weight_loader = loader
        for part in self._all.values():
            for own in part.live._buffers.keys() - part.loaded:  # not the checkpoint's: stays as it is
                part.shadow._buffers[own] = part.live._buffers[own]
        routed = {name for part in self._all.values() for name in part.tensors}
        if stray := sorted(empty.keys() - routed - IGNORED):
            raise SwapRefused(
                f"vLLM would not read {', '.join(stray)}",
                "only tensors the running drafter has a place for",
                "check the names against the checkpoint the engine was started with",
            )

    def _load_into_place(self, name: str, tensor: Tensor) -> None:
        try:
            root: Any = self._root
            root.load_weights([(name, tensor)])
        except (ValueError, AssertionError, RuntimeError, KeyError) as error:
            raise SwapRefused(
                f"{name} does not fit the running drafter: {str(error).splitlines()[0] if str(error) else error!r}",
                "the names and shapes of the checkpoint the engine was started with, and nothing of the target's",
                "distill the drafter with the same architecture and draft vocabulary",
            ) from error

    def _require_complete(self) -> None:
        lacking = [
            f"{path}.{name}"
            for path, part in self._all.items()
            for name, tensor in part.shadow.named_parameters(recurse=False)
            if not part.tensors and tensor.numel()
        ]
        if lacking:
            raise SwapRefused(
                f"the checkpoint lacks weights for {', '.join(sorted(lacking))}",
                "every weight of the running drafter",
                "a layer without new weights would keep its old ones: save the drafter whole",
            )

    def _plan(self) -> Iterator[Slice]:
        for path, part in self.parts.items():
            total = sum(t.numel() * t.element_size() for t in _tensors(part.shadow).values())
            for name in part.tensors:
                yield Slice("load", path, name, total // len(part.tensors))
            yield Slice("pack", path, None, total)

    # ---- staging

    @torch.no_grad()
    def run(self, index: int) -> None:
        """Do slice `index`.

        Raises:
            SwapRefused: the weights are not finite, or what was packed does not compute what was loaded.
        """
        piece = self.slices[index]
        part = self.parts[piece.part]
        if piece.tensor is not None:
            if piece.tensor == part.tensors[0]:
                self._make_room(part)
            self._load_into_place(piece.tensor, self._read(piece.tensor))
        else:
            self._pack(part)
        self._done[index] = True

    def _make_room(self, part: Part) -> None:
        for name, meta in _tensors(part.shadow).items():
            if not meta.is_meta:
                continue
            tensor = vllm_internals.materialise(meta, self._device)
            # whatever the loaders leave out shows up as NaN (or an impossible index) when the part is packed
            tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
            _place(part.shadow, name, tensor)

    def _pack(self, part: Part) -> None:
        for name, tensor in _tensors(part.shadow).items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise SwapRefused(
                    f"{part.path}.{name} has values that are not finite in {str(tensor.dtype).removeprefix('torch.')}",
                    "finite weights in the engine's dtype",
                    "check the training run that made this version",
                )
        method = vllm_internals.linear_method(part.shadow)
        weight = getattr(part.shadow, "weight", None)
        if method is not None and vllm_internals.is_unquantized(method) and isinstance(weight, Tensor):
            part.expected = torch.nn.functional.linear(self._probe(part), weight, _bias(part.shadow))
        vllm_internals.pack(part.shadow, self._vllm_config, self._device)
        self._compare_forms(part)
        if method is not None and part.expected is None:  # quantised: what packing made is all there is to compare
            part.expected = method.apply(part.shadow, self._probe(part), _bias(part.shadow))
        part.digests = {name: _digest(tensor) for name, tensor in _plain(part.shadow).items()}
        if error := self._wrong(part, part.shadow):
            raise SwapRefused(
                f"{part.path} does not compute what was loaded into it ({error})",
                "the packed layer's output on a probe equal to the staged weights' output",
                "this is a fault of the engine or its kernels: restart the replica, and report it",
            )

    def _compare_forms(self, part: Part) -> None:
        """The packed shadow must have the live layer's form, or the two cannot be exchanged."""
        live, shadow = _tensors(part.live), _tensors(part.shadow)
        for name in live.keys() | shadow.keys():
            a, b = live.get(name), shadow.get(name)
            if a is None or b is None or (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
                raise SwapRefused(
                    f"{part.path}.{name} came out of packing in another form than the one in service",
                    "the same tensors with the same shapes and dtypes",
                    "replace the replica instead of swapping",
                )
        keys = (part.live.__dict__.keys() | part.shadow.__dict__.keys()) - _TORCH_STATE
        changed = [k for k in keys if part.live.__dict__.get(k) is not part.shadow.__dict__.get(k)]
        part.attributes = sorted(k for k in changed if k in part.shadow.__dict__ and k in part.live.__dict__)
        for key in part.attributes:
            if getattr(part.shadow.__dict__[key], "__self__", None) is part.shadow:
                raise SwapRefused(f"{part.path}.{key} belongs to the staged layer", "something that can be exchanged")

    # ---- exchanging

    @property
    def staged(self) -> bool:
        """Whether every slice has been done."""
        return all(self._done)

    @torch.no_grad()
    def exchange(self, before: Callable[[str], None] = lambda path: None) -> None:
        """Put the staged weights where the live ones are, and the live ones where the staged were.

        If anything fails midway, what was exchanged is exchanged back before the error is raised. Calling it again
        undoes it.

        Args:
            before: called with each part's path before it is exchanged.
        """
        done: list[Callable[[], None]] = []
        try:
            for part in self.parts.values():
                before(part.path)
                for swap in _swaps(part):
                    swap()
                    done.append(swap)
        except BaseException:
            for swap in reversed(done):
                swap()
            raise
        self.exchanged = not self.exchanged

    def close(self) -> None:
        """Let go of everything that is not in service. Layers and their weight loaders refer to each other, and a
        worker collects cycles so seldom that each swap would leave a whole drafter behind."""
        for part in self._all.values():
            part.shadow.__dict__.clear()
        self._all.clear()
        self.parts.clear()

    # ---- proving

    @torch.no_grad()
    def prove(self) -> dict[str, str | None]:
        """For each part, what in the live layer differs from what was staged; None when nothing does.

        Packed layers, lm_head among them, are executed on a seeded probe; tensors that are executed as they stand are
        hashed.
        """
        return {path: self._wrong(part, part.live) for path, part in self.parts.items()}

    def _wrong(self, part: Part, module: nn.Module) -> str | None:
        for name, tensor in _plain(module).items():
            if _digest(tensor) != part.digests.get(name):
                return f"the digest of {name} differs"
        method = vllm_internals.linear_method(module)
        if method is None or part.expected is None:
            return None
        got = method.apply(module, self._probe(part), _bias(module))
        if got.shape != part.expected.shape:
            return f"a probe gives shape {tuple(got.shape)} instead of {tuple(part.expected.shape)}"
        scale = float(part.expected.float().abs().max()) or 1.0
        error = float((got.float() - part.expected.float()).abs().max()) / scale
        limit = _TOLERANCE.get(got.dtype, 4e-2)
        return None if error <= limit else f"a probe differs by {error:.2g} of its largest value, at most {limit:g}"

    def _probe(self, part: Part) -> Tensor:
        """[PROBE_ROWS, in]: seeded by the part's name, the same in every process."""
        layer: Any = part.live
        width = int(getattr(layer, "input_size_per_partition", layer.input_size))
        seed = int.from_bytes(hashlib.sha256(part.path.encode()).digest()[:4], "little")
        probe = torch.randn(PROBE_ROWS, width, generator=torch.Generator().manual_seed(seed))
        return probe.to(self._device, layer.params_dtype)


def _swaps(part: Part) -> Iterator[Callable[[], None]]:
    """The single exchanges that make up a part's; each one undoes itself when called again."""
    shadow = _tensors(part.shadow)
    for name, tensor in _tensors(part.live).items():
        # captured CUDA graphs read the live tensors' very addresses
        exchange = _swap_storage if tensor.device.type == "cpu" else _swap_contents
        yield partial(exchange, tensor, shadow[name])
    for key in part.attributes:
        yield partial(_swap_entries, part.live.__dict__, part.shadow.__dict__, key)


def _swap_storage(a: Tensor, b: Tensor) -> None:
    a.data, b.data = b.data, a.data


def _swap_contents(a: Tensor, b: Tensor) -> None:
    kept = a.detach().clone()
    a.copy_(b)
    b.copy_(kept)


def _swap_entries(a: dict[str, Any], b: dict[str, Any], key: str) -> None:
    a[key], b[key] = b[key], a[key]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers."""
    own: dict[str, Tensor] = dict(module.named_parameters(recurse=False))
    own.update(module.named_buffers(recurse=False))
    return own


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Those of its tensors that are executed as they stand and are small enough to hash: norms, biases, d2t."""
    return {name: tensor for name, tensor in _tensors(module).items() if tensor.dim() == 1 and tensor.numel()}


def _place(module: nn.Module, name: str, tensor: Tensor) -> None:
    (module._parameters if name in module._parameters else module._buffers)[name] = tensor  # type: ignore[assignment]


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, Tensor) else None


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def _loader_of(parameter: Tensor) -> Callable[..., None]:
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    return getattr(parameter, "weight_loader", default_weight_loader)
