"""Ollama's API, below /api.

Promises: requests and replies in the format of Ollama's own server (api/types.go). Does not know OpenAI's API.
"""

from moegguf.server.ollama import chat, create, embed, models

routes = [route for module in (chat, models, embed, create) for route in module.routes]
