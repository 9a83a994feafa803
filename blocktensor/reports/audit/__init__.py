"""Internal: find out which matmuls of a model ran in FP8, and why others did not."""
