"""Saves, restores and erases llama-server's slots. A slot is a place in the context.

A file contains the tokens of a place and llama.cpp's state for these tokens. A file is
restored only if the model computes the same bits. To check this, the file contains a
name that identifies the model, the build and the load options (`PrefixCache.name`). The
batch loop's thread calls this module between passes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from moegguf.atomic_write import OWNER_ONLY, write_atomically
from moegguf.errors import CapabilityError, OptionError, StorageError, UnknownIdError
from moegguf.generate.kv_sequences import KvSequences
from moegguf.generate.sequence import AT_SCALE, KvSequence
from moegguf.regular_file import open_regular

if TYPE_CHECKING:
    from moegguf.engine.llama import Llama

MAGIC = b"moegslt1"
# MAGIC, hash of everything after the header, size of the JSON description.
_HEADER = struct.Struct("<8s16sI")
_NOT_WHOLE = "is not a completely saved slot; save it again."


def run_action(
    llm: Llama, places: KvSequences, action: str, slot: int, owner: str, **fields: Any
) -> dict[str, Any]:
    """Runs an action on a slot for `owner`: "save", "erase" or "restore". Only tokens
    that belong to `owner` are saved or erased. Returns the counts for llama-server's
    reply. Raises OptionError, UnknownIdError, CapabilityError or StorageError."""
    if not 0 <= slot < len(places):
        raise OptionError(
            f"a slot must be a number from 0 to {len(places) - 1}, but is {slot}."
        )
    kv = places[slot]
    if action == "erase":
        n_erased = len(kv.tokens) if _is_own(kv, owner) else 0
        if n_erased:
            places.truncate(kv, 0)
        return {"n_erased": n_erased}
    if llm.prefix_cache is None:
        raise CapabilityError(
            "only a model that keeps contexts on disk can save and restore slots, but this one keeps none; if it was"
            " loaded with context_store=0 (--context-store), load it with another value."
        )
    path, name = Path(fields["path"]), llm.prefix_cache.name
    if action == "save":
        return _save(llm, kv, path, owner, name, fields["most_bytes"])
    return _restore(places, kv, path, owner, name, llm.n_ctx())


def _is_own(kv: KvSequence, owner: str) -> bool:
    return kv.owner.partition(AT_SCALE)[0] == owner


def _save(
    llm: Llama, kv: KvSequence, path: Path, owner: str, name: str, most_bytes: int
) -> dict[str, Any]:
    if not _is_own(kv, owner) or not kv.tokens:
        raise OptionError(
            f"slot {kv.seq_id} holds no tokens from your requests; send a request first."
        )
    if kv.seq_id == 0 and llm.context.images.spans:
        raise OptionError(
            f"slot {kv.seq_id} contains images, which cannot be saved; save a slot with only text."
        )
    state = llm.context.read_state(kv.seq_id)
    about = json.dumps(
        {"name": name, "adapter": kv.owner.removeprefix(owner), "tokens": kv.tokens}
    ).encode()
    n_bytes = _HEADER.size + len(about) + len(state)
    if n_bytes > most_bytes:
        raise StorageError(
            f"the slot has {n_bytes:,} bytes, but only {most_bytes:,} are left for saved slots; remove some saved"
            " slots."
        )
    digest = xxhash.xxh3_128(about)
    digest.update(state)
    parts = (_HEADER.pack(MAGIC, digest.digest(), len(about)), about, state)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, parts, OWNER_ONLY)
    except OSError as error:
        raise StorageError(
            f"cannot write {path.name} ({error.strerror}); make room on the disk, or make its folder writable."
        ) from None
    return {"n_saved": len(kv.tokens), "n_written": n_bytes}


def _restore(
    places: KvSequences, kv: KvSequence, path: Path, owner: str, name: str, n_ctx: int
) -> dict[str, Any]:
    about, state = _read(path)
    tokens = about["tokens"]
    if about["name"] != name:
        raise OptionError(
            f"{path.name} was saved with a different model, build or load options; save it again."
        )
    if len(tokens) > n_ctx:
        raise OptionError(
            f"{path.name} has {len(tokens)} tokens, but the context has room for {n_ctx}; load the model with a"
            " longer context."
        )
    if not places.replace(kv, tokens, owner + about["adapter"], state):
        raise OptionError(
            f"{path.name} does not fit in the free part of the context; erase other slots."
        )
    return {"n_restored": len(tokens), "n_read": path.stat().st_size}


def _read(path: Path) -> tuple[Mapping[str, Any], bytes]:
    """Returns the description and llama.cpp's state from a file. Raises UnknownIdError
    if the file does not exist or cannot be read, and OptionError if it is damaged."""
    try:
        with open_regular(path, own=True) as file:
            content = file.read()
    except OSError:
        raise UnknownIdError(
            f"there is no saved slot {path.name!r:.80}; save one under this name first."
        ) from None
    if len(content) < _HEADER.size:
        raise OptionError(f"{path.name} {_NOT_WHOLE}")
    magic, digest, n_about = _HEADER.unpack_from(content)
    rest = content[_HEADER.size :]
    if magic != MAGIC or xxhash.xxh3_128_digest(rest) != digest:
        raise OptionError(f"{path.name} {_NOT_WHOLE}")
    return json.loads(rest[:n_about]), rest[n_about:]
