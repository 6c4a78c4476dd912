"""Tests a real worker process with a tiny model: answers, cancelling, snapshots, and
the exit of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from answering import Answer, Load, TinyModel
from scripted_manager import EMPTY_PLAN

from moegguf.engine.llama import Llama
from moegguf.engine.load_spec import LoadSpec
from moegguf.engine.plan import Plan
from moegguf.errors import (
    DeviceLostError,
    ModelFormatError,
    ModelNotFoundError,
    MoeggufError,
    OptionError,
    WorkerError,
)
from moegguf.generate.request import (
    AnswerSummary,
    Delta,
    PromptProgress,
    Request,
    Sampling,
)
from moegguf.serving.events import Snapshot
from moegguf.serving.memory_budget import LoadConfig
from moegguf.serving.wire import build
from moegguf.serving.worker import VALUES, Worker
from moegguf.serving.worker_process import DEVICE_FAILURE_MARK, WorkerProcess

REQUEST = Request(
    prompt="once upon a time",
    return_context=True,
    sampling=Sampling(seed=7, max_tokens=24),
)
ENDLESS = Request(prompt="once upon a time", sampling=Sampling(seed=7, max_tokens=400))


def plan_of(path: Path, options: dict[str, Any]) -> Plan:
    """Returns the plan of a load, or an empty plan for a file that cannot be loaded."""
    with suppress(MoeggufError):
        return Llama.estimate(path, **options)
    return EMPTY_PLAN


@asynccontextmanager
async def worker_of(path: Path, **config: Any) -> AsyncIterator[WorkerProcess]:
    """Yields a worker that has loaded `path`, and stops it afterwards."""
    process = await WorkerProcess.start()
    try:
        config = {"n_ctx": 512, "n_threads": 1, **config}
        await process.load(
            LoadConfig(
                "tiny",
                str(path),
                LoadSpec.of(config),
                plan_of(path, config),
                {"verbose": False, **LoadSpec.others(config)},
            ),
            60,
        )
        yield process
    finally:
        await process.close()
        assert (
            not psutil.pid_exists(process.pid)
            or psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
        )


async def answer_of(
    process: WorkerProcess, request: Request, stream: bool = True
) -> tuple[str, AnswerSummary, int]:
    """Returns the text, the summary and the number of deltas of an answer."""
    *deltas, summary = [
        event
        async for event in process.call(
            "generate", request=request, stream=stream
        ).events()
    ]
    deltas = [delta for delta in deltas if isinstance(delta, Delta)]
    return ("".join(delta.text for delta in deltas), summary, len(deltas))


async def test_a_worker_gives_the_answer_of_the_model_in_process(
    tiny: TinyModel, load: Load
) -> None:
    llm = load(tiny(), logits_all=False, flash_attn=None)
    answer = Answer(llm, REQUEST)
    expected = "".join(delta.text for delta in answer.deltas())
    async with worker_of(tiny()) as process:
        for stream in (True, False):
            text, summary, n_deltas = await answer_of(process, REQUEST, stream)
            assert (
                text == expected
                and summary.answer_tokens == answer.summary.answer_tokens
            )
            assert summary.context == answer.summary.context
            assert stream or n_deltas == 1
        assert process.stats.tokens > 0


async def test_a_failed_device_is_named_and_all_devices_of_the_model_are_left_out() -> (
    None
):
    text = f"{DEVICE_FAILURE_MARK} CUDA1 is gone. This process ends"
    process = await WorkerProcess.start(
        command=(sys.executable, "-c", f"import sys; sys.exit({text!r})")
    )
    error = await process.exited
    await process.close()
    assert isinstance(error, DeviceLostError)
    assert str(error) == (
        "a device that ran the model failed (CUDA1 is gone); the next request loads the model again, without any"
        " of the devices on which it ran."
    )


async def test_an_invalid_message_is_named_in_brackets_without_its_full_stop() -> None:
    program = (
        "import os, sys, time; os.write(int(sys.argv[1]), b'{}\\n'); time.sleep(60)"
    )
    process = await WorkerProcess.start(command=(sys.executable, "-c", program))
    error = await process.exited
    await process.close()
    assert str(error) == (
        "the model's worker process has ended (killed by SIGKILL: it sent an invalid message: a message without a kind"
        " on a worker's socket); the next request loads the model again."
    )


async def test_cancel_ends_an_answer_of_the_worker(tiny: TinyModel) -> None:
    async with worker_of(tiny()) as process:
        request = process.call("generate", request=ENDLESS, stream=True)
        events = request.events()
        assert isinstance(await anext(events), PromptProgress) and isinstance(
            await anext(events), Delta
        )
        request.cancel()
        summary = [event async for event in events][-1]
        assert summary.finish == "cancelled" and summary.answer_tokens < 200
        assert (await answer_of(process, REQUEST))[1].finish == "length"


@pytest.mark.parametrize("n_seq_max", [1, 3])
async def test_contexts_are_reused_by_their_owner_only(
    tiny: TinyModel, n_seq_max: int
) -> None:
    text = 5 * " once upon a time there was a fox that lived beside a river"
    async with worker_of(tiny(), n_seq_max=n_seq_max) as process:

        async def reuses(owner: str, text: str) -> bool:
            request = Request(
                prompt=text, owner=owner, sampling=Sampling(temperature=0, max_tokens=4)
            )
            summary = (await answer_of(process, request))[1]
            assert (
                summary.prompt_tokens + summary.cached_tokens > 100
                and summary.cached_tokens not in range(1, 100)
            )
            return summary.cached_tokens > 0

        async def reuse_together(text: str, *owners: str) -> int:
            return sum(await asyncio.gather(*(reuses(owner, text) for owner in owners)))

        assert [
            await reuses(owner, text) for owner in ("ann", "ann", "bob", "", "")
        ] == [0, 1, 0, 0, 1]
        if n_seq_max > 1:
            assert await reuses("ann", text) and await reuses("bob", text)
        assert await reuse_together(f"a{text}", "ann", "bob") == 0
        assert await reuse_together(f"b{text}", "ann", "ann") == 1
        await process.call(
            "embed", inputs=[f"c{text}"], truncate=True, normalize=True
        ).value()
        assert await reuse_together(f"c{text}", "ann", "") == 0


async def test_tokenize_and_pieces_reply_during_an_answer(
    tiny: TinyModel, load: Load
) -> None:
    expected = load(tiny(), logits_all=False).tokenize(
        "ein Wörtchen".encode(), add_bos=True, special=True
    )
    async with worker_of(tiny()) as process:
        running = process.call("generate", request=ENDLESS, stream=True)
        whole, bare = (
            {"special": True, "add_special": True},
            {"special": False, "add_special": False},
        )
        tokens = await process.call("tokenize", text="ein Wörtchen", **whole).value()
        assert tokens == expected and not running.ended
        inner = await process.call("tokenize", text="ein Wörtchen", **bare).value()
        pieces = build(
            tuple[bytes, ...], await process.call("pieces", tokens=inner).value()
        )
        assert b"".join(pieces) == "ein Wörtchen".encode()
        with pytest.raises(OptionError):
            await process.call("pieces", tokens=[1 << 30]).value()


@pytest.mark.parametrize("special", [True, False])
def test_tokenize_adds_bos_and_eos_only_with_add_special(
    tiny: TinyModel, load: Load, special: bool
) -> None:
    adds = {f"tokenizer.ggml.add_{name}_token": True for name in ("bos", "eos")}
    model = load(tiny(), logits_all=False, kv_overrides=adds)
    bare = VALUES["tokenize"](model, "ein Wörtchen", special=special, add_special=False)
    assert b"".join(map(model.vocabulary.piece, bare)) == "ein Wörtchen".encode()
    whole = VALUES["tokenize"](model, "ein Wörtchen", special=special, add_special=True)
    assert whole == [model.token_bos(), *bare, model.token_eos()]


async def test_count_also_replies_for_prompts_longer_than_the_context(
    tiny: TinyModel,
) -> None:
    async with worker_of(tiny()) as process:
        few = await process.call("count", request=request_of("word")).value()
        once, twice = [
            await process.call("count", request=request_of("word " * 3000 * n)).value()
            for n in (1, 2)
        ]
        assert 3000 < once < twice - 3000
        _, summary, _ = await answer_of(process, request_of("word"))
        assert few == summary.prompt_tokens + summary.cached_tokens


def request_of(text: str) -> Request:
    return Request(
        messages=({"role": "user", "content": text},), sampling=Sampling(max_tokens=1)
    )


@pytest.mark.parametrize(
    ("name", "error"), [("no.gguf", ModelNotFoundError), ("bad.gguf", ModelFormatError)]
)
async def test_a_missing_or_damaged_file_raises_a_typed_error(
    tmp_path: Path, name: str, error: type[Exception]
) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(error):
        async with worker_of(tmp_path / name):
            pass


async def experts_of(
    process: WorkerProcess, watch_s: float, client_key: str | None = None
) -> Snapshot:
    found: Snapshot = await process.call(
        "experts", watch_s=watch_s, client_key=client_key
    ).value()
    return found


async def test_snapshots_add_up_and_count_uses_only_while_watched(
    tiny: TinyModel,
) -> None:
    async with worker_of(tiny()) as process:
        first, before = await experts_of(process, 60), process.stats
        for _ in range(3):
            await answer_of(process, REQUEST)
        now = await experts_of(process, 60)
        snapshot, n_experts = now.since(first), len(now.layers) * now.n_expert
        assert n_experts > 0 and all(
            len(part) == n_experts
            for part in (snapshot.state, snapshot.uses, snapshot.loads)
        )
        uses = sum(memoryview(now.uses).cast("I")) - sum(
            memoryview(first.uses).cast("I")
        )
        assert uses == (now.stats - before).lookups > 0
        assert set(snapshot.state) <= {0, 1, 2} and snapshot.model == "tiny"
        assert not snapshot.busy and snapshot.tokens_per_s > 0 and snapshot.seconds > 0
        assert now.since(now).tokens_per_s == 0
    # The default budget has a slot for every expert.
    async with worker_of(tiny()) as process:
        await answer_of(process, REQUEST)
        await experts_of(process, 0.01)
        await asyncio.sleep(0.02)
        # The 0.01 s of watching are over by the time this answer ends.
        await answer_of(process, REQUEST)
        unwatched = await experts_of(process, 0)
        await answer_of(process, REQUEST)
        assert (await experts_of(process, 0)).uses == unwatched.uses


async def test_snapshots_of_a_client_show_its_own_requests_only(
    tiny: TinyModel,
) -> None:
    def of(client_key: str, prompt: str) -> Request:
        return replace(
            ENDLESS,
            prompt=prompt,
            client_key=client_key,
            sampling=Sampling(seed=7, max_tokens=8),
        )

    def maps(snapshot: Snapshot) -> list[npt.NDArray[Any]]:
        kinds = {"state": np.uint8, "uses": np.uint32, "loads": np.uint32}
        return [
            np.frombuffer(getattr(snapshot, name), kind) for name, kind in kinds.items()
        ]

    async with worker_of(tiny(), expert_cache="40%", n_seq_max=2) as process:
        await answer_of(process, of("ann", "one upon a time"))
        anns, bobs, all_ = [
            maps(await experts_of(process, 60, client_key))
            for client_key in ("ann", "bob", None)
        ]
        assert all(each.any() for each in anns) and not any(each.any() for each in bobs)
        assert (anns[1] == all_[1]).all(), "nobody else has used any"
        await answer_of(process, of("bob", "another thing"))
        await process.call(
            "generate", request=of("bob", "and again"), stream=False
        ).value()
        again, bobs, all_ = [
            maps(await experts_of(process, 60, client_key))
            for client_key in ("ann", "bob", None)
        ]
        assert all(
            (now == before).all() for now, before in zip(again, anns, strict=True)
        )
        assert (again[1] + bobs[1] == all_[1]).all() and (bobs[0] <= all_[0]).all()
        assert not bobs[2][bobs[1] == 0].any() and not bobs[0][bobs[1] == 0].any()
        both = [
            process.call("generate", request=of(client_key, client_key), stream=False)
            for client_key in ("ann", "bob")
        ]
        for request in both:
            await request.value()
        last, _, all_ = [
            maps(await experts_of(process, 60, client_key))
            for client_key in ("ann", "bob", None)
        ]
        assert (last[1] >= again[1]).all() and last[1].sum() < all_[1].sum()


async def test_a_worker_ignores_sigint_and_sigterm_raises_worker_error(
    tiny: TinyModel,
) -> None:
    async with worker_of(tiny()) as process:
        os.kill(process.pid, signal.SIGINT)
        assert (await answer_of(process, REQUEST))[0]
        running = process.call("generate", request=ENDLESS, stream=True)
        os.kill(process.pid, signal.SIGTERM)
        with pytest.raises(WorkerError, match="SIGTERM"):
            await running.value()


async def test_a_worker_exits_at_the_end_of_its_socket_during_an_answer(
    tiny: TinyModel,
) -> None:
    async with worker_of(tiny()) as process:
        running = process.call("generate", request=ENDLESS, stream=True)
        assert isinstance(await anext(running.events()), PromptProgress)
        await process.close()
        assert process._child.returncode == 0


async def test_a_worker_answers_several_requests_together(tiny: TinyModel) -> None:
    async with worker_of(tiny(), n_seq_max=4) as process:
        answers = await asyncio.gather(*(answer_of(process, REQUEST) for _ in range(8)))
        assert all(
            summary.answer_tokens == 24 or summary.finish == "stop"
            for _, summary, _ in answers
        )
        bad = Request(prompt="a", sampling=Sampling(logit_bias={1 << 20: 1.0}))
        running = [
            process.call("generate", request=ENDLESS, stream=True) for _ in range(3)
        ]
        with pytest.raises(OptionError):
            await process.call("generate", request=bad, stream=False).value()
        running[1].cancel()
        finishes = [(await request.value()).finish for request in running]
        assert finishes[1] == "cancelled" and "cancelled" not in (
            finishes[0],
            finishes[2],
        )
        vectors = process.call(
            "embed", inputs=["a text"], truncate=True, normalize=True
        )
        assert (await vectors.value()).n_tokens > 0


def test_a_slow_count_does_not_block_the_next_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = threading.Event(), threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        served = Worker(theirs)
        monkeypatch.setattr(
            served, "_reply", lambda *message: begun.set() or go.wait(30)
        )
        # The thread that reads messages makes this call in a worker.
        served._on_message({"kind": "count", "id": 1})
        assert begun.wait(10) and not go.is_set()
        go.set()
