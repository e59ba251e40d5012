"""MLflow: drafter versions, aliases, runs, provenance."""

from eaglenest.registry.runs import RunLogger, TrackedRun
from eaglenest.registry.versions import CHALLENGER, CHAMPION, PREVIOUS, DrafterVersion, Registry

__all__ = ["CHALLENGER", "CHAMPION", "PREVIOUS", "DrafterVersion", "Registry", "RunLogger", "TrackedRun"]
