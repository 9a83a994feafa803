"""Internal: the torch functions that FP8 tensors override, above autograd."""
