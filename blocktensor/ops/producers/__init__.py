"""Internal: ops that compute a tensor and store only its casts."""
