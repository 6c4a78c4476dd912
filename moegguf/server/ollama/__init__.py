"""Ollama's API, below /api.

Promises: requests and replies in the format of Ollama's own server (api/types.go). Does not know OpenAI's API.
"""

from moegguf.server.ollama import chat, models

routes = [*chat.routes, *models.routes]
