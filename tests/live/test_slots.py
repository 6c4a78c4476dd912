"""Tests saved, restored and erased KV slots: only their owner and model can continue a
context, and continuing it does not change a single bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import Received, TinyModel, ask, started
from waiting import until

from moegguf.engine.llama import Llama
from moegguf.errors import (
    CapabilityError,
    MoeggufError,
    OptionError,
    StorageError,
    UnknownIdError,
)
from moegguf.generate.batching import BatchLoop
from moegguf.generate.sequence import Task
from moegguf.generate.slots import run_action

PROMPT = " the".join(str(n) for n in range(110))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))


class Loop:
    """A batch loop that answers prompts and acts on slots."""

    def __init__(self, path: Path, **options: Any) -> None:
        options = {"n_ctx": 1024, "n_seq_max": 2, "context_store": "64MiB", **options}
        self.llm = Llama(path, flash_attn=None, verbose=False, **options)
        self.loop = BatchLoop(self.llm)
        self._running = started(self.loop)

    def __enter__(self) -> "Loop":
        self._running.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.__exit__(None, None, None)
        self.llm.close()

    def answer(self, **options: Any) -> Received:
        received = Received()
        self.loop.submit(
            ask(prompt=PROMPT, n_logprobs=2, max_tokens=4, **options), received
        )
        return received.wait()

    def act(
        self, action: str, slot: int = 0, owner: str = "", **fields: Any
    ) -> dict[str, Any]:
        """Runs an action on a slot in the loop's thread. Returns the action's outcome
        or raises its error."""
        ended: list[Any] = []

        def run() -> None:
            try:
                ended.append(
                    run_action(
                        self.llm, self.loop.places, action, slot, owner, **fields
                    )
                )
            except MoeggufError as error:
                ended.append(error)

        self.loop.submit_task(Task(run, lambda: None, ended.append, keeps_context=True))
        until(lambda: bool(ended))
        if isinstance(ended[0], Exception):
            raise ended[0]
        found: dict[str, Any] = ended[0]
        return found

    def save(
        self, path: Path, slot: int = 0, most_bytes: int = 1 << 30, **fields: Any
    ) -> dict[str, Any]:
        return self.act("save", slot, path=str(path), most_bytes=most_bytes, **fields)

    def restore(self, path: Path, slot: int = 0, **fields: Any) -> dict[str, Any]:
        return self.act("restore", slot, path=str(path), most_bytes=0, **fields)

    def forget_disk(self) -> None:
        """Turns the context store off, so later prompts find no context on disk."""
        assert self.llm.prefix_cache is not None
        self.llm.prefix_cache._store.is_off = True


@pytest.fixture
def model(tiny: TinyModel) -> Path:
    return tiny("tiny-qwen2moe")


@pytest.fixture
def loop(model: Path) -> Iterator[Loop]:
    with Loop(model) as made:
        made.forget_disk()
        yield made


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_slot_restored_in_a_new_engine_continues_with_the_same_bits(
    model: Path, tmp_path: Path, n_parallel: int
) -> None:
    file = tmp_path / "slots" / "a.bin"
    with Loop(model, n_seq_max=n_parallel) as first:
        first.forget_disk()
        whole = first.answer()
        n_tokens = whole.summary.prompt_tokens + whole.summary.answer_tokens - 1
        saved = first.save(file)
        assert saved == {"n_saved": n_tokens, "n_written": file.stat().st_size}
        assert file.stat().st_mode & 0o777 == 0o600
    with Loop(model, n_seq_max=n_parallel) as later:
        later.forget_disk()
        slot = n_parallel - 1
        assert later.restore(file, slot) == {
            "n_restored": n_tokens,
            "n_read": file.stat().st_size,
        }
        found = later.answer()
        assert (found.text, found.logprobs) == (whole.text, whole.logprobs)
        assert found.summary.cached_tokens == whole.summary.prompt_tokens - 1


def test_an_erased_slot_is_computed_again(loop: Loop) -> None:
    whole = loop.answer()
    assert loop.answer().summary.cached_tokens > 0
    assert (
        sum(loop.act("erase", slot)["n_erased"] for slot in (0, 1))
        > whole.summary.prompt_tokens
    )
    found = loop.answer()
    assert found.summary.cached_tokens == 0 and found.text == whole.text


def test_slots_are_saved_erased_and_reused_for_their_owner_only(
    loop: Loop, tmp_path: Path
) -> None:
    loop.answer(owner="ann")
    with pytest.raises(OptionError, match="no tokens from your requests"):
        loop.save(tmp_path / "a", owner="bob")
    assert loop.act("erase", owner="bob") == {"n_erased": 0}
    loop.save(tmp_path / "a", owner="ann")
    loop.act("erase", owner="ann")
    # The file has no owner: the caller decides who receives the tokens.
    loop.restore(tmp_path / "a", owner="bob")
    assert loop.answer(owner="ann").summary.cached_tokens == 0
    assert loop.answer(owner="bob").summary.cached_tokens > 0


def test_foreign_and_damaged_slot_files_restore_nothing(
    loop: Loop, tiny: TinyModel, tmp_path: Path
) -> None:
    file = tmp_path / "a"
    loop.answer()
    loop.save(file)
    with (
        Loop(tiny("tiny-qwen3moe")) as other,
        pytest.raises(OptionError, match="different model"),
    ):
        other.restore(file)
    content = file.read_bytes()
    for damaged in (
        b"",
        content[:-1],
        content[:100] + b"?" + content[101:],
        b"x" * 1000,
    ):
        file.write_bytes(damaged)
        with pytest.raises(OptionError, match="completely saved"):
            loop.restore(file)
    assert loop.answer().summary.cached_tokens > 0, "what the slot held is still there"
    with pytest.raises(UnknownIdError, match="no saved slot"):
        loop.restore(tmp_path / "missing")


def test_save_of_an_invalid_slot_raises_with_the_reason(
    loop: Loop, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match="0 to 1"):
        loop.save(tmp_path / "a", 2)
    with pytest.raises(OptionError, match="no tokens"):
        loop.save(tmp_path / "a")
    loop.answer()
    with pytest.raises(StorageError, match="10 are left for saved slots"):
        loop.save(tmp_path / "a", most_bytes=10)
    assert not (tmp_path / "a").exists()
    with (
        Loop(model, context_store=0) as other,
        pytest.raises(CapabilityError, match="context_store"),
    ):
        other.save(tmp_path / "a")


def test_a_too_short_context_refuses_a_saved_slot(
    loop: Loop, model: Path, tmp_path: Path
) -> None:
    loop.answer()
    loop.save(tmp_path / "a")
    with (
        Loop(model, n_ctx=256, n_seq_max=1) as short,
        pytest.raises(OptionError, match="but the context has room for 256"),
    ):
        short.restore(tmp_path / "a")
