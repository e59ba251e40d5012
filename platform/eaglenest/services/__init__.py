"""Ray, MLflow and Serve, started and stopped on one machine."""
