"""Internal: casts, transposes and dequantize."""
