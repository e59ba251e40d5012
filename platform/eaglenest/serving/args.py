"""Arguments of the Serve application: `args:` in a file of `serve_configs/`, or `key=value` after `serve run`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from eaglenest.engine.arguments import EngineSpec
from eaglenest.settings import Dtype, get_settings
from eaglenest.targets import Target

APP_NAME = "eaglenest"
DEPLOYMENT = "EagleNest"


class AppArgs(BaseModel):
    """What one application serves. Unknown keys are refused; what is left out comes from the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    target: str = Field(default_factory=lambda: get_settings().target, description="embedded name, hub id or path")
    served_model_name: str | None = Field(default=None, description="`model` of the OpenAI routes; None: the target's")

    drafter: str = Field(default="registry", description="registry, none (plain decoding), or a checkpoint folder")
    registry_uri: str | None = Field(
        default=None, description="MLflow server; None: the settings' (MLFLOW_TRACKING_URI)"
    )
    model_name: str = Field(default_factory=lambda: get_settings().model_name, description="registered model")
    alias: str = Field(default="champion", min_length=1, description="names the version to serve")
    poll_interval_s: float = Field(default=15.0, gt=0, description="seconds between looks at the alias")

    num_speculative_tokens: int = Field(
        default_factory=lambda: get_settings().num_speculative_tokens, ge=1, le=16, description="K"
    )
    dtype: Dtype = Field(default_factory=lambda: get_settings().dtype, description="auto: float32 on a CPU")
    max_model_len: int = Field(default_factory=lambda: get_settings().max_model_len, ge=128, description="tokens")
    max_num_seqs: int = Field(default=32, ge=1, description="sequences batched in one step")
    enforce_eager: bool | None = Field(default=None, description="None: eager on a CPU, compiled on a GPU")
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs of one replica")
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1, description="fraction; unused on a CPU")
    spec_metrics: Literal["none", "summary", "detailed"] = Field(
        default="summary", description="acceptance figures in each response"
    )

    @property
    def speculates(self) -> bool:
        """Whether the engine gets a drafter."""
        return self.drafter != "none"

    @property
    def tracking_uri(self) -> str:
        """The registry's server."""
        return self.registry_uri or get_settings().tracking_uri

    def engine_spec(self, target: Target, drafter: Path | None) -> EngineSpec:
        """The engine that serves this."""
        return EngineSpec(
            target=target.path,
            drafter=drafter,
            num_speculative_tokens=self.num_speculative_tokens,
            served_model_name=self.served_model_name or target.name,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            enforce_eager=self.enforce_eager,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            spec_metrics=self.spec_metrics,
        )
