"""Every op: reference -> kernel -> registered op. ``ops.library`` is the way in."""
