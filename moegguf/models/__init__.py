"""Names of models, the files that a name stands for, and the sources of those files.

Promises: a name has a tag, and means either its old files or its new files while they are replaced, never some of both.
Downloaded and uploaded files are complete and verified before they get a name. An interrupted download of a file of up
to 50 GB is resumed. Ollama's stores are never written. Models are deleted only in our data folder and in the Hugging
Face cache. This package does not know about HTTP servers or terminals, or about how a model is run.
"""
