"""Internal: matmuls of two FP8 operands."""
