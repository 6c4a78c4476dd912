"""OpenAI's API, below /v1.

Promises: requests and replies in the format of OpenAI's clients. Does not know Ollama's API.
"""

from moegguf.server.openai import batches, chat, completions, embeddings, responses

MODULES = (completions, chat, responses, embeddings, batches)
routes = [route for module in MODULES for route in module.routes]
