"""Parses model names: `[host/][namespace/]model[:tag]`.

The rules for characters follow Ollama's (types/model/name.go), so no part of a name can
lead out of a folder. A Hugging Face repository can be written `hf.co/user/repo`,
`huggingface.co/user/repo`, `hf:user/repo`, `user/repo` or as a URL. The tag selects a
file ("Q4_K_M", or a file's whole name). Names are compared ignoring case.

The library has short names such as "qwen3:30b" for well-known MoE models, with their
repositories and sizes. library.json lists these models, and describes how the facts
were checked. A short name without a tag refers to the first model with that name. This
module opens no file except library.json.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from moegguf.errors import ModelNameError
from moegguf.quantities import shown
from moegguf.text import to_utf8, without_password

DEFAULT_TAG = "latest"
HUB_HOST = "hf.co"
OLLAMA_HOST = "registry.ollama.ai"

HUB_SEARCH = "https://huggingface.co/models?library=gguf&search="

# Well-known dense models by the beginning of their names in other programs.
DENSE = {
    "llama3.1": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "llama3": "bartowski/Llama-3.2-3B-Instruct-GGUF",
    "qwen2.5": "Qwen/Qwen2.5-7B-Instruct-GGUF",
    "gemma3": "ggml-org/gemma-3-4b-it-GGUF",
    "mistral": "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
    "phi4": "bartowski/phi-4-GGUF",
    "smollm": "bartowski/SmolLM2-1.7B-Instruct-GGUF",
}

MAX_NAME = 512  # characters
MAX_HOST = 253
MAX_PART = 96  # characters, the Hub's limit
MAX_TAG = 160  # characters; a tag can be a whole file name

# Address of a repository, or of a file in a repository; the file's name is then the
# tag.
_URL = re.compile(
    r"https?://(?:www\.)?(?:hf|huggingface)\.co/([^/?#]+/[^/?#]+)"
    r"(?:/(?:blob|resolve)/[^?#]+/([^/?#]+)(?:[?#].*)?|[/?#].*)?",
    re.IGNORECASE,
)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_HOST = re.compile(
    r"(?=[^/]*[.:]|localhost$)[a-z0-9_][a-z0-9_.-]*(:\d{1,5})?", re.ASCII
)
_RESERVED = {"hf", "ollama"}  # the prefixes hf: and ollama: cannot be model names

FORMS = 'write "model:tag", or "hf.co/user/repo:Q4_K_M" for a model of Hugging Face'


@dataclass(frozen=True)
class Name:
    """The parts of a name. `host` and `namespace` are empty in a name that is only a
    model and a tag. `tag` is never empty."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def canonical(self) -> str:
        """The full form of the name, such as "demo:latest" or
        "hf.co/user/repo:Q4_K_M"."""
        return (
            "/".join(part for part in (self.host, self.namespace, self.model) if part)
            + f":{self.tag}"
        )

    @property
    def key(self) -> str:
        """The canonical name in lower case. Names with equal keys refer to the same
        model."""
        return self.canonical.lower()

    @property
    def is_hub(self) -> bool:
        """Returns whether the name refers to a model on Hugging Face."""
        return self.host == HUB_HOST

    @property
    def repo(self) -> str:
        """The Hugging Face repository that the name refers to: "user/repo"."""
        return f"{self.namespace}/{self.model}"


def parse_name(text: str) -> Name:
    """Parses a name.

    Raises ModelNameError for a text that breaks a rule: wrong characters, a part that
    is empty or too long, or a reserved name.
    """
    if not isinstance(text, str) or not text:
        raise ModelNameError(
            f"a model's name must be text that is not empty, but is {text!r:.40}; {FORMS}."
        )
    if len(text) > MAX_NAME:
        raise ModelNameError(
            f"a model's name may have up to {MAX_NAME} characters, but this has {len(text)}; {FORMS}."
        )
    if url := _URL.fullmatch(text):
        repo, file = url.groups()
        return _name(
            HUB_HOST,
            f"{repo.partition(':')[0]}:{unquote(file)}" if file else repo,
            text,
        )
    prefix, _, rest = text.partition(":")
    if prefix.lower() == "hf":
        return _name(HUB_HOST, rest.removeprefix("//"), text)
    if prefix.lower() == "ollama":
        return _name(OLLAMA_HOST, rest if "/" in rest else f"library/{rest}", text)
    first, slash, rest = text.partition("/")
    if first.lower() in (HUB_HOST, "huggingface.co"):
        return _name(HUB_HOST, rest, text)
    if rest.count("/") == 1:
        return _name(first.lower(), rest, text)
    return _name(HUB_HOST if slash else "", text, text)


def name_or_none(text: str) -> Name | None:
    """Parses a name. Returns None if `text` is not a valid name."""
    with suppress(ModelNameError):
        return parse_name(text)
    return None


def hub_name_of(text: str) -> Name | None:
    """Parses a name. Returns None unless it is the name of a model on Hugging Face."""
    name = name_or_none(text)
    return name if name and name.is_hub else None


def _name(host: str, path: str, text: str) -> Name:
    """Returns the name with this host, and with `[namespace/]model[:tag]` from `path`.
    Raises ModelNameError for a part that breaks a rule."""
    namespace, _, last = path.partition("/") if host else ("", "", path)
    model, colon, tag = last.partition(":")
    name = Name(host, namespace, model, tag if colon else DEFAULT_TAG)
    if name.is_hub and not (namespace and model):
        raise _bad(text, "names no repository: it needs a user and a repository")
    if (
        host
        and not name.is_hub
        and (not _HOST.fullmatch(host) or ".." in host or len(host) > MAX_HOST)
    ):
        raise _bad(
            text,
            f"has three parts, but the first, {host!r:.40}, is not a host such as example.com or localhost:5000",
        )
    parts = [(model, MAX_PART), (name.tag, MAX_TAG)]
    for part, most in [(namespace, MAX_PART), *parts] if host else parts:
        if fault := _fault(part, most):
            raise _bad(text, fault)
    if host and not name.is_hub and "." in namespace:
        raise _bad(
            text,
            f"has a dot in {namespace!r}, which only a host or a name on Hugging Face may have",
        )
    if name.is_hub and "--" in name.repo:
        raise _bad(text, "has '--', which no repository has")
    if not host and model.lower() in _RESERVED:
        raise _bad(text, f"is not a model: {model!r} is a prefix")
    return name


def is_tag(text: str) -> bool:
    """Returns whether `text` can be the tag of a name."""
    return _fault(text, MAX_TAG) is None


def _fault(part: str, most: int) -> str | None:
    """Returns a description of the rule that `part` breaks; None if `part` is valid."""
    if not part:
        return "has an empty part"
    if len(part) > most:
        return f"has a part of {len(part)} characters, but at most {most} are allowed"
    if not _PART.fullmatch(part) or ".." in part or part.endswith("."):
        return (
            f"has {part!r:.40}, but a part has only letters, digits and . _ -, with no . or - first, no . last and no"
            " '..' inside"
        )
    return None


def _bad(text: str, rule: str) -> ModelNameError:
    return ModelNameError(
        f"the model name {shown(without_password(text))} {rule}; {FORMS}."
    )


@dataclass(frozen=True)
class LibraryModel:
    """A model in the library.

    `n_parameters` counts all weights, and `n_active` only the weights that one token
    uses: it leaves out unused experts. Both leave out tables that stay in the file and
    are read row by row (`row_table_bytes`).
    """

    name: str
    repository: str
    file: str  # path in the repository; the first shard of a split model
    quantization: str
    size_bytes: int
    n_parameters: float
    n_active: float
    n_expert: int
    n_expert_used: int
    n_layer: int
    # Bytes of tables that stay in the file and are read row by row.
    row_table_bytes: int = 0

    @property
    def hub_name(self) -> str:
        """The model's full name on Hugging Face."""
        return f"{HUB_HOST}/{self.repository}:{self.quantization}"

    @property
    def resident_bytes(self) -> int:
        """The bytes of the weights that are in memory when all experts are in memory.
        Tables that stay in the file (`row_table_bytes`) are left out."""
        return self.size_bytes - self.row_table_bytes

    @property
    def expert_bytes(self) -> int:
        """An estimate of the bytes of all routed experts, from the numbers of
        parameters. A token uses n_expert_used of every n_expert experts."""
        share = (1 - self.n_active / self.n_parameters) / (
            1 - self.n_expert_used / self.n_expert
        )
        return round(min(1.0, share) * self.resident_bytes)

    @property
    def token_bytes(self) -> int:
        """An estimate of the bytes of the routed experts that one token uses."""
        return self.expert_bytes * self.n_expert_used // self.n_expert

    @property
    def dense_bytes(self) -> int:
        """An estimate of the bytes of all other resident weights, which every token
        uses."""
        return self.resident_bytes - self.expert_bytes


@functools.cache
def library() -> tuple[LibraryModel, ...]:
    """Returns all models in the library, in the order of its table."""
    table = json.loads(
        Path(__file__).with_name("library.json").read_text(encoding="utf-8")
    )
    return tuple(
        LibraryModel(**dict(zip(table["columns"], row, strict=False)))
        for row in table["models"]
    )


def find_in_library(text: str) -> LibraryModel | None:
    """Returns the library's model with this short name, or None if there is none.
    Without a tag, or with the tag `latest`, returns the first model with that name.
    Ignores the case of letters."""
    name = text.lower().removesuffix(":latest")
    return next(
        (
            model
            for model in library()
            if name in (model.name, model.name.partition(":")[0])
        ),
        None,
    )


def fetchable_name(text: str) -> str | None:
    """Returns the Hugging Face name that `text` refers to: `text` itself, or the full
    name of a model in the library. Returns None for other texts, and for the path of a
    .gguf file."""
    if model := find_in_library(text):
        return model.hub_name
    # A path can look like USER/REPOSITORY.
    is_path = text.lower().endswith(".gguf") and ":" not in text
    return text if hub_name_of(text) and not is_path else None


def hub_hint(text: str) -> str:
    """Returns sentences about the models of Hugging Face that `text`, which is no known
    name, may refer to."""
    words = quote(to_utf8(text.partition(":")[0]), safe="")
    known = next(
        (each for name, each in DENSE.items() if text.lower().startswith(name)), None
    )
    example = (
        f" A dense model is {HUB_HOST}/{known} (a name of the hub, not checked here)."
        if known
        else ""
    )
    return (
        f"Models of Hugging Face have names such as {HUB_HOST}/USER/REPOSITORY:Q4_K_M.{example}"
        f" {HUB_SEARCH}{words} lists GGUF files to choose from."
    )


def nearest_names(text: str, others: Sequence[str] = ()) -> list[str]:
    """Returns up to three names from the library and from `others` that are spelled
    similarly to `text`."""
    known = [*others, *(model.name for model in library())]
    return list(
        dict.fromkeys(
            difflib.get_close_matches(text.lower().removesuffix(":latest"), known, n=3)
        )
    )
