"""Model names, the files that a name stands for, and the sources of those files.

Promises: a name has a tag, and while its files are being replaced, it refers either to all old files or to all new
ones. Downloaded and uploaded files are complete and verified before they get a name. An interrupted download of a file
of up to 50 GB is resumed. Ollama's stores are never written to. Models are deleted only from our data folder and from
the Hugging Face cache. This package does not know about HTTP servers or terminals, or about how a model is run.
"""
