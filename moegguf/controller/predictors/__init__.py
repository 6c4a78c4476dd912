"""Predictors, one per idea of a paper; `base` says what one is."""
