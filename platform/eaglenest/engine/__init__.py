"""vLLM and nothing else."""
