"""The routing-path predictor: its network on numbers checked by hand, and how it behaves around a model's passes."""

from __future__ import annotations

import numpy as np
import pytest
from reference_predictors import PathNetwork, RoutingPath

from moegguf.controller.shape import MoeShape
from moegguf.controller.weights import Weights
from moegguf.native.events import Announcement, Phase, RoutingEvent

SHAPE = MoeShape(n_layer=4, n_expert=3, n_expert_used=1, layers=(1, 3), n_vocab=5)
WINDOW, CHUNK, N_EMBD, N_HEAD, N_FF = 6, 4, 8, 2, 10


def random_arrays(seed: int = 0, n_encoder: int = 1, n_decoder: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    attention = {
        "norm": (N_EMBD,),
        **dict.fromkeys("qkv", (N_EMBD, N_HEAD, N_EMBD // N_HEAD)),
        "out": (N_HEAD, N_EMBD // N_HEAD, N_EMBD),
    }
    parts = {"self": attention, "feed": {"norm": (N_EMBD,), "up": (N_EMBD, N_FF), "down": (N_FF, N_EMBD)}}
    sizes: dict[str, tuple[int, ...]] = {
        "embedding": (SHAPE.n_vocab + 1, N_EMBD),
        "window": (WINDOW, N_EMBD),
        "chunk": (CHUNK, N_EMBD),
        "memory_norm": (N_EMBD,),
        "output_norm": (N_EMBD,),
        "heads.weight": (N_EMBD, 2, SHAPE.n_expert),
        "heads.bias": (2, SHAPE.n_expert),
    }
    blocks = [f"encoder.{i}" for i in range(n_encoder)] + [f"decoder.{i}" for i in range(n_decoder)]
    for block in blocks:
        cross = {"cross": attention} if block.startswith("decoder") else {}
        for part, arrays in {**parts, **cross}.items():
            sizes |= {f"{block}.{part}.{name}": size for name, size in arrays.items()}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def network(seed: int = 0) -> PathNetwork:
    return PathNetwork(SHAPE, Weights(random_arrays(seed)))


def make_predictor() -> RoutingPath:
    return RoutingPath.from_weights(SHAPE, Weights(random_arrays()))


def announce(predictor: RoutingPath, *tokens: int, sequence: int = 0, phase: Phase = Phase.DECODE) -> None:
    predictor.announce(Announcement(sequence, phase, np.array(tokens, np.int32)))


def routed(il: int, n_tokens: int = 1, first_token: int = 0, sequence: int = 0) -> RoutingEvent:
    return RoutingEvent(0, 0, sequence, Phase.DECODE, first_token, il, np.zeros((n_tokens, 1), np.int32))


def predicted_by(predictor: RoutingPath) -> np.ndarray:
    rows = [predictor.predict(il, distance) for distance, il in enumerate(SHAPE.layers, start=1)]
    assert all(row is not None for row in rows)
    return np.stack(rows)


# The network


def plain_logits(arrays: dict[str, np.ndarray], window: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """The network written down token by token and head by head, slowly: (len(chunk), n_moe_layer, n_expert)."""

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return gain * x / np.sqrt(np.mean(x * x) + 1e-6)

    def attention(name: str, x: np.ndarray, memory: list[np.ndarray]) -> np.ndarray:
        x = norm(x, arrays[f"{name}.norm"])
        total = np.zeros(N_EMBD)
        for head in range(N_HEAD):
            q, k, v = (arrays[f"{name}.{part}"][:, head] for part in "qkv")
            scores = np.array([(x @ q) @ (m @ k) / np.sqrt(N_EMBD // N_HEAD) for m in memory])
            shares = np.exp(scores) / np.exp(scores).sum()
            total += sum(share * (m @ v) for share, m in zip(shares, memory, strict=True)) @ arrays[f"{name}.out"][head]
        return total

    def feed(name: str, x: np.ndarray) -> np.ndarray:
        return np.maximum(norm(x, arrays[f"{name}.norm"]) @ arrays[f"{name}.up"], 0) @ arrays[f"{name}.down"]

    xs = list(arrays["embedding"][window] + arrays["window"])
    normed_xs = [norm(x, arrays["encoder.0.self.norm"]) for x in xs]
    xs = [x + attention("encoder.0.self", x, normed_xs) for x in xs]
    xs = [x + feed("encoder.0.feed", x) for x in xs]
    memory = [norm(x, arrays["memory_norm"]) for x in xs]
    xs = list(arrays["embedding"][chunk] + arrays["chunk"][: len(chunk)])
    for block in ("decoder.0", "decoder.1"):
        normed_xs = [norm(x, arrays[f"{block}.self.norm"]) for x in xs]
        xs = [x + attention(f"{block}.self", x, normed_xs[: place + 1]) for place, x in enumerate(xs)]
        xs = [x + attention(f"{block}.cross", x, memory) for x in xs]
        xs = [x + feed(f"{block}.feed", x) for x in xs]
    heads = arrays["heads.weight"]
    return np.array([np.tensordot(norm(x, arrays["output_norm"]), heads, 1) + arrays["heads.bias"] for x in xs])


def test_it_computes_what_the_definition_says() -> None:
    window, chunk = np.array([5, 5, 0, 3, 1, 4]), np.array([2, 0, 4, 4])
    expected = plain_logits(random_arrays(), window, chunk)
    net = network()
    found = net.decode(chunk[np.newaxis], 0, net.encode(window[np.newaxis]), net.empty_cache(1))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-3, atol=1e-3)


def test_token_by_token_is_the_same_as_all_at_once() -> None:
    net, chunk = network(), np.array([[2, 0, 4, 4], [1, 1, 3, 0]])
    memory = net.encode(np.array([[5, 5, 0, 3, 1, 4], [5, 5, 5, 5, 5, 5]]))
    whole = net.decode(chunk, 0, memory, net.empty_cache(2)).reshape(2, CHUNK, -1)
    cache = net.empty_cache(2)
    for place in range(CHUNK):
        one = net.decode(chunk[:, place : place + 1], place, memory, cache)
        np.testing.assert_allclose(one, whole[:, place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(random_arrays()))
def test_an_array_that_is_missing_misshapen_or_not_finite_is_refused(name: str) -> None:
    arrays = random_arrays()
    with pytest.raises(ValueError, match=r"must|holds"):
        PathNetwork(SHAPE, Weights({**arrays, name: np.full_like(arrays[name], np.nan)}))
    with pytest.raises(ValueError, match="must"):
        PathNetwork(SHAPE, Weights({**arrays, name: arrays[name][..., np.newaxis]}))
    with pytest.raises(ValueError, match="must"):
        PathNetwork(SHAPE, Weights({key: array for key, array in arrays.items() if key != name}))


# The predictor


def test_all_layers_are_predicted_before_the_first_event() -> None:
    predictor = make_predictor()
    announce(predictor, 2)
    expected = 1 / (1 + np.exp(-plain_logits(random_arrays(), np.full(WINDOW, SHAPE.n_vocab), np.array([2]))[0]))
    np.testing.assert_allclose(predicted_by(predictor), expected, rtol=1e-3, atol=1e-5)
    assert predictor.predict(2, 1) is None  # no experts there


def test_the_context_is_what_came_before_in_the_request() -> None:
    predictor, tokens = make_predictor(), [2, 0, 4, 4, 1, 3]
    for token in tokens:
        announce(predictor, token)
        for il in SHAPE.layers:
            predictor.observe(routed(il))
    padded = np.array([5] * WINDOW + tokens)  # the sixth token is the second one of the second chunk
    logits = plain_logits(random_arrays(), padded[CHUNK : CHUNK + WINDOW], padded[CHUNK + WINDOW :])[-1]
    np.testing.assert_allclose(predicted_by(predictor), 1 / (1 + np.exp(-logits)), rtol=1e-3, atol=1e-5)


def test_it_does_not_matter_when_the_encoder_ran() -> None:
    early, late = make_predictor(), make_predictor()
    for token in [2, 0, 4, 4, 1, 3, 0, 0, 1]:
        announce(early, token)
        announce(late, token)
        early.observe(routed(SHAPE.layers[-1]))
        assert np.array_equal(predicted_by(early), predicted_by(late))


def test_a_new_request_clears_the_state() -> None:
    used, fresh = make_predictor(), make_predictor()
    for token in (1, 2, 3):
        announce(used, token)
    announce(used, 4, sequence=1)
    announce(fresh, 4, sequence=1)
    assert np.array_equal(predicted_by(used), predicted_by(fresh))


def test_after_a_prompt_the_next_token_sees_its_end() -> None:
    predictor = make_predictor()
    announce(predictor, 2, 0, 4, 4, 1, 3, 0, phase=Phase.PREFILL)
    announce(predictor, 1)
    logits = plain_logits(random_arrays(), np.array([0, 4, 4, 1, 3, 0]), np.array([1]))[0]
    np.testing.assert_allclose(predicted_by(predictor), 1 / (1 + np.exp(-logits)), rtol=1e-3, atol=1e-5)


def test_no_prediction_for_a_pass_that_was_not_announced() -> None:
    predictor = make_predictor()
    announce(predictor, 2)
    predictor.observe(routed(1, first_token=-1))
    assert predictor.predict(3, 1) is None
    announce(predictor, 2)
    predictor.observe(routed(1, sequence=7))
    assert predictor.predict(3, 1) is None


@pytest.mark.parametrize("tokens", [(), (-1,), (5,), (1, -1, 2), (1, 2**31 - 1)])
def test_no_prediction_for_tokens_outside_the_vocabulary(tokens: tuple[int, ...]) -> None:
    predictor = make_predictor()
    announce(predictor, 1)
    announce(predictor, *tokens)
    assert predictor.predict(1, 1) is None
    for il in SHAPE.layers:
        predictor.observe(routed(il))
    announce(predictor, 2)
    assert predicted_by(predictor).shape == (2, SHAPE.n_expert)
