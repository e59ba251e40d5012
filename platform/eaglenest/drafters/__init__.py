"""The drafter: configuration, module, losses, vocabulary, checkpoint."""
