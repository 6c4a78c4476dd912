"""OpenAI's API, below /v1.

Promises: requests and replies in the format of OpenAI's clients. Does not know Ollama's API.
"""

from moegguf.server.openai import chat, completions, embeddings, models, responses

routes = [route for module in (chat, completions, responses, embeddings, models) for route in module.routes]
