"""Eviction policies; `base` says what one is."""
