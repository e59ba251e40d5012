"""Promote and roll back."""
