"""Which K pays: from the acceptance by position at one K, and from what its steps cost beside plain ones."""

from __future__ import annotations

from eaglenest.bench.models import Measurement


def best_k(plain: Measurement, speculative: Measurement) -> int:
    """The K, up to the measured one, that is expected to be fastest at the lowest concurrency.

    A plain step takes 1 / (tokens/s); a speculative one AL / (tokens/s), and what it takes longer is shared out evenly
    over its K drafts. A step with k drafts then yields 1 + u_1 + ... + u_k tokens (u: unconditional acceptance, which
    does not depend on how many drafts follow) and takes the plain step and k drafts.

    Args:
        plain: of the same mode. speculative: with acceptance figures, measured at the largest K to consider.

    Returns:
        1 <= k <= K.
    """
    acceptance = speculative.acceptance
    assert acceptance is not None, "a speculative measurement has acceptance figures"
    lowest = min(point.concurrency for point in speculative.points)
    base, spec = plain.point(lowest), speculative.point(lowest)
    assert base is not None, "both are measured at the same concurrencies"
    assert spec is not None
    largest = len(acceptance.unconditional)
    step = 1 / base.tokens_per_s
    draft = max(0.0, acceptance.accept_len / spec.tokens_per_s - step) / largest

    def expected(k: int) -> float:
        return (1 + sum(acceptance.unconditional[:k])) / (step + k * draft)

    return max(range(1, largest + 1), key=expected)
