"""A custom eviction policy, compared with LRU, which evicts the least recently used
expert.

Prints each policy's name, hit rate and number of evictions, then whether the two
answers are equal. A policy that is late or wrong, or that raises an exception, affects
only the speed, never the tokens. The command line accepts this policy, too: `moegguf
run demo --policy examples/policy.py:MostUsed`.
"""

from moegguf import Llama
from moegguf.controller.forecast import Forecast
from moegguf.controller.history import History
from moegguf.native.events import Float32s

QUESTION = [{"role": "user", "content": "What does moegguf do?"}]


class MostUsed:
    """Keeps the experts that this request has used most. The store evicts the expert
    with the lowest score first."""

    def scores(self, history: History, forecast: Forecast) -> Float32s:
        """Returns a score for each expert (n_layer, n_expert): how often the answer
        used it, plus a tenth of how often the prompt did."""
        return history.decode + 0.1 * history.prefill


def main() -> None:
    texts = set()
    for policy in ("lru", MostUsed()):
        with Llama(
            "demo", n_ctx=512, expert_cache="25%", policy=policy, verbose=False
        ) as llm:
            answer = llm.create_chat_completion(QUESTION, temperature=0, max_tokens=80)
            texts.add(answer["choices"][0]["message"]["content"])
            stats = llm.stats()
            print(
                f"{llm.decisions()['policy']}: {stats.hit_rate:.0%} hits, {stats.evictions} evictions"
            )
    print(f"equal answers: {len(texts) == 1}")


if __name__ == "__main__":
    main()
