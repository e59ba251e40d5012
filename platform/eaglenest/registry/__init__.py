"""MLflow: versions of drafters, their aliases and provenance."""
