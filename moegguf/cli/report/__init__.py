"""`moegguf trace report`: one HTML page with everything measured about a recorded routing."""
