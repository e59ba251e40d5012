"""Start a vLLM engine from an `EngineSpec`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from eaglenest.engine.arguments import IN_ENGINE, EngineSpec, engine_arguments, require_eagle3
from eaglenest.engine.environment import on_cpu, prepare_environment
from eaglenest.errors import EagleNestError, EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


def threads_for(vllm_config: Any) -> AbstractContextManager[None]:
    """Start an engine inside this: one that computes in its own process then has its OpenMP threads chosen by vLLM."""
    from eaglenest.engine.vllm_internals import openmp_threads

    in_engine = vllm_config.parallel_config.distributed_executor_backend == IN_ENGINE
    return openmp_threads(vllm_config) if in_engine else nullcontext()


def start_engine(spec: EngineSpec, *, stat_loggers: list[Any] | None = None) -> AsyncLLM:
    """Start an engine; takes 30 s to minutes. Call it inside the event loop that will use it; it blocks that loop.

    The environment of this process gains what the engine's processes want (see `engine_env`).

    Args:
        stat_loggers: vLLM stat logger factories beside its own.

    Raises:
        EngineError: the target has no EAGLE 3 support, or vLLM cannot start.
    """
    arguments = engine_arguments(spec)
    prepare_environment()
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from eaglenest.engine.client import SpeculatingCpuLLM

    client = SpeculatingCpuLLM if spec.drafter is not None and on_cpu() else AsyncLLM
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
        if spec.drafter is not None:
            require_eagle3(config.model_config)
        with threads_for(config):
            return client.from_vllm_config(config, stat_loggers=stat_loggers)
    except EagleNestError:
        raise
    except Exception as error:
        raise EngineError(
            f"vLLM did not start ({type(error).__name__}: {str(error).strip() or 'no message'})",
            f"an engine for {spec.target}" + (f" with the drafter {spec.drafter}" if spec.drafter else ""),
            "read the engine's log above; `eaglenest doctor` checks memory and libraries",
        ) from error
