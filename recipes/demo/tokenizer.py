"""The demo's vocabulary: byte-level BPE. Text is first split by the same regular
expression as in llama.cpp's pre-tokenizer `qwen2`."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END_OF_TEXT, IM_START, IM_END)
PRE_TOKENIZER = "qwen2"
QWEN2_SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    Path(__file__)
    .with_name("chat_template.jinja")
    .read_text(encoding="utf-8")
    .rstrip("\n")
)


def with_splits(vocabulary: models.BPE) -> Tokenizer:
    """Returns a byte-level tokenizer with this vocabulary that splits text as
    llama.cpp's pre-tokenizer `qwen2` does."""
    tokenizer = Tokenizer(vocabulary)
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str]) -> Tokenizer:
    """Returns a tokenizer whose merges are learned from the texts. The special tokens
    have the ids 0, 1, 2."""
    tokenizer = with_splits(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a special token. Raises ValueError if the token is not in the
    vocabulary."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the vocabulary has no {token}")
    return found


def load_or_train(path: Path, texts: Iterable[str]) -> Tokenizer:
    """Returns the tokenizer saved at `path`. If there is no such file, trains a
    tokenizer on the texts and saves it."""
    if not path.exists():
        train(texts).save(str(path))
    return Tokenizer.from_file(str(path))
