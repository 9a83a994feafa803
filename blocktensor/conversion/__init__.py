"""Internal: turn the weights of a model into FP8 weights, freeze them, unfreeze them."""
