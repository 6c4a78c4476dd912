"""Prints two answers while the model generates them. Each part is printed as soon as it
arrives, preceded by the number of its question. Both complete answers are printed at
the end.
"""

import asyncio

from moegguf import Engine

QUESTIONS = ("Who are you?", "What does moegguf do?")


async def answer(engine: Engine, number: int) -> str:
    """Returns the answer to QUESTIONS[number]. Prints each part of the answer as soon
    as it is generated."""
    text = ""
    messages = [{"role": "user", "content": QUESTIONS[number]}]
    async for delta in engine.stream(messages, temperature=0, max_tokens=100):
        print(f"{number}{delta.text}", end="|", flush=True)
        text += delta.text
    return text


async def main() -> None:
    with Engine("demo", parallel=2, expert_cache="50%", n_ctx=512) as engine:
        texts = await asyncio.gather(answer(engine, 0), answer(engine, 1))
    print()
    for number, text in enumerate(texts):
        print(f"{number}: {text}")


if __name__ == "__main__":
    asyncio.run(main())
