"""Internal: functions that act on an nn.Module. The public names are in ``blocktensor``."""
