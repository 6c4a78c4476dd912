"""Names of models: `[host/][namespace/]model[:tag]`.

Ollama's rules (types/model/name.go: first character, characters, lengths), so that a name is never a path. Hugging Face
repositories can be written `hf.co/user/repo`, `huggingface.co/user/repo`, `hf:user/repo`, `user/repo` or as a URL; the
tag selects a file ("Q4_K_M", or a file's whole name). Names are compared without case. Opens no files.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from moegguf.errors import ModelNameError

DEFAULT_TAG = "latest"
HUB_HOST = "hf.co"
OLLAMA_HOST = "registry.ollama.ai"
OLLAMA_PREFIX = "ollama:"

MAX_NAME = 512  # characters
MAX_HOST = 253
MAX_PART = 96  # as on the hub
MAX_TAG = 160  # whole file names are tags

_HUB_HOSTS = {HUB_HOST, "huggingface.co", "www.huggingface.co", "www.hf.co"}
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_HOST = re.compile(r"(?=[^/]*[.:]|localhost$)[a-z0-9_][a-z0-9_.-]*(:\d{1,5})?", re.ASCII)
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE | re.ASCII)
_RESERVED = {"hf", "ollama"}  # prefixes, not models

FORMS = 'write "model:tag", or "hf.co/user/repo:Q4_K_M" for a model of Hugging Face'


@dataclass(frozen=True)
class Name:
    """The parts of a name. `host` and `namespace` are empty for local models; `tag` never is."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def canonical(self) -> str:
        """The full form: "demo:latest", "hf.co/user/repo:Q4_K_M"."""
        return "/".join(part for part in (self.host, self.namespace, self.model) if part) + f":{self.tag}"

    @property
    def key(self) -> str:
        """Equal for names that mean the same."""
        return self.canonical.lower()

    @property
    def is_hub(self) -> bool:
        """Whether it names a model on Hugging Face."""
        return self.host == HUB_HOST

    @property
    def repo(self) -> str:
        """The repository of a hub name: "user/repo"."""
        return f"{self.namespace}/{self.model}"


def parse_name(text: str) -> Name:
    """The name that `text` means.

    Raises ModelNameError for paths, other characters, long texts and reserved names.
    """
    if not isinstance(text, str) or not text:
        raise ModelNameError(f"a model's name must be text, but is {text!r:.40}; {FORMS}.")
    if len(text) > MAX_NAME:
        raise ModelNameError(f"a model's name has at most {MAX_NAME} characters, but this one {len(text)}; {FORMS}.")
    if "://" in text:
        return _parse_url(text)
    lowered = text.lower()
    if lowered.startswith("hf:"):
        return _hub_name(text[3:], text)
    if lowered.startswith(OLLAMA_PREFIX):
        namespace, _, last = text[len(OLLAMA_PREFIX) :].rpartition("/")
        return _name(OLLAMA_HOST, namespace or "library", last, text)
    *before, last = text.split("/")
    if not before and lowered not in _HUB_HOSTS:
        return _name("", "", last, text)
    if not before or before[0].lower() in _HUB_HOSTS:
        return _hub_name(text.partition("/")[2], text)
    if len(before) == 1:
        return _hub_name(text, text)
    if len(before) == 2 and before[0]:
        return _name(before[0].lower(), before[1], last, text)
    raise _bad(text, "looks like a path")


def name_or_none(text: str) -> Name | None:
    """The name that `text` means; None where it is none."""
    with suppress(ModelNameError):
        return parse_name(text)
    return None


def hub_name_of(text: str) -> Name | None:
    """The name of a model on Hugging Face that `text` means, if it does."""
    name = name_or_none(text)
    return name if name and name.is_hub else None


def is_hub_name(text: str) -> bool:
    """Whether `text` names a Hugging Face repository and is not a path, which may look like USER/REPOSITORY."""
    return hub_name_of(text) is not None and (":" in text or not text.lower().endswith(".gguf"))


def _hub_name(path: str, text: str) -> Name:
    user, _, rest = path.partition("/")
    if not user or not rest.partition(":")[0]:
        raise _bad(text, "names no repository: it needs a user and a repository")
    return _name(HUB_HOST, user, rest, text)


def _parse_url(text: str) -> Name:
    """The URL of a repository, or of one of its files, whose name is then the tag."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").lower()
    except ValueError:
        raise _bad(text, "is not an address") from None
    if parts.scheme.lower() == "hf":
        return _hub_name(text.partition("://")[2], text)
    if parts.scheme.lower() not in ("http", "https") or host not in _HUB_HOSTS:
        raise _bad(text, "is not an address of huggingface.co")
    user, repo, *rest = [unquote(part) for part in parts.path.strip("/").split("/")] + [""] * 2
    rest = [part for part in rest if part]
    if rest and rest[0] in ("blob", "resolve") and len(rest) > 2:
        repo = f"{repo.partition(':')[0]}:{rest[-1]}"
    return _name(HUB_HOST, user, repo, text)


def _name(host: str, namespace: str, last: str, text: str) -> Name:
    """The name with `model[:tag]` in `last`. Raises ModelNameError for a part that breaks a rule."""
    model, colon, tag = last.partition(":")
    name = Name(host, namespace, model, tag if colon else DEFAULT_TAG)
    if (
        (name.host and not (_HOST.fullmatch(name.host) or name.is_hub))
        or ".." in name.host
        or len(name.host) > MAX_HOST
    ):
        raise _bad(text, "has three parts, but the first is not a host")
    parts = [(name.model, MAX_PART), (name.tag, MAX_TAG)]
    for part, most in [(name.namespace, MAX_PART), *parts] if name.host else parts:
        if fault := _fault(part, most):
            raise _bad(text, fault)
    if name.host and not name.is_hub and "." in name.namespace:
        raise _bad(text, "has a namespace with a dot")
    if name.is_hub and "--" in name.namespace + "/" + name.model:
        raise _bad(text, "has '--', which no repository has")
    if not name.host and name.model.lower() in _RESERVED:
        raise _bad(text, f"is not a model: {name.model!r} is a prefix")
    return name


def is_tag(text: str) -> bool:
    """Whether `text` can be the tag of a name."""
    return _fault(text, MAX_TAG) is None


def _fault(part: str, most: int) -> str | None:
    """The rule that `part` breaks; None when it breaks none."""
    if not part:
        return "has an empty part"
    if len(part) > most:
        return f"has a part of {len(part)} characters, at most {most} are allowed"
    if not _PART.fullmatch(part) or ".." in part or part.endswith("."):
        return f"has {part!r:.40}, but a part starts with a letter or digit and has only those and . _ -"
    if _DEVICES.fullmatch(part):
        return f"has {part!r:.40}, which is a device on some systems"
    return None


def _bad(text: str, rule: str) -> ModelNameError:
    shown = repr(text) if len(text) <= 80 else repr(text[:77]) + "..."
    return ModelNameError(f"the model name {shown} {rule}; {FORMS}.")
