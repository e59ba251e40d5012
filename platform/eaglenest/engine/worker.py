"""What vLLM's workers import by name, and nobody else: importing it corrects the worker's kernels."""

from __future__ import annotations

import torch

from eaglenest.engine import cpu_kernels
from eaglenest.engine.extension import DrafterExtension

cpu_kernels.correct()  # vLLM imports extensions after its own overrides and before it builds the sampler


class WorkerExtension(DrafterExtension):
    """The worker extension of a serving engine: the drafter's swap."""


class CaptureExtension:
    """The worker extension of a teacher's engine: hands out the states its connector keeps (`capture.py`)."""

    def take_states(self, keys: list[str]) -> dict[str, tuple[bytes, list[int]]]:
        """bfloat16 states and their shapes, by key, from the first rank; the other ranks have none."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from eaglenest.engine.capture import StatesConnector

        connector = get_kv_transfer_group()
        assert isinstance(connector, StatesConnector)
        taken = connector.take(keys)
        return {key: (t.view(torch.int16).numpy().tobytes(), list(t.shape)) for key, t in taken.items()}
