"""HTTP: Ollama's, OpenAI's and llama-server's APIs over the models that `serving` holds, and the page.

Promises: every field is checked before it reaches a model, every error has the form of the API that was called, a
client that leaves stops its answer, and pages of other origins are refused. The APIs do not import each other: what
they share lies in `common`. Does not know processes, llama.cpp or experts one by one.
"""
