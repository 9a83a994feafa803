"""Internal: names, weights and running modules of an nn.Module, for the folders above."""
