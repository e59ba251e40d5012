"""Ray, MLflow and Serve, started and stopped on one machine, on its loopback address only."""
