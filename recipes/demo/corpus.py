"""Collects freely licensed text from a Linux machine with Python. Selection and split
are the same in every run.

A source that is missing on the machine does not contribute any documents. The order of
selection, and the split into training and held-out texts, depend only on the documents'
names. Two machines with the same packages therefore train on the same text.
"""

import gzip
import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

HELDOUT_ONE_IN = 30
MAX_DOCUMENT_CHARS = 60_000
MIN_DOCUMENT_CHARS = 200
# Prefixes of the names of thousands of generated pages without a free licence
NOT_FREE = ("gcloud", "google-cloud", "bq.", "gsutil")


@dataclass(frozen=True)
class Document:
    """One text of the corpus. `name` identifies it on every machine, and `kind` is a
    key of KINDS."""

    kind: str
    name: str
    text: str

    @property
    def digest(self) -> int:
        """A number that depends only on the name. The corpus is sorted and split by
        this number."""
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big")

    @property
    def heldout(self) -> bool:
        """True if this document is left out of training."""
        return self.digest % HELDOUT_ONE_IN == 0


@dataclass(frozen=True)
class Kind:
    """A kind of text: its description and its licences. max_chars: selection stops when
    the selected texts contain this number of characters.
    """

    about: str
    licence: str
    max_chars: int


KINDS = {
    "python": Kind(
        "Python's standard library (without its tests)", "PSF-2.0", 5_000_000
    ),
    "pydoc": Kind("Python's language reference (pydoc topics)", "PSF-2.0", 1_000_000),
    "manual": Kind(
        "manual pages in English",
        "free licences of the packages (GPL, LGPL, BSD, MIT, ...)",
        9_000_000,
    ),
    "perl": Kind(
        "Perl's modules with their documentation",
        "Artistic-1.0-Perl or GPL-1.0+",
        3_000_000,
    ),
    "licence": Kind("licences and copyright files", "free to copy verbatim", 1_500_000),
    "header": Kind(
        "C and C++ headers",
        "free licences of the packages (GPL with exception, LGPL, MIT, ...)",
        3_000_000,
    ),
}


def read_text(path: Path) -> str:
    """Returns the text of a file, decompressed if the file's name ends with .gz.
    Returns "" if the file cannot be read or is not UTF-8."""
    try:
        raw = (
            gzip.decompress(path.read_bytes())
            if path.suffix == ".gz"
            else path.read_bytes()
        )
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError):
        return ""


ROFF_ESCAPES = (
    (re.compile(r"\\f(\[[^]]*\]|\(..|.)|\\s[-+]?\d+|\\[&/,|^%c]|\\m\[[^]]*\]"), ""),
    (re.compile(r"\\-|\\\(hy|\\\(mi|\\\[hy\]"), "-"),
    (re.compile(r"\\\(em|\\\[em\]|\\\(en|\\\[en\]"), "-"),
    (re.compile(r"\\\((aq|cq|oq)|\\\[(aq|cq|oq)\]|\\'|\\`"), "'"),
    (re.compile(r"\\\((lq|rq|dq)|\\\[(lq|rq|dq)\]|\\\*\((lq|rq)|\\\*\(C[\"']?"), '"'),
    (re.compile(r"\\\((bu|\*b)|\\\[bu\]"), "*"),
    (re.compile(r"\\e|\\\(rs|\\\[rs\]"), r"\\"),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\[*n](\(..|\[[^]]*\]|.)|\\\(..|\\\[[^]]*\]|\\."), ""),
)
ROFF_FONT_MACROS = {"B", "I", "R", "BR", "IR", "RB", "RI", "BI", "IB", "SM", "SB", "IP"}


def plain_roff(text: str) -> str:
    """Returns a man(7) page as plain text. Returns "" if the page has no title line
    (.TH), because it uses other macros or only refers to another page."""
    if not re.search(r"^\.TH\b", text, re.M):
        return ""
    lines = []
    for line in text.splitlines():
        if not line.startswith((".", "'")):
            lines.append(line)
            continue
        macro, _, rest = line[1:].strip().partition(" ")
        words = re.sub(r'"([^"]*)"', r"\1", rest).strip()
        if macro in ("SH", "SS"):
            lines += ["", words]
        elif macro in ROFF_FONT_MACROS and words:
            lines.append(words)
        elif macro in ("PP", "LP", "P", "TP", "sp"):
            lines.append("")
    plain = "\n".join(lines)
    for pattern, replacement in ROFF_ESCAPES:
        plain = pattern.sub(replacement, plain)
    return re.sub(r"\n{3,}", "\n\n", plain).strip()


def files(root: Path, pattern: str) -> Iterator[Path]:
    """Yields the regular files in a folder that match the pattern, in sorted order.
    Symbolic links are left out. Yields nothing if the folder does not exist."""
    return (p for p in sorted(root.glob(pattern)) if p.is_file() and not p.is_symlink())


def python_documents() -> Iterator[Document]:
    """Yields the modules of Python's standard library. Tests, installed packages and a
    few other folders are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "lib2to3",
        "pydoc_data",
        "ensurepip",
    }
    for path in files(root, "**/*.py"):
        name = path.relative_to(root)
        if not skipped.intersection(name.parts):
            yield Document("python", f"python/{name}", read_text(path))


def gather() -> Iterator[Document]:
    """Yields every document on this machine from which `select` may choose."""
    yield from python_documents()
    for topic, text in sorted(topics.topics.items()):
        yield Document("pydoc", f"pydoc/{topic}", text)
    man, perl = Path("/usr/share/man"), Path("/usr/share/perl")
    for path in files(man, "man[1-8]/*"):
        if path.name.startswith(NOT_FREE):
            continue
        yield Document(
            "manual",
            f"man/{path.name.removesuffix('.gz')}",
            plain_roff(read_text(path)),
        )
    for path in files(perl, "**/*.p[mo]*"):
        yield Document(
            "perl",
            f"perl/{'/'.join(path.relative_to(perl).parts[1:])}",
            read_text(path),
        )
    for path in files(Path("/usr/share/common-licenses"), "*"):
        yield Document("licence", f"licence/{path.name}", read_text(path))
    for path in files(Path("/usr/share/doc"), "*/copyright"):
        if not path.parent.name.startswith(NOT_FREE):
            yield Document("licence", f"copyright/{path.parent.name}", read_text(path))
    for path in files(Path("/usr/include"), "**/*.h"):
        yield Document(
            "header", f"include/{path.relative_to('/usr/include')}", read_text(path)
        )


def usable(text: str) -> bool:
    """Returns True if a text is long enough and consists almost only of ASCII
    characters. The vocabulary is too small for other writing systems."""
    ascii_chars = sum(c < "\x80" for c in text)
    return len(text) >= MIN_DOCUMENT_CHARS and ascii_chars >= 0.99 * len(text)


def select(documents: Iterable[Document]) -> list[Document]:
    """Returns the documents of the corpus in the order of their digests. Drops texts
    that are not `usable` or begin like an earlier one, and cuts long texts. Drops all
    further texts of a kind that already has `max_chars` characters."""
    left = {kind: facts.max_chars for kind, facts in KINDS.items()}
    seen: set[str] = set()
    chosen = []
    for document in sorted(documents, key=lambda d: d.digest):
        text = document.text[:MAX_DOCUMENT_CHARS]
        start = text[:400]
        if left[document.kind] <= 0 or start in seen or not usable(text):
            continue
        seen.add(start)
        left[document.kind] -= len(text)
        chosen.append(Document(document.kind, document.name, text))
    return chosen


def write_heldout(documents: Iterable[Document], folder: Path) -> None:
    """Writes the held-out texts to FOLDER/KIND.txt, for evaluation elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        texts = [d.text for d in documents if d.kind == kind and d.heldout]
        (folder / f"{kind}.txt").write_text("\n\n".join(texts), encoding="utf-8")
