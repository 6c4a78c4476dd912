"""A conversation with two questions.

Prints each question and its answer, then the number of reused tokens in the second
prompt. The second prompt repeats the first question and its answer, so the model does
not process these tokens again.
"""

from moegguf import Engine

QUESTIONS = ("What is an expert?", "What is a router?")


def main() -> None:
    messages = []
    with Engine("demo", parallel=1, expert_cache="50%", n_ctx=1024) as engine:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            (answer,) = engine.chat(messages, temperature=0, max_tokens=100)
            messages.append({"role": "assistant", "content": answer.text})
            print(f"> {question}")
            print(answer.text)
    summary = answer.summary
    print(
        f"{summary.cached_tokens} of {summary.whole_prompt_tokens} tokens of the last prompt were reused."
    )


if __name__ == "__main__":
    main()
