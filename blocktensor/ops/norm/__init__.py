"""Internal: the passes of an RMS norm over its elements, between torch's sums over rows."""
