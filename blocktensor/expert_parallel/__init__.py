"""Internal: tokens that travel to the ranks of their experts. ``blocktensor.distributed`` is public."""
