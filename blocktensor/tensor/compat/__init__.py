"""Internal: parts of torch and of other libraries that need to be told of FP8 tensors."""
