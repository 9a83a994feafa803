"""Internal: products of tokens in groups with a stack of experts, one expert a group."""
