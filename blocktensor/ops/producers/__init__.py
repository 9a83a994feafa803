"""Internal: ops that compute a tensor and store its casts alone."""
