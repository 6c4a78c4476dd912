"""Tools around moegguf: vendoring, patches, model makers. Not part of the installed package."""
