"""The corrected kernel, and whether vLLM still needs the correction."""

from __future__ import annotations

import pytest
import torch

from eaglenest.engine.cpu_kernels import expand


def test_each_value_is_repeated_for_its_tokens_in_its_own_dtype() -> None:
    temperature = torch.full((6,), float("nan"))
    expand(temperature, torch.tensor([0.7, 0.0, 1.5]), torch.tensor([2, 5, 6]), 0, 1)
    assert temperature.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0, 1.0, 1.5])
    top_k = torch.zeros(4, dtype=torch.int32)
    expand(top_k, torch.tensor([50, 3], dtype=torch.int32), torch.tensor([0, 4]), 0, 0)
    assert top_k.tolist() == [3, 3, 3, 3]


@pytest.mark.slow
def test_the_pinned_vllm_still_leaves_the_output_untouched() -> None:
    """When this fails, vLLM has mended its fallback: remove `engine/cpu_kernels.py` and its call."""
    from vllm.platforms import current_platform

    vllm_cpu = pytest.importorskip("vllm.utils.cpu_triton_utils")
    current_platform.import_kernels()
    output = torch.full((3,), -1.0)
    vllm_cpu._expand_kernel_impl(output, torch.tensor([0.7, 0.9]), torch.tensor([1, 3]), 0, 1)
    assert output.tolist() == [-1.0, -1.0, -1.0]


@pytest.mark.slow
def test_the_pinned_vllm_still_fails_on_top_k_without_drafts() -> None:
    """When this fails, vLLM has mended it: remove `engine/client.py`."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    nothing, top_k = torch.empty(0, 10), torch.empty(0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="reduction dim"):
        apply_top_k_top_p_pytorch(nothing, top_k, None, allow_cpu_sync=True)
    apply_top_k_top_p_pytorch(nothing, top_k, torch.empty(0), allow_cpu_sync=True)


@pytest.mark.slow
def test_only_a_bare_top_k_gets_a_top_p_and_it_cuts_nothing_off() -> None:
    from vllm import SamplingParams

    from eaglenest.engine.client import without_bare_top_k

    bare = SamplingParams(top_k=2)
    changed = without_bare_top_k(bare)
    assert (bare.top_p, changed.top_k) == (1.0, 2)
    assert changed.top_p < 1
    assert torch.tensor(changed.top_p, dtype=torch.float32) == 1
    for params in (SamplingParams(top_k=2, top_p=0.9), SamplingParams(top_p=0.9), SamplingParams(temperature=0)):
        assert without_bare_top_k(params) is params
