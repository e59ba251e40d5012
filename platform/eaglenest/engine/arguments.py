"""From a typed description of an engine to vLLM's arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eaglenest.engine.environment import on_cpu
from eaglenest.errors import EngineError
from eaglenest.settings import Dtype

EXTENSION = "eaglenest.engine.worker.WorkerExtension"
"""The worker extension, as vLLM's `worker_extension_cls` wants it: swaps drafters and, on a CPU, corrects a kernel."""

CAPTURE_EXTENSION = "eaglenest.engine.worker.CaptureExtension"
"""The worker extension of an engine that keeps hidden states (`EngineSpec.capture`)."""

IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor of a CPU engine of one rank: it computes in the engine's own process.

vLLM's choice for CPUs, a worker process, waits for its messages in a loop of `sched_yield`. On a small machine whose
cores all compute, those loops keep threads that want a core for a moment (event loops, proxy, client) from it for up to
two seconds: streams stop and burst. Measured on two cores, eight streams: 99% of the gaps between chunks under 0.2 s
instead of 0.5 to 2 s, the median pause of an event loop 1 ms, and the same tokens/s."""


class EngineSpec(BaseModel):
    """One vLLM engine: a target, perhaps a drafter, and their limits."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path = Field(description="local Hugging Face folder of the target")
    drafter: Path | None = Field(default=None, description="drafter checkpoint folder; None: plain decoding")
    capture: tuple[int, ...] = Field(default=(), description="streams kept for a teacher; takes a drafter's place")
    num_speculative_tokens: int = Field(default=3, ge=1, le=16, description="K; unused without a drafter")
    served_model_name: str | None = Field(default=None, description="name of the model in the OpenAI routes")
    dtype: Dtype = Field(default="auto", description="auto: float32 on a CPU, bfloat16 on a GPU")
    max_model_len: int = Field(default=2048, ge=128, description="context, in tokens")
    max_num_seqs: int = Field(default=32, ge=1, description="sequences batched in one step")
    enforce_eager: bool | None = Field(default=None, description="None: eager on a CPU, compiled on a GPU")
    tensor_parallel_size: int = Field(default=1, ge=1)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1, description="fraction; unused on a CPU")
    seed: int = Field(default=0, ge=0)
    spec_metrics: Literal["none", "summary", "detailed"] = Field(
        default="summary", description="acceptance figures in each response"
    )
    extension: str = Field(default=EXTENSION, description="worker extension class")


def resolve_dtype(dtype: Dtype) -> str:
    """The dtype an engine runs in.

    `auto` is float32 on a CPU: without AVX512-BF16 a speculative step in bfloat16 costs three plain ones.
    """
    if dtype != "auto":
        return dtype
    return "float32" if on_cpu() else "bfloat16"


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments for `vllm.AsyncEngineArgs` (the same names as `vllm serve` takes).

    Raises:
        EngineError: a folder is missing, or the drafter does not fit the target by its config.
    """
    _check_folders(spec)
    arguments: dict[str, Any] = {
        "model": str(spec.target),
        "served_model_name": [spec.served_model_name] if spec.served_model_name else None,
        "dtype": resolve_dtype(spec.dtype),
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": on_cpu() if spec.enforce_eager is None else spec.enforce_eager,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "seed": spec.seed,
        "load_format": "safetensors",
        "trust_remote_code": False,
    }
    if not on_cpu():
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
    elif spec.tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = IN_ENGINE
    if spec.drafter is not None:
        arguments["worker_extension_cls"] = spec.extension
        arguments["per_request_spec_decode_metrics"] = spec.spec_metrics
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": str(spec.drafter),
            "num_speculative_tokens": spec.num_speculative_tokens,
            # vLLM's default today; pinned, because acceptance is not comparable across it
            "draft_sample_method": "greedy",
        }
    elif spec.capture:
        arguments["worker_extension_cls"] = CAPTURE_EXTENSION
        arguments["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.capture)}},
        }
        arguments["kv_transfer_config"] = {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "eaglenest.engine.capture",
            "kv_role": "kv_producer",
        }
    return arguments


def require_eagle3(model_config: Any) -> None:
    """Refuse a target whose vLLM class cannot hand out its hidden states.

    Args:
        model_config: vLLM's `ModelConfig` of the target.

    Raises:
        EngineError: the class lacks `SupportsEagle3`.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    architectures = list(model_config.architectures)
    model_class, architecture = ModelRegistry.resolve_model_cls(architectures, model_config)
    if not supports_eagle3(model_class):
        raise EngineError(
            f"vLLM's {architecture} hands out no hidden states (it lacks SupportsEagle3)",
            "a target such as llama, qwen2, qwen3, gpt_oss, granite, deepseek_v2 or minimax_m2",
            "choose another target, or serve this one without a drafter",
        )


def _check_folders(spec: EngineSpec) -> None:
    target = _config(spec.target, "target")
    if spec.drafter is None:
        return
    drafter = _config(spec.drafter, "drafter")
    text = target.get("text_config") or target
    want, have = text.get("hidden_size"), drafter.get("target_hidden_size", drafter.get("hidden_size"))
    if (want, text.get("vocab_size")) != (have, drafter.get("vocab_size")):
        raise EngineError(
            f"the drafter in {spec.drafter} was made for another target: hidden size {have}, "
            f"vocabulary {drafter.get('vocab_size')}",
            f"hidden size {want}, vocabulary {text.get('vocab_size')}, as the target has",
            "distill a drafter from this target",
        )


def _config(folder: Path, what: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(
            f"the {what}'s folder {folder} has no readable config.json ({type(error).__name__})",
            "a local Hugging Face folder",
            f"check the path of the {what}",
        ) from error
    return dict(config)
