"""Internal: what torch does not say about itself; below the FP8 types, which ask."""
