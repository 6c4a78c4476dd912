"""Model names, the files that a name stands for, and the sources of those files.

Promises: every name has a tag. While the files of a name are being replaced, the name
refers either to all old files or to all new ones. Downloaded and uploaded files are
complete and verified before they get a name. If the download of a file of up to 50 GB
is interrupted, the next download continues it. Ollama's stores are never written to.
Models are deleted only from our data folder and from the Hugging Face cache. This
package does not know about HTTP servers, or how a model is run.
"""
