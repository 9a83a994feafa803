"""Internal: weights and tokens spread over ranks. ``blocktensor.distributed`` is public."""
