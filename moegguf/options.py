"""A table of options, with their keywords, flags, environment variables and help texts.

Commands take the flags of these options from the table, `settings` reads the environment with it, and `python -m
moegguf.options` prints it as docs/options.md. This module imports nothing that is slow, because `--help` needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

MODEL, MEMORY, SAMPLING, OUTPUT, RESEARCH = "Model", "Memory", "Sampling", "Output", "Research"
SERVER = "Server"
GROUPS = (MODEL, MEMORY, SAMPLING, OUTPUT, SERVER, RESEARCH)

KV_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Types of a KV cache, by the names that llama.cpp's tools accept."""
MAX_CONTEXT_TOKENS = 1 << 24
MAX_KV_TOKENS = 1 << 28  # limit on the total tokens in a context, over all its sequences
MAX_BATCH_PARALLEL = 256
MAX_PARALLEL = 256  # llama.cpp's LLAMA_MAX_SEQ
MAX_THREADS = 512  # ggml's GGML_MAX_N_THREADS
PLACEMENTS = ("auto", "layers", "slots", "cpu")
"""Ways to place experts on a machine with a GPU: see engine/solver.py."""
DRAFTS = ("auto", "off", "ngram", "mtp")
"""Values of the option `draft` other than a path: ways to guess the next tokens, which a pass then verifies."""
KERNELS = ("avx512", "avx2", "upstream")
LOG_LEVELS = ("debug", "info", "warning", "error")

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

    name: str  # mostly a keyword of `Llama`, a parameter of a request, or a field of `Settings` or `Environment`
    scope: Literal["load", "request", "server"]  # concerns loading, a request, or the server
    group: str
    help: str
    flags: tuple[str, ...] = ()  # names of the flag; empty: no command has a flag for the option
    metavar: str = ""
    variable: str = ""  # environment variable without the prefix MOEGGUF_; "": none
    kind: Kind = "text"  # decides how the option's text is parsed
    default: str = ""  # description of the default, for the help
    choices: tuple[str, ...] = ()  # allowed values if `kind` is "choice"
    least: float | None = None  # smallest allowed number
    most: float | None = None  # largest allowed number
    zero_is_default: bool = False  # True: a 0 in the environment counts as unset
    often: bool = False  # True: often used, so that the help lists it first

    @property
    def full_help(self) -> str:
        """Returns the help text, followed by the environment variable and the description of the default, if there are
        any."""
        default = ", or ".join(filter(None, (f"MOEGGUF_{self.variable}" if self.variable else "", self.default)))
        return self.help + (f"  [default: {default}]" if default else "")


_TABLE = (
    Option("n_ctx", "load", MODEL, "Tokens of context; 0: the model's own.", ("--ctx", "-c", "--ctx-size"), "TOKENS",
           "CONTEXT_LENGTH", "whole", "what a tenth of the free memory holds", least=0, most=MAX_CONTEXT_TOKENS,
           zero_is_default=True, often=True),
    Option("n_threads", "load", MODEL, 'CPU threads, or "auto": as many as other processes leave free.',
           ("--threads", "-t"), "N", kind="threads", default="auto", least=0, most=MAX_THREADS),
    Option("n_gpu_layers", "load", MODEL, "Layers on a GPU; -1: all.", ("--n-gpu-layers", "-ngl", "--gpu-layers"), "N",
           kind="whole", least=-1, most=1 << 24),
    Option("n_batch", "load", MODEL, "Most tokens of a pass; unless given, as memory and reading allow.",
           kind="whole", default="512 to 4096", least=1, most=1 << 14),
    Option("draft", "load", MODEL,
           "Guess tokens ahead and verify several in a pass, while that saves time: ngram (what followed the same"
           " tokens earlier in the text), mtp (the same, else the model's own heads for more than the next token),"
           " auto (of these what the file has, where no bit of an answer depends on it), off, or a smaller model of"
           " the same vocabulary (in a Modelfile DRAFT; a request names no model).", ("--draft",), "HOW|FILE", "DRAFT",
           default="auto"),
    Option("mmproj", "load", MODEL, "The model's projector for images.", ("--mmproj",), "FILE",
           default="the one beside the model"),
    Option("lora_path", "load", MODEL, "A LoRA adapter (GGUF) of the model; in a Modelfile ADAPTER.", ("--lora",),
           "FILE", default="that of the model's name"),
    Option("lora_scale", "load", MODEL, "How much the adapter counts.", ("--lora-scale",), "X", kind="number",
           default="1", least=-1000, most=1000),
    Option("flash_attention", "load", MODEL, "Fused attention, which rounds otherwise.", variable="FLASH_ATTENTION",
           kind="switch", default="where the devices that compute have it"),
    Option("expert_cache", "load", MEMORY, 'Memory for experts: "4GiB", "50%" or "auto".', ("--expert-cache",),
           "BUDGET", "EXPERT_CACHE", "budget", "auto", often=True),
    Option("vram_cache", "load", MEMORY,
           "Memory of a GPU for experts, in the same forms; --expert-cache is RAM beside it. With several GPUs it is"
           " their sum, or one for each, with commas. Prompts may be staged in a part of it (`moegguf estimate`).",
           ("--vram-cache",), "BUDGET", "VRAM_CACHE", "budget", "auto"),
    Option("placement", "load", MEMORY,
           "What goes into that memory: layers (whole ones; the CPU computes the others), slots (experts as they are"
           " used), cpu (nothing: no GPU) or auto, which measures; with several GPUs auto is slots.", ("--placement",),
           "WHERE", "PLACEMENT", "choice", "auto", PLACEMENTS),
    Option("warm_start", "load", MEMORY,
           "Fetch the experts that earlier runs used most when the model is loaded, and remember this run's.",
           ("--warm-start/--no-warm-start",), "", "WARM_START", "switch", "off"),
    Option("context_store", "load", MEMORY,
           'Disk for computed contexts, so that a prompt that begins as an earlier one goes on from there, also after'
           ' the model was unloaded: "8GiB", "auto" (a tenth of the free disk, at most 16 GiB), or 0.',
           ("--context-store",), "SIZE", "CONTEXT_STORE", "store size", "auto"),
    Option("mirror", "load", MEMORY,
           "A copy of the model's file on another drive, from which experts are read, too, so that both drives' speeds"
           " add up; several times for several copies. PATH: the copy (of a split model the first file), or the folder"
           " of copies that have the model's own file names.", ("--mirror",), "PATH", kind="paths", default="none"),
    Option("type_k", "load", MEMORY, "Type of the K cache, such as q8_0.", ("--cache-type-k", "-ctk"), "TYPE",
           kind="choice", default="f16", choices=KV_CACHE_TYPES),
    Option("type_v", "load", MEMORY, "Type of the V cache, such as q8_0.", ("--cache-type-v", "-ctv"), "TYPE",
           kind="choice", default="f16", choices=KV_CACHE_TYPES),
    Option("kv_cache_type", "load", MEMORY, f"Type of the K and V cache: {', '.join(KV_CACHE_TYPES)}.",
           variable="KV_CACHE_TYPE", kind="choice", default="f16", choices=KV_CACHE_TYPES),
    Option("num_predict", "request", SAMPLING, "Longest answer; -1: until it ends.",
           ("--max-tokens", "-n", "--n-predict"), "N", kind="whole", least=-2, most=MAX_ANSWER_TOKENS, often=True),
    Option("temperature", "request", SAMPLING, "0 takes the likeliest token.", ("--temperature", "--temp"), "T",
           kind="number", default="the model's, or 0.8", least=0, most=1000, often=True),
    Option("top_k", "request", SAMPLING, "Only the N likeliest tokens; 0: all.", ("--top-k",), "N", kind="whole",
           default="the model's, or 40", least=-1, most=(1 << 31) - 1),
    Option("top_p", "request", SAMPLING, "Only the likeliest tokens that together have P.", ("--top-p",), "P",
           kind="number", default="the model's, or 0.9", least=0, most=1),
    Option("min_p", "request", SAMPLING, "Only tokens with P times the likeliest's share.", ("--min-p",), "P",
           kind="number", default="the model's, or 0", least=0, most=1),
    Option("repeat_penalty", "request", SAMPLING, "Divides the scores of recent tokens.", ("--repeat-penalty",), "R",
           kind="number", default="the model's, or 1", least=0.001, most=1000),
    Option("presence_penalty", "request", SAMPLING, "Lowers the scores of recent tokens.", kind="number", default="0",
           least=-100, most=100),
    Option("frequency_penalty", "request", SAMPLING, "Lowers them for each time that a token came.", kind="number",
           default="0", least=-100, most=100),
    Option("repeat_last_n", "request", SAMPLING, "Tokens that penalties count; -1: the context's.", kind="whole",
           default="64", least=-1, most=MAX_ANSWER_TOKENS),
    Option("typical_p", "request", SAMPLING, "Only tokens that are about as likely as expected.", kind="number",
           default="1", least=0, most=1),
    Option("top_n_sigma", "request", SAMPLING,
           "Only tokens within N standard deviations of the likeliest one's logit; negative: all.", kind="number",
           default="-1", least=-1, most=1000),
    Option("xtc_probability", "request", SAMPLING,
           "Chance to leave out all but the least likely of the tokens that reach xtc_threshold.", kind="number",
           default="0", least=0, most=1),
    Option("xtc_threshold", "request", SAMPLING, "Chance that a token needs for that; above 0.5 none has it.",
           kind="number", default="0.1", least=0, most=1),
    Option("dry_multiplier", "request", SAMPLING, "Lowers the scores of tokens that go on a repetition; 0: of none.",
           kind="number", default="0", least=0, most=1000),
    Option("dry_base", "request", SAMPLING, "How fast that grows with the repetition's length.", kind="number",
           default="1.75", least=1, most=1000),
    Option("dry_allowed_length", "request", SAMPLING, "Longest repetition that lowers no score.", kind="whole",
           default="2", least=0, most=MAX_ANSWER_TOKENS),
    Option("dry_penalty_last_n", "request", SAMPLING, "Tokens in which repetitions are looked for; -1: the context's.",
           kind="whole", default="-1", least=-1, most=MAX_ANSWER_TOKENS),
    Option("mirostat", "request", SAMPLING,
           "1 or 2: that version of Mirostat, in place of top_k, top_p and the others that leave tokens out; 0: not.",
           kind="whole", default="0", least=0, most=2),
    Option("mirostat_tau", "request", SAMPLING, "Entropy that Mirostat aims at.", kind="number", default="5", least=0,
           most=1000),
    Option("mirostat_eta", "request", SAMPLING, "How fast Mirostat learns.", kind="number", default="0.1", least=0,
           most=1),
    Option("num_keep", "request", SAMPLING, "First tokens that stay when the context is full; -1: the prompt.",
           kind="whole", default="4", least=-1, most=MAX_ANSWER_TOKENS),
    Option("reasoning_budget_tokens", "request", SAMPLING,
           "Tokens of thinking; then its end is forced, and the answer goes on. 0: no thinking, -1: no limit. Of"
           " `serve`: for requests that name none.", ("--reasoning-budget",), "N", "THINK_BUDGET", "whole", "-1",
           least=-1, most=MAX_ANSWER_TOKENS),
    Option("reasoning_budget_message", "request", SAMPLING,
           "Text before the end of the thinking, where that is forced.", ("--reasoning-budget-message",), "TEXT",
           "THINK_BUDGET_MESSAGE", default="none"),
    Option("seed", "request", SAMPLING, "Random seed.", ("--seed", "-s"), "N", kind="whole", default="random"),
    Option("strategy", "load", RESEARCH,
           "What decides on experts: moegguf (what was measured to be best), none, lru, or as a whole one of"
           " moe-infinity, promoe, expertflow, duoserve.", ("--strategy",), "NAME", "STRATEGY", default="moegguf"),
    Option("policy", "load", RESEARCH,
           "Which experts stay: auto (the strategy's), a name, vram=NAME,ram=NAME, or a class of yours, FILE.py:CLASS.",
           ("--policy",), "NAME", "POLICY", default="auto"),
    Option("predictor", "load", RESEARCH,
           "Expert predictor: a name, such as skip or eamc, or a class of yours, FILE.py:CLASS.", ("--predictor",),
           "NAME", default="the strategy's"),
    Option("prefetch", "load", RESEARCH, "Fetch predicted experts ahead while that saves time.",
           ("--prefetch/--no-prefetch",), kind="switch", default="the strategy's"),
    Option("log", "load", OUTPUT, "debug prints on stderr why moegguf decided what it did: see decisions.md.",
           variable="LOG", kind="choice", default="off", choices=("off", "debug")),
    Option("hooks", "load", RESEARCH, "0 runs plain llama.cpp.", variable="HOOKS", kind="switch", default="1"),
    Option("kernels", "load", RESEARCH, "The CPU's kernels for products and attention, to compare.", variable="KERNELS",
           kind="choice", default="the fastest that the processor has", choices=KERNELS),
    Option("host", "server", SERVER, "Where to listen, and where clients look for the server.", ("--host",),
           "HOST[:PORT]", "HOST", "address", "127.0.0.1:11434", often=True),
    Option("api_keys", "server", SERVER,
           "Key required of clients, or several with commas or in lines, each with contexts, files and batches of its"
           " own; a key, or a trusted network, must be given for addresses other than loopback. The variable keeps"
           " keys out of the process list.", ("--api-key",), "KEY", "API_KEY", "list", often=True),
    Option("share_contexts", "server", SERVER,
           "A request begins with what was computed for other keys, too, which its timing then tells.",
           ("--share-contexts",), "", "SHARE_CONTEXTS", "switch", "off"),
    Option("trusted", "server", SERVER,
           'Networks whose clients need no key, such as "192.168.1.0/24", unless a proxy forwards their requests;'
           ' commas between them. Everyone there can use, add and remove models.', ("--trust-network",), "NETWORKS",
           "TRUST_NETWORK", "networks"),
    Option("origins", "server", SERVER, "Allowed web origins, besides those of this machine.", variable="ORIGINS",
           kind="list"),
    Option("memory_bytes", "server", MEMORY, "Memory for all loaded models together.", ("--memory",), "SIZE", "MEMORY",
           "size", "what is free", often=True),
    Option("n_parallel", "server", MODEL, "Requests that a model answers at once.", ("--parallel",), "N",
           "NUM_PARALLEL", "whole", "1", least=0, most=MAX_PARALLEL, zero_is_default=True, often=True),
    Option("kv_tokens", "server", MEMORY,
           "Tokens of context of all requests that a model answers at once, one whole context at least; when they are"
           " used up, the newest waits.", ("--kv-tokens",), "N", "KV_TOKENS", "whole",
           "a full context for each, less where experts would miss that memory", least=0, most=MAX_KV_TOKENS,
           zero_is_default=True),
    Option("keep_alive_s", "server", SERVER, "How long an idle model stays loaded; negative: for ever.",
           variable="KEEP_ALIVE", kind="duration", default="5m"),
    Option("max_models", "server", SERVER, "At most so many models at once.", variable="MAX_LOADED_MODELS",
           kind="whole", default="as many as fit", least=0, most=1024, zero_is_default=True),
    Option("max_queue", "server", SERVER,
           "Requests that may wait; when full, of the client with most of them the newest is refused for one of a"
           " client with fewer.", ("--max-queue",), "N", "MAX_QUEUE", "whole", "512", least=0, most=1_000_000),
    Option("load_timeout_s", "server", SERVER, "A load fails after this long without progress; 0: never.",
           variable="LOAD_TIMEOUT", kind="timeout", default="5m"),
    Option("batch_parallel", "server", SERVER, "Requests of a batch at once.", variable="BATCH_PARALLEL", kind="whole",
           default="16", least=1, most=MAX_BATCH_PARALLEL),
    Option("batch_window_s", "server", SERVER, "A batch that takes longer expires; negative: never.",
           variable="BATCH_WINDOW", kind="duration", default="24h"),
    Option("responses_age_s", "server", SERVER,
           "How long responses of /v1/responses are stored, for `previous_response_id`; 0: not, negative: for ever.",
           variable="RESPONSES_AGE", kind="duration", default="24h"),
    Option("upload_bytes", "server", SERVER, "Size of an uploaded file.", variable="UPLOAD_LIMIT", kind="size",
           default="200MiB"),
    Option("storage_bytes", "server", SERVER, "Size of all uploaded files and answers of batches together.",
           variable="STORAGE_LIMIT", kind="size", default="10GiB"),
    Option("debug", "server", OUTPUT, "1 is --log-level debug, and shows tracebacks.", variable="DEBUG", kind="level",
           default="0"),
    Option("log_level", "server", OUTPUT,
           "What the server writes on stderr: from `info` on a line for each request, with `debug` llama.cpp's log"
           " too.", ("--log-level",), "LEVEL", "LOG_LEVEL", "choice", "info", LOG_LEVELS),
    Option("log_format", "server", OUTPUT, "text, or json: an object on each line.", ("--log-format",), "FORMAT",
           "LOG_FORMAT", "choice", "text", ("text", "json")),
    Option("history", "server", OUTPUT, "1: a chat keeps no history of lines.", variable="NOHISTORY", kind="off switch",
           default="0"),
    Option("editor", "server", OUTPUT, "Editor that Ctrl-G opens in a chat.", variable="EDITOR",
           default="that of VISUAL or EDITOR"),
    Option("models", "load", MODEL, "Folder of GGUF files known by name.", variable="MODELS", kind="path",
           default="`models` in MOEGGUF_HOME"),
    Option("home", "load", MODEL, "Folder of names, blobs, history and what was learnt of models.", variable="HOME",
           kind="path", default="the user's data folder"),
    Option("library", "load", MODEL, "Folder of the native library.", variable="LIBRARY", kind="path",
           default="the installed one"),
    Option("trial_load", "load", MODEL, "Try a file in a process of its own first; `again`: at every load.",
           variable="TRIAL_LOAD", kind="trial", default="1"),
)  # fmt: skip

OPTIONS: Mapping[str, Option] = {option.name: option for option in _TABLE}
OF_EVERY_LOAD = (
    "expert_cache", "vram_cache", "placement", "warm_start", "context_store", "strategy", "policy", "draft",
)  # fmt: skip
"""Load options whose environment variables apply wherever a model is loaded: in the Python API, in commands and in
servers."""
OF_COMMANDS = ("n_ctx", "n_parallel", "kv_tokens", "kv_cache_type", "flash_attention")
"""Load options whose environment variables apply only in commands and servers. These variables may also begin with
OLLAMA_."""
COMMAND_DEFAULTS: Mapping[str, Any] = {"n_ctx": None, "flash_attn": None, "embedding": None}
"""Keywords of `Llama` that have other defaults in commands. There, the context is chosen for the memory, fused
attention is used where devices have it, and the file's header decides whether texts are pooled. `Llama` has
llama-cpp-python's own defaults: 512, False, False."""
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
    """Returns {load option: value} for the parameters of a Modelfile or a request that set one. None, 0 and "" set
    none. For num_gpu, only None and -1 set none, since 0 means that no layer is on a GPU."""

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
    yield (
        "What each option is called as flag, as environment variable, and as keyword of `Llama` (load), parameter of a"
        " Modelfile and a request (request), or setting of the server (server). The help of a command says which flags"
        " it has. A flag or keyword counts before the variable. Where a variable of the server, of context or of KV"
        f" cache is unset, OLLAMA_NAME is read. 0 is as unset in {zero}."
    )
    for group in GROUPS:
        yield from ("", f"## {group}", "", "| name | of | flags | variable | default | |", "|---|---|---|---|---|---|")
        for option in (option for option in _TABLE if option.group == group):
            flags = " ".join(f"`{flag}`" for flag in option.flags).replace("/", "` `")
            variable = f"`MOEGGUF_{option.variable}`" if option.variable else ""
            help = option.help.replace("|", "\\|")
            yield f"| `{option.name}` | {option.scope} | {flags} | {variable} | {option.default} | {help} |"


if __name__ == "__main__":
    print("\n".join(page()))
