"""Sends requests to a server on this machine with OpenAI's client. Start the server
with `moegguf serve` first.

Prints the names of the server's models, a complete answer, and the answer to the same
question in parts as they arrive. To use another server, pass its address as the first
argument. If the server requires a key, set the environment variable MOEGGUF_API_KEY.
Install the client with `pip install openai`.
"""

import os
import sys

from openai import OpenAI


def main(url: str) -> None:
    client = OpenAI(
        base_url=f"{url}/v1", api_key=os.environ.get("MOEGGUF_API_KEY") or "any"
    )
    print("models: " + ", ".join(model.id for model in client.models.list()))
    whole = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is a router?"}],
        temperature=0,
        max_tokens=60,
    )
    print(whole.choices[0].message.content)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "What is a router?"}],
        temperature=0,
        max_tokens=60,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="|", flush=True)
    print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:11434")
