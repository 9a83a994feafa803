"""Internal: what a training run needs and how fast it is, from the module tree alone."""
