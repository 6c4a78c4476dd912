"""Anthropic's Messages API, at /v1/messages.

Promises: requests and replies in the format of Anthropic's clients. Does not know OpenAI's or Ollama's API.
"""

from moegguf.server.anthropic.messages import routes as routes
