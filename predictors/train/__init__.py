"""Trains predictors on recorded routing with the papers' sizes, and measures them
(predictors/train/predictor.py).

The training code itself is in the package (`moegguf/learning`). `moegguf learn` runs it
with smaller sizes by default.
"""
