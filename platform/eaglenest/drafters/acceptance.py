"""Acceptance length simulated from teacher-forced drafts, by replaying the steps a server would take."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Acceptance:
    """Pooled acceptance: AL = 1 + accepted / steps."""

    steps: int = 0
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)  # how often position k was accepted

    @property
    def length(self) -> float:
        """Acceptance length; 1.0 is the floor (nothing drafted is accepted)."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def rates(self) -> list[float]:
        """Share of steps in which position k (and all before it) was accepted."""
        return [n / self.steps if self.steps else 0.0 for n in self.by_position]

    def add(self, other: Acceptance) -> None:
        """Pool with another count."""
        self.steps += other.steps
        self.accepted += other.accepted
        longest = max(len(self.by_position), len(other.by_position))
        padded = [c + [0] * (longest - len(c)) for c in (self.by_position, other.by_position)]
        self.by_position = [a + b for a, b in zip(*padded, strict=True)]


def replay(hits: list[list[bool]], steps: int) -> Acceptance:
    """Walk along one answer as serving does: each step starts where the last one failed.

    The mean over all positions is not what is served: serving visits positions after failures more often.

    Args:
        hits: per consecutive row of one answer, whether draft k equals the target's token, for k < its reach. A draft
            counts only if all before it in the step were right, so teacher forcing gives what free drafting would.
        steps: K.
    """
    result = Acceptance(by_position=[0] * steps)
    row = 0
    while row < len(hits):
        taken = 0
        while taken < min(steps, len(hits[row])) and hits[row][taken]:
            result.by_position[taken] += 1
            taken += 1
        result.steps += 1
        result.accepted += taken
        row += taken + 1
    return result
