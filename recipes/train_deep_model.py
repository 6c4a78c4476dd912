"""Trains the deep model: a relative of the demo model with 12 layers, whose routers are
trained with the model.

    python -m recipes.train_deep_model -o deep.gguf

The deep model is meant for measuring routing. Every second layer starts as a layer of
the demo model. The layers between start with outputs of zero, so that the network at
first computes the same as the demo model. Then all weights, routers included, are
trained. Half of the training tokens come from the demo model's corpus. The other half
comes from the texts in `predictors/texts.py` that are neither requests nor held out.

The program needs the extra `lab`. If a run is interrupted, starting the program again
continues it. The program writes the model, and its card (.json) beside it. On a busy
machine, OMP_WAIT_POLICY=passive in the environment makes torch much faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from moegguf.models.catalog import find_model
from predictors import texts
from recipes.demo import corpus, data, evaluate, export, restart, train
from recipes.demo.model import DemoModel, Layer, Shape

NAME = "moegguf deep laboratory model"
# Rows that a training step takes from each of the two sources, and tokens of a row.
N_ROWS, N_CTX = 2, 512
# A kind of text contributes at most this number of characters, so that no kind
# prevails.
MAX_KIND_CHARS = 1_500_000
PEAK_LR = 1e-3
EVERY = 2  # one in EVERY layers starts as a layer of the demo model


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="GGUF file to write"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for checkpoints (default: OUTPUT.work)"
    )
    parser.add_argument(
        "--minutes", type=float, default=75, help="wall time of the training"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Trains the model, and writes it with its card; returns the exit status."""
    args = arguments(given)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    work = args.work or args.output.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    try:
        make(args.output, work, args.minutes)
    except (ValueError, OSError) as error:
        print(f"train_deep_model: {error}", file=sys.stderr)
        return 1
    return 0


def make(output: Path, work: Path, minutes: float) -> None:
    """Trains the model, unless `work` holds the checkpoint of a finished training.
    Writes the model and its card."""
    demo = find_model("demo")
    tokenizer = restart.read_tokenizer(demo)
    found = texts.load(texts.cache_folder())
    shallow = DemoModel(Shape())
    restart.read_weights(demo, shallow)
    model = deeper(shallow)
    sources = Sources.of(tokenizer, found)
    progress = train.run(
        train.Stage("deep", minutes, PEAK_LR, sources.batch), model, work
    )
    export.write_f32(work / "f32.gguf", model, tokenizer, NAME)
    export.quantise(work / "f32.gguf", output)
    heldout = {kind: data.encode(tokenizer, of.heldout) for kind, of in found.items()}
    card = {
        "n_layer": model.shape.n_layer,
        "n_parameters": sum(weight.numel() for weight in model.parameters()),
        "file_bytes": output.stat().st_size,
        "available_tokens": {
            "corpus": len(sources.corpus.rows),
            "texts": len(sources.same_kinds.rows),
        },
        "trained_tokens": progress.tokens,
        "steps": progress.steps,
        "minutes": round(progress.seconds / 60),
        "heldout_tokens": {kind: len(of) for kind, of in heldout.items()},
        "loss_demo": losses(demo, heldout),
        "loss": losses(output, heldout),
    }
    output.with_suffix(".json").write_text(
        json.dumps(card, indent=2) + "\n", encoding="utf-8"
    )


@dataclass(frozen=True)
class Sources:
    """The two sources of training rows."""

    corpus: data.Windows  # the demo model's corpus
    same_kinds: data.Windows  # texts of the requests' kinds

    @classmethod
    def of(cls, tokenizer: Tokenizer, found: Mapping[str, texts.Texts]) -> Sources:
        """Collects and tokenises both sources."""
        documents = [
            document.text
            for document in corpus.select(corpus.gather())
            if not document.heldout
        ]
        chosen = [
            text
            for kind in found.values()
            for text in first_chars(kind.fit, MAX_KIND_CHARS)
        ]
        general, own = data.encode(tokenizer, documents), data.encode(tokenizer, chosen)
        return cls(data.Windows(general, N_CTX), data.Windows(own, N_CTX))

    def batch(self, step: int) -> data.Batch:
        """Returns the batch of a training step: N_ROWS rows from each source."""
        parts = [
            source.batch(step, N_ROWS) for source in (self.corpus, self.same_kinds)
        ]
        return data.Batch(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.targets for part in parts]),
        )


def first_chars(written: Sequence[str], n_chars: int) -> Iterator[str]:
    """Yields the first texts. Ends with the text that completes `n_chars`
    characters."""
    for text in written:
        if n_chars <= 0:
            return
        n_chars -= len(text)
        yield text


def deeper(shallow: DemoModel) -> DemoModel:
    """Returns a network that has EVERY times as many layers as `shallow`, and that
    computes the same. The additional layers have random weights, but output zero."""
    model = DemoModel(replace(shallow.shape, n_layer=EVERY * shallow.shape.n_layer))
    top = {
        name: weight
        for name, weight in shallow.state_dict().items()
        if not name.startswith("layers.")
    }
    model.load_state_dict(top, strict=False)
    for il, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        if il % EVERY == 0:
            layer.load_state_dict(shallow.layers[il // EVERY].state_dict())
            continue
        for weight in (layer.attn.out, layer.moe.down_exps, layer.moe.down_shexp):
            torch.nn.init.zeros_(weight)
    return model


def losses(path: Path, heldout: Mapping[str, data.Tokens]) -> dict[str, float]:
    """Returns the mean loss of a GGUF file by kind of text, in nats per token, computed
    by llama.cpp."""
    llm = evaluate.open_gguf(path, N_CTX)
    found = {
        kind: evaluate.mean_loss(llm, evaluate.windows(tokens, N_CTX))
        for kind, tokens in heldout.items()
    }
    return {kind: round(loss, 3) for kind, loss in found.items()}


if __name__ == "__main__":
    sys.exit(main())
