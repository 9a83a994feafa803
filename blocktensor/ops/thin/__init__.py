"""Internal: the thin matmuls of adapters, of tokens in groups with matrices of few columns."""
