"""A table of options, with their keywords, flags, environment variables and help texts.

Commands take the flags of these options from the table, `settings` finds in it the
environment variables to read, and `python -m moegguf.options` prints it as
docs/options.md. This module imports only modules that load fast, because `--help` needs
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

MODEL, MEMORY, SAMPLING, OUTPUT, RESEARCH = (
    "Model",
    "Memory",
    "Sampling",
    "Output",
    "Research",
)
SERVER = "Server"
GROUPS = (MODEL, MEMORY, SAMPLING, OUTPUT, SERVER, RESEARCH)

KV_CACHE_TYPES = (
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q4_1",
    "iq4_nl",
    "q5_0",
    "q5_1",
)
"""Data types of the KV cache, by the names that llama.cpp's tools accept."""
MAX_CONTEXT_TOKENS = 1 << 24
# Limit on the total tokens in a context, over all its sequences.
MAX_KV_TOKENS = 1 << 28
MAX_BATCH_PARALLEL = 256
MAX_PARALLEL = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS
PLACEMENTS = ("auto", "layers", "slots", "slots-mapped", "cpu")
"""Ways to place experts on a machine with a GPU: see engine/solver.py."""
DRAFTS = ("auto", "off", "ngram", "mtp")
"""Values of the option `draft` other than a path. The option selects how the next
tokens are guessed before one pass verifies them."""
KERNELS = ("avx512", "avx2", "upstream")
LOG_LEVELS = ("debug", "info", "warning", "error")

BUDGETS = {"RAM": "expert_cache", "VRAM": "vram_cache"}
"""{tier: name of the option with the budget for experts in this tier}"""

MAX_ANSWER_TOKENS = 1 << 22
LOAD_PARAMETERS = {
    "num_ctx": "n_ctx", "num_batch": "n_batch", "num_thread": "n_threads", "num_gpu": "n_gpu_layers",
    "expert_cache": "expert_cache", "draft": "draft", "mirror": "mirror",
}  # fmt: skip
"""{name of a parameter of a Modelfile or a request that changes how a model is loaded:
name of the option}"""
LOCAL_PARAMETERS = ("num_batch", "num_gpu", "mirror")
"""Parameters of LOAD_PARAMETERS that a request to a server cannot set."""

Kind = Literal[
    "text", "budget", "size", "duration", "timeout", "whole", "number", "switch", "off switch", "level",
    "trial", "choice", "threads", "address", "networks", "list", "path", "paths", "store size",
]  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One option of the table."""

    # The option applies to a load, to a request, or to the server.
    scope: Literal["load", "request", "server"]
    group: str
    # Usually a keyword of `Llama`, a parameter of a request, or a field of `Settings`
    # or `Environment`.
    name: str
    help: str
    flags: tuple[str, ...] = ()  # names of the flag; empty: the option has no flag
    metavar: str = ""
    # Environment variable without the prefix MOEGGUF_; "": no variable.
    variable: str = ""
    kind: Kind = "text"  # decides how the option's text is parsed
    default: str = ""  # description of the default, for the help
    choices: tuple[str, ...] = ()  # allowed values if `kind` is "choice"
    least: float | None = None  # smallest allowed number
    most: float | None = None  # largest allowed number
    zero_is_default: bool = False  # True: a 0 in the environment is treated as unset
    often: bool = False  # True: often used, so that the help lists it first

    @property
    def full_help(self) -> str:
        """Returns the help text, followed by the environment variable and the
        description of the default, if there are any."""
        default = ", or ".join(
            filter(
                None,
                (f"MOEGGUF_{self.variable}" if self.variable else "", self.default),
            )
        )
        return self.help + (f"  [default: {default}]" if default else "")


_model = partial(Option, "load", MODEL)
_memory = partial(Option, "load", MEMORY)
_research = partial(Option, "load", RESEARCH)
# Options of sampling: numbers, and whole numbers.
_number = partial(Option, "request", SAMPLING, kind="number")
_whole = partial(Option, "request", SAMPLING, kind="whole")
_server = partial(Option, "server", SERVER)
_output = partial(Option, "server", OUTPUT)

_TABLE = (
    _model("n_ctx", "Context length in tokens. 0: the model's own.",
        ("--ctx", "-c", "--ctx-size"), "TOKENS", "CONTEXT_LENGTH", "whole",
        "as memory allows", least=0, most=MAX_CONTEXT_TOKENS, zero_is_default=True,
        often=True),
    _model("n_threads", 'Number of CPU threads. "auto" uses the CPUs that other processes leave free.',
        ("--threads", "-t"), "N", kind="threads", default="auto", least=0, most=MAX_THREADS),
    _model("n_gpu_layers",
        "Number of layers that a GPU computes (-1: all layers). With -1, the CPU may still compute the experts of"
        " some layers (see placement).",
        ("--n-gpu-layers", "-ngl", "--gpu-layers"), "N", kind="whole", least=-1, most=1 << 24),
    _model("n_batch",
        "Maximum number of tokens in a pass. The default depends on the free memory and the speed of the drive.",
        kind="whole", default="512 to 4096", least=1, most=1 << 14),
    _model("draft",
        "How moegguf guesses the next tokens, which it verifies in one pass. ngram guesses the tokens that followed"
        " the same tokens earlier in the text. mtp also guesses with the model's prediction heads. auto guesses"
        " with what the file contains, but only if guesses cannot change an answer. off guesses nothing. FILE"
        " guesses with a smaller model of the same vocabulary (in a Modelfile: DRAFT; a request cannot name a"
        " model).", ("--draft",), "HOW|FILE", "DRAFT",
        default="auto"),
    _model("mmproj", "The model's projector file for images.", ("--mmproj",), "FILE",
        default="the projector next to the model"),
    _model("lora_path", "File with a LoRA adapter in GGUF for the model. In a Modelfile, use ADAPTER.",
        ("--lora",), "FILE", default="the adapter with which the model was created"),
    _model("lora_scale", "Factor by which the LoRA adapter's weights are multiplied.", ("--lora-scale",),
        "X", kind="number", default="1", least=-1000, most=1000),
    _model("flash_attention",
        "Compute attention with fused kernels (flash attention), which round differently from other kernels.",
        variable="FLASH_ATTENTION", kind="switch", default="on, if all devices support it"),
    _memory("expert_cache", 'Memory for experts: "4GiB", "50%" or "auto".', ("--expert-cache",),
        "BUDGET", "EXPERT_CACHE", "budget", "auto", often=True),
    _memory("vram_cache",
        "VRAM for experts, in the same forms as --expert-cache, which then sets the RAM for experts. With several"
        " GPUs, set the total, or one value per GPU, separated by commas. moegguf may use a part of this VRAM to"
        " stage prompts (see `moegguf estimate`).",
        ("--vram-cache",), "BUDGET", "VRAM_CACHE", "budget", "auto"),
    _memory("placement",
        "Parts of the model that are in VRAM. layers: the experts of as many layers as fit, and all other"
        " weights; the CPU computes the other experts. slots: slots for experts, and all other weights; the GPU"
        " computes all layers, unless --n-gpu-layers leaves some to the CPU. slots-mapped (experimental): like"
        " slots,"
        " but the GPU reads missing experts directly from RAM, which no GPU backend supports yet. cpu: nothing."
        " auto: the fastest of layers, slots and cpu according to measured speeds; with several GPUs, or if"
        " --n-gpu-layers leaves some layers to the CPU, slots.",
        ("--placement",), "WHERE", "PLACEMENT", "choice", "auto", PLACEMENTS),
    _memory("warm_start",
        "When a model is loaded, read the experts that earlier runs with this option used most. Record which"
        " experts this run uses.", ("--warm-start/--no-warm-start",), "", "WARM_START", "switch", "off"),
    _memory("context_store",
        'Disk space for computed contexts: a size ("8GiB"), "auto" (a tenth of the disk space that is free'
        " or used for contexts, at most 16 GiB), or 0 to store no contexts. A prompt that begins with at least 64"
        " tokens of an earlier prompt reuses the stored context, even after the model was unloaded.",
        ("--context-store",), "SIZE", "CONTEXT_STORE", "store size", "auto"),
    _memory("mirror",
        "A copy of the model's file on another drive, or a folder with copies that have the original file names."
        " moegguf reads experts from all copies at once. For a split model, name the first file of the copy. The"
        " option can be repeated.", ("--mirror",), "PATH", kind="paths", default="none"),
    _memory("type_k", "Data type of the K cache, such as q8_0.", ("--cache-type-k", "-ctk"), "TYPE",
        kind="choice", default="f16", choices=KV_CACHE_TYPES),
    _memory("type_v", "Data type of the V cache, such as q8_0.", ("--cache-type-v", "-ctv"), "TYPE",
        kind="choice", default="f16", choices=KV_CACHE_TYPES),
    _memory("kv_cache_type", f"Data type of the K and V caches: {', '.join(KV_CACHE_TYPES)}.",
        variable="KV_CACHE_TYPE", kind="choice", default="f16", choices=KV_CACHE_TYPES),
    _whole("num_predict",
        "Maximum tokens. -1: a full context.",
        ("--max-tokens", "-n", "--n-predict"), "N", least=-2, most=MAX_ANSWER_TOKENS, often=True),
    _number("temperature", "Randomness. 0 selects the likeliest token.",
        ("--temperature", "--temp"), "T", default="the model's, or 0.8", least=0, most=1000,
        often=True),
    _whole("top_k", "Sample only from the N likeliest tokens. 0 means all tokens.", ("--top-k",),
        "N", default="the model's, or 40", least=-1, most=(1 << 31) - 1),
    _number("top_p", "Sample only from the likeliest tokens whose probabilities add up to P.",
        ("--top-p",), "P", default="the model's, or 0.9", least=0, most=1),
    _number("min_p",
        "Sample only from tokens with at least P times the probability of the likeliest token.", ("--min-p",), "P",
        default="the model's, or 0", least=0, most=1),
    _number("repeat_penalty", "Penalty on tokens that occurred recently. 1 means no penalty.",
        ("--repeat-penalty",), "R", default="the model's, or 1", least=0.001, most=1000),
    _number("presence_penalty",
        "Amount by which the logit of every token that occurred recently is lowered.",
        default="0", least=-100, most=100),
    _number("frequency_penalty",
        "Amount by which a token's logit is lowered for each recent occurrence of the token.",
        default="0", least=-100, most=100),
    _whole("repeat_last_n",
        "Number of recent tokens that the penalties consider. -1 means the whole context.",
        default="64", least=-1, most=MAX_ANSWER_TOKENS),
    _number("typical_p",
        "Sample only from tokens that are about as likely as expected (locally typical sampling). 1 means all"
        " tokens.", default="1", least=0, most=1),
    _number("top_n_sigma",
        "Sample only from tokens whose logits are within N standard deviations of the highest logit. 0 or"
        " a negative number means all tokens.",
        default="-1", least=-1, most=1000),
    _number("xtc_probability",
        "Probability that XTC removes the tokens that reach xtc_threshold, except the least likely of these tokens.",
        default="0", least=0, most=1),
    _number("xtc_threshold",
        "Minimum probability of the tokens that XTC may remove. Above 0.5, XTC removes no token.",
        default="0.1", least=0, most=1),
    _number("dry_multiplier",
        "Strength of the DRY penalty on tokens that would continue a repetition. 0 means no penalty.",
        default="0", least=0, most=1000),
    _number("dry_base",
        "Base of the exponential growth of the DRY penalty with the length of a repetition.",
        default="1.75", least=1, most=1000),
    _whole("dry_allowed_length",
        "Length of the longest repetition without a DRY penalty, in tokens.", default="2", least=0,
        most=MAX_ANSWER_TOKENS),
    _whole("dry_penalty_last_n",
        "Number of recent tokens that DRY searches for repetitions. -1 means the whole context.",
        default="-1", least=-1, most=MAX_ANSWER_TOKENS),
    _whole("mirostat",
        "Version of Mirostat (1 or 2), which replaces top_k, top_p and the other filters at temperatures above 0. 0"
        " turns Mirostat off.",
        default="0", least=0, most=2),
    _number("mirostat_tau", "Target entropy of Mirostat.", default="5", least=0,
        most=1000),
    _number("mirostat_eta", "Learning rate of Mirostat.", default="0.1", least=0,
        most=1),
    _whole("num_keep",
        "Number of tokens at the start of the context that moegguf keeps when it shifts a full context. -1 means the"
        " whole prompt.",
        default="4", least=-1, most=MAX_ANSWER_TOKENS),
    _whole("reasoning_budget_tokens",
        "Maximum number of thinking tokens. At the limit, moegguf ends the thinking, and the model answers. 0"
        " means no thinking. -1 means no limit. `serve` applies its limit to requests that set no limit or -1.",
        ("--reasoning-budget",), "N", "THINK_BUDGET", default="-1", least=-1, most=MAX_ANSWER_TOKENS),
    Option("request", SAMPLING, "reasoning_budget_message",
        "Text that moegguf inserts before the end of the thinking if the limit ends the thinking.",
        ("--reasoning-budget-message",),
        "TEXT", "THINK_BUDGET_MESSAGE", default="none"),
    _whole("seed", "Seed for sampling random tokens.", ("--seed", "-s"), "N",
        default="random"),
    _research("strategy",
        "Strategy that decides which experts stay in memory and which experts are prefetched: moegguf (the best"
        " policy in measurements of the model), none, lru, or the strategy of a paper (moe-infinity, promoe,"
        " expertflow or duoserve).",
        ("--strategy",), "NAME", "STRATEGY",
        default="moegguf"),
    _research("policy",
        "Policy that decides which experts are evicted: auto (the strategy's policy), a name, vram=NAME,ram=NAME,"
        " or FILE.py:CLASS for a class that you wrote.",
        ("--policy",), "NAME", "POLICY", default="auto"),
    _research("predictor",
        "Predictor of experts: a name such as skip or eamc, or FILE.py:CLASS for a class that you wrote.",
        ("--predictor",), "NAME", default="the strategy's"),
    _research("prefetch",
        "Read predicted experts before they are used. Except with the strategies of papers, moegguf does this only"
        " as long as it saves time.",
        ("--prefetch/--no-prefetch",), kind="switch", default="the strategy's"),
    Option("load", OUTPUT, "log", "debug prints the reasons for moegguf's decisions on stderr (see decisions.md).",
        variable="LOG", kind="choice", default="off", choices=("off", "debug")),
    _research("hooks", "0 runs llama.cpp without the expert store.", variable="HOOKS", kind="switch",
        default="1"),
    _research("kernels",
        "Kernels for matrix products and attention on the CPU, for comparisons: avx512, avx2 or upstream"
        " (llama.cpp's kernels).",
        variable="KERNELS", kind="choice", default="the fastest that the processor supports", choices=KERNELS),
    _server("host", "Address of the server.",
        ("--host",), "HOST[:PORT]", "HOST", "address", "127.0.0.1:11434", often=True),
    _server("api_keys",
        "Key that clients must send, or several keys, separated by commas. Each key has its own contexts, files and"
        " batches. An address other than loopback needs a key or a trusted network. The variable hides keys from the"
        " process list.",
        ("--api-key",), "KEY", "API_KEY", "list", often=True),
    _server("share_contexts",
        "Reuse contexts that were computed for other API keys. The time to the first token then reveals that a"
        " context was reused.", ("--share-contexts",), "", "SHARE_CONTEXTS", "switch", "off"),
    _server("trusted",
        'Networks whose clients need no key, such as "192.168.1.0/24", separated by commas. Requests through a'
        " proxy still need a key. All clients in these networks can use, add and remove models.",
        ("--trust-network",), "NETWORKS", "TRUST_NETWORK", "networks"),
    _server("origins", "Web origins that may use the server, in addition to origins on this machine.",
        variable="ORIGINS", kind="list"),
    Option("server", MEMORY, "memory_bytes", "RAM for all loaded models together.", ("--memory",), "SIZE", "MEMORY",
        "size", "the free memory", often=True),
    Option("server", MODEL, "n_parallel", "Maximum number of requests that a model answers at once.",
        ("--parallel",), "N", "NUM_PARALLEL", "whole", "1", least=0, most=MAX_PARALLEL,
        zero_is_default=True, often=True),
    Option("server", MEMORY, "kv_tokens",
        "Total context length in tokens of all requests that a model answers at once, at least one full context. If"
        " the contexts of these requests together reach this total, the newest request waits.",
        ("--kv-tokens",), "N", "KV_TOKENS", "whole",
        "a full context per request, or less if experts need the memory", least=0, most=MAX_KV_TOKENS,
        zero_is_default=True),
    _server("keep_alive_s",
        "Time for which an idle model stays loaded, unless another model needs its memory. A negative time means"
        " forever. For models named on the command line of `serve`, the default is forever.",
        variable="KEEP_ALIVE", kind="duration", default="5m"),
    _server("max_models", "Maximum number of models that are loaded at once.",
        variable="MAX_LOADED_MODELS", kind="whole", default="as many as fit", least=0, most=1024,
        zero_is_default=True),
    _server("max_queue",
        "Maximum number of waiting requests. If the queue is full, a new request replaces the newest request of the"
        " client with the most requests, unless the client of the new request would then have as many requests.",
        ("--max-queue",), "N", "MAX_QUEUE", "whole", "512", least=0, most=1_000_000),
    _server("load_timeout_s",
        "Time without progress after which loading a model fails. 0 means no limit.",
        variable="LOAD_TIMEOUT", kind="timeout", default="5m"),
    _server("batch_parallel", "Maximum number of requests of a batch that are processed at once.",
        variable="BATCH_PARALLEL", kind="whole", default="16", least=1, most=MAX_BATCH_PARALLEL),
    _server("batch_window_s",
        "Time after which an unfinished batch expires. A negative time means never.",
        variable="BATCH_WINDOW", kind="duration", default="24h"),
    _server("responses_age_s",
        "Time for which the server stores responses of /v1/responses for `previous_response_id`. 0 means that no"
        " responses are stored. A negative time means forever.",
        variable="RESPONSES_AGE", kind="duration", default="24h"),
    _server("upload_bytes", "Maximum size of an uploaded file.", variable="UPLOAD_LIMIT", kind="size",
        default="200MiB"),
    _server("storage_bytes",
        "Maximum total size of uploaded files and of the answers of unfinished batches, and, separately, of the"
        " contexts that /slots saves.", variable="STORAGE_LIMIT", kind="size", default="10GiB"),
    _output("debug", "1 has the effect of --log-level debug, and prints tracebacks.", variable="DEBUG",
        kind="level", default="0"),
    _output("log_level",
        "Amount of logging on stderr. info prints a line for each request, and debug also prints llama.cpp's log.",
        ("--log-level",), "LEVEL", "LOG_LEVEL", "choice", "info", LOG_LEVELS),
    _output("log_format", "Format of the log: text, or json with one object per line.",
        ("--log-format",), "FORMAT", "LOG_FORMAT", "choice", "text", ("text", "json")),
    _output("history", "1 turns off the history of input lines in a chat.", variable="NOHISTORY",
        kind="off switch", default="0"),
    _output("editor", "Editor that Ctrl-G opens in a chat.", variable="EDITOR",
        default="the value of VISUAL or EDITOR"),
    _model("models", "Folder of GGUF files that can be used by name.", variable="MODELS", kind="path",
        default="`models` in MOEGGUF_HOME"),
    _model("home", "Folder for model names, chat history, uploaded files, and data about models.",
        variable="HOME", kind="path", default="the user's data folder"),
    _model("library", "Folder with the native library.", variable="LIBRARY", kind="path",
        default="the installed library"),
    _model("trial_load",
        "Test a new model file in a separate process before it is loaded. 0 turns the test off, and `again` repeats"
        " it at every load.", variable="TRIAL_LOAD", kind="trial", default="1"),
)  # fmt: skip

OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}
OF_EVERY_LOAD = (
    "expert_cache", "vram_cache", "placement", "warm_start", "context_store", "strategy", "policy", "draft",
)  # fmt: skip
"""Options whose environment variables apply wherever a model is loaded: in the Python
API, in commands and in servers."""
OF_COMMANDS = ("n_ctx", "n_parallel", "kv_tokens", "kv_cache_type", "flash_attention")
"""Options of a load whose environment variables apply only in commands and servers.
These variables may also begin with OLLAMA_."""
COMMAND_DEFAULTS: Mapping[str, Any] = {
    "n_ctx": None,
    "flash_attn": None,
    "embedding": None,
}
"""Defaults in commands of keywords whose defaults in `Llama` are llama-cpp-python's:
512, False, False. None means that the context length is chosen to fit the memory, that
fused attention is used if the devices support it, and that an embedding model is
recognized by its file's header."""
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "n_parallel": ("n_seq_max",),
    "kv_cache_type": ("type_k", "type_v"),
    "flash_attention": ("flash_attn",),
}
"""{option: the keywords of `Llama` that it sets}, for options that differ in name from
their keywords."""


def load_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts {option: value} to keyword arguments of `Llama`."""
    return {
        keyword: value
        for name, value in given.items()
        for keyword in KEYWORDS.get(name, (name,))
    }


def load_options_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {load option: value} for the parameters of a Modelfile or a request that
    set a load option. The values None, 0 and "" set nothing. For num_gpu, only None and
    -1 set nothing, since 0 means that no layer is on a GPU."""

    def is_set(name: str) -> bool:
        value = parameters.get(name)
        return value not in (None, -1) if name == "num_gpu" else bool(value)

    return {
        option: parameters[name]
        for name, option in LOAD_PARAMETERS.items()
        if is_set(name)
    }


def _listed(variables: Iterable[str]) -> str:
    *most, last = (f"MOEGGUF_{variable}" for variable in variables)
    return f"{', '.join(most)} and {last}"


def page() -> Iterator[str]:
    """Yields the lines of docs/options.md."""
    yield "<!-- made by `python -m moegguf.options > docs/options.md` -->"
    yield "# Options"
    yield ""
    zero = _listed(option.variable for option in _TABLE if option.zero_is_default)
    of_commands = _listed(OPTIONS[name].variable for name in OF_COMMANDS)
    yield (
        "Options of scope `load` affect how a model is loaded, and most of their names are keywords of `Llama`. Options"
        " of scope `request` are parameters of Modelfiles and requests. Options of scope `server` configure the server."
        " A flag or a keyword overrides the environment variable. `--help` prints the flags of a command. The column"
        " default contains the defaults of commands. In Python, `Llama` has two other defaults, as in llama-cpp-python:"
        " a context of 512 tokens, and no flash attention."
    )
    yield ""
    yield (
        "If a variable MOEGGUF_NAME of the server, the context or the KV cache is not set, moegguf uses the variable"
        f" OLLAMA_NAME instead. In {zero}, the value 0 means the default. The variables {of_commands} apply only in"
        " commands and servers. In Python, pass keywords to `Llama` or `Engine` instead of these variables."
    )
    for group in GROUPS:
        yield from (
            "",
            f"## {group}",
            "",
            "| name | scope | flags | variable | default | meaning |",
            "|---|---|---|---|---|---|",
        )
        for option in (option for option in _TABLE if option.group == group):
            flags = " ".join(f"`{flag}`" for flag in option.flags).replace("/", "` `")
            variable = f"`MOEGGUF_{option.variable}`" if option.variable else ""
            help = option.help.replace("|", "\\|")
            yield f"| `{option.name}` | {option.scope} | {flags} | {variable} | {option.default} | {help} |"


if __name__ == "__main__":
    print("\n".join(page()))
