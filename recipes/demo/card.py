"""Builds the text of the model card: `card_template.md`, filled with the figures of the
run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.demo.corpus import KINDS
from recipes.demo.data import Corpus
from recipes.demo.evaluate import LOSS_CTX, KindLoss
from recipes.demo.model import Shape
from recipes.demo.train import BALANCE_WEIGHT, Progress

TEMPLATE = Path(__file__).with_name("card_template.md")


@dataclass(frozen=True)
class Figures:
    """The measurements and other facts that the card states."""

    shape: Shape
    n_parameters: int
    file_bytes: int
    expert_bytes: int
    corpus: Corpus
    n_conversations: int
    earlier: Sequence[str]
    stages: Mapping[str, Progress]
    losses_f32: Mapping[str, KindLoss]
    losses_q4: Mapping[str, KindLoss]
    losses_long: Mapping[str, KindLoss]
    load: torch.Tensor
    scores: Mapping[str, tuple[int, int]]
    answers: Mapping[str, str]
    questions_seen: frozenset[str]


def overall(losses: Mapping[str, KindLoss]) -> float:
    """Returns the mean loss in nats per token over all kinds of text, weighted by
    number of tokens."""
    total = sum(one.nats_per_token * one.tokens for one in losses.values())
    return total / sum(one.tokens for one in losses.values())


def overall_bits(losses: Mapping[str, KindLoss], corpus: Corpus) -> float:
    """Returns the mean loss in bits per byte over all kinds of text, weighted by
    size."""
    n_bytes = {kind: corpus.heldout_bytes[kind] for kind in losses}
    return sum(losses[kind].bits_per_byte * n_bytes[kind] for kind in losses) / sum(
        n_bytes.values()
    )


def data_rows(corpus: Corpus) -> list[str]:
    """Returns one table row for each kind of text: description, licence, and numbers of
    training and held-out tokens."""
    return [
        f"| {kind} | {KINDS[kind].about} | {KINDS[kind].licence} | {corpus.train_tokens[kind]:,} | {len(tokens):,} |"
        for kind, tokens in corpus.heldout.items()
    ]


def loss_rows(figures: Figures) -> list[str]:
    """Returns one table row with losses for each kind of text, and one row over all
    kinds."""
    full, q4, long = figures.losses_f32, figures.losses_q4, figures.losses_long
    rows = [
        f"| {k} | {full[k].nats_per_token:.3f} | {q4[k].nats_per_token:.3f} | {q4[k].bits_per_byte:.3f}"
        f" | {long[k].nats_per_token:.3f} |"
        for k in full
    ]
    bits = overall_bits(q4, figures.corpus)
    total = f"| **all** | **{overall(full):.3f}** | **{overall(q4):.3f}** | **{bits:.3f}** | **{overall(long):.3f}** |"
    return [*rows, total]


def earlier_stages(path: Path) -> list[str]:
    """Returns the table rows of training stages in the model card at `path`, or no rows
    if there is no card. The caller passes the card of the file from which this run
    starts."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return re.findall(r"^\| [^|]+ \| [\d,]+ \| [\d,]+ \| \d+ \|$", text, re.MULTILINE)


def stage_rows(figures: Figures) -> list[str]:
    """Returns one table row for each stage of training that ran at least one step. The
    rows of earlier runs come first."""
    own = [
        f"| {name} | {one.steps:,} | {one.tokens:,} | {one.seconds / 60:.0f} |"
        for name, one in figures.stages.items()
        if one.steps
    ]
    return [*figures.earlier, *own]


def score_rows(figures: Figures) -> list[str]:
    """Returns one table row for each situation of the quiz, with the number of right
    answers."""
    return [
        f"| {where} | {right} of {n} | {right / n:.0%} |"
        for where, (right, n) in figures.scores.items()
    ]


def routing_rows(load: torch.Tensor) -> list[str]:
    """Returns one table row for each layer. A row contains the unevenness, entropy,
    maximum and minimum of the experts' loads. load: (n_layer, n_expert), each expert's
    share of the choices; each row sums to 1."""
    rows = []
    for il, shares in enumerate(load):
        uneven = float(shares.std(correction=0) / shares.mean())
        entropy = float(
            -(shares * shares.clamp_min(1e-12).log()).sum()
            / torch.tensor(len(shares)).log()
        )
        extremes = f"{100 * shares.max():.2f} % | {100 * shares.min():.2f} %"
        rows.append(f"| {il} | {uneven:.2f} | {entropy:.3f} | {extremes} |")
    return rows


def answer_rows(figures: Figures) -> list[str]:
    """Returns a line for each question with its answer. A star marks questions on which
    the model was not trained."""
    return [
        f"- **{question}**{'' if question in figures.questions_seen else ' *'} {answer}"
        for question, answer in figures.answers.items()
    ]


def page(figures: Figures) -> str:
    """Returns the text of the model card."""
    return TEMPLATE.read_text(encoding="utf-8").format(
        **vars(figures.shape),
        n_embd_head=figures.shape.n_embd_head,
        n_ctx=figures.shape.n_ctx_train,
        n_million=figures.n_parameters / 1e6,
        file_mb=figures.file_bytes / 1e6,
        expert_kb=figures.expert_bytes / 1e3,
        n_experts=figures.shape.n_layer * figures.shape.n_expert,
        n_conversations=figures.n_conversations,
        balance_weight=BALANCE_WEIGHT,
        even_share=100 / figures.shape.n_expert,
        data_rows="\n".join(data_rows(figures.corpus)),
        stage_rows="\n".join(stage_rows(figures)),
        score_rows="\n".join(score_rows(figures)),
        loss_ctx=LOSS_CTX,
        loss_rows="\n".join(loss_rows(figures)),
        routing_rows="\n".join(routing_rows(figures.load)),
        answer_rows="\n".join(answer_rows(figures)),
    )
