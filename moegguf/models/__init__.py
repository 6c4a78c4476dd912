"""Names of models, the files behind them, and the sources of those files.

Promises: a name has a tag and always means the same files; files are complete and verified before they get a name; an
interrupted download is resumed; Ollama's stores are never written; nothing outside our data folder and the Hugging Face
cache is ever deleted. Does not know how a model is run, HTTP servers or terminals.
"""
