"""Measures one system in this process: `python -m moegguf.bench.measure '<spec as
JSON>'` prints one line of JSON.

Load, prompt and generation are timed separately. Tokenisation and sampling are not
timed. After each timed step, the most probable next token of each sequence is recorded,
so that the systems' tokens can be compared. With `draft`, a greedy answer is timed as a
whole, including drafts and sampling. The module bench/series.py starts such a process
for each run.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import numpy as np

from moegguf.bench.bound import Bounds, Held, bound_figures
from moegguf.bench.memory_limit import die_with_parent
from moegguf.bench.rows import imitated_routing, store_figures
from moegguf.bench.series import Spec, Test
from moegguf.controller.strategies import find_strategy
from moegguf.engine.devices import all_devices
from moegguf.engine.llama import Llama
from moegguf.engine.load_spec import parse_mirrors
from moegguf.engine.sequences import SequenceTokens
from moegguf.engine.speeds import expert_read_speed
from moegguf.engine.stats import Stats
from moegguf.errors import LibraryError, MoeggufError, OptionError
from moegguf.generate.engine import Engine
from moegguf.generate.request import Sampling
from moegguf.gguf.experts import read_layout
from moegguf.native import library
from moegguf.native.events import Phase
from moegguf.native.store import StoreOptions
from moegguf.options import BUDGETS
from moegguf.package import __version__
from moegguf.processor import read_processor
from moegguf.quantities import human_number, parse_link
from moegguf.text import decode_text

PROBE_S = 0.5  # duration of a measurement of the file's read speed


def describe_build(patched: str) -> dict[str, Any]:
    """Returns llama-bench's fields build_commit, build_number, cpu_info, gpu_info and
    backends. build_commit is `patched` followed by "llama-cpp-python-" and the version
    of the bindings. `patched` is "" for a library without patches."""
    devices = all_devices()
    backends = dict.fromkeys(device.backend for device in devices)

    def by_kind(*kinds: str) -> str:
        return ", ".join(
            device.description for device in devices if device.kind in kinds
        )

    version = library.llama_cpp().__version__
    return {
        # ggml_commit() is not used: it names the commit of the git repository around
        # the build folder, which may be unrelated to llama.cpp.
        "build_commit": f"{patched}llama-cpp-python-{version}",
        "build_number": 0,
        "cpu_info": by_kind("CPU", "accelerator") or read_processor().model,
        "gpu_info": by_kind("GPU", "integrated GPU"),
        "backends": ",".join(name for name in backends if name != "CPU") or "CPU",
    }


def simulated_links() -> ModuleType:
    """Returns the module moegguf.testing.link_device. Raises LibraryError if the module
    is missing, as in an installed wheel."""
    try:
        from moegguf.testing import link_device
    except ImportError as error:
        raise LibraryError(
            "a simulated link needs moegguf's test equipment, which an installed wheel does not include; clone its"
            " repository, run `make` in it, and use its .venv/bin/moegguf."
        ) from error
    return link_device


def load(spec: Spec) -> Llama:
    """Loads the model with the options of `spec`. The environment variable
    MOEGGUF_HOOKS must already have the value for this system: 1 for moegguf, 0 for the
    others (`environment_of`)."""
    # A negative n_gpu_layers lets moegguf place a model with experts according to
    # `placement`. In all other cases llama.cpp puts n_gpu_layers layers on a GPU, or
    # every layer if the number is negative.
    planned = (
        spec.system == "moegguf"
        and spec.n_gpu_layers < 0
        and read_layout(spec.model).is_moe
    )
    gpu_layers: dict[str, Any] = {} if planned else {"n_gpu_layers": spec.n_gpu_layers}
    link = parse_link(spec.simulate_link) if spec.simulate_link else None
    device = (
        simulated_links().link_device(link, spec.simulate_threads) if link else None
    )
    return Llama(
        spec.model,
        **spec.loading | ({} if spec.system == "moegguf" else {BUDGETS["RAM"]: "100%"}),
        strategy=spec.strategy,
        store=StoreOptions(
            **find_strategy(spec.strategy).switches
            | spec.store
            | {"repack": spec.repack, "device": device}
        ),
        context_store=0,
        draft=spec.draft or "off",
        use_mmap=spec.system in ("mmap", "stock"),
        n_threads=spec.n_threads,
        n_threads_batch=spec.n_threads,
        **gpu_layers,
        **spec.sizes,
        verbose=spec.verbose,
    )


class Feed:
    """Chooses the tokens for each test and repetition. Systems with the same model,
    seed and text get the same tokens."""

    def __init__(self, llama: Llama, spec: Spec) -> None:
        self._seed = spec.seed
        self._n_vocab = llama.n_vocab()
        self._bos = llama.token_bos() if llama._model.add_bos_token() else -1
        self._text: list[int] = []
        if spec.text is not None:
            try:
                text = decode_text(Path(spec.text).read_bytes()).encode()
            except OSError as error:
                raise OptionError(
                    f"the text {spec.text!r} cannot be read ({error.strerror}); check the path given to --text."
                ) from error
            self._text = llama.tokenize(text, add_bos=False, special=False)
            if not self._text:
                raise OptionError(
                    f"the file {spec.text!r} contains no text; write text to it, or name another file with --text."
                )

    def tokens(self, n: int, repetition: int) -> list[int]:
        """Returns the `n` tokens of this repetition: consecutive tokens of the text,
        wrapping around at its end, or random tokens if there is no text. If the model
        adds a BOS token, this token replaces the first one."""
        if self._text:
            start = repetition * n
            tokens = np.take(self._text, range(start, start + n), mode="wrap").tolist()
        else:
            tokens = (
                np.random.default_rng([self._seed, n, repetition])
                .integers(self._n_vocab, size=n)
                .tolist()
            )
        if self._bos >= 0:
            tokens[:1] = [self._bos]
        return tokens


def greedy_token(llama: Llama, row: int = -1) -> int:
    """Returns the token with the largest logit. `row` is the token's index in the pass;
    -1: the last token of sequence 0."""
    return int(llama.context.logits(row).argmax())


class Sequences:
    """Sequences that begin with empty contexts and are evaluated together."""

    def __init__(self, llama: Llama, n_sequences: int) -> None:
        llama.reset()
        self.llama = llama
        self.likeliest = [0] * n_sequences  # most probable next token of each sequence
        self._requests: list[int] = []
        self._n_past = 0
        for sequence in range(n_sequences):
            llama.context.forget(sequence)
            self._requests.append(llama.context.requests.begin())

    def evaluate(self, tokens: Sequence[Sequence[int]], phase: Phase) -> int:
        """Evaluates the next tokens of the sequences, the same number for each. Returns
        the time in nanoseconds."""
        elapsed_ns = 0
        for chunks in self._batches(tokens, phase):
            start = time.perf_counter_ns()
            rows = self.llama.context.eval_sequences(chunks)
            elapsed_ns += time.perf_counter_ns() - start
            if rows is None:
                raise OptionError(
                    f"the context has no room for {len(tokens)} sequences; give a smaller --parallel."
                )
            for chunk, row in zip(chunks, rows, strict=True):
                if chunk.wants_logits:
                    self.likeliest[chunk.sequence] = greedy_token(self.llama, row)
        self._n_past += len(tokens[0])
        return elapsed_ns

    def _batches(
        self, tokens: Sequence[Sequence[int]], phase: Phase
    ) -> Iterator[list[SequenceTokens]]:
        """Yields batches of at most `n_batch` tokens. A batch contains the tokens of
        the first sequence, then of the next one, and so on."""
        room = self.llama.n_batch
        batch: list[SequenceTokens] = []
        for sequence, own in enumerate(tokens):
            begin = 0
            while begin < len(own):
                part = own[begin : begin + room]
                n_past = self._n_past + begin
                begin += len(part)
                room -= len(part)
                request = self._requests[sequence]
                batch.append(
                    SequenceTokens(
                        sequence,
                        part,
                        n_past,
                        request,
                        phase,
                        wants_logits=begin == len(own),
                    )
                )
                if room == 0:
                    yield batch
                    room = self.llama.n_batch
                    batch = []
        if batch:
            yield batch


@dataclass
class Sample:
    """The results of one repetition."""

    prompt_ns: int  # time to evaluate the timed prompt tokens
    # Time of each decoding step; with an engine, the answer's time divided by the
    # number of tokens.
    token_ns: list[int]
    # Most probable tokens after the prompt; then those after each step, or an engine's
    # answer.
    tokens: list[int]
    stats: Stats  # growth of the counters during the repetition

    @property
    def total_ns(self) -> int:
        """The time of the prompt and of all steps together, in nanoseconds."""
        return self.prompt_ns + sum(self.token_ns)


def begin(llama: Llama, test: Test, tokens: Sequence[Sequence[int]]) -> Sequences:
    """Creates a repetition's sequences, and evaluates their first `n_depth` tokens,
    which are not timed."""
    sequences = Sequences(llama, test.n_parallel)
    if test.n_depth:
        sequences.evaluate([own[: test.n_depth] for own in tokens], Phase.PREFILL)
    return sequences


def measure(
    sequences: Sequences,
    test: Test,
    tokens: Sequence[Sequence[int]],
    greedy: bool,
    engine: Engine | None = None,
) -> Sample:
    """Runs one repetition after `begin`. `tokens` holds the tokens of each sequence. An
    `engine` generates the answer if the context is not empty. Otherwise each step
    evaluates a token of each sequence: with `greedy` the most probable one, else the
    one in `tokens`. The first token of an empty context always comes from `tokens`."""
    llama = sequences.llama
    before = llama.stats()
    sample = Sample(0, [], [], before)
    start = test.n_depth + test.n_prompt
    if test.n_prompt:
        sample.prompt_ns = sequences.evaluate(
            [own[test.n_depth : start] for own in tokens], Phase.PREFILL
        )
        sample.tokens += sequences.likeliest
    if engine is not None and test.n_gen and start:
        sampling = Sampling(temperature=0.0, max_tokens=test.n_gen, ignore_eos=True)
        (answer,) = engine.generate(
            llama.input_ids[:start].tolist(), sampling, return_context=True
        )
        if answer.error is not None:
            raise answer.error
        sample.token_ns = [
            round(answer.summary.total_s * 1e9 / test.n_gen)
        ] * test.n_gen
        sample.tokens += answer.summary.context[start:]
    else:
        for at in range(start, start + test.n_gen):
            step = sequences.likeliest if greedy and at else [own[at] for own in tokens]
            sample.token_ns.append(
                sequences.evaluate([[token] for token in step], Phase.DECODE)
            )
            sample.tokens += sequences.likeliest
    sample.stats = llama.stats() - before
    return sample


def run_test(
    llama: Llama,
    spec: Spec,
    test: Test,
    feed: Feed,
    engine: Engine | None,
    bounds: Bounds | None,
) -> dict[str, Any]:
    """Runs all repetitions of one test. If the model has an expert store, measures the
    file's read speed before and after each repetition. With `bounds`, computes the
    bound of each repetition after all repetitions have ended."""
    session = llama.session
    greedy = spec.feed == "greedy"

    def probe() -> float:
        if session is None:
            return 0.0
        return expert_read_speed(
            llama.layout,
            PROBE_S,
            session.store.options,
            parse_mirrors(spec.loading.get("mirror")),
        ).bytes_per_s

    def tokens_of(one: Test, repetition: int) -> list[list[int]]:
        first = repetition * one.n_parallel
        return [
            feed.tokens(one.n_tokens, first + sequence)
            for sequence in range(one.n_parallel)
        ]

    time.sleep(spec.delay_s)
    if spec.warmup:  # llama-bench's warm-up: the whole prompt, then at most one token
        short = replace(test, n_depth=0, n_gen=min(test.n_gen, 1))
        tokens = tokens_of(short, spec.repetitions)
        measure(begin(llama, short, tokens), short, tokens, greedy=False)
    samples: list[Sample] = []
    figures: list[dict[str, float]] = []
    held: list[Held] = []
    links: list[float] = []
    speed = probe()
    for repetition in range(spec.repetitions):
        tokens = tokens_of(test, repetition)
        sequences = begin(llama, test, tokens)
        if bounds is not None:
            held.append(bounds.held())
        sample = measure(sequences, test, tokens, greedy, engine)
        samples.append(sample)
        if session is not None:
            speed, before = probe(), speed
            link = (before + speed) / 2
            links.append(link)
            figures.append(store_figures(sample.stats, link))
    if bounds is not None:
        for repetition, sample in enumerate(samples):
            tokens = tokens_of(test, repetition)
            sequences = begin(llama, test, tokens)
            routing = bounds.record(partial(measure, sequences, test, tokens, greedy))
            least = bounds.least_bytes(routing, held[repetition])
            stats = sample.stats
            figures[repetition] |= bound_figures(
                least,
                bounds.speeds(links[repetition]),
                test.n_measured,
                sample.total_ns / 1e9,
                stats.stall_s + stats.hook_s,
            )
    return {
        **asdict(test),
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "samples_ns": [sample.total_ns for sample in samples],
        "token_ns": [sample.token_ns for sample in samples],
        "tokens": [sample.tokens for sample in samples],
        "figures": figures,
    }


def run(spec: Spec) -> dict[str, Any]:
    """Loads the model, measures every test and closes the model. Returns the results.
    Raises MoeggufError."""
    start = time.perf_counter()
    with load(spec) as llama:
        load_s = time.perf_counter() - start
        session = llama.session
        plan = llama.plan
        model = llama._model
        if llama.n_seq_max < spec.n_parallel:
            raise OptionError(
                f"--parallel {spec.n_parallel}: this model's context holds {llama.n_seq_max} sequences; give fewer."
            )
        if session is not None and plan.resident:
            session.store.drain()  # waits until every expert has been read
        fill_s = time.perf_counter() - start - load_s
        feed = Feed(llama, spec)
        bounds = (
            Bounds(llama, session, spec.simulate_link)
            if spec.bound and session is not None
            else None
        )
        with nullcontext() if spec.draft is None else Engine(llama) as engine:
            tests = [
                run_test(llama, spec, test, feed, engine, bounds) for test in spec.tests
            ]
        # VmHWM is this process's peak memory. ru_maxrss would include the peak of the
        # process that started this one.
        peak_kib = re.search(
            r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        info = session.store.info() if session is not None else {}
        warned = list(plan.warnings) if session is not None else []
        if spec.simulate_link:
            copied = simulated_links().memory_copy_bytes_per_s()
            if parse_link(spec.simulate_link).bytes_per_s > copied:
                warned.append(
                    f"the simulated link is slower than {spec.simulate_link}: one thread copies {copied / 1e9:.1f} GB/s"
                    " within this machine's memory; scale bandwidth and compute down together"
                )
        placed = plan.placement and plan.placement.chosen
        patched = f"moegguf-{__version__}+" if spec.system != "stock" else ""
        return {
            **describe_build(patched),
            # llama.cpp's description contains "?B" if llama.cpp does not know the
            # model's size
            "model_type": model.desc().replace("?B", human_number(model.n_params())),
            "model_size": model.size(),
            "model_n_params": model.n_params(),
            "routing": imitated_routing(llama.layout.metadata),
            "tests": tests,
            "load_s": load_s,
            "fill_s": fill_s,
            "peak_rss_bytes": int(peak_kib[1]) * 1024 if peak_kib else 0,
            "n_slots": info.get("n_slots_usable", 0),
            "n_ubatch_used": llama.context_params.n_ubatch,
            "budget_bytes": plan.budget_bytes if session is not None else 0,
            "planned_bytes": plan.total_bytes if session is not None else 0,
            "warnings": warned,
            "decisions": llama.decisions(),
            "placement": str(placed) if placed else "",
            "predicted_ts": placed.tokens_per_s if placed else 0.0,
        }


def open_result() -> TextIO:
    """Returns a file that writes to this process's original stdout, for the result.
    Stdout then goes to stderr, so that library output does not mix with the result. The
    kernel also kills this process when its parent exits."""
    die_with_parent()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    out = open_result()
    warnings.simplefilter("ignore")  # the plan's warnings are part of the result
    try:
        found = run(Spec.from_json(sys.argv[1]))
    except MoeggufError as error:
        found = {"error": str(error)}
    print(json.dumps(found), file=out, flush=True)
