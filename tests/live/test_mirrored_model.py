"""Tests a model with a mirror, a copy of its file: both files are read, and the logits
do not change if one of them fails."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from answering import DEMO, QUESTION, reply
from running import Llama, Load, Reference, TinyModel, greedy_logits

from moegguf import errors
from moegguf.quantities import Link
from moegguf.testing.library import arm_fault, limit_faults, slow_drive


@pytest.fixture(autouse=True)
def no_limits() -> Iterator[None]:
    """Makes faults apply to every file again after a test."""
    yield
    limit_faults(None)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return Path(shutil.copy(DEMO, tmp_path / "copy.gguf"))


def load_demo(load: Load, mirror: object) -> Llama:
    return load(DEMO, expert_cache="30%", mirror=mirror)


def test_a_mirrored_model_reads_both_copies_and_keeps_the_logits(
    load: Load, reference: Reference, mirror: Path
) -> None:
    llm = load_demo(load, mirror)
    assert np.array_equal(greedy_logits(llm), reference(DEMO))
    stats = llm.stats()
    own, other = stats.drives
    assert (own.name, other.name) == ("file", "mirror 1")
    assert min(own.bytes_read, other.bytes_read) > 0
    assert own.bytes_read + other.bytes_read == stats.bytes_read
    assert not (own.is_dropped or other.is_dropped)


@pytest.fixture
def two_slow_drives(mirror: Path) -> Iterator[Path]:
    """Slows reads of the demo model and of its copy down to 50 MB/s each. Yields the
    path of the copy."""
    for path in (DEMO, mirror):
        slow_drive(path, Link(50e6, 1e-3))
    yield mirror
    for path in (DEMO, mirror):
        slow_drive(path, None)


def test_two_slow_drives_are_both_read_and_keep_the_answer(
    load: Load, two_slow_drives: Path
) -> None:
    text, one = reply(load_demo(load, None), QUESTION, return_context=True)
    llm = load_demo(load, two_slow_drives)
    mirrored_text, two = reply(llm, QUESTION, return_context=True)
    assert mirrored_text == text and two.context == one.context != ()
    assert all(drive.bytes_read > 0 for drive in llm.stats().drives)


def test_stats_without_mirrors_have_no_drives(load: Load) -> None:
    assert load_demo(load, None).stats().drives == ()


@pytest.mark.parametrize("failing", ["its own file", "the mirror"])
def test_a_failed_drive_changes_no_logit_and_warns_once(
    load: Load, reference: Reference, mirror: Path, failing: str
) -> None:
    llm = load_demo(load, mirror)
    path = mirror if failing == "the mirror" else DEMO
    n_passes = 0

    def fail_later() -> None:
        nonlocal n_passes
        n_passes += 1
        if n_passes == 5:
            limit_faults(path)
            arm_fault("read", 1, sticky=True)

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        logits = greedy_logits(llm, before_each=fail_later)
    assert np.array_equal(logits, reference(DEMO))
    dropped = [
        str(warning.message)
        for warning in given
        if "is no longer used" in str(warning.message)
    ]
    assert (
        len(dropped) == 1
        and path.name in dropped[0]
        and "Input/output error" in dropped[0]
    )
    assert [drive.is_dropped for drive in llm.stats().drives] == [
        path == DEMO,
        path == mirror,
    ]
    assert llm.stats().read_errors == 0


def test_a_mirror_written_to_is_dropped_with_unchanged_logits(
    load: Load, reference: Reference, mirror: Path
) -> None:
    llm = load_demo(load, mirror)
    mirror.write_bytes(bytes(mirror.stat().st_size))
    with pytest.warns(
        UserWarning, match=r"copy\.gguf' was written to after the model was loaded"
    ):
        logits = greedy_logits(llm)
    assert np.array_equal(logits, reference(DEMO))


def test_a_folder_with_copies_of_all_shards_is_a_mirror(
    tiny: TinyModel, load: Load, reference: Reference, tmp_path: Path
) -> None:
    path = tiny("tiny-qwen2moe", "q4_0", 3)
    shards = sorted(
        path.parent.glob(f"{path.name.rpartition('-00001')[0]}-*-of-00003.gguf")
    )
    assert len(shards) == 3
    for shard in shards:
        shutil.copy(shard, tmp_path / shard.name)
    for mirror in (tmp_path, tmp_path / path.name):
        llm = load(path, expert_cache="40%", mirror=mirror)
        assert np.array_equal(greedy_logits(llm), reference(path))
        assert all(drive.bytes_read > 0 for drive in llm.stats().drives)
        llm.close()


def test_mirrors_of_other_models_are_refused_and_missing_ones_skipped(
    load: Load, reference: Reference, tiny: TinyModel, tmp_path: Path
) -> None:
    other = Path(shutil.copy(tiny(), tmp_path / "other.gguf"))
    with pytest.raises(
        errors.OptionError, match=r"other\.gguf' has .* bytes instead of"
    ):
        load_demo(load, other)
    with pytest.warns(UserWarning, match="No such file or directory"):
        llm = load_demo(load, [tmp_path / "unplugged"])
    assert np.array_equal(greedy_logits(llm), reference(DEMO))
