"""Studies of recorded routing, and of systems on a running model: one module per command."""
