"""HTTP: the APIs of Ollama, OpenAI, Anthropic and llama-server over the models that
`serving` manages, and the page.

Promises: a request's body is validated before a model gets the request. Errors have the
form of the API that was called. An answer stops when its client disconnects. A request
from a web page of another origin is refused unless the origin is on this machine,
belongs to a desktop app, or is allowed by the settings. The packages `anthropic`,
`ollama` and `openai` do not import each other: their shared code is in `common`. This
package does not know about llama.cpp, or how worker processes are started.
"""
