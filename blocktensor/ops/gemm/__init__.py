"""Internal: products of two FP8 operands."""
