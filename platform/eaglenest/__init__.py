"""EagleNest raises EAGLE 3.1 drafters and swaps them into running vLLM services."""

__version__ = "0.1.0"
