"""Internal: the GEMM for Hopper GPUs, in Gluon."""
