"""Promote and roll back: a version becomes the champion, and every replica takes it, or none."""

from eaglenest.rollout.promote import Replicas, RolloutResult, promote, rollback

__all__ = ["Replicas", "RolloutResult", "promote", "rollback"]
