"""Fails if a docstring or comment breaks a rule of plain English. `make lint` runs
this.

python -m tools.prose                 # the packages that follow the rules, as `make lint` does
python -m tools.prose PATH ...        # other files and folders
python -m tools.prose --counts .      # only the number of findings of each package

CONTRIBUTING.md, "Plain English", has the rules and examples. This program finds only
breaches that can be detected without understanding a sentence: openings without a
subject, and phrases that make a reader search. It also finds sentences of more than
MOST_WORDS words, and class docstrings that describe more than MOST_FIELDS fields in one
paragraph.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 30
MOST_FIELDS = 4

# Packages that must follow the rules. `make lint` checks them.
IN_ORDER = ("moegguf", "predictors", "recipes", "tests", "tools")

# Texts that break a rule for a reason: "FILE: " and the text's first 40 characters.
# MOST_EXCEPTIONS are allowed.
EXCEPTIONS: frozenset[str] = frozenset()
MOST_EXCEPTIONS = 20

_QUESTIONS = "whether what who whom whose where how why which when if"
_PRONOUNS = "it its they their these this those that he she"
_PREPOSITIONS = (
    "of as behind in on at by for from to with without within between among after"
    " before beside besides into"
)
BANNED_OPENINGS = frozenset(
    f"{_QUESTIONS} {_PRONOUNS} {_PREPOSITIONS} else otherwise then so such".split()
)
COMMENT_OPENINGS = frozenset(
    "if when this it whether".split()
)  # A comment may open with these words, because the code beside it names the subject.
BANNED_STARTS = ("the same", "as many", "so many", "how many")
BANNED_PHRASES = (
    "that of",
    "those of",
    "of which",
    "so many",
    "so much",
    "is told",
    "are told",
    "is asked",
    "are asked",
    "besides",
    ": None:",
)

_SENTENCE_END = re.compile(
    r"(?:(?<=[.?!;])|(?<=[.?!]\)))\s+(?=[A-Z`({\"0-9]|llama|ggml|moegguf|[a-z]+_[a-z])|\n\s*\n|\n\s*- "
)
# The file's name at the beginning of its first comment.
_FILE_NAME = re.compile(r"^[a-z_]+\.(?:py|h|cpp): ")
_WORD = re.compile(r"[^\s]*[A-Za-z0-9][^\s]*")
_FIELD = re.compile(r"(?:^|[.;\n])\s*`?[a-z_][a-z0-9_]*`?(?:, `?[a-z_][a-z0-9_]*`?)*: ")
_CODE_LINE = re.compile(r"^(?: {3,}|\t|>>> |\.\.\. |python3? |```)")
_PARTS_OF_CODE = re.compile(r"```.*?```|``[^`]*``", re.DOTALL)
_NATIVE_COMMENT = re.compile(
    r"/\*(.*?)\*/|((?:^[ \t]*//[^\n]*\n?)+)|(//[^\n]*)", re.DOTALL | re.MULTILINE
)
_NATIVE_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"")
_DIRECTIVE = re.compile(
    r"^(?:type:|noqa|mypy:|ruff:|pragma|!|clang-format|NOLINT|-{3,}|={3,})"
)


@dataclass(frozen=True)
class Text:
    """A docstring or comment, and its location."""

    path: str
    line: int
    kind: str  # "docstring", "class" or "comment"
    words: str


@dataclass(frozen=True)
class Finding:
    """A rule that a text breaks."""

    text: Text
    rule: str

    def __str__(self) -> str:
        return f"{self.text.path}:{self.text.line}: {self.rule}: {' '.join(self.text.words.split())[:90]}"


def python_texts(path: str, source: str) -> Iterator[Text]:
    """Yields the docstrings and comments of a Python file.

    Comments on successive lines form one text if no code precedes them.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        if (words := ast.get_docstring(node)) is not None:
            kind = "class" if isinstance(node, ast.ClassDef) else "docstring"
            yield Text(path, node.body[0].lineno, kind, words)
    yield from _python_comments(path, source)


def _python_comments(path: str, source: str) -> Iterator[Text]:
    """Yields the comments of a Python file."""
    block: list[str] = []
    first = last = 0
    was_alone = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#: ")
        is_alone = not token.line[: token.start[1]].strip()
        if block and is_alone and was_alone and token.start[0] == last + 1:
            block.append(words)
        else:
            if block:
                yield Text(path, first, "comment", "\n".join(block))
            block, first = [words], token.start[0]
        last, was_alone = token.start[0], is_alone
    if block:
        yield Text(path, first, "comment", "\n".join(block))


def native_texts(path: str, source: str) -> Iterator[Text]:
    """Yields the comments of a C++ or JavaScript file.

    `//` comments on successive lines form one text if no code precedes them.
    """
    code = _NATIVE_STRING.sub(
        lambda match: '"' + "_" * (len(match[0]) - 2) + '"', source
    )
    for match in _NATIVE_COMMENT.finditer(code):
        lines = [line.strip().strip("/*").rstrip() for line in match[0].splitlines()]
        words = "\n".join(
            line if _CODE_LINE.match(line) else line.strip() for line in lines
        )
        yield Text(
            path, code.count("\n", 0, match.start()) + 1, "comment", words.strip()
        )


def sentences_of(words: str) -> list[str]:
    """Returns the sentences of a text, without its lines of code."""
    prose = "\n".join(
        "" if _CODE_LINE.match(line) else line for line in words.splitlines()
    )
    prose = _PARTS_OF_CODE.sub("code", prose)
    return [
        part.strip() for part in _SENTENCE_END.split(prose) if part and part.strip()
    ]


def rules_broken(text: Text) -> Iterator[str]:
    """Yields the rules that a text breaks."""
    if _DIRECTIVE.match(text.words):
        return
    sentences = sentences_of(text.words)
    if not sentences:
        return
    opening = _FILE_NAME.sub("", sentences[0].lower())
    first_word = re.split(r"[\s,.:;]", opening, maxsplit=1)[0]
    banned = (
        BANNED_OPENINGS - COMMENT_OPENINGS
        if text.kind == "comment"
        else BANNED_OPENINGS
    )
    if first_word in banned:
        yield f"opens with {first_word!r}"
    for start in BANNED_STARTS:
        if opening.startswith(start):
            yield f"opens with {start!r}"
    spoken = " ".join(" ".join(sentences).split())
    for phrase in BANNED_PHRASES:
        if re.search(
            rf"(?<!\w){re.escape(phrase)}(?!\w)"
            if phrase[-1].isalpha()
            else re.escape(phrase),
            spoken,
        ):
            yield f"says {phrase!r}"
    for sentence in sentences:
        if (n_words := len(_WORD.findall(sentence))) > MOST_WORDS:
            yield f"has a sentence of {n_words} words"
    # Each line of such a list describes one field.
    described = re.split("Args:|Attributes:", text.words)[0]
    fields = max(
        len(_FIELD.findall(paragraph)) for paragraph in described.split("\n\n")
    )
    if text.kind == "class" and fields > MOST_FIELDS:
        yield f"describes more than {MOST_FIELDS} fields in a paragraph"


def files_in(place: Path) -> Iterator[Path]:
    """Yields the Python, C++, CUDA and JavaScript files in a folder, or `place` itself
    if it is a file."""
    if place.is_file():
        yield place
        return
    for path in sorted(place.rglob("*")):
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".js") and not {
            "vendor",
            "build",
            ".venv",
        } & set(path.parts):
            yield path


def findings_in(places: Sequence[str], root: Path = ROOT) -> Iterator[Finding]:
    """Yields a finding for each rule that a text in these files and folders breaks. The
    paths are relative to `root`."""
    for place in places:
        for path in files_in(root / place):
            name = path.relative_to(root).as_posix()
            source = path.read_text()
            texts = (
                python_texts(name, source)
                if path.suffix == ".py"
                else native_texts(name, source)
            )
            for text in texts:
                for rule in rules_broken(text):
                    if f"{name}: {' '.join(text.words.split())[:40]}" not in EXCEPTIONS:
                        yield Finding(text, rule)


def package_of(path: str) -> str:
    """Returns the folder under which a file is counted: its folder within moegguf/,
    else its top-level folder."""
    folders = path.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] == ["moegguf"] else 1])


def main() -> int:
    """Prints the findings. Returns 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", default=IN_ORDER)
    parser.add_argument(
        "--counts",
        action="store_true",
        help="print the number of findings of each package",
    )
    arguments = parser.parse_args()
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS
    findings = list(findings_in(arguments.places))
    if arguments.counts:
        for package, n in sorted(
            Counter(package_of(finding.text.path) for finding in findings).items()
        ):
            print(f"{package:24} {n:6,}")
    else:
        for finding in findings:
            print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
