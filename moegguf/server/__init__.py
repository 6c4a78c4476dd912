"""HTTP: the APIs of Ollama, OpenAI, Anthropic and llama-server over the models that `serving` manages, and the page.

Promises: every field is checked before it reaches a model. Every error has the form of the API that was called. An
answer stops when its client disconnects. Requests from pages of other origins are refused. The APIs do not import each
other: their common code is in `common`. Does not know processes, llama.cpp or single experts.
"""
