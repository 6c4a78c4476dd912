"""Tests the trial load: another process loads a model first, and a model that fails
there is refused."""

import json
import math
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import Llama, Load, TinyModel
from waiting import until

from moegguf.engine import known_facts, trial
from moegguf.engine.load_spec import LoadSpec
from moegguf.errors import (
    AllocationError,
    ExpertIOError,
    GenerationCancelled,
    ModelFormatError,
)
from moegguf.gguf.experts import ExpertLayout, read_layout
from moegguf.gguf.projector import ProjectorHeader, read_projector
from moegguf.gguf.reader import ggml_type
from moegguf.processor import Processor
from moegguf.settings import cache_folder
from tools.models import write_projector
from tools.mutants import read_header, write_file
from tools.mutants.header import Item


def process(code: str) -> tuple[str, ...]:
    """Returns a command that runs the Python program `code`, in place of a trial's
    command."""
    return (sys.executable, "-c", code)


ABORT = process(
    "import os; os.write(2, b'x.c:1: GGML_ASSERT(n > 0) failed'); os.abort()"
)
KILL = process("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
TOO_LONG = process("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)")
# The signal that a failed read of memory-mapped data raises.
BUS = process("import os, signal; os.kill(os.getpid(), signal.SIGBUS)")
SLEEP = process("import sys; sys.stdin.read()")
BARE = process("""print('{"kind": "bare", "reason": "AssertionError: no"}')""")
MEMORY = process("""print('{"kind": "memory", "reason": "bad_alloc"}')""")
KNOWN = process("""print('{"kind": "known", "reason": "OptionError: no"}')""")
NONSENSE = process("print('?')")
BAD_ALLOC = process("import os; os.write(2, b'  what():  std::bad_alloc'); os.abort()")
NOT_FOUND = process("raise SystemExit(\"No module named 'moegguf'\")")


@pytest.fixture(autouse=True)
def own_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEGGUF_TRIAL_LOAD", "1")
    monkeypatch.setenv("MOEGGUF_HOME", str(tmp_path / "home"))


def folder() -> Path:
    return cache_folder() / "trials"


def verdicts() -> list[Path]:
    return sorted(folder().glob("*.json"))


def is_due(
    layout: ExpertLayout,
    options: dict[str, Any],
    projector: ProjectorHeader | None = None,
) -> bool:
    """Returns True if no verdict is stored for a load with these keywords, so the load
    begins with a trial."""
    tried = trial._tried(LoadSpec.of(options), options)
    return trial._verdict(layout, tried, projector).read(str) is None


def use(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "COMMAND", command)


def test_a_valid_model_is_tried_once(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = read_layout(tiny())
    assert is_due(layout, {})
    load(tiny())
    assert len(verdicts()) == 1 and not is_due(layout, {})
    use(ABORT, monkeypatch)
    load(tiny())
    assert is_due(layout, {"flash_attn": True}), "another graph was not tried"
    assert is_due(layout, {"flash_attn": None}), "nor what llama.cpp would choose"
    assert not is_due(layout, {"n_ctx": 4096, "n_threads": 3})
    with pytest.raises(ModelFormatError):
        load(tiny(), flash_attn=True)
    load(tiny())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (ABORT, "SIGABRT: x.c:1: GGML_ASSERT"),
        (TOO_LONG, "did not finish within"),
        (BARE, "AssertionError"),
    ],
)
def test_a_model_that_fails_its_trial_is_refused_until_a_new_trial(
    tiny: TinyModel,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    words: str,
) -> None:
    with monkeypatch.context() as patch:
        use(command, patch)
        with pytest.raises(ModelFormatError, match=words):
            load(tiny())
    with pytest.raises(ModelFormatError, match=words + ".*MOEGGUF_TRIAL_LOAD=again"):
        load(tiny())
    monkeypatch.setenv("MOEGGUF_TRIAL_LOAD", "again")
    load(tiny())
    monkeypatch.setenv("MOEGGUF_TRIAL_LOAD", "1")
    use(command, monkeypatch)
    load(tiny())


def test_a_load_with_hooks_off_is_tried_with_the_store(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial without the store would hold the whole model in memory a second time."""
    monkeypatch.setenv("MOEGGUF_HOOKS", "0")
    use(
        process("import os; os.environ['MOEGGUF_HOOKS'] == '1' or os.abort()"),
        monkeypatch,
    )
    assert load(tiny("tiny-mix")).session is None


@pytest.mark.parametrize(
    ("command", "error", "words"),
    [(KILL, AllocationError, r"SIGKILL.*; free memory and try again, or fetch the file again\.$"),
     *((command, AllocationError, r"needed more than its limit \(.*bad_alloc\); .*, or fetch the file again\.$")
       for command in (MEMORY, BAD_ALLOC)),
     (BUS, ExpertIOError, r"reading the file failed .*SIGBUS.*; check the disk, or fetch the file again\.$")],
)  # fmt: skip
def test_trials_without_memory_or_disk_raise_and_store_no_verdict(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], error: type[Exception],
    words: str,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        use(command, patch)
        with pytest.raises(error, match=words):
            load(tiny())
    assert not verdicts()
    load(tiny())


def test_a_gpu_gives_the_trial_more_time_and_stores_no_timeout(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trial._request(read_layout(tiny()), {}, None)
    monkeypatch.setattr(trial, "has_gpu", lambda: True)
    longer = trial._request(read_layout(tiny()), {}, None)
    assert (
        longer.cpu_s - before.cpu_s == longer.wall_s - before.wall_s == trial.COMPILE_S
    )
    with monkeypatch.context() as patch:
        use(TOO_LONG, patch)
        with pytest.raises(
            ModelFormatError,
            match=f"within {longer.cpu_s} s of computing.*no sign of damage",
        ):
            load(tiny())
    assert not verdicts(), "what was compiled is kept, so the next trial takes less"


def test_a_trial_without_a_verdict_proceeds_to_the_load(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (KNOWN, NOT_FOUND, NONSENSE, ("/no/such/python",)):
        use(command, monkeypatch)
        load(tiny())
    assert not verdicts()


def test_the_trial_process_imports_modules_of_this_process(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "moegguf_elsewhere.py").write_text(
        "import moegguf.engine.trial_process as it\nit.main()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    use((*trial.COMMAND[:3], "moegguf_elsewhere"), monkeypatch)
    load(tiny())
    assert verdicts()


def test_damaged_verdicts_and_another_build_require_a_new_trial(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tiny())
    [path] = verdicts()
    whole = path.read_bytes()
    for damaged in (b"", b"{", b"[]", whole[:-1], b"17"):
        path.write_bytes(damaged)
        assert is_due(read_layout(tiny()), {}), damaged
    path.write_bytes(whole)
    assert not is_due(read_layout(tiny()), {})
    monkeypatch.setattr(known_facts.library, "build_identity", lambda: "another build")
    assert is_due(read_layout(tiny()), {})


def test_verdicts_are_stored_for_each_processor(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tiny())
    other = Processor("another CPU", frozenset())
    with monkeypatch.context() as patch:
        patch.setattr(known_facts, "read_processor", lambda: other)
        assert is_due(read_layout(tiny()), {})
        load(tiny())
        assert not is_due(read_layout(tiny()), {})
    assert not is_due(read_layout(tiny()), {}), (
        "machines that share a home forget each other's verdicts"
    )


def test_unwritable_verdicts_warn_and_the_next_load_tries_again(
    tiny: TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder().parent.mkdir(parents=True)
    folder().write_bytes(b"no folder")
    with pytest.warns(UserWarning, match="cannot be saved.*trials.*MOEGGUF_HOME"):
        load(tiny())
    use(ABORT, monkeypatch)
    with (
        pytest.warns(UserWarning, match="cannot be saved"),
        pytest.raises(ModelFormatError),
    ):
        load(tiny())


def test_projectors_are_part_of_the_trial(
    tiny: TinyModel, projector: Callable[..., Path], load: Load, tmp_path: Path
) -> None:
    good, bad = projector("mlp"), tmp_path / "mmproj-bad.gguf"
    header = read_header(good)
    kept = tuple(tensor for tensor in header.tensors if tensor.name != "mm.2.weight")
    # Libmtmd would use the null pointer of the missing tensor.
    write_file(replace(header, tensors=kept), bad)
    load(tiny(), mmproj=good)
    [path] = verdicts()
    assert json.loads(path.read_bytes()) == ""
    layout = read_layout(tiny())
    assert not is_due(layout, {}, read_projector(good)) and is_due(
        layout, {}, read_projector(bad)
    )
    for _ in range(2):
        with pytest.raises(
            ModelFormatError, match=r"with mmproj-bad\.gguf: llama\.cpp ended .*SIGSEGV"
        ):
            load(tiny(), mmproj=bad)
    load(tiny())


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("patch_size", struct.pack("<I", 1)),
        ("attention.layer_norm_epsilon", struct.pack("<f", math.nan)),
    ],
)
def test_a_projector_that_aborts_libmtmd_raises_model_format_error(
    tiny: TinyModel, load: Load, tmp_path: Path, key: str, new: bytes
) -> None:
    path = write_projector(tmp_path / "mmproj-bad.gguf", "gemma3", 128)
    before, name, after = path.read_bytes().partition(f"clip.vision.{key}".encode())
    path.write_bytes(before + name + after[:4] + new + after[8:])
    with pytest.raises(
        ModelFormatError, match=r"with mmproj-bad\.gguf: llama\.cpp ended .*ASSERT"
    ):
        load(tiny(), mmproj=path)


def test_a_cancelled_load_ends_the_trial(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(SLEEP, monkeypatch)
    with pytest.raises(GenerationCancelled):
        Llama(tiny(), progress=lambda _share: False, verbose=False)


def test_a_trial_process_ends_with_its_parent() -> None:
    code = (
        "import os, subprocess, sys; from moegguf.engine import trial;"
        "process = subprocess.Popen([*trial.COMMAND[:2], '-c', 'import threading; from moegguf.engine.trial_process"
        " import end_with_parent; end_with_parent()'], stdin=subprocess.PIPE);"
        "print(process.pid, flush=True); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    pid = int(done.stdout)
    until(
        lambda: (
            not psutil.pid_exists(pid)
            or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        )
    )


def renamed_tokens(tokens: list[Item]) -> list[Item]:
    """Replaces the last two tokens with an empty token and with the name that llama.cpp
    derives for an empty token.

    llama.cpp aborts if two names are equal.
    """
    return [*tokens[:-2], b"", b"[EMPTY_1022]"]


# {the damage: (key or tensor, function from the valid value to the wrong one)}. The
# value of a tensor is the number of its type.
ABORTING: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "two tokens of one name": ("tokenizer.ggml.tokens", renamed_tokens),
    "two equal tokens": (
        "tokenizer.ggml.tokens",
        lambda tokens: [*tokens[:-1], tokens[0]],
    ),
    "no token": ("tokenizer.ggml.tokens", lambda _tokens: []),
    "bytes without tokens": ("tokenizer.ggml.model", lambda _name: b"llama"),
    "unknown vocabulary": ("tokenizer.ggml.model", lambda _name: b"x"),
    "heads that KV heads do not divide": (
        "qwen3moe.attention.head_count_kv",
        lambda _n: 3,
    ),
    "odd rotated dimensions": ("qwen3moe.rope.dimension_count", lambda _n: 31),
    "a negative epsilon": (
        "qwen3moe.attention.layer_norm_rms_epsilon",
        lambda _e: -1e-5,
    ),
    "a norm in F16": ("blk.0.attn_norm.weight", lambda _type: ggml_type("F16")),
    "experts in I8": ("blk.0.ffn_up_exps.weight", lambda _type: ggml_type("I8")),
}


@pytest.mark.parametrize("name", ABORTING)
def test_files_that_abort_llama_cpp_raise_model_format_error(
    tiny: TinyModel, load: Load, tmp_path: Path, name: str
) -> None:
    header, bad, (changed, change) = (
        read_header(tiny("tiny-qwen3moe")),
        tmp_path / "bad.gguf",
        ABORTING[name],
    )
    pairs = [
        replace(pair, value=change(pair.value)) if pair.key == changed else pair
        for pair in header.pairs
    ]
    tensors = [
        replace(t, raw_type=change(t.raw_type)) if t.name == changed else t
        for t in header.tensors
    ]
    assert (pairs, tensors) != ([*header.pairs], [*header.tensors])
    write_file(type(header)(tuple(pairs), tuple(tensors)), bad)
    for _ in range(2):
        with pytest.raises(
            ModelFormatError, match=r"bad\.gguf: .*(trial load|error loading model)"
        ):
            load(bad)
    load(tiny("tiny-qwen3moe"))


def test_a_trial_uses_few_threads_on_many_processors(
    tiny: TinyModel, projector: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's CPU time is limited, and waiting threads would use it up."""
    monkeypatch.setattr(trial, "count_cpus", lambda: 128)
    options = trial._request(
        read_layout(tiny()), {}, read_projector(projector("mlp"))
    ).options
    assert (options["n_threads"], options["n_threads_batch"]) == (
        1,
        trial.MAX_IMAGE_THREADS,
    )
