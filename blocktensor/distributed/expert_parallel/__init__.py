"""Internal: stacks of experts that ranks share, and tokens that travel to their experts in FP8."""
