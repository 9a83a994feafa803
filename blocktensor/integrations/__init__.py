"""blocktensor in other libraries. Each module is imported by the user, and needs its library."""
