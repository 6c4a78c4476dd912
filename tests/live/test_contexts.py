"""Several contexts on one store, the events of listeners, and a user's own eval callback."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from running import Llama, Load, Reference, TinyModel, greedy_logits, in_threads, random_prompt

from moegguf.native import abi, library
from moegguf.native.events import RoutingEvent
from moegguf.native.store import StoreContext, StoreOptions

bindings = library.llama_cpp()
N_NEW = 40
EvalCallback = bindings.ggml_backend_sched_eval_callback


class Context:
    """Another llama_context of a loaded model, with a context of its own."""

    def __init__(self, llm: Llama) -> None:
        assert llm.session is not None
        self._llm = llm
        self.context: StoreContext = llm.session.store.open_context()
        params = bindings.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, llm.plan.n_ubatch
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = bindings.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.op_offload = False
        params.cb_eval = EvalCallback(self.context.eval_callback())
        params.cb_eval_user_data = self.context.handle
        params.abort_callback = bindings.ggml_abort_callback(self.context.abort_callback())
        params.abort_callback_data = self.context.handle
        self._params = params
        self.ctx = bindings.llama_init_from_model(llm.model, params)
        assert self.ctx
        self._batch = bindings.llama_batch_init(512, 0, 1)
        self._n_past = 0

    def decode(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Logits of every token."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self._n_past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, True
        assert bindings.llama_decode(self.ctx, batch) == 0
        assert self.context.take_failure() is None
        self._n_past += len(tokens)
        shape = len(tokens), self._llm.n_vocab()
        return (
            np.ctypeslib.as_array(bindings.llama_get_logits(self.ctx), shape=(shape[0] * shape[1],))
            .reshape(shape)
            .copy()
        )

    def greedy(self, prompt: list[int]) -> np.ndarray[Any, Any]:
        rows = [self.decode(prompt)]
        for _ in range(N_NEW):
            rows.append(self.decode([int(np.argmax(rows[-1][-1]))]))
        return np.concatenate(rows)

    def close(self) -> None:
        bindings.llama_batch_free(self._batch)
        bindings.llama_free(self.ctx)
        self.context.close()


@pytest.fixture(params=["40%", "50%", "100%"])
def shared(request: pytest.FixtureRequest, tiny: TinyModel, load: Load) -> Iterator[tuple[Llama, list[Context]]]:
    llm = load(tiny(), expert_cache=request.param, n_ubatch=2)
    contexts = [Context(llm), Context(llm)]
    yield llm, contexts
    for context in contexts:
        context.close()


def test_two_contexts_of_one_model_decode_at_once(shared: tuple[Llama, list[Context]], reference: Reference) -> None:
    llm, contexts = shared
    prompts = [random_prompt(llm, 200), random_prompt(llm, 150, seed=1)]
    prompts_alone = greedy_logits(llm, prompts[1], N_NEW)
    results = in_threads(*(lambda i=i: contexts[i].greedy(prompts[i]) for i in range(2)))
    assert np.array_equal(results[0], reference(llm.model_path, n_ubatch=2, n_new=N_NEW))
    assert np.array_equal(results[1], prompts_alone)
    stats = llm.stats()
    assert stats.lookups == stats.hits_ready + stats.hits_late + stats.misses
    assert (stats.evictions > 0) == (not llm.plan.resident)
    assert stats.tokens == 150 + N_NEW + 200 + N_NEW + 150 + N_NEW


def test_a_failure_of_one_context_is_not_the_others(tiny: TinyModel, load: Load, reference: Reference) -> None:
    llm = load(tiny(), expert_cache="40%")
    other = Context(llm)
    library.arm_fault("stat", 1, sticky=True)
    batch = other._batch
    batch.n_tokens = 1
    batch.token[0], batch.pos[0], batch.n_seq_id[0], batch.logits[0] = 5, 0, 1, True
    batch.seq_id[0][0] = 0
    assert bindings.llama_decode(other.ctx, batch) == 2
    library.arm_fault("stat", 0)
    assert np.array_equal(greedy_logits(llm), reference(tiny()))
    failure = other.context.take_failure()
    assert failure is not None
    assert failure.status == abi.IO
    other.close()


class Router:
    """A user's eval callback: notes what llama.cpp's router chose, at nodes of its own, and every node it was shown."""

    def __init__(self, context: StoreContext) -> None:
        self.choices: list[tuple[int, list[list[int]]]] = []
        self._callback = EvalCallback(self._eval)
        library.load().moegguf_context_chain(context.handle, c.cast(self._callback, c.c_void_p), None)

    def _eval(self, tensor: Any, ask: bool, _user: Any) -> bool:
        name = Tensor.from_address(c.cast(tensor, c.c_void_p).value or 0)
        if not name.name.startswith(b"ffn_moe_topk-"):
            return not ask
        if not ask:
            self.choices.append((int(name.name.rpartition(b"-")[2]), name.rows()))
        return True


class Tensor(c.Structure):
    """struct ggml_tensor, as far as a test of int32 tensors in host memory needs it."""

    _fields_ = [
        ("type", c.c_int32), ("buffer", c.c_void_p), ("ne", c.c_int64 * 4), ("nb", c.c_size_t * 4), ("op", c.c_int32),
        ("op_params", c.c_int32 * 16), ("flags", c.c_int32), ("src", c.c_void_p * 10), ("view_src", c.c_void_p),
        ("view_offs", c.c_size_t), ("data", c.c_void_p), ("name", c.c_char * 64),
    ]  # fmt: skip

    def rows(self) -> list[list[int]]:
        n, n_rows = self.ne[0], self.ne[1]
        return [list((c.c_int32 * n).from_address(self.data + row * self.nb[1])) for row in range(n_rows)]


@pytest.mark.parametrize("expert_cache", ["40%", "100%"])
@pytest.mark.parametrize("model", ["tiny-qwen2moe", "tiny-deepseek2"])
def test_gate_events_tell_what_the_router_chose(
    tiny: TinyModel, load: Load, reference: Reference, model: str, expert_cache: str
) -> None:
    path = tiny(model)
    llm = load(path, expert_cache=expert_cache, store=StoreOptions(fill=False))  # nothing moves before we listen
    assert llm.session is not None
    events: list[tuple[int, list[list[int]]]] = []

    def on_routing(event: RoutingEvent) -> None:
        events.append((event.il, event.expert_ids.tolist()))

    llm.session.store.listen(on_routing)
    router = Router(llm.session.store_context)
    assert np.array_equal(greedy_logits(llm), reference(path)), "a user's callback changes nothing"
    llm.session.store.listen()  # returns after the last event
    assert llm.stats().events_dropped == 0
    assert len(events) == 33 * len(llm.layout.layers)
    assert events == router.choices
