"""Internal: tokens that travel to their experts. ``blocktensor.distributed`` is public."""
