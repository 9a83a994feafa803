"""Internal: shards of FP8 weights under FSDP2. ``blocktensor.distributed`` is public."""
