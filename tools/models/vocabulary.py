"""Builds a byte-level BPE vocabulary of any size from 259 up that encodes and decodes
all UTF-8, without a corpus.

The order of tokens is: 256 bytes, pieces and words that merges produce, filler words,
and three special tokens of ChatML. No merge produces a filler word, so a model can
generate a filler word, but the tokenizer never returns one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from gguf.constants import TokenType

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PIECES = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri
ro ic ne ea ra ce li ch ll be ma si om ur ing ion ent ter est ate ers ess ity ment tion able ally ight ough
ould
""".split()

WORDS = """
the of and to in a is that it for was on are with as be at one have this from or had by not but what some we
can out other were all there when up use your how said an each she which do their time if will way about
many then them write would like so these her long make thing see him two has look more day could go come did
number sound no most people my over know water than call first who may down side been now find any new work
part take get place made live where after back little only round man year came show every good me give our
under name very through just form sentence great think say help low line differ turn cause much mean before
move right boy old too same tell does set three want air well also play small end put home read hand large
spell add even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father expert memory model token layer
cache function return class def import print user assistant system because between should another question
answer computer
""".split()


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in llama.cpp's `gpt2` form, the type of each token, and the merges in the
    order of their rank."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def id_of(self, special: str) -> int:
        """Returns the token id of one of SPECIALS."""
        return len(self.tokens) - len(SPECIALS) + SPECIALS.index(special)


def build_vocabulary(n_vocab: int) -> Vocabulary:
    """Returns a vocabulary of exactly n_vocab tokens. Raises ValueError if n_vocab is
    less than 259.

    The vocabulary depends only on n_vocab.
    """
    n_reachable = n_vocab - len(SPECIALS)
    if n_reachable < 256:
        raise ValueError(
            f"n_vocab has to be at least {256 + len(SPECIALS)} (bytes, specials), not {n_vocab}"
        )
    tokens, merges = _merged_tokens(n_reachable)
    tokens += islice(_fillers(set(tokens)), n_reachable - len(tokens))
    types = [int(TokenType.NORMAL)] * n_reachable + [int(TokenType.CONTROL)] * len(
        SPECIALS
    )
    return Vocabulary([*tokens, *SPECIALS], types, merges)


def byte_characters() -> list[str]:
    """Returns the printable character that represents each byte in a byte-level BPE
    vocabulary (GPT-2's table)."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    stand_ins = iter(range(256, 512))
    return [
        chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)
    ]


def _merged_tokens(limit: int) -> tuple[list[str], list[str]]:
    """Returns at most `limit` tokens (bytes, pieces, words) and the merges that produce
    them.

    Earlier merges are applied to each word first. New merges then join the rest of the
    word from left to right.
    """
    tokens = dict.fromkeys(byte_characters())
    ranks: dict[tuple[str, str], int] = {}
    for word in [*PIECES, *("Ġ" + word for word in WORDS), *WORDS]:
        symbols = _encode(word, ranks)
        while len(symbols) > 1:
            merged = symbols[0] + symbols[1]
            if merged not in tokens and len(tokens) == limit:
                return list(tokens), [" ".join(pair) for pair in ranks]
            ranks[symbols[0], symbols[1]] = len(ranks)
            tokens[merged] = None
            symbols = [merged, *symbols[2:]]
    return list(tokens), [" ".join(pair) for pair in ranks]


def _encode(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    symbols = list(word)
    while len(symbols) > 1:
        rank, at = min(
            (ranks.get(pair, len(ranks)), at)
            for at, pair in enumerate(pairwise(symbols))
        )
        if rank == len(ranks):
            break
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return symbols


def _fillers(taken: set[str]) -> Iterator[str]:
    """Yields an endless series of invented words made of syllables, each with a leading
    space.

    Skips the words in `taken`.
    """
    syllables = [
        consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"
    ]
    words = ["Ġ"]
    while True:
        words = [word + syllable for word in words for syllable in syllables]
        yield from (word for word in words if word not in taken)
