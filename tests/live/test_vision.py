"""Tests images with each kind of projector: logits, positions, reuse of the context,
and damaged files."""

import base64
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from answering import Answer, Load, TinyModel, endless
from pictures import deep_png, interlaced_png, message, png, png_of
from running import write_adapter

from moegguf.engine import context as engine
from moegguf.engine.llama import Llama
from moegguf.errors import (
    BudgetError,
    CapabilityError,
    ContextError,
    ModelFormatError,
    OptionError,
)
from moegguf.generate.images import (
    INTERLACED_BYTES,
    PLAIN_BYTES,
    WIDE_BYTES,
    read_image,
)
from moegguf.generate.prompt import read_prompt
from moegguf.generate.request import AnswerSummary, Message, Request, Sampling
from moegguf.gguf.projector import DECODED_BYTES
from moegguf.native.store import StoreOptions
from tools.models import write_projector

Projector = Callable[..., Path]

KINDS = [
    ("mlp", "tiny-qwen2moe"),
    ("gemma3", "tiny-qwen3moe"),
    ("qwen2vl_merger", "tiny-qwen3vlmoe"),
    # The model adds a row of a table that stays in the file to each image token.
    ("gemma3", "tiny-gemma4"),
]


def answer(
    llm: Llama, messages: Sequence[Message], **options: Any
) -> tuple[str, AnswerSummary]:
    request = Request(
        messages=tuple(messages),
        sampling=Sampling(temperature=0, max_tokens=6),
        truncate=False,
        **options,
    )
    running = Answer(llm, request)
    return "".join(delta.text for delta in running.deltas()), running.summary


def last_logits(llm: Llama) -> np.ndarray:
    return np.ctypeslib.as_array(
        llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)
    ).copy()


@pytest.mark.parametrize(("kind", "preset"), KINDS)
def test_logits_with_images_are_equal_at_any_expert_cache(
    tiny: TinyModel, projector: Projector, load: Load, kind: str, preset: str
) -> None:
    def run(budget: str) -> tuple[str, np.ndarray, int]:
        llm = load(
            tiny(preset),
            mmproj=projector(kind),
            expert_cache=budget,
            n_ubatch=64,
            logits_all=False,
        )
        text, summary = answer(llm, [message("look ", png(120, 64), "what is it?")])
        return text, last_logits(llm), summary.stats.misses

    text, logits, misses = run("30%")
    all_text, all_logits, all_misses = run("100%")
    assert text == all_text and np.array_equal(logits, all_logits)
    assert misses > all_misses


@pytest.mark.parametrize(("kind", "preset"), KINDS)
def test_a_conversation_with_images_reuses_the_context(
    tiny: TinyModel, projector: Projector, load: Load, kind: str, preset: str
) -> None:
    llm = load(tiny(preset), mmproj=projector(kind), logits_all=False)
    first = message("look ", png(128, 96, seed=1), "what is it?")
    text, summary = answer(llm, [first])
    logits = last_logits(llm)
    turns = [
        first,
        {"role": "assistant", "content": text},
        message("and ", png(64, 64, seed=2), "this?"),
    ]
    _, timing_2 = answer(llm, turns)
    reused, n_tokens = timing_2.cached_tokens, llm.n_tokens
    assert reused >= summary.prompt_tokens  # the first image is not evaluated again
    continued = last_logits(llm)
    llm.reset()
    _, timing_3 = answer(llm, turns)
    assert (
        timing_3.cached_tokens == 0
        and timing_3.prompt_tokens == reused + timing_2.prompt_tokens
    )
    assert llm.n_tokens == n_tokens and np.allclose(
        last_logits(llm), continued, atol=0.05
    )
    answer(llm, [message("look ", png(128, 96, seed=3), "what is it?")])
    # An image of the same size with different pixels.
    assert not np.array_equal(last_logits(llm), logits)


def test_image_tokens_are_counted_and_share_positions(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    llm = load(tiny("tiny-qwen3vlmoe"), mmproj=projector("qwen2vl_merger"), n_ctx=256)
    texts = answer(llm, [message("look ", "what is it?")])[1].prompt_tokens
    _, summary = answer(llm, [message("look ", png(128, 128), "what is it?")])
    n_image = summary.prompt_tokens + summary.cached_tokens - texts
    assert n_image > 64  # 8 x 8 tokens and the delimiters around them
    assert llm.n_tokens - llm.context.images.position(llm.n_tokens) == 64 - 8
    with pytest.raises(ContextError, match="num_ctx"):
        answer(llm, [message(png(256, 256), "what is it?")])


@pytest.mark.parametrize(("kind", "preset"), [KINDS[0], KINDS[2]])
def test_an_answer_after_an_image_ends_when_its_context_is_full(
    tiny: TinyModel, projector: Projector, load: Load, kind: str, preset: str
) -> None:
    llm = load(tiny(preset), mmproj=projector(kind), n_ctx=512, logits_all=False)
    sampling = Sampling(temperature=0, logit_bias=endless(llm))
    asked = message("look ", png(64, 64), "what is it?")
    running = Answer(llm, Request(messages=(asked,), sampling=sampling))
    running.deltas()
    summary = running.summary
    assert (summary.finish, summary.n_shifts) == ("length", 0)
    assert summary.prompt_tokens + summary.answer_tokens == 512


def test_a_projector_of_one_pass_requires_a_wide_pass_and_its_slots(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    with pytest.raises(BudgetError, match="one pass of 64 tokens"):
        load(
            tiny("tiny-qwen3moe"),
            mmproj=projector("gemma3"),
            expert_cache="10%",
            store=StoreOptions(overlap=False),
        )
    llm = load(tiny("tiny-qwen3moe"), mmproj=projector("gemma3"), n_ubatch=8, n_batch=8)
    assert llm.plan.n_ubatch == 64 and llm.plan.needs.projector_bytes > 0
    assert answer(llm, [message(png(), "what is it?")])[0]


def test_models_projectors_and_adapters_load_from_paths_not_in_utf8(
    tiny: TinyModel, projector: Projector, load: Load, tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path, mmproj = folder / "model.gguf", folder / "mmproj.gguf"
    path.symlink_to(tiny())
    mmproj.symlink_to(projector())
    adapter = write_adapter(
        folder / "adapter.gguf", "qwen2moe", "blk.1.ffn_gate_exps.weight", (16, 64, 128)
    )
    options = {
        "lora_path": str(adapter),
        "trace": folder / "trace",
        "draft": "off",
        "n_seq_max": 1,
    }
    llm = load(path, mmproj=mmproj, expert_cache="50%", **options)
    assert answer(llm, [message(png(), "what is it?")])[0]
    assert llm.model_path == str(path)
    load(tiny(), draft=path, flash_attn=None, expert_cache="100%")


def test_an_image_without_a_projector_raises_capability_error(
    tiny: TinyModel, load: Load
) -> None:
    with pytest.raises(CapabilityError, match="--mmproj"):
        answer(load(tiny()), [message(png(), "what is it?")])


def test_a_projector_of_another_model_is_refused(
    tiny: TinyModel, load: Load, tmp_path: Path
) -> None:
    llm = load(tiny(), mmproj=write_projector(tmp_path / "mmproj.gguf", "mlp", 64))
    with pytest.raises(ModelFormatError, match="mismatch"):
        answer(llm, [message(png(), "what is it?")])
    with pytest.raises(ModelFormatError, match="architecture"):
        load(tiny(), mmproj=tiny())


def test_a_template_of_content_parts_gets_parts(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    parts = (
        "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    )
    template = f"{{% for m in messages %}}{parts}{{% endfor %}}:"
    llm = load(tiny(), mmproj=projector())
    assert (
        answer(llm, [message(png(), "what is it?")], template=template)[1].prompt_tokens
        > 64
    )


def test_chat_handlers_answer_and_leave_no_prefix_to_reuse(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    from llama_cpp.llama_chat_format import Llava15ChatHandler

    handler = Llava15ChatHandler(str(projector()), verbose=False)
    llm = load(tiny(), chat_handler=handler, expert_cache="50%", logits_all=False)
    before = llm.create_completion(
        "a text that is long " * 8, max_tokens=4, temperature=0
    )

    def ask(data: bytes) -> str:
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "what is it?"},
        ]
        reply = llm.create_chat_completion(
            [{"role": "user", "content": parts}], max_tokens=4, temperature=0
        )
        assert reply["usage"]["prompt_tokens"] > 64
        return str(reply["choices"][0]["message"]["content"])

    assert ask(png(seed=1)) == ask(png(seed=1))
    after = llm.create_completion(
        "a text that is long " * 8, max_tokens=4, temperature=0
    )
    assert before["choices"] == after["choices"]


DECODE = """
import sys
import threading
from ctypes import c_uint8
from moegguf.native import library

def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

mtmd, data = library.mtmd(), sys.stdin.buffer.read()
before = kib("VmRSS")
assert mtmd.mtmd_helper_bitmap_init_from_buf(None, (c_uint8 * len(data)).from_buffer_copy(data), len(data), False)
print(1024 * (kib("VmHWM") - before))
"""


@pytest.mark.parametrize(
    ("make", "pixel_bytes"),
    [
        (png, PLAIN_BYTES),
        (interlaced_png, PLAIN_BYTES + INTERLACED_BYTES),
        (deep_png, WIDE_BYTES),
    ],
)
def test_decoding_an_image_stays_within_the_planned_memory(
    make: Callable[[int, int], bytes], pixel_bytes: int
) -> None:
    width, height = 3000, 1500
    data = make(width, height)
    done = subprocess.run(
        [sys.executable, "-c", DECODE], input=data, stdout=subprocess.PIPE
    )
    assert (
        6 * width * height
        < int(done.stdout)
        < 1.05 * pixel_bytes * width * height + len(data)
    )


def test_image_data_beyond_the_header_size_is_not_inflated(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    llm, compressor = load(tiny(), mmproj=projector()), zlib.compressobj()
    data = (
        b"".join(compressor.compress(bytes(1 << 20)) for _ in range(200))
        + compressor.flush()
    )
    rss = psutil.Process().memory_info().rss
    with pytest.raises(OptionError, match="damaged"):
        answer(llm, [message(png_of(64, 64, data), "what is it?")])
    assert psutil.Process().memory_info().rss - rss < 100 << 20


def test_the_largest_allowed_image_is_decoded_and_a_larger_one_refused(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    reader, height = (
        load(tiny(), mmproj=projector()).context.open_projector(),
        DECODED_BYTES // WIDE_BYTES // 4096,
    )
    reader._mtmd.mtmd_bitmap_free(
        reader._bitmap(read_image(deep_png(4096, height)), with_pixels=True)
    )
    with pytest.raises(OptionError, match="pixels"):
        read_image(deep_png(4096, height + 1))


def test_cutting_a_conversation_counts_its_images(
    tiny: TinyModel, projector: Projector, load: Load
) -> None:
    """The number of cut messages stays constant over several turns, so that the
    computed context can be reused."""
    llm = load(tiny(), mmproj=projector(), n_ctx=512)
    messages, cut = list[Message](), list[int]()
    for turn in range(12):
        messages.append(message(png(seed=turn), "and this?"))
        request = Request(
            messages=tuple(messages), sampling=Sampling(max_tokens=1), truncate=True
        )
        cut.append(read_prompt(llm, request).cut_messages)
        messages.append({"role": "assistant", "content": "x"})
    assert len(set(cut)) < 6 and cut == sorted(cut)


def test_threads_share_one_projector(
    tiny: TinyModel, projector: Projector, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that counts the tokens of a prompt with images may open the projector
    while another thread generates an answer.
    """
    begun, n_made = threading.Barrier(2), list[int]()

    class Slow(engine.Projector):
        def __init__(self, *arguments: Any) -> None:
            n_made.append(1)
            with suppress(threading.BrokenBarrierError):
                # Returns at once if another thread creates a second projector at this
                # time.
                begun.wait(0.2)
            super().__init__(*arguments)

    monkeypatch.setattr(engine, "Projector", Slow)
    llm = load(tiny(), mmproj=projector("mlp"))
    with ThreadPoolExecutor() as threads:
        first, second = threads.map(lambda _: llm.context.open_projector(), range(2))
    assert first is second and len(n_made) == 1
