"""The `eaglenest` command."""
