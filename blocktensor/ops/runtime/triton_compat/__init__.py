"""Internal: everything that depends on Triton's version (see README.md here)."""
