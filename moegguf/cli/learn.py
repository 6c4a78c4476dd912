"""`moegguf learn`: records a model's routing, and trains the networks and tables that
the papers' strategies need.

Results go to stdout, progress to stderr. This module has only the flags and the tables;
`bench.record` and `learning` do the work.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from moegguf.cli.bench import split
from moegguf.cli.options import (
    EXISTING_FILE,
    AsJson,
    Flag,
    Given,
    flags,
    model_argument,
)
from moegguf.cli.trace import LOADING, showing_progress
from moegguf.errors import BusyError, OptionError
from moegguf.quantities import percent
from moegguf.terminal.messages import print_message

if TYPE_CHECKING:
    from moegguf.gguf.experts import ExpertLayout
    from moegguf.learning.learn import Learning, Learnt
    from moegguf.trace.analysis import Progress
    from moegguf.trace.prompts import Prompt

TEXTS = Path(__file__).parents[1] / "learning" / "texts.jsonl"
SOURCES = {"prompts": "--prompts", "trace": "--trace", "from_server": "--from-server"}
Model = Annotated[
    str,
    model_argument(
        "A GGUF file (of a split model, the first file), `demo`, or a name from `moegguf list`."
    ),
]
FEW_TOKENS = 1000  # below this number of recorded tokens, a warning is printed

LEARN_FLAGS = (
    Flag("--strategy", "NAMES",
        "Strategies to train, separated by commas: promoe, expertflow, duoserve, moe-infinity.  [default: all of"
        " them]", []),
    Flag("--prompts", "FILE",
        "Your own texts: a .jsonl file with one prompt per line, or a text file with one text per paragraph."
        "  [default: texts that moegguf includes]", None, Path, EXISTING_FILE),
    Flag("--from-server", None,
        "Learn from the responses of /v1/responses that your server stored on this machine without an API key.",
        False),
    Flag("--trace", "FILE", "Learn from a recorded trace (`moegguf trace record --inputs`).",
        None, Path, EXISTING_FILE),
    Flag("--tokens", "N", "Start no further text after N tokens.", 8192, int, {"min": 1}),
    Flag("--max-tokens -n", "N",
        "Maximum length of an answer in tokens, unless the text sets one.", 64, int, {"min": 1}),
    Flag("--ctx -c", "TOKENS", "Context length in tokens, enough for the longest text and its answer.",
        1024, int, {"min": 1}),
    Flag("--seed", "N", "Random seed for answers and training.", 0),
)  # fmt: skip


@flags(*LOADING, own=LEARN_FLAGS)
def learn(
    model: Model, as_json: AsJson = False, *, given: Given, **chosen: Any
) -> None:
    """Train what the papers' strategies need for MODEL, and save it beside the model.

    The model answers texts while its routing is recorded. Then networks are trained,
    and tested on texts that were held out. Ctrl-C leaves earlier results unchanged.
    """
    _limit_threads(given.get("n_threads"))
    from moegguf.gguf.experts import read_layout
    from moegguf.learning.learn import check_strategies
    from moegguf.models.catalog import find_model
    from moegguf.terminal.tables import print_json

    strategies = check_strategies(split(chosen["strategy"]))
    sources = [flag for name, flag in SOURCES.items() if chosen[name]]
    if len(sources) > 1:
        flags_given = " and ".join(sources)
        raise OptionError(
            f"{flags_given} cannot be given together: learning has one source; keep one of them."
        )
    path = find_model(model)
    layout = read_layout(path)
    if not layout.is_moe:
        raise OptionError(
            f"{model} has no experts, so there is nothing to learn; name another model."
        )
    with showing_progress() as progress:
        learning = _recorded(path, layout, strategies, given, chosen, progress)
        learnt = [
            learning.learn(name, _reporting(progress, name)) for name in strategies
        ]
    if as_json:
        print_json(learnt)
        return
    _print_learnt(model, learning, learnt)


def _limit_threads(n_threads: int | None) -> None:
    """Limits the threads of numpy's matrix products to `n_threads`, by default to the
    number of idle processors (at least 1) according to the load average. With more
    threads than idle processors, matrix products are slow. Environment variables that
    the user has set are not changed. Must be called before numpy is imported."""
    from moegguf.engine.machine import count_cpus

    n_free = max(1, count_cpus() - round(os.getloadavg()[0]))
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(n_threads or n_free))


def _recorded(
    path: Path,
    layout: ExpertLayout,
    strategies: Sequence[str],
    given: Given,
    chosen: Mapping[str, Any],
    progress: Progress,
) -> Learning:
    """Returns the recorded requests from which strategies learn. The requests come from
    the trace that the user names, or are recorded now into a temporary file."""
    from moegguf.controller.artifacts import Artifacts
    from moegguf.learning.learn import TRACE_BYTES, Learning, most_tokens, needs_inputs
    from moegguf.settings import cache_folder
    from moegguf.trace.format import read

    artifacts = Artifacts(layout)
    if chosen["trace"]:
        return Learning(
            read(chosen["trace"], TRACE_BYTES), artifacts, seed=chosen["seed"]
        )
    prompts = _texts(chosen)
    shape = len(layout.layers), layout.hparams.n_embd
    most = most_tokens(*shape, strategies, chosen["tokens"])
    if most < chosen["tokens"]:
        print_message(
            f"training has memory for the router inputs of {most:,} tokens; recording stops there"
        )
    from moegguf.bench.record import RecordOptions, record

    cache_folder().mkdir(parents=True, exist_ok=True)
    options = RecordOptions(
        chosen["max_tokens"],
        needs_inputs(strategies),
        seed=chosen["seed"],
        most_tokens=most,
    )
    with tempfile.TemporaryDirectory(prefix="learn-", dir=cache_folder()) as folder:
        out = Path(folder) / "routing.npz"
        stats = record(
            path,
            prompts,
            out,
            options,
            _reporting(progress, "recording"),
            n_ctx=chosen["ctx"],
            strategy="lru",
            **given,
        )
        if stats.tokens < FEW_TOKENS:
            print_message(
                f"warning: only {stats.tokens:,} tokens; thousands give better predictions (--prompts, --tokens)."
            )
        return Learning(read(out), artifacts, seed=chosen["seed"])


def _reporting(progress: Progress, stage: str) -> Progress:
    """Returns a callback that reports progress with the name of the stage before each
    step."""
    return lambda step, share: progress(f"{stage}: {step}", share)


def _texts(chosen: Mapping[str, Any]) -> list[Prompt]:
    """Returns the texts whose routing is recorded: the prompts in a file, by default in
    a bundled file, or with --from-server the turns of /v1/responses that a server has
    stored. Raises OptionError if the server is running, or if no responses are
    stored."""
    from moegguf.trace.prompts import Prompt, read_prompts

    if not chosen["from_server"]:
        return read_prompts(chosen["prompts"] or TEXTS)
    from moegguf.serving.responses import ResponseStore
    from moegguf.settings import data_folder, read_settings

    store = ResponseStore(data_folder() / "responses", read_settings().responses_age_s)
    if not store.stores:
        raise OptionError(
            "--from-server reads stored responses, but with MOEGGUF_RESPONSES_AGE=0 no responses are stored; give"
            " --prompts, or set another age and use the server first."
        )
    try:
        turns = store.turns()
    except BusyError as error:
        raise OptionError(
            "--from-server: a running server has its stored responses open; stop the server first."
        ) from error
    finally:
        store.close()
    found = [Prompt(text, "server") for text in turns if text.strip()]
    if not found:
        raise OptionError(
            "--from-server reads responses to clients without a key, but none are stored on this machine; give"
            " --prompts instead."
        )
    return found


def _print_learnt(model: str, learning: Learning, learnt: Sequence[Learnt]) -> None:
    from moegguf.cli.trace_tables import print_notes, print_table
    from moegguf.learning.learn import JUDGED_SHARE, LAYER_EXPERTS

    names = (
        "strategy",
        "tokens",
        "seconds",
        "validation",
        "right",
        "popularity",
        "hits",
        "LRU",
    )
    lines = [
        [one.strategy, f"{one.tokens:,}", f"{one.seconds:.1f}",
         *(percent(share, "")
           for share in (one.validation, one.right, one.popularity, one.hits, one.lru))]
        for one in learnt
    ]  # fmt: skip
    print_table("Learned, and tried on texts that were held out", names, lines)
    judged = learning.judged
    tried = ",".join(one.strategy for one in learnt)
    print_notes(
        "",
        f"tried on: {judged.decode().n_tokens:,} tokens of {len(judged.sequences())} answers",
        "validation: experts that the network got right on texts that ended its training",
        "right: of the experts that the predictor named, the share that the router chose;",
        "  popularity: where the experts that are used most are named",
        f"hits: with {JUDGED_SHARE:.0%} of the experts in memory, and a link that transfers {LAYER_EXPERTS} experts",
        "  in the time of a layer; LRU: without predictions",
        f"saved in {learnt[0].files[0].parent}",
        f"next: moegguf run {model} --strategy {learnt[0].strategy}",
        f"      moegguf bench -m {model} --strategy moegguf,lru,{tried}",
    )
