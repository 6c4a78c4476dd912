"""Names of models, the files behind them, and where those come from.

Promises: a name always carries a tag and always means the same files; nothing gets a name before it is whole and
verified; a download is resumed where it was cut; an Ollama store is read and never written; nothing outside our own
folder and the Hugging Face cache is ever removed. Knows file names, Hugging Face repositories, our index.
Does not know how a model is run, HTTP servers or terminals.
"""
