"""Every setting, typed, in one place. Environment variables override the defaults: EAGLENEST_<NAME>."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_TARGET = "smollm2-135m-instruct"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class Settings(BaseSettings):
    """What EagleNest needs to know of its surroundings. Unknown keys are refused."""

    model_config = SettingsConfigDict(env_prefix="EAGLENEST_", extra="forbid", frozen=True)

    cache_dir: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "eaglenest",
        description="what can be made again: converted targets, answers, staged drafters",
    )
    runs_dir: Path = Field(
        default=Path("runs"), description="what a run leaves: MLflow's store, reports, service state"
    )

    target: str = Field(default=DEFAULT_TARGET, description="embedded name, hub id or local path of the target")
    model_name: str = Field(
        default="smollm2-135m-drafter", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="MLflow registered model"
    )
    mlflow_tracking_uri: str | None = Field(
        default=None,
        validation_alias="MLFLOW_TRACKING_URI",
        description="an MLflow server to use; unset: the local one on mlflow_port",
    )

    host: str = Field(default="127.0.0.1", description="address every local service binds to")
    serve_port: int = Field(default=8000, ge=1, le=65535)
    mlflow_port: int = Field(default=5000, ge=1, le=65535)
    ray_port: int = Field(default=6379, ge=1, le=65535)
    ray_dashboard_port: int = Field(default=8265, ge=1, le=65535)

    num_speculative_tokens: int = Field(default=3, ge=1, le=16, description="K: draft tokens per step")
    dtype: Dtype = Field(default="auto", description="auto: float32 on a CPU, bfloat16 on a GPU")
    max_model_len: int = Field(default=2048, ge=128, description="context of the served target, in tokens")
    kv_cache_gib: int = Field(default=1, ge=1, description="KV cache of a CPU engine, in GiB")

    @property
    def tracking_uri(self) -> str:
        """The MLflow server in use: MLFLOW_TRACKING_URI, or the local one."""
        return self.mlflow_tracking_uri or self.local_tracking_uri

    @property
    def local_tracking_uri(self) -> str:
        """The MLflow server that `eaglenest up` starts."""
        return f"http://{self.host}:{self.mlflow_port}"

    @property
    def dashboard_url(self) -> str:
        """Ray's dashboard and Jobs API."""
        return f"http://{self.host}:{self.ray_dashboard_port}"

    @property
    def serve_url(self) -> str:
        """Root of the OpenAI-compatible endpoint, without `/v1`."""
        return f"http://{self.host}:{self.serve_port}"


def shown(text: str) -> str:
    """A URI, or a message with URIs in it, without user names and passwords: for whatever is printed or logged."""
    return re.sub(r"//[^/\s]*@", "//", text)


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The process's settings, read once from the environment."""
    return Settings()
