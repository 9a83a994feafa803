"""Internal: the aten ops that the FP8 tensor types implement, below autograd."""
