"""Internal: all ops, with their references, kernels, registration and choice of backends."""
