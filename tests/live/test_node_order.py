"""What a layer computes while its experts arrive: the nodes that do not depend on them come first."""

import ctypes as c

import numpy as np
import pytest
from running import Load, TinyModel

from moegguf.engine.llama import Llama
from moegguf.native import library

PROMPT = [5, 9, 2, 11]


def computed_nodes(llm: Llama, tokens: list[int]) -> list[str]:
    """The names of the nodes of a pass in the order of computing, as a user's own callback is asked about them."""
    base = c.CDLL(str(library.find_library() / "libggml-base.so"))
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = c.c_char_p, [c.c_void_p]
    names: list[str] = []

    def note(tensor: int, ask: bool, _: object) -> bool:
        if ask:
            names.append(base.ggml_get_name(tensor).decode())
        return not ask  # not asked for, or: go on

    callback = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)(note)
    chain = library.load().moegguf_context_chain
    chain(llm.session.store.context.handle, c.cast(callback, c.c_void_p), None)
    try:
        llm.eval(tokens)
    finally:
        chain(llm.session.store.context.handle, None, None)
    return names


@pytest.mark.parametrize("n_tokens", [1, 4])
def test_the_shared_expert_is_computed_while_others_arrive(load: Load, tiny: TinyModel, n_tokens: int) -> None:
    path = tiny("tiny-qwen2moe", "q4_0")
    few, all_resident = load(path, expert_cache="30%"), load(path, expert_cache="100%")
    ordered, plain = computed_nodes(few, PROMPT[:n_tokens]), computed_nodes(all_resident, PROMPT[:n_tokens])
    assert sorted(ordered) == sorted(plain)
    for il in range(few.session.layout.n_layer):  # type: ignore[union-attr]
        names = [f"ffn_moe_slot_ids-{il}", f"ffn_shexp-{il}", f"ffn_moe_up-{il}", f"ffn_moe_down-{il}"]
        assert [ordered.index(name) for name in names] == sorted(ordered.index(name) for name in names)
        assert plain.index(f"ffn_moe_down-{il}") < plain.index(f"ffn_shexp-{il}"), "llama.cpp's own order"
    assert np.array_equal(few.scores[:n_tokens], all_resident.scores[:n_tokens])
