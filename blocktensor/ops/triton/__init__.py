"""Portable Triton kernels: casts, transpose, dequantize, GEMM."""
