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
    vllm_cpu = pytest.importorskip("vllm.utils.cpu_triton_utils")
    output = torch.full((3,), -1.0)
    vllm_cpu._expand_kernel_impl(output, torch.tensor([0.7, 0.9]), torch.tensor([1, 3]), 0, 1)
    assert output.tolist() == [-1.0, -1.0, -1.0]
