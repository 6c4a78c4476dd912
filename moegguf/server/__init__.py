"""HTTP: the APIs of Ollama, OpenAI, Anthropic and llama-server over the models that `serving` manages, and the page.

Promises: a request's body is validated before a model gets the request. Errors have the form of the API that was
called. An answer stops when its client disconnects. Requests from pages of other origins are refused unless the
settings allow the origin. The packages `anthropic`, `ollama` and `openai` do not import each other: their shared code
is in `common`. Does not know about llama.cpp, or how worker processes are started.
"""
