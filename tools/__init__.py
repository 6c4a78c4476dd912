"""Tools for the development of moegguf, such as vendoring, patches and model makers. The installed package does not
contain these tools."""
