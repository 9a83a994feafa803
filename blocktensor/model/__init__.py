"""Internal: what is done to an nn.Module. The public names are in ``blocktensor``."""
