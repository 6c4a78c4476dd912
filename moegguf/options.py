"""A table of options, with their keywords, flags, environment variables and help texts.

Commands take the flags of these options from the table, `settings` finds in it the environment variables to read, and
`python -m moegguf.options` prints it as docs/options.md. This module imports only modules that load fast, because
`--help` needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MODEL, MEMORY, SAMPLING, OUTPUT, RESEARCH = "Model", "Memory", "Sampling", "Output", "Research"
SERVER = "Server"
GROUPS = (MODEL, MEMORY, SAMPLING, OUTPUT, SERVER, RESEARCH)

KV_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Data types of the KV cache, by the names that llama.cpp's tools accept."""
MAX_CONTEXT_TOKENS = 1 << 24
MAX_KV_TOKENS = 1 << 28  # limit on the total tokens in a context, over all its sequences
MAX_BATCH_PARALLEL = 256
MAX_PARALLEL = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS
PLACEMENTS = ("auto", "layers", "slots", "slots-mapped", "cpu")
"""Ways to place experts on a machine with a GPU: see engine/solver.py."""
DRAFTS = ("auto", "off", "ngram", "mtp")
"""Values of the option `draft` other than a path. The option selects how the next tokens are guessed before one pass
verifies them."""
KERNELS = ("avx512", "avx2", "upstream")
LOG_LEVELS = ("debug", "info", "warning", "error")

BUDGETS = {"RAM": "expert_cache", "VRAM": "vram_cache"}
"""{tier: name of the option with the budget for experts in this tier}"""

MAX_ANSWER_TOKENS = 1 << 22
LOAD_PARAMETERS = {
    "num_ctx": "n_ctx", "num_batch": "n_batch", "num_thread": "n_threads", "num_gpu": "n_gpu_layers",
    "expert_cache": "expert_cache", "draft": "draft", "mirror": "mirror",
}  # fmt: skip
"""{name of a parameter of a Modelfile or a request that changes how a model is loaded: name of the option}"""

Kind = Literal[
    "text", "budget", "size", "duration", "timeout", "whole", "number", "switch", "off switch", "level",
    "trial", "choice", "threads", "address", "networks", "list", "path", "paths", "store size",
]  # fmt: skip


@dataclass(frozen=True)
class Option:
    """One option of the table."""

    name: str  # usually a keyword of `Llama`, a parameter of a request, or a field of `Settings` or `Environment`
    scope: Literal["load", "request", "server"]  # the option applies to a load, to a request, or to the server
    group: str
    help: str
    flags: tuple[str, ...] = ()  # names of the flag; empty: the option has no flag
    metavar: str = ""
    variable: str = ""  # environment variable without the prefix MOEGGUF_; "": no variable
    kind: Kind = "text"  # decides how the option's text is parsed
    default: str = ""  # description of the default, for the help
    choices: tuple[str, ...] = ()  # allowed values if `kind` is "choice"
    least: float | None = None  # smallest allowed number
    most: float | None = None  # largest allowed number
    zero_is_default: bool = False  # True: a 0 in the environment is treated as unset
    often: bool = False  # True: often used, so that the help lists it first

    @property
    def full_help(self) -> str:
        """Returns the help text, followed by the environment variable and the description of the default, if there are
        any."""
        default = ", or ".join(filter(None, (f"MOEGGUF_{self.variable}" if self.variable else "", self.default)))
        return self.help + (f"  [default: {default}]" if default else "")


_TABLE = (
    Option("n_ctx", "load", MODEL, "Context length in tokens. 0: the model's own.",
           ("--ctx", "-c", "--ctx-size"), "TOKENS", "CONTEXT_LENGTH", "whole",
           "a tenth of the free memory", least=0, most=MAX_CONTEXT_TOKENS, zero_is_default=True,
           often=True),
    Option("n_threads", "load", MODEL, 'Number of CPU threads. "auto": as many as other processes leave free.',
           ("--threads", "-t"), "N", kind="threads", default="auto", least=0, most=MAX_THREADS),
    Option("n_gpu_layers", "load", MODEL, "Number of layers on a GPU. -1: all layers.",
           ("--n-gpu-layers", "-ngl", "--gpu-layers"), "N", kind="whole", least=-1, most=1 << 24),
    Option("n_batch", "load", MODEL,
           "Maximum number of tokens in a pass. If it is not given, it depends on memory and reading speed.",
           kind="whole", default="512 to 4096", least=1, most=1 << 14),
    Option("draft", "load", MODEL,
           "Guess the next tokens and verify several of them in one pass, as long as this saves time. ngram: guess"
           " what followed the same tokens earlier in the text. mtp: as ngram, and otherwise with the model's own"
           " prediction heads. auto: what the file supports, if drafts cannot change a bit of an answer. off: no"
           " drafts. FILE: a smaller model with the same vocabulary (in a Modelfile: DRAFT; a request cannot name a"
           " model).", ("--draft",), "HOW|FILE", "DRAFT",
           default="auto"),
    Option("mmproj", "load", MODEL, "The model's projector file for images.", ("--mmproj",), "FILE",
           default="the projector beside the model"),
    Option("lora_path", "load", MODEL, "A LoRA adapter (GGUF) for the model. In a Modelfile: ADAPTER.", ("--lora",),
           "FILE", default="the adapter in the model's entry"),
    Option("lora_scale", "load", MODEL, "Factor on the adapter's weights.", ("--lora-scale",), "X", kind="number",
           default="1", least=-1000, most=1000),
    Option("flash_attention", "load", MODEL, "Fused (flash) attention, which rounds differently.",
           variable="FLASH_ATTENTION", kind="switch", default="on, if all devices that compute support it"),
    Option("expert_cache", "load", MEMORY, 'Memory for experts: "4GiB", "50%" or "auto".', ("--expert-cache",),
           "BUDGET", "EXPERT_CACHE", "budget", "auto", often=True),
    Option("vram_cache", "load", MEMORY,
           "GPU memory for experts, in the same forms; --expert-cache then sets the RAM for experts. With several"
           " GPUs: the total, or one value per GPU, separated by commas. A part of this memory may stage prompts (see"
           " `moegguf estimate`).",
           ("--vram-cache",), "BUDGET", "VRAM_CACHE", "budget", "auto"),
    Option("placement", "load", MEMORY,
           "Contents of the GPU memory. layers: whole layers, while the CPU computes the others. slots: the experts"
           " in use. slots-mapped (experimental): slots, but the GPU reads missing experts directly from RAM; no GPU's"
           " backend supports this yet. cpu: nothing, so no GPU is used. auto: the fastest of layers, slots and cpu"
           " according to measured speeds; with several GPUs, slots.", ("--placement",),
           "WHERE", "PLACEMENT", "choice", "auto", PLACEMENTS),
    Option("warm_start", "load", MEMORY,
           "At load, fetch the experts that earlier runs used most, and remember the experts that this run uses.",
           ("--warm-start/--no-warm-start",), "", "WARM_START", "switch", "off"),
    Option("context_store", "load", MEMORY,
           'Disk space for computed contexts: "8GiB", "auto" (a tenth of the free disk space, at most 16 GiB), or 0.'
           " A prompt that begins like an earlier one continues from its stored context, even if the model was"
           " unloaded in between.",
           ("--context-store",), "SIZE", "CONTEXT_STORE", "store size", "auto"),
    Option("mirror", "load", MEMORY,
           "A copy of the model's file on another drive. Experts are read from all copies, so the speeds of the"
           " drives add up. May be repeated. PATH: the copy (of a split model, the first file), or a folder with"
           " copies under the model's own file names.", ("--mirror",), "PATH", kind="paths", default="none"),
    Option("type_k", "load", MEMORY, "Data type of the K cache, such as q8_0.", ("--cache-type-k", "-ctk"), "TYPE",
           kind="choice", default="f16", choices=KV_CACHE_TYPES),
    Option("type_v", "load", MEMORY, "Data type of the V cache, such as q8_0.", ("--cache-type-v", "-ctv"), "TYPE",
           kind="choice", default="f16", choices=KV_CACHE_TYPES),
    Option("kv_cache_type", "load", MEMORY, f"Data type of the K and V caches: {', '.join(KV_CACHE_TYPES)}.",
           variable="KV_CACHE_TYPE", kind="choice", default="f16", choices=KV_CACHE_TYPES),
    Option("num_predict", "request", SAMPLING, "Maximum tokens. -1: no limit.",
           ("--max-tokens", "-n", "--n-predict"), "N", kind="whole", least=-2, most=MAX_ANSWER_TOKENS, often=True),
    Option("temperature", "request", SAMPLING, "Randomness. 0: always the likeliest token.",
           ("--temperature", "--temp"), "T", kind="number", default="the model's, or 0.8", least=0, most=1000,
           often=True),
    Option("top_k", "request", SAMPLING, "Sample from the N likeliest tokens. 0: from all tokens.", ("--top-k",), "N",
           kind="whole", default="the model's, or 40", least=-1, most=(1 << 31) - 1),
    Option("top_p", "request", SAMPLING, "Sample from the likeliest tokens whose probabilities add up to P.",
           ("--top-p",), "P", kind="number", default="the model's, or 0.9", least=0, most=1),
    Option("min_p", "request", SAMPLING,
           "Sample from the tokens with at least P times the probability of the likeliest token.", ("--min-p",), "P",
           kind="number", default="the model's, or 0", least=0, most=1),
    Option("repeat_penalty", "request", SAMPLING, "Penalty on tokens that occurred recently. 1: no penalty.",
           ("--repeat-penalty",), "R", kind="number", default="the model's, or 1", least=0.001, most=1000),
    Option("presence_penalty", "request", SAMPLING, "Lowers the score of every token that occurred recently.",
           kind="number", default="0", least=-100, most=100),
    Option("frequency_penalty", "request", SAMPLING, "Lowers a token's score once for each recent occurrence.",
           kind="number", default="0", least=-100, most=100),
    Option("repeat_last_n", "request", SAMPLING,
           "Number of recent tokens that the penalties count. -1: the whole context.", kind="whole", default="64",
           least=-1, most=MAX_ANSWER_TOKENS),
    Option("typical_p", "request", SAMPLING,
           "Sample from the tokens that are about as likely as expected (locally typical sampling). 1: off.",
           kind="number", default="1", least=0, most=1),
    Option("top_n_sigma", "request", SAMPLING,
           "Sample from the tokens whose logit is within N standard deviations of the highest logit. Negative: all"
           " tokens.", kind="number",
           default="-1", least=-1, most=1000),
    Option("xtc_probability", "request", SAMPLING,
           "Probability of removing all but the least likely of the tokens that reach xtc_threshold.", kind="number",
           default="0", least=0, most=1),
    Option("xtc_threshold", "request", SAMPLING,
           "Probability that a token must reach for XTC. Above 0.5: XTC removes no token.", kind="number",
           default="0.1", least=0, most=1),
    Option("dry_multiplier", "request", SAMPLING,
           "Strength of the DRY penalty on tokens that would continue a repetition. 0: off.", kind="number",
           default="0", least=0, most=1000),
    Option("dry_base", "request", SAMPLING, "Growth of the DRY penalty with the length of the repetition.",
           kind="number", default="1.75", least=1, most=1000),
    Option("dry_allowed_length", "request", SAMPLING,
           "Length of the longest repetition without a DRY penalty, in tokens.", kind="whole", default="2", least=0,
           most=MAX_ANSWER_TOKENS),
    Option("dry_penalty_last_n", "request", SAMPLING,
           "Number of recent tokens that DRY searches for repetitions. -1: the whole context.", kind="whole",
           default="-1", least=-1, most=MAX_ANSWER_TOKENS),
    Option("mirostat", "request", SAMPLING,
           "Version of Mirostat, 1 or 2, which replaces top_k, top_p and the other filters of tokens. 0: off.",
           kind="whole", default="0", least=0, most=2),
    Option("mirostat_tau", "request", SAMPLING, "Target entropy of Mirostat.", kind="number", default="5", least=0,
           most=1000),
    Option("mirostat_eta", "request", SAMPLING, "Learning rate of Mirostat.", kind="number", default="0.1", least=0,
           most=1),
    Option("num_keep", "request", SAMPLING,
           "Number of first tokens that stay when the context is full. -1: the whole prompt.", kind="whole",
           default="4", least=-1, most=MAX_ANSWER_TOKENS),
    Option("reasoning_budget_tokens", "request", SAMPLING,
           "Maximum number of tokens of thinking. At the limit, the thinking is ended and the answer follows. 0: no"
           " thinking. -1: no limit. With `serve`: for requests that do not set a limit.", ("--reasoning-budget",),
           "N", "THINK_BUDGET", "whole", "-1", least=-1, most=MAX_ANSWER_TOKENS),
    Option("reasoning_budget_message", "request", SAMPLING,
           "Text to insert before the end of the thinking if the limit ends it.", ("--reasoning-budget-message",),
           "TEXT", "THINK_BUDGET_MESSAGE", default="none"),
    Option("seed", "request", SAMPLING, "Random seed.", ("--seed", "-s"), "N", kind="whole", default="random"),
    Option("strategy", "load", RESEARCH,
           "What decides which experts are kept and fetched: moegguf (the best as measured), none, lru, or a paper's"
           " whole strategy: moe-infinity, promoe, expertflow or duoserve.", ("--strategy",), "NAME", "STRATEGY",
           default="moegguf"),
    Option("policy", "load", RESEARCH,
           "Policy that decides which experts stay: auto (the strategy's policy), a name, vram=NAME,ram=NAME, or a"
           " class of your own, FILE.py:CLASS.",
           ("--policy",), "NAME", "POLICY", default="auto"),
    Option("predictor", "load", RESEARCH,
           "Predictor of experts: a name such as skip or eamc, or a class of your own, FILE.py:CLASS.",
           ("--predictor",), "NAME", default="the strategy's"),
    Option("prefetch", "load", RESEARCH, "Fetch predicted experts ahead, as long as this saves time.",
           ("--prefetch/--no-prefetch",), kind="switch", default="the strategy's"),
    Option("log", "load", OUTPUT, "debug: print the reasons for moegguf's decisions on stderr (see decisions.md).",
           variable="LOG", kind="choice", default="off", choices=("off", "debug")),
    Option("hooks", "load", RESEARCH, "0: run plain llama.cpp.", variable="HOOKS", kind="switch", default="1"),
    Option("kernels", "load", RESEARCH, "The CPU's kernels for matrix products and attention, for comparisons.",
           variable="KERNELS", kind="choice", default="the fastest that the processor supports", choices=KERNELS),
    Option("host", "server", SERVER, "Address of the server.",
           ("--host",), "HOST[:PORT]", "HOST", "address", "127.0.0.1:11434", often=True),
    Option("api_keys", "server", SERVER,
           "Key that clients must send, or several keys, separated by commas; each has its own contexts, files and"
           " batches. An address other than loopback needs a key or a trusted network. The variable hides keys from the"
           " process list.",
           ("--api-key",), "KEY", "API_KEY", "list", often=True),
    Option("share_contexts", "server", SERVER,
           "Reuse contexts that were computed for other API keys. The time of an answer then reveals the reuse.",
           ("--share-contexts",), "", "SHARE_CONTEXTS", "switch", "off"),
    Option("trusted", "server", SERVER,
           'Networks whose clients need no key, such as "192.168.1.0/24", separated by commas. A request that a proxy'
           " forwards still needs a key. All clients in these networks can use, add and remove models.",
           ("--trust-network",), "NETWORKS", "TRUST_NETWORK", "networks"),
    Option("origins", "server", SERVER, "Web origins to allow in addition to this machine's own.", variable="ORIGINS",
           kind="list"),
    Option("memory_bytes", "server", MEMORY, "Memory for all loaded models together.", ("--memory",), "SIZE", "MEMORY",
           "size", "the free memory", often=True),
    Option("n_parallel", "server", MODEL, "Requests that a model answers at once.", ("--parallel",), "N",
           "NUM_PARALLEL", "whole", "1", least=0, most=MAX_PARALLEL, zero_is_default=True, often=True),
    Option("kv_tokens", "server", MEMORY,
           "Total context length, in tokens, of all requests that a model answers at once; at least one full"
           " context. When it is used up, the newest request waits.", ("--kv-tokens",), "N", "KV_TOKENS", "whole",
           "a full context per request, or less if experts need the memory", least=0, most=MAX_KV_TOKENS,
           zero_is_default=True),
    Option("keep_alive_s", "server", SERVER, "Time for which an idle model stays loaded. Negative: forever.",
           variable="KEEP_ALIVE", kind="duration", default="5m"),
    Option("max_models", "server", SERVER, "Maximum number of models that are loaded at once.",
           variable="MAX_LOADED_MODELS", kind="whole", default="as many as fit", least=0, most=1024,
           zero_is_default=True),
    Option("max_queue", "server", SERVER,
           "Maximum number of waiting requests. If the queue is full, a new request replaces the newest request of"
           " the client with the most requests, unless its own client has as many.", ("--max-queue",), "N",
           "MAX_QUEUE", "whole", "512", least=0, most=1_000_000),
    Option("load_timeout_s", "server", SERVER, "Time without progress after which a load fails. 0: no limit.",
           variable="LOAD_TIMEOUT", kind="timeout", default="5m"),
    Option("batch_parallel", "server", SERVER, "Number of requests of a batch that are answered at once.",
           variable="BATCH_PARALLEL", kind="whole", default="16", least=1, most=MAX_BATCH_PARALLEL),
    Option("batch_window_s", "server", SERVER, "Time after which an unfinished batch expires. Negative: never.",
           variable="BATCH_WINDOW", kind="duration", default="24h"),
    Option("responses_age_s", "server", SERVER,
           "Time for which responses of /v1/responses are stored for `previous_response_id`. 0: they are not stored."
           " Negative: forever.",
           variable="RESPONSES_AGE", kind="duration", default="24h"),
    Option("upload_bytes", "server", SERVER, "Maximum size of an uploaded file.", variable="UPLOAD_LIMIT", kind="size",
           default="200MiB"),
    Option("storage_bytes", "server", SERVER, "Maximum total size of uploaded files and answers of batches.",
           variable="STORAGE_LIMIT", kind="size", default="10GiB"),
    Option("debug", "server", OUTPUT, "1: as --log-level debug, and tracebacks are shown.", variable="DEBUG",
           kind="level", default="0"),
    Option("log_level", "server", OUTPUT,
           "Amount of logging on stderr. info adds a line for each request, and debug also llama.cpp's log.",
           ("--log-level",), "LEVEL", "LOG_LEVEL", "choice", "info", LOG_LEVELS),
    Option("log_format", "server", OUTPUT, "text, or json (one object per line).", ("--log-format",), "FORMAT",
           "LOG_FORMAT", "choice", "text", ("text", "json")),
    Option("history", "server", OUTPUT, "1: do not save the history of a chat's input lines.", variable="NOHISTORY",
           kind="off switch", default="0"),
    Option("editor", "server", OUTPUT, "Editor that Ctrl-G opens in a chat.", variable="EDITOR",
           default="the value of VISUAL or EDITOR"),
    Option("models", "load", MODEL, "Folder of GGUF files that can be used by name.", variable="MODELS", kind="path",
           default="`models` in MOEGGUF_HOME"),
    Option("home", "load", MODEL, "Folder for names, downloaded files, history, and what was learned about models.",
           variable="HOME", kind="path", default="the user's data folder"),
    Option("library", "load", MODEL, "Folder with the native library.", variable="LIBRARY", kind="path",
           default="the installed one"),
    Option("trial_load", "load", MODEL, "Try to load a new file in a separate process first. `again`: at every load.",
           variable="TRIAL_LOAD", kind="trial", default="1"),
)  # fmt: skip

OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}
OF_EVERY_LOAD = (
    "expert_cache", "vram_cache", "placement", "warm_start", "context_store", "strategy", "policy", "draft",
)  # fmt: skip
"""Options whose environment variables apply wherever a model is loaded: in the Python API, in commands and in
servers."""
OF_COMMANDS = ("n_ctx", "n_parallel", "kv_tokens", "kv_cache_type", "flash_attention")
"""Options of a load whose environment variables apply only in commands and servers. These variables may also begin with
OLLAMA_."""
COMMAND_DEFAULTS: Mapping[str, Any] = {"n_ctx": None, "flash_attn": None, "embedding": None}
"""Defaults in commands of keywords whose defaults in `Llama` are llama-cpp-python's: 512, False, False. None means that
the context length is chosen to fit the memory, that fused attention is used if the devices support it, and that an
embedding model is recognized by its file's header."""
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "n_parallel": ("n_seq_max",),
    "kv_cache_type": ("type_k", "type_v"),
    "flash_attention": ("flash_attn",),
}
"""{option: the keywords of `Llama` that it sets}, for options that differ in name from their keywords."""


def load_keywords(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts {option: value} to keyword arguments of `Llama`."""
    return {keyword: value for name, value in given.items() for keyword in KEYWORDS.get(name, (name,))}


def load_options_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {load option: value} for the parameters of a Modelfile or a request that set a load option. The values
    None, 0 and "" set nothing. For num_gpu, only None and -1 set nothing, since 0 means that no layer is on a GPU."""

    def is_set(name: str) -> bool:
        value = parameters.get(name)
        return value not in (None, -1) if name == "num_gpu" else bool(value)

    return {option: parameters[name] for name, option in LOAD_PARAMETERS.items() if is_set(name)}


def page() -> Iterator[str]:
    """Yields the lines of docs/options.md."""
    yield "<!-- made by `python -m moegguf.options > docs/options.md` -->"
    yield "# Options"
    yield ""
    zero = ", ".join(f"MOEGGUF_{option.variable}" for option in _TABLE if option.zero_is_default)
    of_commands = ", ".join(f"MOEGGUF_{OPTIONS[name].variable}" for name in OF_COMMANDS)
    yield (
        "An option has a name, and may have flags and an environment variable. Its name is a keyword of `Llama` (scope"
        " `load`), a parameter of Modelfiles and requests (scope `request`), or a setting of the server (scope"
        " `server`). The help of a command lists its flags. A flag or a keyword overrides the variable. If a variable"
        " of the server, of the context or of the KV cache is not set, OLLAMA_NAME is used. The value 0 has no effect"
        f" in {zero}. The variables {of_commands} apply only in commands and servers. In Python, give keywords of"
        " `Llama` or `Engine` instead."
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
