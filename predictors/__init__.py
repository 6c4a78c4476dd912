"""The laboratory: how predictors and the demo model were made, and what the papers' claims are worth here.

It imports `moegguf`, never the other way round. Of this folder only the weights in `demo/` belong to the package.
"""
