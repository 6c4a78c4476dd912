"""The model card, written from the figures of the run."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tools.demo.corpus import KINDS
from tools.demo.data import Corpus
from tools.demo.evaluate import KindLoss
from tools.demo.model import Shape
from tools.demo.train import BALANCE_WEIGHT, Progress

PAGE = """\
# moegguf demo

A very small Mixture-of-Experts model ({n_million:.1f} M parameters, {file_mb:.1f} MB) that ships with moegguf, so that
`moegguf run demo` shows the expert cache at work without a download. It answers short questions about moegguf and
little else. It was trained from scratch; no other model's weights or output were used.

- File: `moegguf-demo-Q4_0.gguf`, quantised by llama.cpp: matrices in Q4_0, embedding and output in Q8_0, routers, norms and biases in F32
- Licence of the weights: Apache-2.0; the texts they were trained on keep their own licences, listed below
- Chat format: ChatML, in the file; a system message is optional; trained with at most {n_ctx} tokens of context

## Shape
Architecture `qwen2moe`: {n_layer} layers, width {n_embd}, {n_head} heads of {n_embd_head} ({n_head_kv} for keys and values),
{n_expert} experts of {n_ff_exp} per layer with top-{n_expert_used} (probabilities not renormalised), a gated shared expert of {n_ff_shexp},
byte-level BPE with {n_vocab} tokens split as in Qwen2. One expert is {expert_kb:.0f} kB in the file; there are {n_experts}.

## Data
Texts found on a Linux machine with Python, chosen by `tools/demo/corpus.py`; 1 document in 30 is held out by a hash of its name.

| kind | what | licence | training tokens available | held-out tokens |
|---|---|---|---|---|
{data_rows}

Then {n_conversations} questions and conversations about moegguf and MoE offloading, written for this model
(`tools/demo_questions.jsonl`), with their wording varied at random. Where the budget ends first, not every available token is seen.

## Training
`python -m tools.train_demo`, torch 2.13.0 in float32 on 2 cores of an AMD EPYC that other jobs shared; AdamW, balance loss (Switch) with weight {balance_weight}.
In the chat stage the loss on conversations counts the answers only, half of the rows are corpus, and the forward pass rounds weights as Q4_0 does.

| stage | steps | tokens | minutes |
|---|---|---|---|
{stage_rows}

## Held-out loss of the final model
Windows of {n_ctx} tokens without overlap; bits per byte counts UTF-8 bytes of the text.

| kind | torch float32, nats/token | Q4_0 under llama.cpp, nats/token | Q4_0, bits/byte |
|---|---|---|---|
{loss_rows}

## How evenly routing spreads
Over the same held-out tokens. Coefficient of variation of the load of the {n_expert} experts (0 = even), entropy of the load as
a share of its maximum (1 = even), and the largest and smallest share of choices (even: {even_share:.2f} %).

| layer | coefficient of variation | entropy | largest | smallest |
|---|---|---|---|---|
{routing_rows}

## Answers
Greedy, by the Q4_0 file under llama.cpp. Questions marked * are not worded like this in the training questions.

{answer_rows}

## Limits
A model of this size repeats what it was taught and invents the rest. It knows almost nothing beyond its questions, only English,
and loses the thread after a few turns. Its answers are no documentation: where they differ from the README, the README is right.
Its experts are small and few, so its hit rates and speeds say nothing about large models.
"""


@dataclass(frozen=True)
class Figures:
    """Everything the card states that had to be measured."""

    shape: Shape
    n_parameters: int
    file_bytes: int
    expert_bytes: int
    corpus: Corpus
    n_conversations: int
    stages: Mapping[str, Progress]
    losses_f32: Mapping[str, KindLoss]
    losses_q4: Mapping[str, KindLoss]
    load: torch.Tensor
    answers: Mapping[str, str]
    questions_seen: frozenset[str]


def overall(losses: Mapping[str, KindLoss]) -> float:
    """Mean nats per token over all kinds together."""
    total = sum(one.nats_per_token * one.tokens for one in losses.values())
    return total / sum(one.tokens for one in losses.values())


def overall_bits(losses: Mapping[str, KindLoss], corpus: Corpus) -> float:
    """Bits per byte over all kinds together."""
    n_bytes = {kind: corpus.heldout_bytes[kind] for kind in losses}
    return sum(losses[kind].bits_per_byte * n_bytes[kind] for kind in losses) / sum(n_bytes.values())


def data_rows(corpus: Corpus) -> list[str]:
    """One line per kind of text."""
    return [
        f"| {kind} | {KINDS[kind].about} | {KINDS[kind].licence} | {corpus.train_tokens[kind]:,} | {len(tokens):,} |"
        for kind, tokens in corpus.heldout.items()
    ]


def loss_rows(figures: Figures) -> list[str]:
    """One line per kind, and one over all."""
    full, q4 = figures.losses_f32, figures.losses_q4
    rows = [
        f"| {k} | {full[k].nats_per_token:.3f} | {q4[k].nats_per_token:.3f} | {q4[k].bits_per_byte:.3f} |"
        for k in full
    ]
    bits = overall_bits(q4, figures.corpus)
    return [*rows, f"| **all** | **{overall(full):.3f}** | **{overall(q4):.3f}** | **{bits:.3f}** |"]


def routing_rows(load: torch.Tensor) -> list[str]:
    """One line per layer. load: (n_layer, n_expert), rows adding up to 1."""
    rows = []
    for il, shares in enumerate(load):
        uneven = float(shares.std(correction=0) / shares.mean())
        entropy = float(-(shares * shares.clamp_min(1e-12).log()).sum() / torch.tensor(len(shares)).log())
        extremes = f"{100 * shares.max():.2f} % | {100 * shares.min():.2f} %"
        rows.append(f"| {il} | {uneven:.2f} | {entropy:.3f} | {extremes} |")
    return rows


def answer_rows(figures: Figures) -> list[str]:
    """Question and answer, with a star at questions that were not trained on."""
    return [
        f"- **{question}**{'' if question in figures.questions_seen else ' *'} {answer}"
        for question, answer in figures.answers.items()
    ]


def page(figures: Figures) -> str:
    """The whole card."""
    stage_rows = [
        f"| {name} | {one.steps:,} | {one.tokens:,} | {one.seconds / 60:.0f} |"
        for name, one in figures.stages.items()
    ]
    return PAGE.format(
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
        stage_rows="\n".join(stage_rows),
        loss_rows="\n".join(loss_rows(figures)),
        routing_rows="\n".join(routing_rows(figures.load)),
        answer_rows="\n".join(answer_rows(figures)),
    )
