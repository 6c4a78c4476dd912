"""Creates traces from routing that other programs recorded: `moegguf trace import`.

Such a trace has the form of a recorded trace, but no times, weights or router inputs. A
prompt is divided into passes of at most PROMPT_PASS tokens, and each later token is a
separate pass, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from moegguf.controller.shape import MoeShape
from moegguf.errors import TraceError
from moegguf.gguf.experts import read_layout
from moegguf.gguf.fingerprint import fingerprint
from moegguf.native.events import Phase
from moegguf.trace.format import check, write
from moegguf.trace.routing_files import IDS, Ids, Routing, read_routing
from moegguf.trace.trace import Trace, TraceHeader

PROMPT_PASS = 512
_NEEDED = {
    "n_expert": "--experts N (the experts of a layer)",
    "n_expert_used": "--used N (the experts that a token uses in a layer)",
    "expert_bytes": "--expert-size SIZE (the bytes of one expert, such as 9MiB)",
}
"""{fact that a trace must have: the option with which the user can give this fact}."""


@dataclass(frozen=True)
class ImportOptions:
    """Facts that the user provides in addition to the files. Facts about the model's
    shape have the names of `MoeShape`'s fields.

    A fact that is None is taken from the files or from the model's file.
    """

    # GGUF file of the recorded model; the trace gets the model's shape and fingerprint.
    model: Path | None = None
    n_expert: int | None = None
    n_expert_used: int | None = None
    layers: tuple[int, ...] | None = None
    expert_bytes: int | None = None
    # Number of tokens of each prompt whose length the file does not state.
    n_prompt: int = 1

    @property
    def facts(self) -> dict[str, Any]:
        """{name: value} of the given facts about the model's shape."""
        given = asdict(self)
        return {
            name: given[name]
            for name in (*_NEEDED, "layers")
            if given[name] is not None
        }


def import_trace(paths: Sequence[Path], out: Path, options: ImportOptions) -> Trace:
    """Combines the routing in these files into one trace, writes the trace to `out`,
    and returns it.

    Raises TraceError for a file that breaks a rule, and for files or options that
    contradict each other about the model. Also raises TraceError if a necessary fact is
    missing everywhere, and the same errors as `read_layout`. After an error, `out` is
    unchanged.
    """
    facts = _Facts()
    header = TraceHeader(
        paths[0].stem,
        settings={"imported_from": paths[0].name, "imported_files": len(paths)},
    )
    if options.model is not None:
        header = TraceHeader(
            options.model.stem, facts.add_model(options.model), settings=header.settings
        )
    facts.add("the options", options.facts)
    requests = list[tuple[str, Routing]]()
    for path in paths:
        found = read_routing(path)
        facts.add(path.name, found.facts)
        requests += [
            (path.name, _with_experts(path.name, each, facts))
            for each in found.requests
        ]
    shape = facts.shape(requests[0][1].chosen.shape[1])
    for name, request in requests:
        _check_ids(name, request, shape)
    trace = _trace(shape, header, requests, options.n_prompt)
    check(trace, "correct the imported files, or the options that describe the model")
    write(out, trace)
    return trace


class _Facts:
    """Collects facts about the recorded model, and the source of each fact."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, str]] = {}

    def add(self, source: str, facts: Mapping[str, Any]) -> None:
        """Adds facts. Raises TraceError if one of them contradicts an earlier fact of
        the same name."""
        for name, value in facts.items():
            known, where = self._found.setdefault(name, (value, source))
            if known != value:
                raise TraceError(
                    f"{name} is {_short(known)} in {where}, but {_short(value)} in {source}; import the files of one"
                    " model at a time, with options that fit it."
                )

    def add_model(self, path: Path) -> str:
        """Adds the shape of the model in a GGUF file. Returns the fingerprint of the
        model's routers."""
        layout = read_layout(path)
        self.add(path.name, asdict(MoeShape.of(layout)))
        return fingerprint(layout)

    def get(self, name: str) -> Any:
        """Returns the value of a fact. If the fact is missing, raises TraceError, which
        names the option that sets it."""
        if name not in self._found:
            raise TraceError(
                f"{name} is required, but is neither in the files nor given; add {_NEEDED[name]}, or --model FILE.gguf."
            )
        return self._found[name][0]

    def shape(self, n_rows: int) -> MoeShape:
        """Returns the model's shape. `n_rows` is the number of layers in the first
        request. Without the fact `layers`, the layers are numbered from 0. Raises
        TraceError."""
        known = {name: value for name, (value, _) in self._found.items()}
        layers = known.setdefault("layers", tuple(range(n_rows)))
        if layers[0] < 0 or any(b <= a for a, b in pairwise(layers)):
            raise TraceError(
                f"layers must be in rising order and at least 0, but are {_short(layers)}; number them as in the model."
            )
        known.setdefault("n_layer", layers[-1] + 1)
        return MoeShape(**known | {name: self.get(name) for name in _NEEDED})


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def _with_experts(name: str, routing: Routing, facts: _Facts) -> Routing:
    """Returns the request with expert ids. If the request has logits, chooses the
    experts with the largest logits. Raises TraceError."""
    if not routing.has_logits:
        return routing
    n_used = facts.get("n_expert_used")
    n_expert = routing.chosen.shape[2]
    if n_used > n_expert:
        raise TraceError(
            f"{name}: a token uses {n_used} experts, but has logits for {n_expert}; correct --used or n_expert_used."
        )
    ids = np.argsort(-routing.chosen, axis=2, kind="stable")[:, :, :n_used]
    return Routing(ids, routing.tokens, routing.n_prompt)


def _check_ids(name: str, routing: Routing, shape: MoeShape) -> None:
    """Raises TraceError if the number of layers or an expert id does not fit the model,
    or if a token has the same expert twice in a layer."""
    ids = routing.chosen
    if ids.shape[1] != shape.n_moe_layer:
        raise TraceError(
            f"{name}: {IDS} has {ids.shape[1]} layers, but the model has experts in {shape.n_moe_layer};"
            " save the layers with experts, and name them with --layers."
        )
    if ids.min() < 0 or ids.max() >= shape.n_expert:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise TraceError(
            f"{name}: {IDS} must be from 0 to below {shape.n_expert}, but one is {wrong}; leave out tokens that were"
            " not routed, and correct --experts."
        )
    ordered = np.sort(ids, axis=2)
    twice = np.argwhere(ordered[:, :, 1:] == ordered[:, :, :-1])
    if len(twice):
        token, row = twice[0][:2]
        raise TraceError(
            f"{name}: a token must use different experts, but token {token} uses one twice in layer {shape.layers[row]}"
            f" {_short(ids[token, row].tolist())}; leave out rows that were filled in, such as an answer's last one."
        )


def _trace(
    shape: MoeShape,
    header: TraceHeader,
    requests: Iterable[tuple[str, Routing]],
    n_prompt: int,
) -> Trace:
    """Returns a trace of these requests (name of the file, routing), one after another.
    A request that does not state its number of prompt tokens is assumed to have
    `n_prompt`, or fewer if it is shorter. Raises TraceError for a stated number that
    does not fit the request."""
    lengths = list[int]()
    firsts = list[int]()
    phases = list[int]()
    sequences = list[int]()
    experts = list[Ids]()
    tokens = list[Ids]()
    for sequence, (name, request) in enumerate(requests):
        n_tokens = len(request.tokens)
        n_read = (
            min(n_prompt, n_tokens) if request.n_prompt is None else request.n_prompt
        )
        if not 0 <= n_read <= n_tokens:
            raise TraceError(
                f"{name}: n_prompt must be from 0 to {n_tokens}, the number of tokens in its request, but is {n_read};"
                " correct it."
            )
        begins = range(0, n_read, PROMPT_PASS)
        n_decoded = n_tokens - n_read
        lengths += [min(PROMPT_PASS, n_read - begin) for begin in begins] + [
            1
        ] * n_decoded
        firsts += [*begins, *[0] * n_decoded]
        phases += [Phase.PREFILL] * len(begins) + [Phase.DECODE] * n_decoded
        sequences += [sequence] * (len(begins) + n_decoded)
        experts.append(request.chosen)
        tokens.append(request.tokens)
    ids = np.concatenate(experts).transpose(1, 0, 2)
    return Trace(
        shape=shape,
        header=header,
        pass_sequence=np.array(sequences, np.int32),
        pass_phase=np.array(phases, np.uint8),
        pass_first_token=np.array(firsts, np.int32),
        pass_ns=np.zeros(len(lengths), np.int64),
        pass_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens=np.concatenate(tokens).astype(np.int32),
        expert_ids=np.ascontiguousarray(ids, np.int16),
    )
