"""Anthropic's Messages API, at /v1/messages, and its list of models.

Promises: requests and replies in the format of Anthropic's clients. Does not know OpenAI's or Ollama's API.
"""

from moegguf.server.anthropic import messages, models

routes = [*messages.routes, *models.routes]
