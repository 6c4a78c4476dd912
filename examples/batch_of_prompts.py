"""Eight prompts, processed one at a time and then together.

Prints each answer and, for both runs, the number of experts read from the file. A pass
reads an expert only once for all prompts that use it. Processing prompts together
therefore reads fewer experts.
"""

from moegguf import Engine

NAMES = (
    "an expert",
    "a router",
    "a slot",
    "a budget",
    "a hit",
    "a miss",
    "a token",
    "prefetching",
)


def answer_all(parallel: int) -> list[str]:
    """Answers every question, `parallel` of them at a time. Prints the number of
    experts read, and returns the answers."""
    conversations = [
        [{"role": "user", "content": f"What is {name}?"}] for name in NAMES
    ]
    with Engine("demo", parallel=parallel, expert_cache="25%", n_ctx=256) as engine:
        answers = engine.chat(conversations, temperature=0, max_tokens=40)
        n_read = engine.stats().misses
    n_tokens = sum(answer.summary.answer_tokens for answer in answers)
    print(f"{parallel} at once: {n_tokens} tokens, {n_read} experts were read.")
    return [str(answer.error or answer.text) for answer in answers]


def main() -> None:
    alone = answer_all(1)
    together = answer_all(len(NAMES))
    for name, text in zip(NAMES, together, strict=True):
        print(f"{name}: {text}")
    print(f"equal answers: {alone == together}")


if __name__ == "__main__":
    main()
