"""An engine client that keeps one kind of request from ending a speculating CPU engine of vLLM 0.32.

With speculation every batch goes through the rejection sampler, also one without a draft (a prompt's first step). When
such a batch asks for top-k without top-p, vLLM's top-k for CPUs takes the maximum of an empty tensor and the engine
dies: `{"top_k": 20}` in one request would end the service. Its top-p branch has no such fault, and a top-p of 1 in
float32 cuts nothing off. `tests/engine/test_cpu_kernels.py` says when a newer vLLM no longer needs this.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

ALMOST_ONE = 1 - 1e-9
"""Below 1, so that vLLM takes the branch with top-p; 1 once it is float32, so that it keeps every token."""


class SpeculatingCpuLLM(AsyncLLM):
    """`AsyncLLM` for a CPU engine with a drafter."""

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        return await super().add_request(request_id, prompt, without_bare_top_k(params), *args, **kwargs)


def without_bare_top_k(params: Any) -> Any:
    """The same sampling, with an ineffective top-p beside a top-k that had none."""
    if not isinstance(params, SamplingParams) or params.top_k <= 0 or params.top_p < 1:
        return params
    params = copy.copy(params)
    params.top_p = ALMOST_ONE
    return params
