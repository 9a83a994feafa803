"""Internal: the loss of logits, with its gradient in their place."""
