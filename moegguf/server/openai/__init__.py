"""OpenAI's API, below /v1.

Promises: requests and replies have the format that OpenAI's clients use, with
additional fields. This package does not import the packages `anthropic` and `ollama`.
"""

from moegguf.server.openai import chat, completions, responses

routes = [*completions.routes, *chat.routes, *responses.routes]
