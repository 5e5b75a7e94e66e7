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

    def _content(self) -> dict[str, Any]:
        """The JSON of the SCAN family."""
        numbered = {str(number): word for number, word in enumerate(self.words)}
        return {"word2idx": self.index, "idx2word": numbered, "idx": len(self)}

    def save(self, path: str | Path) -> None:
        """Write the JSON of the SCAN family, whole or not at all."""
        write_atomically(path, json.dumps(self._content()).encode())

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read the JSON of the SCAN family."""
        expected = "a SCAN vocabulary with the keys word2idx, idx2word and idx"
        try:
            content = json.loads(read_regular(Path(path)))
        except (OSError, ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
            raise unreadable(path, error, expected=expected) from None
        try:
            found = cls(tuple(content["idx2word"][str(number)] for number in range(content["idx"])))
            agree = all(content[key] == value for key, value in found._content().items())
        except (KeyError, TypeError):
            agree = False
        if not agree:
            advice = "Build the vocabulary again."
            raise DamagedError(
                "the keys are missing or contradict each other", where=path, expected=expected, advice=advice
            )
        if found.words[:4] != SPECIAL_WORDS:
            what = f"the first words are {list(found.words[:4])}"
            raise DamagedError(
                what, where=path, expected=", ".join(SPECIAL_WORDS), advice="Build the vocabulary again."
            )
        return found
