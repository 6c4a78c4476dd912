"""The plan for the short run on a card: the steps in order, with their times, processes
and predicted figures.

Each step has a share of the time. A step must finish before the shares of this step and
all earlier steps are used up. In each turn, a step runs its parts, but some parts only
in the first turn. The predictions were written down before any run, for cards with PCIe
5.0 x16 and fast memory (H100, H200). Some figures have no prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tools.gpu.case import N_FIRST, Case
from tools.gpu.rig import GB

TOTAL_S = 568.0  # time for all steps; the whole run takes a few seconds more
ANSWER, PROMPT, EQUAL = "answer, t/s", "prompt, t/s", "bits are equal"
# Figure: number of leading tokens that are equal to llama.cpp's.
SAME = "tokens as of llama.cpp, resident"
SLOTS = "slots per expert"  # figure: number of slots divided by the number of experts
# Figure: the last layer predicts nothing.
SCORED = "store, layers predicted in the graph a token"
# Figure: us per layer that resident llama.cpp does not take, without the time of
# copies.
STOP = "a stop, us"

# Remedies: experimental changes that a library may contain behind switches, each with
# its bit. `moegguf_switches` returns the bits of all remedies in the library. The
# variable MOEGGUF_SWITCHES holds the bits of the remedies that are on.
DEFAULT = "abdefij"  # the remedies that are on by default
SWITCHES = {
    "a": 1,
    "b": 2,
    "c": 4,
    "d": 8,
    "e": 16,
    "f": 32,
    "g": 64,
    "i": 128,
    "j": 512,
    "k": 256,
}

Kind = Literal["facts", "micro", "measure", "batches", "tests"]
# Predicted range: {name of the figure: (minimum, maximum)}.
Predicted = Mapping[str, tuple[float, float]]


def switch_bits(letters: str) -> int:
    """Returns the value of MOEGGUF_SWITCHES that turns on the remedies with these
    letters."""
    return sum(SWITCHES[letter] for letter in letters.replace("-", ""))


@dataclass(frozen=True)
class Part:
    """One process in a step: its command, and the predicted ranges of its figures."""

    name: str
    kind: Kind
    arguments: tuple[str, ...] = ()  # command-line arguments for `micro` or pytest
    case: Case | None = None
    predicted: Predicted = field(default_factory=dict)
    # Letters of the remedies that are on; "-": all are off; "": MOEGGUF_SWITCHES is not
    # set.
    switches: str = ""
    needs_card: bool = False  # the part is skipped on a simulated device
    once: bool = False  # true: only the step's first turn has this part
    # CUDA runtime calls are counted, which takes a little time.
    counts_calls: bool = False
    # Name of the model, whose file must be complete before the part begins.
    model: str = ""
    # Number of layers in which a token may wait for experts; 0: not given.
    n_layer: int = 0
    limit_s: float = 40.0


@dataclass(frozen=True)
class Step:
    """Parts that answer one question."""

    name: str
    share_s: float
    question: str
    parts: tuple[Part, ...]
    n_turns: int = 1


@dataclass(frozen=True)
class Setting:
    """The measured device (a card or a simulated one), the models, and the sizes of all
    measurements."""

    device: str
    link: str  # link speed of a simulated device; empty: the device is a real card
    # {name: (preset, quantisation, layers)}; 0 layers: as in the preset.
    models: Mapping[str, tuple[str, str, int]]
    card_bytes: int  # memory of the imitated smaller card
    # True: the process allocates the card's other memory; false: no memory is held.
    holds: bool
    sizes: Mapping[str, Any]
    # {share of the experts with a slot in %: budget for these slots and for the staging
    # tensors of prompts}, in steps Q3 and Q5
    caches: Mapping[int, str]
    # Slots of a large pool; on a real card, byte offsets of F16 slots need more than 32
    # bits.
    n_slots: int
    # Experts in the products of step S1's small pools, and of step M2 on a simulated
    # device.
    n_experts: int
    n_columns: int  # columns of an expert's matrix in the products of step S1

    @property
    def is_simulated(self) -> bool:
        """Returns True if the device is simulated, so that no card is needed."""
        return bool(self.link)

    def file(self, model: str, folder: Path) -> Path:
        """Returns the path of a model's file."""
        return folder / f"{model}.gguf"


SHALLOW, WIDE, MIX = "qwen3-16-layers", "qwen1.5-moe", "tiny-mix"
CARD = Setting(
    device="CUDA0",
    link="",
    models={
        WIDE: ("qwen1.5-moe-a2.7b", "q4_k_m", 24),
        SHALLOW: ("qwen3-30b-a3b", "q4_k_m", 16),
        MIX: ("tiny-mix", "q4_k_m", 0),
    },
    card_bytes=8 * GB,
    holds=True,
    sizes={
        "n_prompt": 1024,
        "n_prompts": 2,
        "n_decode": 256,
        "n_ctx": 2048,
        "n_ubatch": 512,
    },
    caches={65: "4.59GB", 23: "1.74GB"},
    n_slots=3000,
    n_experts=128,
    n_columns=2048,
)
REHEARSAL = Setting(
    device="",
    link="8GB/s",
    models={
        WIDE: ("tiny-qwen2moe", "q4_k_m", 0),
        SHALLOW: ("tiny-qwen3moe", "q4_k_m", 4),
        MIX: ("tiny-mix", "q4_k_m", 0),
    },
    card_bytes=1_300_000,
    holds=False,
    sizes={
        "n_prompt": 64,
        "n_prompts": 2,
        "n_decode": 16,
        "n_ctx": 256,
        "n_ubatch": 64,
    },
    caches={65: "65%", 23: "1.2MB"},
    n_slots=30,
    n_experts=16,
    n_columns=256,
)


def steps(setting: Setting, models: Path, n_threads: int) -> tuple[Step, ...]:
    """Returns the steps of the short run, in order."""
    plan = _Plan(setting, models, n_threads)
    return (
        Step("facts", 15, "the machine, the link, the library", tuple(plan.facts())),
        Step(
            "M1", 20, "what a stop is made of: remedies a, b, f", tuple(plan.latency())
        ),
        Step(
            "M5",
            15,
            "products from pinned memory: do mapped slots pay (0.7 or more)?",
            tuple(plan.mapped()),
        ),
        Step(
            "S1",
            20,
            "32-bit offsets: is a large pool wrong? how slow are F16 products with many slots?",
            tuple(plan.offsets()),
        ),
        Step(
            "M2",
            15,
            "is a prompt's product slower where experts lie apart?",
            tuple(plan.strides()),
        ),
        Step(
            "Q1",
            90,
            "Qwen1.5-MoE, everything resident: why 307 of 339 and 4,380 of 8,020?",
            tuple(plan.resident()),
            3,
        ),
        Step(
            "Q2",
            115,
            "Qwen1.5-MoE, 8 GB: slots against layers and -ncmoe",
            tuple(plan.small_card()),
            2,
        ),
        Step(
            "Q3",
            150,
            "Qwen3-30B, 16 layers: a stop with slots for 65 % and 23 % of the experts, for each remedy",
            tuple(plan.shares()),
            2,
        ),
        Step(
            "Q4",
            35,
            "several sequences, joining, leaving and guessing: are the bits equal?",
            tuple(plan.batches()),
        ),
        Step(
            "Q5",
            33,
            "Qwen3-30B, slots for 23 % of the experts: prediction in the graph, slots of two sizes, one arena",
            tuple(plan.remedies()),
        ),
        Step(
            "identity",
            60,
            "a card with slots: are the logits equal to the logits without slots?",
            tuple(plan.identity()),
        ),
    )


@dataclass(frozen=True)
class _Plan:
    """Creates the parts of each step."""

    setting: Setting
    models: Path
    n_threads: int

    def facts(self) -> Iterator[Part]:
        yield Part("the machine", "facts")
        predicted = {
            "from pinned memory, 900 kB each, GB/s": (35, 48),
            "from pinned memory, 2900 kB each, GB/s": (42, 53),
            "from pinned memory, 30000 kB each, GB/s": (48, 56),
        }
        yield Part("copies", "micro", ("copies",), predicted=predicted, needs_card=True)

    def latency(self) -> Iterator[Part]:
        predicted = {
            "hand-off to a sleeping thread, and back": (5, 20),
            "ids to pageable memory, and wait": (9, 14),
            "ids to pinned memory, and wait": (5, 9),
            "ids from pageable memory, and wait": (8, 13),
            "ids from pinned memory, and wait": (5, 9),
            "ids to pageable memory behind copies, and wait": (9, 18),
            "ids to pinned memory behind copies, and wait": (5, 12),
            "ids from pageable memory behind copies, and wait": (8, 60),
            "ids from pinned memory behind copies, and wait": (5, 60),
            "graph of 1, until its first kernel runs": (5, 11),
            "graph of 25, until its first kernel runs": (6, 13),
            "graph of 50, until its first kernel runs": (7, 15),
            "kernel node": (1.3, 2.0),
            "kernel node that is launched early": (0.8, 1.6),
            "copy node": (4, 5),
            "copy node and kernel node in turn": (5.5, 7),
        }
        in_us = {f"{name}, us": value for name, value in predicted.items()}
        yield Part("latencies", "micro", ("latency",), predicted=in_us, needs_card=True)

    def mapped(self) -> Iterator[Part]:
        for type_, columns, rows in (
            ("q4_K", 2048, 768),
            ("q6_K", 768, 2048),
            ("mxfp4", 2880, 2880),
        ):
            predicted = dict[str, tuple[float, float]]()
            for n_tokens in (1, 4):
                what = f"{type_}, tokens: {n_tokens}"
                predicted |= {
                    f"{what}, pinned memory against copies": (0.70, 0.85),
                    f"{what}, {EQUAL}": (1, 1),
                }
            arguments = (
                "mapped",
                self.setting.device,
                type_,
                str(columns),
                str(rows),
                "128",
                "8",
            )
            yield Part(
                type_,
                "micro",
                arguments,
                predicted=predicted,
                needs_card=True,
                limit_s=8,
            )

    def offsets(self) -> Iterator[Part]:
        columns = self.setting.n_columns
        few = self.setting.n_experts
        many = self.setting.n_slots
        for type_, rows, wrong in (
            ("f16", 768, (1, 4)),
            ("f16", 512, (1,)),
            ("bf16", 768, (1, 4)),
            ("q4_0", 768, ()),
        ):
            for n in (few, many):
                overflows = wrong if n == CARD.n_slots else ()
                predicted = {
                    f"{type_}, slots: {n}, tokens: {n_tokens}, {EQUAL}": (0, 0)
                    if n_tokens in overflows
                    else (1, 1)
                    for n_tokens in (1, 4)
                }
                yield self._products(
                    "offsets",
                    f"{type_} x {rows}, {n} slots",
                    (type_, columns, rows, n),
                    predicted,
                )

    def strides(self) -> Iterator[Part]:
        # The `down` matrices of Qwen1.5-MoE and Qwen3-30B, each in two types. Slots of
        # both types are as far apart as the larger type needs.
        for type_, columns, n_experts, n_used, stride, most in (
            ("q5_0", 1408, 60, 4, 3_075_776, 1.2),
            ("q8_0", 1408, 60, 4, 3_075_776, 1.05),
            ("q4_K", 768, 128, 8, 1_310_400, 1.0),
            ("q6_K", 768, 128, 8, 1_310_400, 1.05),
        ):
            rows = 2048
            if self.setting.is_simulated:
                rows = 64
                n_experts = self.setting.n_experts
                n_used = 2
            predicted = {
                f"{type_} {rows}x{n_experts}, apart against together": (0.85, most)
            }
            arguments = (type_, columns, rows, n_experts, n_used, stride)
            yield self._products("strides", f"{type_} x {rows}", arguments, predicted)

    def _products(
        self, what: str, name: str, arguments: Sequence[object], predicted: Predicted
    ) -> Part:
        device = "CPU" if self.setting.is_simulated else self.setting.device
        return Part(
            name,
            "micro",
            (what, device, *map(str, arguments)),
            predicted=predicted,
            limit_s=8,
        )

    def resident(self) -> Iterator[Part]:
        ours = {"vram_cache": "100%", "placement": "slots"}
        yield self._measured(
            "llama.cpp", WIDE, None, {ANSWER: (325, 350), PROMPT: (7600, 8400)}
        )
        yield self._measured(
            "moegguf", WIDE, ours, {ANSWER: (322, 345), PROMPT: (7500, 9000)}
        )
        without = self._measured(
            "moegguf, ids copied (no f)",
            WIDE,
            ours,
            {ANSWER: (300, 330), PROMPT: (7500, 9000)},
        )
        yield replace(without, switches=DEFAULT.replace("f", ""))

    def small_card(self) -> Iterator[Part]:
        limit = {"limit_bytes": self.setting.card_bytes, "hold": self.setting.holds}
        wide = limit | self._long()
        slots = {"placement": "slots"}
        whole = {"placement": "layers"}
        if not self.setting.is_simulated:
            whole |= {"vram_cache": "5.9GB"}
        for name, options, predicted, more in (
            (
                "llama.cpp -ncmoe 7",
                None,
                {ANSWER: (148, 160), PROMPT: (1450, 1750)},
                limit | {"more_on_cpu": -2},
            ),
            (
                "llama.cpp -ncmoe 6",
                None,
                {ANSWER: (158, 175)},
                limit | {"more_on_cpu": -3},
            ),
            (
                "llama.cpp -ncmoe 5",
                None,
                {ANSWER: (166, 190)},
                limit | {"more_on_cpu": -4},
            ),
            ("moegguf", {}, {ANSWER: (130, 205), PROMPT: (900, 4800)}, limit),
            (
                "moegguf, slots",
                slots,
                {ANSWER: (175, 205), PROMPT: (3200, 4800)},
                limit,
            ),
            (
                "moegguf, slots, a pass per prompt",
                slots,
                {ANSWER: (160, 200), PROMPT: (4000, 8000)},
                wide,
            ),
            (
                "moegguf, 5.9 GB of layers",
                whole,
                {ANSWER: (155, 172), PROMPT: (900, 1400)},
                limit,
            ),
        ):
            part = self._measured(name, WIDE, options, predicted, **more)
            yield replace(part, once=name == "llama.cpp -ncmoe 5")

    def shares(self) -> Iterator[Part]:
        everything = {"vram_cache": "100%", "placement": "slots"}
        yield self._measured("llama.cpp, resident", SHALLOW, None, {ANSWER: (600, 750)})
        yield self._measured(
            "moegguf, resident", SHALLOW, everything, {ANSWER: (580, 740)}
        )
        for share, answer, stop, remedies in (
            (
                65,
                (370, 510),
                (33, 50),
                (
                    ("i", 54, 70),
                    ("ai", 46, 66),
                    ("bi", 44, 64),
                    ("ci", 54, 70),
                    ("abi", 39, 51),
                    ("abcdefi", 30, 46),
                ),
            ),
            (
                23,
                (250, 350),
                (33, 70),
                (("i", 54, 90), ("ci", 40, 80), ("ei", 54, 90), ("abcdefi", 30, 66)),
            ),
        ):
            slots = self._slots(share)
            shares = {SLOTS: (share / 100 - 0.01, share / 100 + 0.01)}
            yield self._measured(
                f"{share} %", SHALLOW, slots, {ANSWER: answer, STOP: stop} | shares
            )
            for switches, least, most in remedies:
                part = self._measured(
                    f"{share} %, remedies: {switches}",
                    SHALLOW,
                    slots,
                    {STOP: (least, most)},
                )
                # Batches of 96 prefetched matrices instead of 8 (c) hardly change a stop.
                yield replace(part, switches=switches, once=switches == "ci")
            wide = self._measured(
                f"{share} %, a pass per prompt", SHALLOW, slots, {}, **self._long()
            )
            yield replace(wide, once=True)
            calls = self._measured(f"{share} %, calls counted", SHALLOW, slots, {})
            yield replace(calls, counts_calls=True, once=True)

    def remedies(self) -> Iterator[Part]:
        """Yields pairs of parts that differ in one remedy: g (prediction in the graph),
        i (slots of two sizes, with an equal number of bytes) and k (one arena)."""
        slots = self._slots(23)
        predicting = slots | {"predictor": "skip", "prefetch": {"watchdog": False}}
        one_size = (0.205, 0.22)
        two_sizes = (0.22, 0.24)
        for name, options, switches, answer, share in (
            ("prediction from inputs", predicting, DEFAULT, (240, 370), two_sizes),
            (
                "prediction in the graph",
                predicting,
                DEFAULT + "g",
                (240, 380),
                two_sizes,
            ),
            (
                "slots of one size",
                slots,
                DEFAULT.replace("i", ""),
                (245, 340),
                one_size,
            ),
            ("slots of two sizes", slots, DEFAULT, (250, 350), two_sizes),
            ("one arena", slots, DEFAULT + "k", (250, 355), two_sizes),
        ):
            n_scored = self.setting.models[SHALLOW][2] - 1
            scored = {SCORED: (n_scored, n_scored)} if "g" in switches else {}
            part = self._measured(
                name, SHALLOW, options, {ANSWER: answer, SLOTS: share} | scored
            )
            yield replace(part, switches=switches)

    def batches(self) -> Iterator[Part]:
        case = replace(self._case(MIX, {"vram_cache": "40%"}), n_ctx=512, n_ubatch=64)
        predicted = {f"{n} sequences, {EQUAL}": (1.0, 1.0) for n in (3, 9)}
        yield Part(
            "tiny-mix, 40 %",
            "batches",
            case=case,
            predicted=predicted,
            model=MIX,
            limit_s=35,
        )

    def identity(self) -> Iterator[Part]:
        for name, chosen in {
            "passes": "test_passes_of_any_width_give_the_gpus_own_logits",
            "gpt-oss, mxfp4": "test_every_architecture_gives_the_gpus_own_logits and gpt-oss and mxfp4",
            "f16, bf16": "test_every_quantisation and (f16 or bf16)",
        }.items():
            arguments = ("tests/live/test_gpu.py", "-k", chosen)
            yield Part(
                name,
                "tests",
                arguments,
                predicted={"failed": (0, 0), "skipped": (0, 0)},
                needs_card=True,
                limit_s=45,
            )

    def _slots(self, share: int) -> dict[str, Any]:
        """Returns options with slots for `share` % of the experts, and without
        prefetching, because trials of prefetching would begin in some turns and not in
        others."""
        return {
            "vram_cache": self.setting.caches[share],
            "placement": "slots",
            "prefetch": False,
        }

    def _long(self) -> dict[str, Any]:
        """Returns sizes with which a pass may have as many tokens as the context, so a
        prompt takes one pass."""
        return {"n_ubatch": self.setting.sizes["n_ctx"]}

    def _case(self, model: str, options: dict[str, Any] | None, **more: Any) -> Case:
        file = str(self.setting.file(model, self.models))
        system = "llama.cpp" if options is None else "moegguf"
        common: dict[str, Any] = {
            "device": self.setting.device,
            "link": self.setting.link,
            **self.setting.sizes,
        }
        return Case(
            model=file,
            system=system,
            options=options,
            n_threads=self.n_threads,
            **common | more,
        )

    def _measured(
        self,
        name: str,
        model: str,
        options: dict[str, Any] | None,
        predicted: Predicted,
        **more: Any,
    ) -> Part:
        case = self._case(model, options, **more)
        n_layer = self.setting.models[model][2]
        if (options or {}).get(
            "placement"
        ) == "slots" and case.n_ubatch == self.setting.sizes["n_ubatch"]:
            n_tokens = N_FIRST + case.n_decode
            predicted = {**predicted, SAME: (n_tokens, n_tokens)}
        return Part(
            name,
            "measure",
            case=case,
            predicted=predicted,
            model=model,
            n_layer=n_layer,
        )
