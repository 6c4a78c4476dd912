"""Ollama's API, below /api.

Promises: requests and replies have the format of Ollama's own server (api/types.go),
with a few additional fields. This package does not import the packages `anthropic` and
`openai`.
"""

from moegguf.server.ollama import chat, models

routes = [*chat.routes, *models.routes]
