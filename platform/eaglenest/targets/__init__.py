"""The target: what is imitated."""
