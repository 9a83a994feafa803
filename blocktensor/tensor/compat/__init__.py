"""Internal: functions of torch that need to be told of the FP8 types; above these types."""
