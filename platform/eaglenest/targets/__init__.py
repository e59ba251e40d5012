"""The target: what is imitated."""

from eaglenest.targets.resolve import Target, default_aux_layer_ids, resolve_target

__all__ = ["Target", "default_aux_layer_ids", "resolve_target"]
