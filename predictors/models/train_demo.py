"""Train the demo model from scratch on this machine's free texts and `demo_questions.jsonl`.

    python -m predictors.models.train_demo --work build/demo --pretrain-minutes 45 --chat-minutes 25 --out moegguf/demo

Needs the extra `lab` (torch 2.13.0, tokenizers, gguf), and llama_cpp with its library for the last step.
Every step saves its result in the work folder and resumes from there; the command can be stopped and repeated. On a
machine with other load, OMP_WAIT_POLICY=passive in the environment makes torch almost twice as fast.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from predictors.models.demo import card, corpus, data, evaluate, export, tokenizer, train
from predictors.models.demo.chat import Chat, read_conversations
from predictors.models.demo.model import DemoModel, Shape

QUESTIONS = Path(__file__).with_name("demo_questions.jsonl")
FILE_NAME = "moegguf-demo-Q4_0.gguf"
PRETRAIN_LR, PRETRAIN_ROWS, PRETRAIN_CTX = 2e-3, 8, 256
CHAT_LR, CHAT_ROWS, CHAT_BASE_ROWS = 1e-3, 3, 1
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
    """The inputs of training: tokenizer and tokens."""

    tokenizer: Tokenizer
    corpus: data.Corpus


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and intermediate files")
    parser.add_argument("--pretrain-minutes", type=float, default=45, help="wall time on the corpus")
    parser.add_argument("--chat-minutes", type=float, default=25, help="wall time on conversations too")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")
    parser.add_argument("--heldout-out", type=Path, help="also write the held-out texts to this folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF file and its card")
    return parser.parse_args()


def prepare(work: Path) -> Sources:
    """Collects, tokenises and saves the corpus, unless that was done before."""
    tokenizer_path, tokens_path = work / "tokenizer.json", work / "tokens.npz"
    if not tokens_path.exists():
        documents = corpus.select(corpus.gather())
        bpe = tokenizer.load_or_train(tokenizer_path, (d.text for d in documents if not d.heldout))
        data.save(tokens_path, bpe, documents)
    return Sources(Tokenizer.from_file(str(tokenizer_path)), data.load(tokens_path))


def stages(sources: Sources, args: argparse.Namespace, shape: Shape) -> list[train.Stage]:
    """The corpus alone, then conversations mixed with it, with weights rounded as in Q4_0."""
    windows = data.Windows(sources.corpus.train, PRETRAIN_CTX)
    chat = Chat(
        sources.tokenizer,
        read_conversations(QUESTIONS),
        data.Windows(sources.corpus.train, shape.n_ctx_train, seed=1),
        CHAT_ROWS,
        CHAT_BASE_ROWS,
    )
    rows = partial(windows.batch, n_rows=PRETRAIN_ROWS)
    return [
        train.Stage("pretrain", args.pretrain_minutes, PRETRAIN_LR, rows),
        train.Stage("chat", args.chat_minutes, CHAT_LR, chat.batch, rounded=True),
    ]


def measure(model: DemoModel, sources: Sources, progress: dict[str, train.Progress], path: Path) -> card.Figures:
    """The figures of the card, from the trained model and from the finished file."""
    shape, conversations = model.shape, read_conversations(QUESTIONS)
    losses, load = evaluate.torch_losses(model, sources.corpus, shape.n_ctx_train)
    return card.Figures(
        shape=shape,
        n_parameters=sum(p.numel() for p in model.parameters()),
        file_bytes=path.stat().st_size,
        expert_bytes=3 * shape.n_embd * shape.n_ff_exp * 18 // 32,
        corpus=sources.corpus,
        n_conversations=len(conversations),
        stages=progress,
        losses_f32=losses,
        losses_q4=evaluate.gguf_losses(path, sources.corpus, shape.n_ctx_train),
        load=load,
        answers=evaluate.answers(path, list(SHOWN), shape.n_ctx_train),
        questions_seen=frozenset(m["content"] for talk in conversations for m in talk if m["role"] == "user"),
    )


def main() -> None:
    """Runs the pipeline."""
    args = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    sources = prepare(args.work)
    if args.heldout_out:
        corpus.write_heldout(corpus.select(corpus.gather()), args.heldout_out)
    model = DemoModel(Shape())
    plan = stages(sources, args, model.shape)
    progress = {stage.name: train.run(stage, model, args.work) for stage in plan}
    export.write_f32(args.work / "f32.gguf", model, sources.tokenizer)
    export.quantise(args.work / "f32.gguf", args.out / FILE_NAME)
    figures = measure(model, sources, progress, args.out / FILE_NAME)
    (args.out / "README.md").write_text(card.page(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
