"""Internal: linears whose weights are cut between ranks. ``blocktensor.distributed`` is public."""
