"""300 requests made from six kinds of real text, in a fixed order of arrival, and their
routing.

    python -m predictors.study.requests write -o requests.jsonl
    python -m predictors.study.requests record lab.gguf -o build/evidence

The texts come from `predictors/texts.py`. The first 180 requests are for learning
(collections, counts, networks), the next 40 for choosing, and the last 80 for
reporting. The manifest in this repository lists the hashes of all requests. If a
request differs from the manifest, `write` and `record` fail and name the request.

`record` writes learning.trace, choosing.trace and reporting.trace. Each request is
processed in a single pass. Except for rounding, its tokens are routed as if they had
been decoded one by one. The traces therefore record the tokens after the opening as
decoded, with one pass per token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from moegguf.bench.record import RecordOptions, record
from moegguf.native import library
from moegguf.trace.format import read, write
from moegguf.trace.prompts import Prompt
from predictors import texts
from predictors.commands import new_parser, write_json
from predictors.study.arrange import answered

MANIFEST = Path(__file__).parents[1] / "results" / "requests.json"
OPENING_CHARS = 160
REQUEST_CHARS = 480
ROLES = {"learning": 180, "choosing": 40, "reporting": 80}
N_CTX = 512


@dataclass(frozen=True)
class Request:
    """A text. Its opening is the prompt, and the rest is treated as the answer. Traces
    show the answer as decoded token by token.
    """

    kind: str
    role: str
    text: str

    @property
    def opening(self) -> str:
        """Returns the prompt: the first OPENING_CHARS characters of the text."""
        return self.text[:OPENING_CHARS]


def load(folder: Path) -> list[Request]:
    """Returns the requests in order of arrival, which is determined by a hash of each
    text. Raises ValueError if a text cannot be fetched."""
    found = [
        (kind, text) for kind, of in texts.load(folder).items() for text in of.requests
    ]
    roles = [role for role, n in ROLES.items() for _ in range(n)]
    ordered = sorted(found, key=lambda one: texts.digest(f"arrival {one[1]}"))
    return [
        Request(kind, role, text[:REQUEST_CHARS])
        for (kind, text), role in zip(ordered, roles, strict=True)
    ]


def manifest(requests: Sequence[Request]) -> dict[str, object]:
    """Returns the manifest: the sources of the texts, and the kind, role and hash of
    each request. The manifest contains no text."""
    sources = {
        kind: {**asdict(source), "read": source.read.__name__}
        for kind, source in texts.SOURCES.items()
    }
    return {
        "sources": sources,
        "requests": [
            {"kind": r.kind, "role": r.role, "sha256": texts.digest(r.text)}
            for r in requests
        ],
    }


def checked(folder: Path) -> list[Request]:
    """Returns the requests that `load` returns. Raises ValueError if a text cannot be
    fetched or a request differs from the manifest."""
    requests = load(folder)
    known = json.loads(MANIFEST.read_text("utf-8"))["requests"]
    own_requests: list[object] = manifest(requests)["requests"]  # type: ignore
    for number, (own, other) in enumerate(zip(own_requests, known, strict=True)):
        if own != other:
            raise ValueError(
                f"request {number} is {own}, but the manifest has {other}; delete the fetched packages and try again,"
                " or run `manifest` if the sources were changed"
            )
    return requests


def write_prompts(path: Path, requests: Sequence[Request]) -> None:
    """Writes a .jsonl file of the requests for `moegguf trace record` and `moegguf
    bench`. Also writes a .txt file with the complete texts next to it.
    """
    rows = [
        {"prompt": r.opening, "completion": r.text[OPENING_CHARS:], "label": r.kind}
        for r in requests
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path.with_suffix(".txt").write_text(
        "\n\n".join(r.text for r in requests), encoding="utf-8"
    )


def record_role(
    model: Path, requests: Sequence[Request], path: Path, inputs: bool
) -> None:
    """Records the routing of these requests to `path`. In the trace, the tokens after a
    request's opening look as if they had been decoded one by one. If `inputs` is True,
    also records the routers' inputs."""
    prompts = [
        Prompt(request.text, request.kind, n_predict=None) for request in requests
    ]
    options = RecordOptions(n_predict=0, inputs=inputs)
    # `main` treats an existing `path` as a finished recording, so the recording is made
    # in a temporary folder.
    with TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        record(
            model,
            prompts,
            whole,
            options,
            n_ctx=N_CTX,
            logits_all=True,
            verbose=False,
            expert_cache="100%",
        )
        trace = read(whole)
    llm = library.llama_cpp().Llama(str(model), vocab_only=True, verbose=False)
    lengths = [
        len(llm.tokenize(request.opening.encode(), special=True))
        for request in requests
    ]
    write(path, answered(trace, dict(zip(trace.sequences(), lengths, strict=True))))


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "write", help="write them as prompts, and their text beside them"
    )
    one.add_argument("-o", "--output", type=Path, required=True, help="a .jsonl")
    one.add_argument("--role", choices=ROLES, help="of one part only")
    one = commands.add_parser("record", help="record their routing")
    one.add_argument("model", type=Path)
    one.add_argument("-o", "--output", type=Path, required=True, help="a folder")
    commands.add_parser(
        "manifest", help="write the manifest anew, after a change of the sources"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    args = arguments(given)
    folder = texts.cache_folder()
    try:
        if args.command == "manifest":
            write_json(MANIFEST, manifest(load(folder)))
            return 0
        by_role: Mapping[str, list[Request]] = {role: [] for role in ROLES}
        for request in checked(folder):
            by_role[request.role].append(request)
        if args.command == "write":
            roles = [args.role] if args.role else ROLES
            write_prompts(
                args.output, [request for role in roles for request in by_role[role]]
            )
        else:
            args.output.mkdir(parents=True, exist_ok=True)
            for role, requests in by_role.items():
                path = args.output / f"{role}.trace"
                if not path.exists():  # reuses the recordings of an earlier run
                    record_role(args.model, requests, path, inputs=True)
    except (ValueError, OSError) as error:
        print(f"requests: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
