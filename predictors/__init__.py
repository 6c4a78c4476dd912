"""The laboratory. Its code made the predictors and the demo model, and tests the claims of the papers.

It imports `moegguf`, and `moegguf` does not import anything from it. Only the weights in `demo/` belong to the package.
"""
