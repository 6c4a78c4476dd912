"""Train the demo model on this machine's free texts and `demo_questions.jsonl`, from
scratch or from an older demo.

    python -m recipes.train_demo --work build/demo --pretrain-minutes 45 --out build/demo/out
    python -m recipes.train_demo --work build/demo --start moegguf-demo-Q4_0.gguf --out build/demo/out

Needs the extra `lab` (torch 2.13.0, tokenizers, gguf), and llama_cpp with its library
for the last step. Every step saves its result in the work folder and resumes from
there, so the command can be interrupted and run again. On a busy machine,
OMP_WAIT_POLICY=passive in the environment makes torch almost twice as fast.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from predictors.models import quiz_demo
from predictors.models.demo.questions import read_conversations
from recipes.demo import card, corpus, data, evaluate, export, restart, tokenizer, train
from recipes.demo.chat import SETTLING_STEPS, Chat
from recipes.demo.model import DemoModel, Shape

FILE_NAME = "moegguf-demo-Q4_0.gguf"
PRETRAIN_LR, RESTART_LR, CHAT_LR, SETTLE_LR = 2e-3, 1e-3, 1e-3, 3e-4
NEW_SHARE = 0.7
"""After the stage `chat` the weights are averaged with the weights before it, so that
the model forgets less. The new weights have this share in the mean."""
PRETRAIN_STEPS = ((512, 4), (1024, 2), (512, 4), (2048, 1))
"""The training steps, which are repeated in a cycle: (tokens per row, number of rows).
Most rows are short, because attention makes long rows slower."""
SHOWN = (
    "What does moegguf do?",
    "what is moegguf",
    "hi",
    "Who are you?",
    "How do I set the memory budget?",
    "how can i make it use less memory",
    "What is an expert?",
    "What is a hit?",
    "Could you explain what a slot is?",
    "Does it change the output?",
    "Will the answers get worse with a small budget?",
    "What is the capital of Italy?",
)


@dataclass(frozen=True)
class Sources:
    """The tokenizer, and the tokens for training and measuring."""

    tokenizer: Tokenizer
    corpus: data.Corpus


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for checkpoints and intermediate files",
    )
    parser.add_argument(
        "--start",
        type=Path,
        help="go on from the weights and the tokenizer of this GGUF file",
    )
    parser.add_argument(
        "--pretrain-minutes", type=float, default=45, help="wall time on the corpus"
    )
    parser.add_argument(
        "--chat-minutes", type=float, default=25, help="wall time on conversations too"
    )
    parser.add_argument(
        "--settle-minutes",
        type=float,
        default=10,
        help="wall time on both in equal parts",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    parser.add_argument(
        "--heldout-out", type=Path, help="also write the held-out texts to this folder"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the GGUF file and its card"
    )
    return parser.parse_args()


def prepare(work: Path, start: Path | None) -> Sources:
    """Returns the tokenizer and the tokens. Collects, tokenises and saves the corpus
    unless an earlier run already did so. With `start`, uses the tokenizer of this GGUF
    file, unless an earlier run saved another one."""
    tokenizer_path, tokens_path = work / "tokenizer.json", work / "tokens.npz"
    if start and not tokenizer_path.exists():
        restart.read_tokenizer(start).save(str(tokenizer_path))
    if not tokens_path.exists():
        documents = corpus.select(corpus.gather())
        bpe = tokenizer.load_or_train(
            tokenizer_path, (d.text for d in documents if not d.heldout)
        )
        data.save(tokens_path, bpe, documents)
    return Sources(Tokenizer.from_file(str(tokenizer_path)), data.load(tokens_path))


def stages(sources: Sources, args: argparse.Namespace) -> list[train.Stage]:
    """Returns the stages of the training. The first trains on the corpus, the second
    mostly on conversations, and the third on about equal amounts of both. The last two
    round the weights as Q4_0 does."""
    texts = data.Lengths(sources.corpus.train, PRETRAIN_STEPS)
    chat = Chat(sources.tokenizer, read_conversations(), sources.corpus.train)
    settling = replace(chat, steps=SETTLING_STEPS)
    return [
        train.Stage(
            "pretrain",
            args.pretrain_minutes,
            RESTART_LR if args.start else PRETRAIN_LR,
            texts.batch,
        ),
        train.Stage("chat", args.chat_minutes, CHAT_LR, chat.batch, rounded=True),
        train.Stage(
            "settle", args.settle_minutes, SETTLE_LR, settling.batch, rounded=True
        ),
    ]


def measure(
    model: DemoModel,
    sources: Sources,
    progress: dict[str, train.Progress],
    path: Path,
    earlier: list[str],
) -> card.Figures:
    """Returns the figures for the card, measured on the trained model and on the
    finished file."""
    shape, conversations = model.shape, read_conversations()
    losses, load = evaluate.torch_losses(model, sources.corpus)
    return card.Figures(
        shape=shape,
        n_parameters=sum(p.numel() for p in model.parameters()),
        file_bytes=path.stat().st_size,
        expert_bytes=3 * shape.n_embd * shape.n_ff_exp * 18 // 32,
        corpus=sources.corpus,
        n_conversations=len(conversations),
        earlier=earlier,
        stages=progress,
        losses_f32=losses,
        losses_q4=evaluate.gguf_losses(path, sources.corpus),
        losses_long=evaluate.gguf_losses(path, sources.corpus, shape.n_ctx_train),
        load=load,
        scores=quiz_demo.scores(str(path), taught=True),
        answers=evaluate.answers(path, list(SHOWN), shape.n_ctx_train),
        questions_seen=frozenset(
            m["content"] for talk in conversations for m in talk if m["role"] == "user"
        ),
    )


def main() -> None:
    """Runs the pipeline."""
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    sources = prepare(args.work, args.start)
    if args.heldout_out:
        corpus.write_heldout(corpus.select(corpus.gather()), args.heldout_out)
    model = DemoModel(Shape())
    if args.start:
        restart.read_weights(args.start, model)
    pretrain, chat, settle = stages(sources, args)
    progress = {pretrain.name: train.run(pretrain, model, args.work)}
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    progress[chat.name] = train.run(chat, model, args.work)
    model.load_state_dict(
        {
            n: NEW_SHARE * w + (1 - NEW_SHARE) * before[n]
            for n, w in model.state_dict().items()
        }
    )
    progress[settle.name] = train.run(settle, model, args.work)
    export.write_f32(args.work / "f32.gguf", model, sources.tokenizer)
    export.quantise(args.work / "f32.gguf", args.out / FILE_NAME)
    earlier = (
        card.earlier_stages(args.start.with_name("README.md")) if args.start else []
    )
    figures = measure(model, sources, progress, args.out / FILE_NAME, earlier)
    (args.out / "README.md").write_text(card.page(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
