"""A correction to vLLM 0.32's CPU fallback of one kernel, through vLLM's registry of kernel overrides.

When requests are sampled, the rejection sampler spreads each request's temperature, top-k and top-p over its draft
tokens with `expand_kernel`. Without Triton, the fallback for CPUs converts the output to int64 first and fills that
copy: the tensor the sampler goes on with stays uninitialised, and sampled answers do not follow the target's
distribution.
`tests/engine/test_cpu_kernels.py` says when a newer vLLM no longer needs this.
"""

from __future__ import annotations

from torch import Tensor

EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: Tensor, values: Tensor, cumulative: Tensor, replace_from: float, replace_to: float, longest: int = 0
) -> None:
    """Fill `output` [num_tokens] with each request's value, repeated for each of its tokens.

    Args:
        values: [batch]. cumulative: [batch], cumulative counts of tokens.
        replace_from, replace_to: a value to write another one for.
        longest: the kernel's limit of tokens per request; not needed here.
    """
    counts = cumulative.diff(prepend=cumulative.new_zeros(1))
    wanted = values.masked_fill(values == replace_from, replace_to)
    output.copy_(wanted.repeat_interleave(counts))


def correct() -> None:
    """Register the correction where the faulty fallback is in use. Call it in a worker, before its engine loads."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_cpu() and not HAS_TRITON:
        from vllm.triton_utils.dispatcher import register_kernels

        register_kernels({EXPAND: expand})
