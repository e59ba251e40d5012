"""What vLLM's workers import by name, and nobody else: importing it corrects the worker's kernels."""

from __future__ import annotations

from eaglenest.engine import cpu_kernels
from eaglenest.engine.extension import DrafterExtension

cpu_kernels.correct()  # vLLM imports extensions after its own overrides and before it builds the sampler


class WorkerExtension(DrafterExtension):
    """The worker extension: the drafter's swap."""
