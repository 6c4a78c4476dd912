"""The laboratory. Its code trains predictors, tests the demo model, and tests the claims of the papers.

The laboratory imports `moegguf`, and `moegguf` imports nothing from the laboratory. Of these files, moegguf's source
distribution contains only the weights in `demo/`.
"""
