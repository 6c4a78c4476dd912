"""The model's hyperparameters (GGUF key-values), read and checked before llama.cpp asserts on them.

Names follow llama.cpp's llama_hparams.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moegguf.errors import ModelFormatError
from moegguf.gguf.reader import GgufFile, TensorInfo

# llama.cpp's compiled-in limits at the pinned version
MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_WIDTH = 1 << 24  # n_embd, n_ff, n_head and the like
MAX_CONTEXT = 1 << 27  # the longest real one is 10 Mi
MAX_GATING = 4  # of enum llama_expert_gating_func_type; 0 is the architecture's own
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
# llama.cpp asserts n_rot == n_embd_head_k for these
FULLY_ROTATED = {
    "arctic", "cohere2moe", "dbrx", "deepseek", "dots1", "ernie4_5", "ernie4_5-moe", "exaone-moe", "granite",
    "granitemoe", "grok", "grovemoe", "hunyuan-moe", "hy_v3", "llada-moe", "llama4", "mellum", "mistral3", "olmoe",
    "paddleocr", "qwen2moe", "qwen3moe", "qwen3vlmoe", "rnd1", "smallthinker",
}  # fmt: skip
# llama.cpp has no rotary embedding for these
UNROTATED = {
    "bloom", "glm5-next", "gpt2", "jais", "jamba", "kimi-k3", "kimi-linear", "mamba", "mamba2", "mpt", "nemotron_h",
    "nemotron_h_moe", "refact", "t5", "t5encoder",
}  # fmt: skip
# {key: (least, most)} of fractions; others must be finite. A zero is what writers put where a model has no such part.
FRACTIONS = {
    "attention.layer_norm_epsilon": (0.0, 1.0),
    "attention.layer_norm_rms_epsilon": (0.0, 1.0),
    "attention.group_norm_epsilon": (0.0, 1.0),
    "hyper_connection.epsilon": (0.0, 1.0),
    "rope.freq_base": (1e-6, 1e30),
    "rope.freq_base_swa": (1e-6, 1e30),
    "rope.scaling.factor": (0.0, 1e9),
    "rope.scale_linear": (0.0, 1e9),
}
UNBOUNDED = frozenset({"kda.gate_lower_bound"})  # minus infinity: no bound
# {key: (least, most)} of whole numbers that have no use of their own here; others are at most MAX_WIDTH
WHOLE = {
    "context_length": (1, MAX_CONTEXT),
    "expert_gating_func": (0, MAX_GATING),
    "full_attention_interval": (1, MAX_LAYERS),
    "attention.sliding_window": (0, 1 << 30),
    "rope.scaling.original_context_length": (0, (1 << 31) - 1),
    "attention.indexer.top_k": (0, (1 << 31) - 1),
    "pooling_type": (-1, (1 << 32) - 1),
    "decoder_start_token_id": (-1, (1 << 32) - 1),
    "attention.key_length": (1, MAX_WIDTH),
    "attention.value_length": (1, MAX_WIDTH),
}


@dataclass(frozen=True)
class Hparams:
    """`n_layer_all` counts every block in the file; `n_layer` leaves out the multi-token-prediction blocks at its end,
    which are not run. Per-layer tuples have n_layer_all entries."""

    arch: str
    n_layer_all: int
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
    is_mla: bool
    n_rot: int
    key_lengths: tuple[int, ...]  # of all layers, and of sliding-window layers where that is another
    value_lengths: tuple[int, ...]


class Keys:
    """Typed access to the keys of one architecture; every error is a ModelFormatError naming the key."""

    def __init__(self, arch: str, file: GgufFile) -> None:
        self.arch, self.metadata, self._file = arch, file.metadata, file

    def fail(self, name: str, rule: str) -> ModelFormatError:
        """The error of a key that breaks a rule."""
        return self._file.key_error(f"{self.arch}.{name}", rule, ":")

    def check_all(self) -> None:
        """Every number of the architecture must be one that can be computed with: in its range, finite."""
        start = f"{self.arch}."
        for key, value in self.metadata.items():
            if not key.startswith(start) or isinstance(value, bool | str):
                continue
            name = key.removeprefix(start)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, float):
                    low, high = FRACTIONS.get(name, (-math.inf, math.inf))
                    is_finite = math.isfinite(item) or (name in UNBOUNDED and not math.isnan(item))
                    if not is_finite or not low <= item <= high:
                        allowed = f"from {low:g} to {high:g}" if name in FRACTIONS else "a finite number"
                        raise self.fail(name, f"must be {allowed}, but is {item:g}")
                elif not isinstance(value, tuple):
                    self._in_range(name, item, *WHOLE.get(name, (-MAX_WIDTH, MAX_WIDTH)))

    def number(self, name: str, default: int | None = 0, low: int = 0, high: int = MAX_WIDTH) -> int:
        """A whole number from low to high; default: where the key is missing, None where it must not be."""
        value = self.metadata.get(f"{self.arch}.{name}", default)
        if value is None:
            raise self.fail(name, f"is missing, but every {self.arch} model has it")
        return self._in_range(name, value, low, high)

    def _in_range(self, name: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"must be a whole number, but is {str(value)[:40]!r}")
        if not low <= value <= high:
            raise self.fail(name, f"must be from {low} to {high}, but is {value}")
        return value

    def per_layer(self, name: str, n_layer: int, high: int = MAX_WIDTH) -> tuple[int, ...]:
        """One number for all layers, or an array with one per layer; n_layer numbers either way, 0 without the key."""
        value = self.metadata.get(f"{self.arch}.{name}", 0)
        values = value if isinstance(value, tuple) else (value,) * n_layer
        if len(values) != n_layer:
            raise self.fail(name, f"has {len(values)} numbers for {n_layer} layers")
        return tuple(self._in_range(name, item, 0, high) for item in values)


def read_hparams(file: GgufFile) -> Hparams:
    """The hyperparameters in a file's key-values.

    Raises ModelFormatError for a number that is missing, of the wrong kind, or that llama.cpp would abort on.
    """
    arch, metadata = file.metadata.get("general.architecture"), file.metadata
    if not isinstance(arch, str) or not 0 < len(arch) <= 64 or not arch.isprintable():
        raise ModelFormatError(
            f"{file.name}: key 'general.architecture' must name the architecture, but is {str(arch)[:40]!r};"
            " give a language model in GGUF form."
        )
    keys = Keys(arch, file)
    keys.check_all()
    n_layer = keys.number("block_count", None, 1, MAX_LAYERS)
    n_nextn = keys.number("nextn_predict_layers", 0, 0, n_layer - 1)
    n_embd = keys.number("embedding_length", None, 1)
    n_head = n_head_kv = keys.per_layer("attention.head_count", n_layer)
    if f"{arch}.attention.head_count_kv" in metadata:
        n_head_kv = keys.per_layer("attention.head_count_kv", n_layer)
    if max(n_head) > n_embd:
        raise keys.fail("attention.head_count", f"{max(n_head)} heads are more than the {n_embd} numbers they share")
    for il, (heads, of) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if of and heads % of:
            rule = f"layer {il} has {heads} heads, not a multiple of its {of} KV heads"
            raise keys.fail("attention.head_count_kv", rule)
    n_expert, n_expert_used = _read_expert_counts(keys, n_layer)
    scaling = metadata.get(f"{arch}.rope.scaling.type", "linear")
    if scaling not in ROPE_SCALINGS:
        raise keys.fail("rope.scaling.type", f"must be one of {', '.join(ROPE_SCALINGS)}, but is {str(scaling)[:40]!r}")
    head = n_embd // n_head[0] if n_head[0] else 0
    key_length, value_length = (keys.number(f"attention.{name}_length", head) for name in ("key", "value"))
    key_swa = keys.number("attention.key_length_swa", key_length)
    value_swa = keys.number("attention.value_length_swa", value_length)
    n_rot = keys.number("rope.dimension_count", key_length)
    return Hparams(
        arch=arch,
        n_layer_all=n_layer,
        n_layer=n_layer - n_nextn,
        n_ctx_train=keys.number("context_length", None, *WHOLE["context_length"]),
        n_embd=n_embd,
        n_expert=n_expert,
        n_expert_used=n_expert_used,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=keys.per_layer("feed_forward_length", n_layer),
        n_ff_exp=keys.per_layer("expert_feed_forward_length", n_layer),
        key_length=key_length,
        value_length=value_length,
        is_mla=_check_lengths(keys, key_length, key_swa, n_rot, max(n_head_kv)),
        n_rot=n_rot,
        key_lengths=tuple(dict.fromkeys((key_length, key_swa))),
        value_lengths=tuple(dict.fromkeys((value_length, value_swa))),
    )


def _check_lengths(keys: Keys, key_length: int, key_swa: int, n_rot: int, n_head_kv: int) -> bool:
    """Checks the lengths of K rows and their rotated part; returns whether the model has latent attention.

    Numbers are rotated in pairs, at most all of a head; with none llama.cpp computes for ever.
    """
    n_swa = keys.number("rope.dimension_count_swa")
    for name, n in (("rope.dimension_count", n_rot), ("rope.dimension_count_swa", n_swa)):
        is_zero = n == 0 and f"{keys.arch}.{name}" in keys.metadata
        if keys.arch not in UNROTATED and (n % 2 or is_zero):
            raise keys.fail(name, f"must be even and above zero, but is {n}")
    if n_swa > key_swa:
        rule = f"{n_swa} is more than the length of a head in sliding-window layers, {key_swa}"
        raise keys.fail("rope.dimension_count_swa", rule)
    mla_k, mla_v = (keys.number(f"attention.{name}_length_mla") for name in ("key", "value"))
    of_head, n_latent = mla_k or key_length, keys.number("attention.kv_lora_rank") + n_rot
    if (mla_k == 0) != (mla_v == 0):
        raise keys.fail("attention.key_length_mla", "needs value_length_mla beside it, both above zero")
    if n_rot > key_length or (keys.arch in FULLY_ROTATED and n_rot != key_length):
        raise keys.fail("rope.dimension_count", f"{n_rot} does not fit the key length, {key_length}")
    if (mla_k or keys.arch == "deepseek2") and n_rot >= of_head:
        raise keys.fail("attention.key_length", f"{of_head} leaves nothing beside the {n_rot} rotated dimensions")
    if mla_k and (key_length != n_latent or n_head_kv != 1):
        rule = f"must be {n_latent} (kv_lora_rank + rope.dimension_count) with 1 KV head, but is"
        raise keys.fail("attention.key_length", f"{rule} {key_length} with {n_head_kv}")
    return mla_k > 0


def _read_expert_counts(keys: Keys, n_layer: int) -> tuple[int, tuple[int, ...]]:
    n_expert = keys.number("expert_count", high=MAX_EXPERTS)
    used = keys.per_layer("expert_used_count", n_layer, MAX_EXPERTS)
    if n_expert <= 1 and keys.arch.startswith("hunyuan"):  # dense models of the family, which llama.cpp accepts
        return 0, (0,) * n_layer
    if max(used) > n_expert:
        raise keys.fail("expert_used_count", f"a token cannot use {max(used)} of {n_expert} experts")
    if n_expert and not max(used):
        raise keys.fail("expert_used_count", f"must be above zero in a model with {n_expert} experts")
    groups = keys.number("expert_group_count", high=MAX_EXPERTS)
    if groups >= max(n_expert, 1):
        raise keys.fail("expert_group_count", f"{groups} groups are too many for {n_expert} experts")
    if groups > 1:
        if n_expert % groups:
            raise keys.fail("expert_group_count", f"{n_expert} experts do not divide into {groups} groups")
        keys.number("expert_group_used_count", 0, 1, groups - 1)
    return n_expert, used


def check_attention(tensors: Mapping[str, TensorInfo], hparams: Hparams, first: GgufFile) -> None:
    """Raises ModelFormatError for Q, K or V matrices whose rows are not heads x length, by the metadata.

    Q may have twice the rows (an output gate, as in qwen3next). Where sliding-window layers have lengths of their own,
    each length must be that of a layer. Models with latent attention are left to llama.cpp. first: the first file.
    """
    hp = hparams
    if hp.is_mla or hp.n_head[0] == 0:
        return
    for name, n_heads, lengths in (
        ("attn_q", hp.n_head, hp.key_lengths),
        ("attn_k", hp.n_head_kv, hp.key_lengths),
        ("attn_v", hp.n_head_kv, hp.value_lengths),
    ):
        used: set[int] = set()
        complete = True  # some models have no V in layers of one length, and take K
        for il in range(hp.n_layer):
            tensor = tensors.get(f"blk.{il}.{name}.weight")
            if tensor is None or len(tensor.shape) != 2 or n_heads[il] == 0:
                complete = False
                continue
            n_rows, factors = tensor.shape[1], (1, 2) if name == "attn_q" else (1,)
            found = {length for length in lengths if n_rows in [factor * n_heads[il] * length for factor in factors]}
            used |= found
            if not found and len(lengths) == 1:
                rule = f"{n_heads[il]} heads of {lengths[0]} make {n_heads[il] * lengths[0]}"
                raise first.tensor_error(tensor, f"has {n_rows} rows, but {rule}")
            last = tensor
        if complete and used and (unused := set(lengths) - used):
            raise first.tensor_error(last, f"has {last.shape[1]} rows, but no layer has heads of {min(unused)}")
