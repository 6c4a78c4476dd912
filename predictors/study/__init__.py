"""Studies of recorded routing, and of strategies on a running model. Each command is a
separate module."""
