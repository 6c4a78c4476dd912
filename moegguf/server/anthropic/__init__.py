"""Anthropic's Messages API, at /v1/messages.

Promises: requests and replies have the format that Anthropic's clients use. This
package does not import the packages `openai` and `ollama`.
"""

from moegguf.server.anthropic.messages import routes as routes
