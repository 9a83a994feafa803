"""Internal: deciding once for each kind of call, and recording launches."""
