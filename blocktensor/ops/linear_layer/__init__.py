"""Internal: a direction of a linear layer as one op, for compiled graphs."""
