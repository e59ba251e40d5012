"""From prompts to a drafter checkpoint."""
