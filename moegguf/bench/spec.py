"""The options of one process of `moegguf bench`, passed between processes as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from moegguf.errors import OptionError
from moegguf.gguf.reader import ggml_type
from moegguf.quantities import parse_link
from moegguf.settings import parse_choice

SYSTEMS = ("moegguf", "stock", "mmap", "resident")
FEEDS = ("random", "text", "greedy")
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}  # as in llama.cpp's parameters


@dataclass(frozen=True)
class Test:
    """`n_prompt` tokens in one batch, then `n_gen` one by one, after `n_depth` that are not timed. Each may be 0."""

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def n_tokens(self) -> int:
        """All tokens that the context must hold."""
        return self.n_depth + self.n_prompt + self.n_gen


@dataclass(frozen=True)
class Spec:
    """The options of one process.

    system: "moegguf", or llama.cpp: "stock" (without patches, bench/stock.py), "mmap" (moegguf's build without the
    cache, the file is mapped) or "resident" (the same, every weight is read into memory). strategy: a name of
    controller.strategies; policy, predictor, prefetch and store replace parts of it.
    repack: weights in the layout of the CPU's fastest kernels. feed: random tokens as in llama-bench, the tokens of
    `text`, or the model's own (greedy) after n_depth tokens of either. warm_start: begin with what earlier runs used,
    and remember what this one uses.
    vram_cache, placement: as `Llama` takes them. draft: the same, for greedy answers that are timed as a whole; None:
    each token is timed. simulate_link: a link such as "24GB/s,35us"; a simulated device is behind it, that computes
    with simulate_threads (0: as many as the CPU). Without vram_cache and placement, layers and slots are there.
    """

    model: str
    tests: tuple[Test, ...]
    system: str = "moegguf"
    repack: bool = True
    expert_cache: str = "auto"
    repetitions: int = 5
    n_threads: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int = -1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    store: dict[str, Any] = field(default_factory=dict)
    strategy: str = "moegguf"
    policy: str = "auto"
    predictor: str | None = None
    prefetch: bool | None = None
    warm_start: bool = False
    feed: str = "random"
    text: str | None = None
    vram_cache: str | None = None
    placement: str | None = None
    draft: str | None = None
    simulate_link: str | None = None
    simulate_threads: int = 0
    seed: int = 0
    warmup: bool = True
    delay_s: float = 0.0
    probe_s: float = 0.5
    verbose: bool = False

    def __post_init__(self) -> None:
        for name, known in (("system", SYSTEMS), ("feed", FEEDS), ("flash_attn", tuple(FLASH_ATTN))):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} is {getattr(self, name)!r}, but must be one of {', '.join(known)}.")
        ggml_type(self.type_k), ggml_type(self.type_v)
        if self.simulate_link is not None:
            parse_link(self.simulate_link)
        if self.placement is not None:
            parse_choice("placement", self.placement)
        if self.draft is not None and self.feed != "greedy":
            raise OptionError("--draft measures the model's own answers; give --greedy, and a prompt's length with -d.")
        for name in ("repetitions", "n_threads", "n_batch", "n_ubatch"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if not self.tests or any(test.n_prompt + test.n_gen < 1 for test in self.tests):
            raise OptionError("there is nothing to measure; give -p or -n a number above zero.")

    def as_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The options in the text of `as_json`. Raises OptionError for values that are not allowed."""
        values = json.loads(text)
        return cls(**values | {"tests": tuple(Test(**test) for test in values["tests"])})
