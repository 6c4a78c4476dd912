"""Names of models, the files that a name stands for, and the sources of those files.

Promises: a name has a tag and always means the same files. Files are complete and verified before they get a name. An
interrupted download is resumed. Ollama's stores are never written. Nothing outside our data folder and the Hugging
Face cache is ever deleted. This package does not know how a model is run, HTTP servers or terminals.
"""
