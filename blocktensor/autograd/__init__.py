"""Internal: the differentiable linear and quantize. ``blocktensor.functional`` is public."""
