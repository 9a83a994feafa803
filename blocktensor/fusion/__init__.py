"""Internal: run modules of a model in fewer kernels: fused MLPs, experts, norms, shared casts."""
