"""A budget that changes while the model stays loaded.

Answers the same question under three budgets.
Prints the memory used for experts and the hit rate under each budget, and whether the
three answers are equal. They are, because a budget changes the speed but never a token.
"""

from moegguf import Llama

QUESTION = [{"role": "user", "content": "What is an expert?"}]
BUDGETS = ("100%", "50%", "10%")


def main() -> None:
    texts = set()
    with Llama("demo", n_ctx=512, expert_cache=BUDGETS[0], verbose=False) as llm:
        for budget in BUDGETS:
            llm.set_budget(expert_cache=budget)
            before = llm.stats()
            answer = llm.create_chat_completion(QUESTION, temperature=0, max_tokens=60)
            texts.add(answer["choices"][0]["message"]["content"])
            stats = llm.stats() - before
            size = f"{stats.pool_bytes / 1e6:.1f} MB"
            print(
                f"{budget:>4}: {stats.n_slots} slots, {size}, {stats.hit_rate:.0%} hits, {stats.misses} misses"
            )
    print(f"equal answers: {len(texts) == 1}")


if __name__ == "__main__":
    main()
