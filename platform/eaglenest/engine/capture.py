"""The target's hidden states, read out of vLLM's cache while it computes: a KV connector of our own.

vLLM's `extract_hidden_states` writes the residual streams asked for into a cache group beside the KV cache, token by
token, in the same blocks; a prompt that is found in the prefix cache is found with its states. When a request that
asked for its states (`kv_transfer_params={"states": KEY}`) ends, the connector copies them out before its blocks are
given away, and keeps them in the first worker's memory until someone takes them (`CaptureExtension`, in `worker.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KEY = "states"
"""In `kv_transfer_params`: under which name a request's states are kept."""

LAYER = "cache_only_layers"
"""In the name of the layer whose cache holds the states."""


@dataclass(frozen=True)
class Ended:
    """A request that has ended. tokens: how many of its states are in the cache, all but the last token's."""

    key: str
    request_id: str
    tokens: int
    blocks: list[int]


@dataclass
class CaptureMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, each step."""

    ended: list[Ended] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Stores only; nothing is ever loaded."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        # vLLM puts its layer into a group of its own, or among others whose pages are alike: the name tells
        layers = [(i, n) for i, g in enumerate(kv_cache_config.kv_cache_groups) for n in g.layer_names if LAYER in n]
        [(self._group, self._layer)] = layers
        self._ended: list[Ended] = []
        self._cache: Tensor | None = None
        self._kept: dict[str, Tensor] = {}

    def take(self, keys: list[str]) -> dict[str, Tensor]:
        """States of ended requests, [tokens, streams, hidden] bfloat16 on the CPU; they are kept no longer."""
        return {key: self._kept.pop(key) for key in keys if key in self._kept}

    # the scheduler's side

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a request whose states are wanted until a worker has read them."""
        key = (request.kv_transfer_params or {}).get(KEY)
        if key is None or self._group >= len(block_ids):
            return False, None
        tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._ended.append(Ended(key, request.request_id, tokens, list(block_ids[self._group])))
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> CaptureMetadata:
        """Pass on what has ended since the last step."""
        metadata = CaptureMetadata(self._ended)
        self._ended = []
        return metadata

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """There is nothing to load."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """There is nothing to load."""

    def get_finished_count(self) -> int:
        """Only the first worker reads; every rank has the same states."""
        return 1

    # the workers' side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Remember the cache of states: [blocks, streams, block size, hidden]."""
        if get_tensor_model_parallel_rank() == 0:
            self._cache = kv_caches[self._layer]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Read the states of requests that have ended; names those whose blocks are free now."""
        if self._cache is None or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CaptureMetadata)
        for ended in metadata.ended:
            self._kept[ended.key] = self._read(self._cache, ended)
        return {ended.request_id for ended in metadata.ended} or None, None

    def _read(self, cache: Tensor, ended: Ended) -> Tensor:
        size = cache.shape[2]
        blocks = torch.tensor(ended.blocks, device=cache.device)
        slots = torch.arange(ended.tokens, device=cache.device)
        return cache[blocks[slots // size], :, slots % size].to("cpu", torch.bfloat16)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """There is nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is nothing to load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The forward pass writes the cache itself."""

    def wait_for_save(self) -> None:
        """The forward pass writes the cache itself."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A token's states lie together."""
        return "LBNHC"
