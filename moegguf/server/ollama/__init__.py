"""Ollama's API, below /api.

Promises: requests and replies as Ollama's own server reads and writes them (api/types.go). Does not know OpenAI's API.
"""

from moegguf.server.ollama import chat, create, embed, models, pull, show

routes = [route for module in (chat, models, show, embed, pull, create) for route in module.routes]
