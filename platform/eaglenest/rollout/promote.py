"""A promotion as a transaction over the fleet: check, move the alias, nudge, wait; undone when a replica refuses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from eaglenest.errors import CheckpointError, RegistryError, ServiceError, SwapRefused
from eaglenest.registry import CHAMPION, DrafterVersion, Registry
from eaglenest.serving.drafter_source import Contract
from eaglenest.serving.status import ReplicaStatus
from eaglenest.settings import get_settings

TIMEOUT_S = 120.0
_POLL_S = 0.5
_REFUSALS = 2
"""How often in a row all replicas behind must refuse, each after a nudge: a lost connection is no refusal."""


class Replicas(Protocol):
    """The replicas of a running service. `serving.control.ServeReplicas` is the real one."""

    def status(self) -> list[ReplicaStatus]:
        """What each replica serves. Raises ServiceError."""
        ...

    def nudge(self) -> object:
        """Let each look at the registry now; returns when they have. Raises ServiceError."""
        ...


class RolloutResult(BaseModel):
    """A finished rollout: every replica reports `new`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    old: int | None = Field(description="champion before; None: there was none")
    new: int = Field(description="champion now; equal to old when it was so already")
    replicas: list[ReplicaStatus] = Field(description="as they report it; empty: no service is running")
    seconds: float = Field(description="from the first check to the last replica's report")


def promote(
    registry: Registry,
    version: str | int,
    replicas: Replicas | None,
    *,
    timeout_s: float = TIMEOUT_S,
    cache_dir: Path | None = None,
) -> RolloutResult:
    """Make a version the champion and wait until every replica serves it.

    Args:
        version: number or alias.
        replicas: of the running service; None: there is none, only the alias moves, and the next start serves it.
        timeout_s: for the replicas, all together.
        cache_dir: where this machine keeps downloads; by default the one that its replicas use.

    Raises:
        SwapRefused: the version is corrupt, or of another target, architecture or draft vocabulary, or a replica
            refused it. The old champion is still served, and is the champion.
        ServiceError: replicas did not answer in time, and none refused: the alias stays, and they go on trying.
        RegistryError: the registry cannot be reached, or has no such version.
    """
    return _shift(registry, registry.resolve(version), replicas, timeout_s, cache_dir)


def rollback(
    registry: Registry, replicas: Replicas | None, *, timeout_s: float = TIMEOUT_S, cache_dir: Path | None = None
) -> RolloutResult:
    """Promote the previous champion. A second rollback undoes the first.

    Raises:
        RegistryError: there is no previous champion. Otherwise as `promote`.
    """
    return _shift(registry, registry.previous(), replicas, timeout_s, cache_dir)


def _shift(
    registry: Registry, wanted: DrafterVersion, replicas: Replicas | None, timeout_s: float, cache_dir: Path | None
) -> RolloutResult:
    began = time.monotonic()
    before = registry.aliases()
    running = replicas.status() if replicas is not None else []
    _check(registry, wanted, before, bool(running), cache_dir or get_settings().cache_dir / "drafters")
    old, new = registry.promote(wanted)
    settled: list[ReplicaStatus] = []
    if replicas is not None and running:
        settled = _converge(registry, replicas, new, before, began + timeout_s)
    return RolloutResult(old=old, new=new, replicas=settled, seconds=round(time.monotonic() - began, 3))


def _check(
    registry: Registry, wanted: DrafterVersion, before: Mapping[str, int], running: bool, cache_dir: Path
) -> None:
    """The version must arrive whole, be of the champion's target and, for a swap, fit the champion's engine."""
    number = wanted.version
    try:
        folder = registry.download(wanted, cache_dir)
    except CheckpointError as error:
        raise SwapRefused(
            f"version {number} was not promoted: {error.what}",
            error.expected,
            "register it again from its origin, or promote another",
        ) from error
    if CHAMPION not in before:
        return
    champion = registry.resolve(before[CHAMPION])
    if champion.target_fingerprint is None:  # an alias moved by hand to a version that is not ours, and never served
        return
    if wanted.target_fingerprint != champion.target_fingerprint:
        raise SwapRefused(
            f"version {number} was distilled from {wanted.tags.get('target')} ({wanted.target_fingerprint})",
            f"{champion.tags.get('target')} ({champion.target_fingerprint}), the target of champion {champion.version}",
            "keep the drafters of another target in another registered model (EAGLENEST_MODEL_NAME)",
        )
    if not running:
        return
    tags = champion.tags
    contract = Contract(tags["target_fingerprint"], tags["architecture"], tags["d2t_sha256"])
    try:
        contract.check(folder)
    except CheckpointError as error:
        raise SwapRefused(
            f"version {number} does not fit the engines that serve version {champion.version}: {error.what}",
            error.expected,
            f"it takes a rolling replacement: `eaglenest down`, `eaglenest promote {number}`, `eaglenest up`",
        ) from error


def _converge(
    registry: Registry, replicas: Replicas, version: int, before: Mapping[str, int], deadline: float
) -> list[ReplicaStatus]:
    """Nudge until every replica reports the version; undo the promotion when they refuse."""
    statuses: list[ReplicaStatus] = []
    silence: ServiceError | None = None
    refusals = 0
    while refusals < _REFUSALS:
        try:
            replicas.nudge()
            statuses, silence = replicas.status(), None
        except ServiceError as error:
            silence = error
        behind = [status for status in statuses if status.actual_version != version]
        if silence is None and not behind:
            return statuses
        if any(status.desired_version != version for status in behind):
            _refuse_if_overtaken(registry, version)
        refusals = refusals + 1 if silence is None and all(s.refuses(version) for s in behind) else 0
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if any(status.refuses(version) for status in behind):
        raise _undone(registry, replicas, version, before, statuses)
    if silence is not None:
        raise silence
    raise ServiceError(
        f"{len(behind)} of {len(statuses)} replicas do not serve version {version} yet: {_reasons(behind, version)}",
        "every replica to report it in time",
        "it stays the champion and they go on trying: see `eaglenest status`, or `eaglenest rollback`",
    )


def _refuse_if_overtaken(registry: Registry, version: int) -> None:
    champion = registry.aliases().get(CHAMPION)
    if champion != version:
        raise SwapRefused(
            f"version {version} was overtaken: version {champion} was promoted meanwhile",
            "one promotion at a time",
            f"promote version {version} again if it is still wanted",
        )


def _undone(
    registry: Registry,
    replicas: Replicas,
    version: int,
    before: Mapping[str, int],
    statuses: list[ReplicaStatus],
) -> SwapRefused:
    """Put the aliases back and let the replicas return; the error to raise."""
    behind = [status for status in statuses if status.actual_version != version]
    refused = f"{len(behind)} of {len(statuses)} replicas refuse version {version}: {_reasons(behind, version)}"
    old = before.get(CHAMPION)
    if old == version:
        return SwapRefused(refused, None, "it was the champion before this: `eaglenest rollback`, or promote another")
    try:
        restored = registry.restore(before, replacing=version)
        replicas.nudge()
        left = [s.replica_id for s in replicas.status() if s.actual_version == version]
    except (RegistryError, ServiceError) as error:
        return SwapRefused(refused, None, f"undoing the promotion failed, so roll back by hand: {error}")
    if not restored:
        return SwapRefused(refused, None, "another version was promoted meanwhile, and stays: see `eaglenest versions`")
    champion = f"version {old} is the champion again" if old is not None else "there is no champion again"
    if left:
        champion += f"; replicas {left} have still to return to it"
    return SwapRefused(f"{refused}. {champion}", None, "mend or replace that version, then promote it again")


def _reasons(behind: list[ReplicaStatus], version: int) -> str:
    def reason(status: ReplicaStatus) -> str:
        return status.last_error or f"wants {status.desired_version}, serves {status.actual_version}"

    return "; ".join(f"{status.replica_id}: {reason(status)}" for status in behind)
