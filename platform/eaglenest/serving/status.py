"""What a replica says of its drafter. No heavy imports: the command line, the rollout and every replica read it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ReplicaStatus(BaseModel):
    """One replica's drafter: the version the registry asks for, the version in the engine, and why they differ."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replica_id: str
    desired_version: int | None = Field(description="champion, when the registry was last reached; None: never reached")
    actual_version: int | None = Field(description="in the engine; None: plain decoding")
    since: str = Field(description="when actual_version took effect, ISO 8601, UTC")
    last_error: str | None = Field(
        default=None, description="why desired_version is not in the engine, or was not read"
    )
    stage_ms: float | None = Field(
        default=None, description="the last swap's download and verification, off the engine"
    )
    pause_ms: float | None = Field(default=None, description="the last swap's call between two engine steps")
    dtype: str = Field(description="of the target's weights, such as float32")
    k: int = Field(ge=0, description="draft tokens per step; 0: plain decoding")

    def refuses(self, version: int) -> bool:
        """Whether this replica was asked for `version` and said why it will not serve it."""
        return self.desired_version == version and self.actual_version != version and self.last_error is not None
