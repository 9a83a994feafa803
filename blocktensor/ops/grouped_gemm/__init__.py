"""Internal: matmuls of tokens in groups with a stack of experts, one expert for each group."""
