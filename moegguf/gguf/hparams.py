"""Reads the model's hyperparameters (GGUF key-values) that moegguf uses, and checks
that each is in its range.

Names follow llama.cpp's llama_hparams.
"""

from __future__ import annotations

from dataclasses import dataclass

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import KEPT_ITEMS, GgufFile, Value

MAX_LAYERS = 512  # the limit that is compiled into moegguf's release of llama.cpp
MAX_EXPERTS = 1024  # also compiled into llama.cpp
MAX_WIDTH = 1 << 24  # limit of n_embd, n_ff, n_head and similar sizes
MAX_CONTEXT = 1 << 27  # tokens; the longest context of a real model is 10 Mi


@dataclass(frozen=True)
class Hparams:
    """A model's hyperparameters. Tuples whose names begin with `n_` have one entry for
    each of the n_layer_all blocks."""

    arch: str
    n_layer_all: int  # number of all blocks in the file
    # Number of blocks without the multi-token-prediction blocks at the end.
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_expert: int
    n_expert_used: tuple[int, ...]
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_ff: tuple[int, ...]
    n_ff_exp: tuple[int, ...]
    key_length: int
    value_length: int
    is_mla: bool  # True: the model has multi-head latent attention
    # key length of a head, and as a second item the key length in sliding-window layers
    # if it is different
    key_lengths: tuple[int, ...]
    value_lengths: tuple[int, ...]


@dataclass(frozen=True)
class Keys:
    """Reads keys `ARCH.NAME` of a file, where ARCH is an architecture or another
    prefix, and checks the type and range of each value. Every error is a
    ModelFormatError that names the key."""

    arch: str
    file: GgufFile

    def fail(self, name: str, rule: str) -> ModelFormatError:
        """Returns the error for the key `name`, which breaks a rule."""
        return ModelFormatError(
            f"{self.file.name}: key '{self.arch}.{name}': {rule}; the file cannot be run: fetch it again."
        )

    def number(
        self, name: str, default: int | None = 0, low: int = 0, high: int = MAX_WIDTH
    ) -> int:
        """Returns the key's whole number. If the key is missing, returns `default`, or
        raises an error if `default` is None. Raises an error unless the number,
        including `default`, is from `low` to `high`."""
        value = self._value(name, default)
        if value is None:
            raise self.fail(name, f"is missing, but every {self.arch} model has it")
        return self._in_range(name, value, low, high)

    def _value(self, name: str, default: int | None) -> Value | None:
        key = f"{self.arch}.{name}"
        # The reader has skipped the array's elements.
        if key in self.file.arrays and key not in self.file.metadata:
            raise self.fail(
                name,
                f"must have at most {KEPT_ITEMS} numbers, but is an array of"
                f" {self.file.arrays[key]} strings or numbers",
            )
        return self.file.metadata.get(key, default)

    def _in_range(self, name: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"must be a whole number, but is {str(value)[:40]!r}")
        if not low <= value <= high:
            raise self.fail(name, f"must be from {low} to {high}, but is {value}")
        return value

    def per_layer(
        self, name: str, n_layer: int, high: int = MAX_WIDTH
    ) -> tuple[int, ...]:
        """Returns `n_layer` numbers from 0 to `high`: the key's array, or the key's
        single number repeated for every layer. Returns zeros for a missing key. Raises
        an error for an array of the wrong length."""
        value = self._value(name, 0)
        values = value if isinstance(value, tuple) else (value,) * n_layer
        if len(values) != n_layer:
            raise self.fail(
                name,
                f"must have a number for each of {n_layer} layers, but has {len(values)}",
            )
        return tuple(self._in_range(name, item, 0, high) for item in values)


def read_hparams(file: GgufFile) -> Hparams:
    """Reads the hyperparameters from a file's key-values.

    Raises ModelFormatError for a missing or invalid architecture name, and for a number
    that is missing, of the wrong kind or out of its range.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or not 0 < len(arch) <= 64 or not arch.isprintable():
        raise ModelFormatError(
            f"{file.name}: key 'general.architecture' must be a name of 1 to 64 printable characters, but"
            f" {'is missing' if arch is None else f'is {arch!r:.70}'}; give a language model in GGUF form."
        )
    keys = Keys(arch, file)
    n_layer = keys.number("block_count", None, 1, MAX_LAYERS)
    n_nextn = keys.number("nextn_predict_layers", 0, 0, n_layer - 1)
    n_embd = keys.number("embedding_length", None, 1)
    n_head = n_head_kv = keys.per_layer("attention.head_count", n_layer)
    if f"{arch}.attention.head_count_kv" in {*file.metadata, *file.arrays}:
        n_head_kv = keys.per_layer("attention.head_count_kv", n_layer)
    n_expert, n_expert_used = _read_expert_counts(keys, n_layer)
    head = n_embd // n_head[0] if n_head[0] else 0
    key_length = keys.number("attention.key_length", head)
    value_length = keys.number("attention.value_length", head)
    key_swa = keys.number("attention.key_length_swa", key_length)
    value_swa = keys.number("attention.value_length_swa", value_length)
    return Hparams(
        arch=arch,
        n_layer_all=n_layer,
        n_layer=n_layer - n_nextn,
        n_ctx_train=keys.number("context_length", None, 1, MAX_CONTEXT),
        n_embd=n_embd,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=keys.per_layer("feed_forward_length", n_layer),
        n_ff_exp=keys.per_layer("expert_feed_forward_length", n_layer),
        key_length=key_length,
        value_length=value_length,
        is_mla=keys.number("attention.key_length_mla") > 0,
        key_lengths=tuple(dict.fromkeys((key_length, key_swa))),
        value_lengths=tuple(dict.fromkeys((value_length, value_swa))),
    )


def _read_expert_counts(keys: Keys, n_layer: int) -> tuple[int, tuple[int, ...]]:
    n_expert = keys.number("expert_count", high=MAX_EXPERTS)
    used = keys.per_layer("expert_used_count", n_layer, MAX_EXPERTS)
    # dense models of the hunyuan family have these keys, and llama.cpp accepts them
    if n_expert <= 1 and keys.arch.startswith("hunyuan"):
        return 0, (0,) * n_layer
    if max(used) > n_expert:
        raise keys.fail(
            "expert_used_count", f"a token cannot use {max(used)} of {n_expert} experts"
        )
    if n_expert and not max(used):
        raise keys.fail(
            "expert_used_count",
            f"must be above zero in a model with {n_expert} experts",
        )
    groups = keys.number("expert_group_count", high=MAX_EXPERTS)
    if groups >= max(n_expert, 1):
        raise keys.fail(
            "expert_group_count",
            f"must be below {max(n_expert, 1)} in a model with {n_expert} experts, but is {groups}",
        )
    if groups > 1:
        if n_expert % groups:
            raise keys.fail(
                "expert_group_count",
                f"{n_expert} experts do not divide into {groups} groups",
            )
        keys.number("expert_group_used_count", 0, 1, groups - 1)
    return n_expert, used
