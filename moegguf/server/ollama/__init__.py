"""Ollama's API, below /api.

Promises: requests and replies in the format of Ollama's own server (api/types.go). Does not know OpenAI's API.
"""

from moegguf.server.ollama import chat, create, embed, models, pull, show

routes = [route for module in (chat, models, show, embed, pull, create) for route in module.routes]
