"""Internal: the loss of logits, which its gradient overwrites."""
