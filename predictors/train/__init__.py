"""Training of predictors on recorded routing with the papers' sizes, and their scores: predictors/train/predictor.py.

The trainings themselves are the package's (`moegguf/learning`), which `moegguf learn` runs with smaller sizes.
"""
