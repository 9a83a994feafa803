"""Internal: the two FP8 tensor types, and the aten ops that they implement."""
