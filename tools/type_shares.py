"""Prints each tensor type's share of the bytes of widely used Mixture-of-Experts GGUFs.

Usage: python -m tools.type_shares [--files]
The types of a file's experts come from a published header or log, or from the quantiser of the pinned llama.cpp. The
quantiser computes them for the published shape of the model, and replaces a type whose blocks do not divide a row.
`--files` prints a line for each file, with its source, instead of the table of types.
"""

from __future__ import annotations

import argparse
import ctypes as c
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moegguf.native import library
from tools.width_check import F32, Ggml, silence

FTYPES = {
    "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ3_M": 27, "IQ2_S": 28,
    "IQ2_M": 29, "IQ4_XS": 30, "IQ1_M": 31, "MXFP4": 38, "NVFP4": 39,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The shape of a model, from its model card. Latent attention is treated as plain
    attention with these heads."""

    arch: str
    n_embd: int
    n_layer: int
    n_dense: int  # number of leading layers without experts
    n_head: int
    n_head_kv: int
    d_head: int
    n_expert: int
    n_ff: int  # width of an expert
    # Width of the shared expert in each layer with experts; 0: no shared expert.
    n_ff_shared: int
    n_ff_dense: int
    n_vocab: int
    matrices: tuple[str, ...] = ("gate", "up", "down")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the name of each matrix, and its shape in ggml's order of
        dimensions."""
        yield "token_embd.weight", (self.n_embd, self.n_vocab)
        yield "output.weight", (self.n_embd, self.n_vocab)
        for il in range(self.n_layer):
            q, kv = self.n_head * self.d_head, self.n_head_kv * self.d_head
            yield f"blk.{il}.attn_q.weight", (self.n_embd, q)
            yield f"blk.{il}.attn_k.weight", (self.n_embd, kv)
            yield f"blk.{il}.attn_v.weight", (self.n_embd, kv)
            yield f"blk.{il}.attn_output.weight", (q, self.n_embd)
            if il < self.n_dense:
                yield from self._feed_forward(il, "", self.n_ff_dense)
                continue
            if self.n_ff_shared:
                yield from self._feed_forward(il, "_shexp", self.n_ff_shared)
            yield from self._feed_forward(il, "_exps", self.n_ff, self.n_expert)

    def _feed_forward(
        self, il: int, suffix: str, n_ff: int, *n_expert: int
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        for matrix in self.matrices:
            rows = (n_ff, self.n_embd) if matrix == "down" else (self.n_embd, n_ff)
            yield f"blk.{il}.ffn_{matrix}{suffix}.weight", (*rows, *n_expert)


SHAPES = {
    "Qwen3-30B-A3B": Shape("qwen3moe", 2048, 48, 0, 32, 4, 128, 128, 768, 0, 0, 151936),
    "Qwen3-235B-A22B": Shape(
        "qwen3moe", 4096, 94, 0, 64, 4, 128, 128, 1536, 0, 0, 151936
    ),
    "Qwen3-Next-80B-A3B": Shape(
        "qwen3next", 2048, 48, 0, 16, 2, 256, 512, 512, 512, 0, 151936
    ),
    "Qwen3.6-35B-A3B": Shape(
        "qwen35moe", 2048, 40, 0, 32, 4, 256, 256, 512, 512, 0, 248320
    ),
    "gpt-oss-20b": Shape("gpt-oss", 2880, 24, 0, 64, 8, 64, 32, 2880, 0, 0, 201088),
    "gpt-oss-120b": Shape("gpt-oss", 2880, 36, 0, 64, 8, 64, 128, 2880, 0, 0, 201088),
    "GLM-4.5-Air": Shape(
        "glm4moe", 4096, 46, 1, 96, 8, 128, 128, 1408, 1408, 10944, 151552
    ),
    "GLM-4.7-Flash": Shape(
        "deepseek2", 2048, 47, 1, 20, 1, 256, 64, 1536, 1536, 10240, 154880
    ),
    "GLM-5.3": Shape(
        "deepseek2", 6144, 79, 3, 64, 1, 256, 256, 2048, 2048, 12288, 154880
    ),
    "GLM-5.3-Flash": Shape(
        "deepseek2", 4096, 45, 3, 64, 1, 256, 288, 2048, 2048, 12288, 154880
    ),
    "DeepSeek-V3": Shape(
        "deepseek2", 7168, 61, 3, 128, 1, 128, 256, 2048, 2048, 18432, 129280
    ),
    "Kimi-K2": Shape(
        "deepseek2", 7168, 61, 1, 64, 1, 128, 384, 2048, 2048, 18432, 163840
    ),
    "MiniMax-M2": Shape("minimax-m2", 3072, 62, 0, 48, 8, 128, 256, 1536, 0, 0, 200064),
    "Llama-4-Scout": Shape(
        "llama4", 5120, 48, 0, 40, 8, 128, 16, 8192, 8192, 0, 202048
    ),
    "Mixtral-8x7B": Shape("llama", 4096, 32, 0, 32, 8, 128, 8, 14336, 0, 0, 32000),
    "gemma-4-26B-A4B": Shape(
        "gemma4", 2816, 30, 0, 16, 8, 256, 128, 704, 2112, 0, 262144
    ),
    "granite-4.0-h-small": Shape(
        "granitehybrid", 4096, 40, 0, 32, 8, 128, 72, 768, 1536, 0, 100352
    ),
    "LFM2-8B-A1B": Shape("lfm2moe", 2048, 24, 2, 32, 8, 64, 32, 1792, 0, 7168, 65536),
    "Nemotron-3-Nano-30B-A3B": Shape(
        "nemotron_h_moe",
        2688,
        23,
        0,
        32,
        2,
        128,
        128,
        1856,
        3712,
        0,
        131072,
        ("up", "down"),
    ),
}

# A published header: {type: number of tensors} for the experts' gate, up and down
# matrices, and one type for all other tensors.
Header = tuple[dict[str, int], dict[str, int], dict[str, int], str]


@dataclass(frozen=True, eq=False)
class File:
    """A GGUF file. `made` is its published header, or the name of the quantiser's
    preset that computes its types."""

    name: str
    shape: str
    source: str
    made: str | Header


RULES = "computed"
FILES = (
    File("Qwen3-30B-A3B Q4_K_M", "Qwen3-30B-A3B", "log", "Q4_K_M"),
    File("Qwen3-30B-A3B UD-Q4_K_XL", "Qwen3-30B-A3B", "log", (
        {"q4_K": 48}, {"q4_K": 48}, {"q4_K": 1, "q5_K": 37, "q6_K": 10}, "q4_K")),
    File("Qwen3-30B-A3B-128K UD-Q5_K_XL", "Qwen3-30B-A3B", "log", (
        {"q5_K": 48}, {"q5_K": 48}, {"q6_K": 48}, "q5_K")),
    File("Qwen3-30B-A3B Q8_0", "Qwen3-30B-A3B", RULES, "Q8_0"),
    File("Qwen3-30B-A3B Q4_0", "Qwen3-30B-A3B", RULES, "Q4_0"),
    File("Qwen3-30B-A3B IQ4_XS", "Qwen3-30B-A3B", RULES, "IQ4_XS"),
    File("Qwen3-Coder-30B-A3B Q3_K_M", "Qwen3-30B-A3B", RULES, "Q3_K_M"),
    File("Qwen3-VL-30B-A3B UD-IQ3_XXS", "Qwen3-30B-A3B", "log", (
        {"iq3_xxs": 45, "iq3_s": 3}, {"iq3_xxs": 44, "iq3_s": 4}, {"iq3_s": 35, "iq4_xs": 13}, "iq4_xs")),
    File("Qwen3-235B-A22B-2507 UD-Q4_K_XL", "Qwen3-235B-A22B", "log", (
        {"q4_K": 94}, {"q4_K": 94}, {"q4_K": 44, "q5_K": 40, "q6_K": 10}, "q4_K")),
    File("Qwen3-235B-A22B Q4_K_M", "Qwen3-235B-A22B", "log", "Q4_K_M"),
    File("Qwen3-235B-A22B Q3_K_S", "Qwen3-235B-A22B", "log", "Q3_K_S"),
    File("Qwen3-Next-80B-A3B Q4_K_M", "Qwen3-Next-80B-A3B", RULES, "Q4_K_M"),
    File("Qwen3-Next-80B-A3B IQ1_M", "Qwen3-Next-80B-A3B", RULES, "IQ1_M"),
    File("Qwen3-Coder-Next MXFP4_MOE", "Qwen3-Next-80B-A3B", RULES, "MXFP4"),
    File("Qwen3.5-35B-A3B UD-Q4_K_XL", "Qwen3.6-35B-A3B", "log", (
        {"q4_K": 39, "q5_K": 1}, {"q4_K": 39, "q5_K": 1}, {"q5_K": 39, "q6_K": 1}, "q8_0")),
    File("Qwen3.6-35B-A3B Q4_K_M", "Qwen3.6-35B-A3B", RULES, "Q4_K_M"),
    File("Qwen3.6-35B-A3B UD-IQ2_M", "Qwen3.6-35B-A3B", "header", (
        {"iq2_xxs": 40}, {"iq2_xxs": 40}, {"iq3_xxs": 37, "iq4_xs": 3}, "q5_K")),
    File("Qwen3.6-35B-A3B, 3 bits a weight", "Qwen3.6-35B-A3B", "header", (
        {"iq2_s": 40}, {"iq2_s": 40}, {"iq3_s": 40}, "q6_K")),
    File("gpt-oss-20b MXFP4", "gpt-oss-20b", "log", (
        {"mxfp4": 24}, {"mxfp4": 24}, {"mxfp4": 24}, "q8_0")),
    File("gpt-oss-120b MXFP4", "gpt-oss-120b", "log", (
        {"mxfp4": 36}, {"mxfp4": 36}, {"mxfp4": 36}, "q8_0")),
    File("GLM-4.5-Air Q4_K_M", "GLM-4.5-Air", RULES, "Q4_K_M"),
    File("GLM-4.5-Air IQ4_XS", "GLM-4.5-Air", RULES, "IQ4_XS"),
    File("GLM-4.7-Flash Q6_K", "GLM-4.7-Flash", "header", "Q6_K"),
    File("GLM-4.7-Flash UD-IQ2_XXS", "GLM-4.7-Flash", "header of two layers", (
        {"iq2_xxs": 46}, {"iq2_xxs": 46}, {"iq3_s": 46}, "iq4_xs")),
    File("GLM-5.3 UD-Q4_K_XL", "GLM-5.3", "header's counts", (
        {"q4_K": 75, "q5_K": 1}, {"q4_K": 75, "q5_K": 1}, {"q5_K": 72, "q6_K": 4}, "q8_0")),
    File("GLM-5.3-Flash, 3 bits a weight", "GLM-5.3-Flash", "header", (
        {"iq3_xxs": 41, "iq4_xs": 1}, {"iq3_xxs": 41, "iq4_xs": 1}, {"iq4_xs": 39, "q6_K": 3}, "q8_0")),
    File("DeepSeek-R1 UD-IQ2_XXS", "DeepSeek-V3", "log", (
        {"iq2_xxs": 58}, {"iq2_xxs": 58}, {"q3_K": 55, "q4_K": 3}, "q5_K")),
    File("DeepSeek-R1-0528 UD-Q2_K_XL", "DeepSeek-V3", "log", (
        {"q2_K": 58}, {"q2_K": 58}, {"q2_K": 6, "q3_K": 52}, "q4_K")),
    File("DeepSeek-R1-0528 UD-Q3_K_XL", "DeepSeek-V3", "log", (
        {"q3_K": 58}, {"q3_K": 58}, {"q3_K": 50, "q4_K": 8}, "q4_K")),
    File("DeepSeek-V3.1 UD-Q2_K_XL", "DeepSeek-V3", "log", (
        {"q2_K": 58}, {"q2_K": 58}, {"q3_K": 42, "q4_K": 16}, "q4_K")),
    File("DeepSeek-V3.1 IQ1_S", "DeepSeek-V3", RULES, "IQ1_S"),
    File("Kimi-K2 UD-IQ3_XXS", "Kimi-K2", "header of ten layers", (
        {"iq3_xxs": 53, "iq3_s": 7}, {"iq3_xxs": 53, "iq3_s": 7}, {"iq3_xxs": 53, "iq3_s": 1, "iq4_xs": 6}, "iq4_xs")),
    File("MiniMax-M2.7 UD, IQ3_S", "MiniMax-M2", "log", (
        {"iq2_s": 62}, {"iq2_s": 62}, {"iq3_s": 62}, "q6_K")),
    File("Llama-4-Scout Q4_K_M", "Llama-4-Scout", RULES, "Q4_K_M"),
    File("Mixtral-8x7B Q4_K_M", "Mixtral-8x7B", RULES, "Q4_K_M"),
    File("Mixtral-8x7B Q5_K_M", "Mixtral-8x7B", RULES, "Q5_K_M"),
    File("gemma-4-26B-A4B Q4_K_M", "gemma-4-26B-A4B", RULES, "Q4_K_M"),
    File("granite-4.0-h-small Q4_K_M", "granite-4.0-h-small", RULES, "Q4_K_M"),
    File("LFM2-8B-A1B Q4_K_M", "LFM2-8B-A1B", RULES, "Q4_K_M"),
    File("Nemotron-3-Nano-30B-A3B Q4_K_M", "Nemotron-3-Nano-30B-A3B", RULES, "Q4_K_M"),
)  # fmt: skip


class ModelOf(c.Structure):
    """The C struct llama_quant_model_desc."""

    _fields_ = [("architecture", c.c_char_p)] + [
        (name, c.c_uint32)
        for name in (
            "n_embd",
            "n_ff",
            "n_layer",
            "n_head",
            "n_head_kv",
            "n_expert",
            "n_embd_head_k",
            "n_embd_head_v",
        )
    ]


class Quantiser:
    """Calls the quantisation rules of the pinned llama.cpp: functions that libllama
    exports for llama.cpp's tests."""

    def __init__(self) -> None:
        self._llama = library.llama_cpp()
        self._exported = c.CDLL(str(library.find_library() / "libllama.so"))
        self.ggml = Ggml(1)

    def types(self, shape: Shape, ftype: int) -> list[int]:
        """Returns the ggml type that the quantiser's preset `ftype` chooses for each
        tensor of a model."""
        described = ModelOf(
            shape.arch.encode(), shape.n_embd, shape.n_ff, shape.n_layer, shape.n_head, shape.n_head_kv,
            shape.n_expert, shape.d_head, shape.d_head,
        )  # fmt: skip
        model = self._call(
            "_Z31llama_quant_model_from_metadataPK22llama_quant_model_desc",
            c.byref(described),
        )
        options = self._llama.llama_model_quantize_default_params()
        state = self._call(
            "_Z16llama_quant_initPK11llama_modelPK27llama_model_quantize_params",
            model,
            c.byref(options),
        )
        graph = self.ggml.graph()
        tensors = []
        for name, dims in shape.tensors():
            tensors.append(graph.input(F32, dims[::-1], b""))
            graph.change("set_name", tensors[-1], name.encode())
        found = (c.c_int * len(tensors))()
        self._call(
            "_Z25llama_quant_compute_typesP19quantize_state_impl11llama_ftypePP11ggml_tensorP9ggml_typem",
            state, ftype, (c.c_void_p * len(tensors))(*tensors), found, c.c_size_t(len(tensors)),
        )  # fmt: skip
        graph.close()
        return list(found)

    def _call(self, name: str, *arguments: Any) -> c.c_void_p:
        function = getattr(self._exported, name)
        function.restype = c.c_void_p
        return c.c_void_p(function(*arguments))


def count(quantiser: Quantiser, file: File) -> Counter[str]:
    """Returns {name of a type: total size in bytes of the file's matrices of this
    type}."""
    shape = SHAPES[file.shape]
    names = quantiser.ggml.types
    if isinstance(file.made, str):
        number_to_name = {number: name for name, number in names.items()}
        types = [
            number_to_name[number]
            for number in quantiser.types(shape, FTYPES[file.made])
        ]
    else:
        types = list(listed(shape, file.made))
    found: Counter[str] = Counter()
    for (_, dims), name in zip(shape.tensors(), types, strict=True):
        found[name] += quantiser.ggml.row_bytes(names[name], math.prod(dims))
    return found


def listed(shape: Shape, header: Header) -> Iterator[str]:
    """Yields the name of a type for each tensor, in the order of `shape.tensors`.

    A published header only counts the types of the experts' matrices, so the assignment
    of types to layers is arbitrary. All other tensors have the header's last type.
    """
    *of_experts, rest = header
    left = {
        matrix: Counter(counts).elements()
        for matrix, counts in zip(("gate", "up", "down"), of_experts, strict=True)
    }
    for name, _ in shape.tensors():
        matrix = name.removesuffix("_exps.weight").partition("ffn_")[2]
        yield next(left[matrix]) if matrix in left else rest


def main() -> int:
    """Prints the table of types, or the list of files. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--files", action="store_true", help="list the files instead of the types"
    )
    options = parser.parse_args()
    silence()
    quantiser = Quantiser()
    bytes_of = {file: count(quantiser, file) for file in FILES}
    if options.files:
        for file, found in bytes_of.items():
            total = found.total()
            parts = ", ".join(
                f"{name.upper()} {n / total:.0%}"
                for name, n in found.most_common()
                if n > 0.005 * total
            )
            print(f"| {file.name} | {total / 1e9:.1f} GB | {parts} | {file.source} |")
        return 0
    shares = {
        name: [found[name] / found.total() for found in bytes_of.values()]
        for name in quantiser.ggml.types
    }
    for name, of_files in sorted(shares.items(), key=lambda item: -sum(item[1])):
        print(
            f"| {name.upper()} | {sum(of_files) / len(FILES):.1%} | {sum(share > 0 for share in of_files)} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
