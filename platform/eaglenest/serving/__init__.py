"""Ray Serve: the endpoint and its reconciler."""
