"""The parts of vLLM 0.32 that are not its public surface, all in one place.

vLLM remembers, for each layer, how its tensors looked before they were packed, so that it can reload weights
(`vllm.model_executor.model_loader.reload`). The swap builds second layers from the same memory. Its choice of OpenMP
threads and cores (`vllm.utils.ompmultiprocessing`) is made for worker processes; an engine without them needs it, too.
`tests/engine/test_shadow.py`, `test_swap.py` and `test_executor.py` hold this module to the pinned version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_TORCH_STATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_PACKED_MARK = "_already_called_process_weights_after_loading"


@contextmanager
def openmp_threads(vllm_config: Any) -> Iterator[None]:
    """Lay vLLM's choice of OpenMP threads, and of a core for each, over the environment of an engine started inside.

    OpenMP reads it once, when a process starts, so it cannot be set in the engine's process itself. Does nothing on a
    GPU.
    """
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    with OMPProcessManager(vllm_config).configure_omp_envs(rank=0, local_rank=0):
        yield


def clone_structure(live: nn.Module) -> nn.Module:
    """A module of the same class and attributes as `live`, with dictionaries of its own and none of its tensors.

    Its parameters and buffers are meta tensors in the shapes and with the weight loaders they had before packing; it
    has no children yet. It is never run as a module: its bound methods may still be those of `live`.
    """
    clone: nn.Module = object.__new__(type(live))
    clone.__dict__.update(live.__dict__)
    for name in _TORCH_STATE:
        clone.__dict__[name] = set() if name.endswith("_set") else {}
    clone.__dict__.pop(_PACKED_MARK, None)
    parameters, buffers = _unpacked(live)
    for name, parameter in live._parameters.items():
        empty: Any = None if parameter is None else _meta(parameters.get(name, parameter), clone)
        clone.register_parameter(name, empty)
    for name, buffer in live._buffers.items():
        persistent = name not in live._non_persistent_buffers_set
        clone.register_buffer(name, None if buffer is None else _meta(buffers.get(name, buffer), clone), persistent)
    return clone


def materialise(meta: Tensor, device: Any) -> Tensor:
    """A real tensor, uninitialised, of `meta`'s class, shape, strides, dtype and attributes, on `device`."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    with device:
        return materialize_meta_tensor(meta)


def pack(clone: nn.Module, vllm_config: Any, device: Any) -> None:
    """Let vLLM bring a loaded layer into the form its kernels execute, as it does at start."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    method = getattr(clone, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        with device, set_current_vllm_config(vllm_config):
            method.process_weights_after_loading(clone)


def linear_method(module: nn.Module) -> Any | None:
    """The object that executes a linear layer or lm_head, `apply(module, x, bias)`; None for anything else."""
    from vllm.model_executor.layers.linear import LinearMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    method = getattr(module, "quant_method", None)
    return method if isinstance(method, LinearMethodBase) or isinstance(module, ParallelLMHead) else None


def is_unquantized(method: Any) -> bool:
    """Whether the layer computes x @ weight.T with the checkpoint's own weight, packed or not."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    return isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)


def _unpacked(live: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """vLLM's memory of the layer's tensors before packing, by name: parameters and buffers, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(live).restore_metadata


def _meta(tensor: Tensor, owner: nn.Module) -> Tensor:
    """A meta copy whose weight loader is bound to `owner`. The remembered tensor itself stays as it is."""
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    return restore_layer_refs(to_meta_tensor(tensor), owner)
