"""Internal: every op with its reference, kernels, registration and choice of backend."""
