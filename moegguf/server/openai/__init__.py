"""OpenAI's API, below /v1.

Promises: requests and replies in the format of OpenAI's clients. Does not know Ollama's API.
"""

from moegguf.server.openai import chat, completions, responses

routes = [*completions.routes, *chat.routes, *responses.routes]
