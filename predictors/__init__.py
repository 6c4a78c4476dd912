"""The laboratory. Its code trains predictors, tests the demo model, and tests the
claims of published papers.

The laboratory imports `moegguf`, and `moegguf` imports nothing from the laboratory.
From this folder, moegguf's source distribution contains only the weights in `demo/`.
"""
