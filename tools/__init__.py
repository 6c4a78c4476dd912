"""Tools for developing moegguf, such as programs for vendoring, patches and test
models. The installed package does not contain them."""
