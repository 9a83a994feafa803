"""Internal: decide once for each kind of call, and record launches."""
