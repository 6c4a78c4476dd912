"""The events of listeners, and a user's own eval callback."""

import ctypes as c
from typing import Any

import numpy as np
import pytest
from running import Load, Reference, TinyModel, greedy_logits

from moegguf.native import library
from moegguf.native.events import RoutingEvent
from moegguf.native.store import StoreContext, StoreOptions

bindings = library.llama_cpp()
EvalCallback = bindings.ggml_backend_sched_eval_callback


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
    events: list[tuple[int, list[list[int]]]] = []

    def on_routing(event: RoutingEvent) -> None:
        events.append((event.il, event.expert_ids.tolist()))

    llm.session.store.listen(on_routing)
    router = Router(llm.session.store.context)
    assert np.array_equal(greedy_logits(llm), reference(path)), "a user's callback changes nothing"
    llm.session.store.listen()  # returns after the last event
    assert llm.stats().events_dropped == 0
    assert len(events) == 33 * len(llm.layout.layers)
    assert events == router.choices
