"""Functions that damage a header. Each takes the parts of a file and a random
generator, and returns changed parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

from tools.mutants.header import ARRAY, FORMATS, STRING, Header, Item, KeyValue

WHOLE = [0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 31, 32, 33, 63, 64, 65, 96, 100, 127, 128, 129, 255, 256, 257, 511, 512,
         513, 1000, 1024, 4096, 10007, 65535, 65536, 1 << 20, (1 << 24) + 1, 1 << 28, (1 << 31) - 1, 1 << 31,
         (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1, -1, -2, -128, -(1 << 31)]  # fmt: skip
REAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e-12, -1e-5, 1e-38, 1e-45, 1e5, 1e10, 1e30, 3.4e38, -3.4e38, 8.0, 10000.0,
        math.inf, -math.inf, math.nan]  # fmt: skip
TEXTS = [b"", b"none", b"no_vocab", b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"test", b"gemma4",
         b"hybriddna", b"whitespace", b"default", b"llama3", b"llama-bpe", b"qwen2", b"deepseek-llm", b"tekken",
         b"kimi-k2", b"jina-v2-en", b"linear", b"yarn", b"longrope", b"chat", b"\0", b"\xff", b"x" * 5000]  # fmt: skip
ARCHS = [b"qwen2moe", b"qwen3moe", b"llama", b"deepseek2", b"qwen3next", b"gpt-oss", b"llama4", b"glm4moe", b"bert",
         b"t5", b"rwkv7", b"mamba", b"clip", b"llada-moe", b"olmoe", b"phimoe", b"dbrx", b"grok", b"jamba"]  # fmt: skip
# Keys that GGUF files may have, without the prefix. Adding a key reaches code that a
# file's own keys do not reach.
KEYS = """
context_length embedding_length embedding_length_out block_count leading_dense_block_count feed_forward_length
expert_feed_forward_length expert_shared_feed_forward_length expert_chunk_feed_forward_length use_parallel_residual
tensor_data_layout expert_count expert_used_count experts_per_group expert_shared_count expert_group_count
expert_group_used_count expert_weights_scale expert_weights_norm expert_gating_func expert_group_scale
moe_every_n_layers moe_latent_size nextn_predict_layers num_deepstack_layers pooling_type logit_scale
decoder_start_token_id decoder_block_count attn_logit_softcapping router_logit_softcapping final_logit_softcapping
swin_norm rescale_every_n_layers time_mix_extra_dim time_decay_extra_dim residual_scale embedding_scale
token_shift_count interleave_moe_layer_step full_attention_interval attention.head_count attention.head_count_kv
attention.max_alibi_bias attention.clamp_kqv attention.key_length attention.value_length
attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.group_norm_epsilon
attention.group_norm_groups attention.causal attention.q_lora_rank attention.kv_lora_rank
attention.sliding_window attention.scale attention.output_scale attention.temperature_length
attention.temperature_scale attention.key_length_mla attention.value_length_mla attention.key_length_swa
attention.value_length_swa attention.sliding_window_pattern attention.indexer.head_count
attention.indexer.key_length attention.indexer.top_k attention.shared_kv_layers rope.dimension_count
rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear
rope.scaling.type rope.scaling.factor rope.scaling.attn_factor rope.scaling.original_context_length
rope.scaling.finetuned rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor rope.scaling.yarn_attn_factor
rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow ssm.conv_kernel ssm.inner_size ssm.state_size
ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms kda.head_dim wkv.head_size shortconv.l_cache vocab_size
""".split()
TOKENIZER_KEYS = """
model pre token_type token_type_count scores merges bos_token_id eos_token_id eot_token_id eom_token_id
unknown_token_id seperator_token_id padding_token_id mask_token_id add_bos_token add_eos_token add_sep_token
add_space_prefix remove_extra_whitespaces precompiled_charsmap suppress_tokens fim_pre_token_id fim_suf_token_id
fim_mid_token_id fim_pad_token_id
""".split()
PROJECTOR_KEYS = """
projector_type has_audio_encoder has_vision_encoder has_gen_audio_encoder use_gelu use_silu vision.embedding_length
vision.feed_forward_length vision.block_count vision.projection_dim vision.attention.head_count
vision.attention.head_count_kv vision.attention.head_dim vision.attention.layer_norm_epsilon vision.feature_layer
vision.projector_type vision.image_size vision.image_min_pixels vision.image_max_pixels vision.preproc_min_tiles
vision.preproc_max_tiles vision.preproc_image_size vision.patch_size vision.image_mean vision.image_std
vision.projector.scale_factor vision.projector.query_side vision.projector.window_side
vision.projector.spatial_offsets vision.spatial_merge_size vision.swiglu_clamp vision.mm_patch_merge_type
vision.image_grid_pinpoints vision.n_wa_pattern vision.wa_layer_indexes vision.wa_pattern_mode vision.window_size
minicpmv_version minicpmv_query_num vision.sam.head_count vision.sam.block_count vision.sam.embedding_length
vision.expert_used_count
""".split()
PROJECTOR_KINDS = [b"mlp", b"mlp_norm", b"ldp", b"ldpv2", b"resampler", b"adapter", b"qwen2vl_merger",
                   b"qwen2.5vl_merger", b"qwen3vl_merger", b"gemma3", b"gemma4v", b"idefics3", b"pixtral",
                   b"internvl", b"llama4", b"lfm2", b"kimivl", b"glm4v", b"janus_pro", b"cogvlm"]  # fmt: skip

Mutation = Callable[[Header, Random], Header]


def _scalar(gguf_type: int, random: Random) -> Item:
    if gguf_type == STRING:
        return random.choice(TEXTS + ARCHS)
    if FORMATS[gguf_type] in "fd":
        return (
            random.choice(REAL) if random.random() < 0.8 else random.uniform(-1e6, 1e6)
        )
    if FORMATS[gguf_type] == "?":
        return random.choice((0, 1))
    return random.choice(WHOLE) if random.random() < 0.8 else random.randint(0, 300)


def _near(value: Item, gguf_type: int, random: Random) -> Item:
    """Returns a whole number near `value`, as a faulty converter may write.

    A value that is not a whole number is replaced with a random value of the same type.
    """
    if isinstance(value, bytes) or FORMATS[gguf_type] in "fd?":
        return _scalar(gguf_type, random)
    return max(
        0,
        random.choice(
            (
                value + 1,
                value - 1,
                value * 2,
                value // 2,
                value * 3,
                value + 32,
                value - 32,
            )
        ),
    )


def _pick(header: Header, random: Random) -> int:
    return random.randrange(len(header.pairs))


def change_value(header: Header, random: Random) -> Header:
    """Replaces one key's value with a value of the same type. An array's items are
    changed, added, removed, shuffled or replaced with items of another type."""
    index = _pick(header, random)
    pair = header.pairs[index]
    if isinstance(pair.value, list):
        return header.with_pair(index, _changed_array(pair, random))
    change = (
        _near(pair.value, pair.gguf_type, random)
        if random.random() < 0.4
        else _scalar(pair.gguf_type, random)
    )
    return header.with_pair(index, replace(pair, value=change))


def _changed_array(pair: KeyValue, random: Random) -> KeyValue:
    assert isinstance(pair.value, list) and pair.item_type is not None
    items = list(pair.value)
    kind = random.randrange(5)
    if kind == 0:
        items = items[
            : random.choice((0, 1, 2, len(items) // 2, max(0, len(items) - 1)))
        ]
    elif kind == 1:
        items += [
            _scalar(pair.item_type, random) for _ in range(random.choice((1, 2, 100)))
        ]
    elif kind == 2 and items:
        for _ in range(random.choice((1, 3, len(items)))):
            items[random.randrange(len(items))] = _scalar(pair.item_type, random)
    elif kind == 3:
        random.shuffle(items)
    else:
        item_type = random.choice([*FORMATS, STRING])
        return replace(
            pair, item_type=item_type, value=[_scalar(item_type, random) for _ in items]
        )
    return replace(pair, value=items)


def change_type(header: Header, random: Random) -> Header:
    """Replaces one key's value with a value of random type: a number, a string, or an
    array of 0 to 6 equal items."""
    index = _pick(header, random)
    pair = header.pairs[index]
    old = pair.value[0] if isinstance(pair.value, list) and pair.value else pair.value
    gguf_type = random.choice([*FORMATS, STRING])
    value = _scalar(gguf_type, random)
    if (
        isinstance(old, int | float)
        and gguf_type != STRING
        and random.random() < 0.5
        and math.isfinite(old)
    ):
        value = float(old) if FORMATS[gguf_type] in "fd" else int(old)
    if random.random() < 0.5:
        return header.with_pair(index, KeyValue(pair.key, gguf_type, value))
    return header.with_pair(
        index,
        KeyValue(pair.key, ARRAY, [value] * random.choice((0, 1, 2, 4, 6)), gguf_type),
    )


def remove_pair(header: Header, random: Random) -> Header:
    """Removes one key with its value."""
    return header.with_pair(_pick(header, random), None)


def add_pair(header: Header, random: Random) -> Header:
    """Adds a random value under a key that GGUF files may have. The key's old value, if
    any, is removed."""
    arch = next(
        (p.value for p in header.pairs if p.key == "general.architecture"), None
    )
    arch = arch if isinstance(arch, bytes) else b"llama"
    if arch == b"clip":
        key = f"clip.{random.choice(PROJECTOR_KEYS)}"
    elif random.random() < 0.3:
        key = f"tokenizer.ggml.{random.choice(TOKENIZER_KEYS)}"
    else:
        key = f"{arch.decode(errors='replace')}.{random.choice(KEYS)}"
    gguf_type = random.choice((4, 4, 4, 5, 6, 6, 7, 10, STRING))
    value = _scalar(gguf_type, random)
    pair = KeyValue(key, gguf_type, value)
    if random.random() < 0.15:
        pair = KeyValue(
            key,
            ARRAY,
            [_scalar(gguf_type, random) for _ in range(random.choice((0, 2, 4, 6)))],
            gguf_type,
        )
    kept = tuple(p for p in header.pairs if p.key != key)
    return replace(header, pairs=(*kept, pair))


def swap_values(header: Header, random: Random) -> Header:
    """Swaps the values of two keys."""
    first = header.pairs[_pick(header, random)]
    second = header.pairs[_pick(header, random)]
    names = {first.key: second, second.key: first}
    return replace(
        header,
        pairs=tuple(
            replace(names[p.key], key=p.key) if p.key in names else p
            for p in header.pairs
        ),
    )


def change_kind(header: Header, random: Random) -> Header:
    """Replaces the name of the tokenizer model or of the pre-tokenizer, and the kind of
    projector, if there is one."""
    key = random.choice(
        ("tokenizer.ggml.model", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    )
    kinds = {key: TEXTS, "clip.projector_type": PROJECTOR_KINDS}
    pairs = tuple(
        replace(p, value=random.choice(kinds[p.key])) if p.key in kinds else p
        for p in header.pairs
    )
    return replace(header, pairs=pairs)


def change_tensor_type(header: Header, random: Random) -> Header:
    """Changes the ggml type of one tensor, or of all tensors whose names contain a part
    such as "ffn_up"."""
    index = random.randrange(len(header.tensors))
    raw_type = random.randrange(44)
    if random.random() < 0.3:
        kind = header.tensors[index].name.rpartition(".")[0].rpartition(".")[2]
        tensors = tuple(
            replace(t, raw_type=raw_type) if kind in t.name else t
            for t in header.tensors
        )
        return replace(header, tensors=tensors)
    return header.with_tensor(index, replace(header.tensors[index], raw_type=raw_type))


def change_shape(header: Header, random: Random) -> Header:
    """Changes one dimension of a tensor, adds or removes a dimension, or shuffles the
    dimensions.

    Returns the header unchanged if the tensor would have 2^24 elements or more.
    """
    index = random.randrange(len(header.tensors))
    tensor = header.tensors[index]
    shape = list(tensor.shape)
    at = random.randrange(len(shape))
    kind = random.randrange(6)
    if kind < 3:
        ne = shape[at]
        shape[at] = random.choice(
            (ne + 1, ne - 1, ne * 2, ne // 2, 1, ne + 32, max(1, ne - 32), 0, 3)
        )
    elif kind == 3:
        shape = [*shape, random.choice((1, 2))][:4]
    elif kind == 4 and len(shape) > 1:
        shape.pop(at)
    else:
        random.shuffle(shape)
    return (
        header.with_tensor(index, replace(tensor, shape=tuple(shape)))
        if math.prod(shape) < 1 << 24
        else header
    )


def remove_tensor(header: Header, random: Random) -> Header:
    """Removes one tensor."""
    return header.with_tensor(random.randrange(len(header.tensors)), None)


def rename_tensor(header: Header, random: Random) -> Header:
    """Changes one letter of a tensor's name, or removes a tensor and renames another
    one to the removed name."""
    first = random.randrange(len(header.tensors))
    second = random.randrange(len(header.tensors))
    name = header.tensors[second].name
    if random.random() < 0.5 or first == second:
        at = random.randrange(len(name))
        return header.with_tensor(
            second,
            replace(header.tensors[second], name=name[:at] + "z" + name[at + 1 :]),
        )
    renamed = header.with_tensor(first, replace(header.tensors[first], name=name))
    return renamed.with_tensor(second, None)


# each mutation with its relative frequency
MUTATIONS: list[tuple[Mutation, int]] = [
    (change_value, 30), (change_type, 8), (remove_pair, 6), (add_pair, 20), (swap_values, 4), (change_kind, 5),
    (change_tensor_type, 15), (change_shape, 8), (remove_tensor, 4), (rename_tensor, 4),
]  # fmt: skip


def mutate(header: Header, seed: int) -> tuple[Header, str]:
    """Returns the header after one to three mutations, and a description of the
    mutations. Both depend only on the header and the seed."""
    random = Random(seed)
    mutations, weights = zip(*MUTATIONS, strict=True)
    changed = header
    names = []
    for mutation in random.choices(
        mutations, weights, k=random.choice((1, 1, 1, 1, 2, 3))
    ):
        changed = mutation(changed, random)
        names.append(mutation.__name__)
    return (
        changed,
        f"{'+'.join(names)}: {'; '.join(_differences(header, changed))[:400]}",
    )


def _differences(old: Header, new: Header) -> list[str]:
    """Returns a line for each key and tensor that differs: its name, the old value and
    the new value."""
    parts = [
        {p.key: _show(p) for p in header.pairs}
        | {t.name: f"{t.shape} type {t.raw_type}" for t in header.tensors}
        for header in (old, new)
    ]
    names = parts[0] | parts[1]
    return [
        f"{n}: {parts[0].get(n)} -> {parts[1].get(n)}"
        for n in names
        if parts[0].get(n) != parts[1].get(n)
    ]


def _show(pair: KeyValue) -> str:
    if isinstance(pair.value, list):
        return f"type {pair.item_type} x {len(pair.value)} {str(pair.value[:8])[:60]}"
    return f"type {pair.gguf_type} {str(pair.value)[:60]}"
