"""Internal: tokens that travel in FP8 to their experts on other ranks."""
