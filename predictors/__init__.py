"""The laboratory: it made the predictors and the demo model, and tests here what the papers claim.

It imports `moegguf`, and `moegguf` imports nothing of it. Only the weights in `demo/` belong to the package.
"""
