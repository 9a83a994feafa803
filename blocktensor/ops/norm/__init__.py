"""Internal: the elementwise passes of an RMS norm, between torch's sums over rows."""
