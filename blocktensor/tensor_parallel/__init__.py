"""Internal: linear layers whose weights ranks share. ``blocktensor.distributed`` is public."""
