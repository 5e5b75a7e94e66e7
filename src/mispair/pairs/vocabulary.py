"""The tokenizer and the vocabulary of the SCAN family."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mispair.errors import DamagedError
from mispair.support.files import read_regular, unreadable, write_atomically

START, END, UNK = 1, 2, 3  # 0 pads
MOST_WORDS = 250  # of a text; networks read no further, because their memory grows with the square of it
SPECIAL_WORDS = ("<pad>", "<start>", "<end>", "<unk>")

# Most captions are words, commas, hyphens and a last period, where the 30 regular expressions of nltk come down to a
# split. Other captions, and words that nltk cuts in two, are left to nltk, so the result is the same.
_PLAIN = re.compile(r"(?:[a-z0-9 ]|,(?= )|-(?!-))*+(?:\. *)?")  # possessive: linear time whatever the text
_CUT_IN_TWO = re.compile("cannot|gimme|gonna|gotta|lemme|wanna")


def tokenize(text: str) -> list[str]:
    """Lower-case words and punctuation marks, as by nltk's `word_tokenize`.

    Without the punkt data (which needs a download) mid-caption periods stay with their word, as in "st. bernard".

    >>> tokenize("A man's dog, running.")
    ['a', 'man', "'s", 'dog', ',', 'running', '.']
    """
    text = text.lower()
    if _PLAIN.fullmatch(text) and not _CUT_IN_TWO.search(text):
        return text.replace(",", " , ").replace(".", " . ").split()
    return _nltk_tokenizer()[1](text)


def tokenizer_name() -> str:
    """The tokenizer of nltk in use; the two differ on mid-caption periods."""
    return _nltk_tokenizer()[0]


@cache
def _nltk_tokenizer() -> tuple[str, Callable[[str], list[str]]]:
    from nltk.tokenize import NLTKWordTokenizer, word_tokenize  # takes a second: not before a caption needs it

    try:
        word_tokenize("a")
    except LookupError:
        return "NLTKWordTokenizer", NLTKWordTokenizer().tokenize
    return "word_tokenize", word_tokenize


@dataclass(frozen=True)
class Vocabulary:
    """Words by number; the first four are the special words.

    >>> vocabulary = Vocabulary.build(["a dog", "a cat"], threshold=2)
    >>> vocabulary.words
    ('<pad>', '<start>', '<end>', '<unk>', 'a')
    >>> vocabulary.encode_tokens(["a", "dog"])
    [1, 4, 3, 2]
    """

    words: tuple[str, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Number of each word."""
        return {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode_tokens(self, tokens: Iterable[str]) -> list[int]:
        """Start, the number of each token, end; unknown words share one number."""
        return [START, *(self.index.get(token, UNK) for token in tokens), END]

    def encode(self, texts: Iterable[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Token numbers of the first `MOST_WORDS` words of all texts, one after the other, and offsets (N + 1,)."""
        ids: list[int] = []
        offsets = [0]
        for text in texts:
            ids.extend(self.encode_tokens(tokenize(text)[:MOST_WORDS]))
            offsets.append(len(ids))
        return np.asarray(ids, dtype=np.int32), np.asarray(offsets, dtype=np.int64)

    @classmethod
    def build(cls, texts: Iterable[str], threshold: int = 4) -> Vocabulary:
        """Every token seen at least `threshold` times, frequent ones first, equally frequent ones by the alphabet."""
        counts = Counter(token for text in texts for token in tokenize(text))
        kept = (word for word, count in counts.items() if count >= threshold and word not in SPECIAL_WORDS)
        return cls((*SPECIAL_WORDS, *sorted(kept, key=lambda word: (-counts[word], word))))

    def save(self, path: str | Path) -> None:
        """Write the JSON of the SCAN family, whole or not at all."""
        content = {
            "word2idx": self.index,
            "idx2word": {str(number): word for number, word in enumerate(self.words)},
            "idx": len(self),
        }
        write_atomically(path, json.dumps(content).encode())

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read the JSON of the SCAN family."""
        expected = "a SCAN vocabulary with the keys word2idx, idx2word and idx"
        try:
            content = json.loads(read_regular(Path(path)))
        except (OSError, ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
            raise unreadable(path, error, expected=expected) from None
        keys = ("word2idx", "idx2word", "idx")
        missing = [key for key in keys if not isinstance(content, dict) or key not in content]
        if missing:
            raise DamagedError(f"{' and '.join(missing)} missing", where=path, expected=expected)
        words, problem = _words(*(content[key] for key in keys))
        if problem:
            raise DamagedError(problem, where=path, advice="Build the vocabulary again.")
        return cls(words)


def _words(numbers: Any, words: Any, size: Any) -> tuple[tuple[str, ...], str]:
    """The words in the order of their numbers, and a problem, if any."""
    if not isinstance(numbers, dict) or not isinstance(words, dict):
        return (), "word2idx and idx2word are not both JSON objects"
    ordered = tuple(word for number in range(len(words)) if isinstance(word := words.get(str(number)), str))
    if len(ordered) < len(words):
        return (), f"the numbers in idx2word are not 0 to {len(words) - 1:,} with a word each"
    if numbers != {word: number for number, word in enumerate(ordered)}:
        different = next((word for number, word in enumerate(ordered) if numbers.get(word) != number), None)
        detail = f"have {len(numbers):,} and {len(words):,} words" if different is None else f"differ at {different!r}"
        return (), f"word2idx and idx2word {detail}"
    if size != len(ordered):
        return (), f"idx is {size!r}, but there are {len(ordered):,} words"
    if ordered[:4] != SPECIAL_WORDS:
        return (), f"the first words are {list(ordered[:4])}, not {', '.join(SPECIAL_WORDS)}"
    return ordered, ""
