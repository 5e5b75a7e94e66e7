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

from mispair.errors import DataError
from mispair.support.files import read_regular, replacing

START, END, UNK = 1, 2, 3  # 0 pads
MOST_WORDS = 250  # of a text; networks read no further, because their memory grows with the square of it
SPECIAL_WORDS = ("<pad>", "<start>", "<end>", "<unk>")

# Most captions are words, commas, hyphens and a last period, where the 30 regular expressions of nltk come down to a
# split. Whatever does not match, or holds a word that nltk cuts in two, is left to nltk, so the result is the same.
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
    """Which of nltk's tokenizers is in use; the two differ on mid-caption periods."""
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
        """Token numbers of all texts one after the other, of each its first `MOST_WORDS` words.

        Returns:
            The numbers, and offsets (N + 1,) such that text i is `ids[offsets[i]:offsets[i + 1]]`.
        """
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
        with replacing(path) as file:
            file.write(json.dumps(content).encode())

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read the JSON of the SCAN family.

        Raises:
            DataError: The file is missing, is no such JSON, or contradicts itself.
        """
        return cls(_checked_words(_read_json(Path(path)), str(path)))


def _read_json(path: Path) -> dict[str, Any]:
    expected = "expected a SCAN vocabulary with the keys word2idx, idx2word and idx"
    try:
        content = json.loads(read_regular(path))
    except OSError as error:
        raise DataError(f"{path}: the vocabulary cannot be read ({error.strerror}); {expected}.") from None
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors alike
        raise DataError(f"{path}: this is not JSON ({error}); {expected}.") from None
    missing = [key for key in ("word2idx", "idx2word", "idx") if not isinstance(content, dict) or key not in content]
    if missing:
        raise DataError(f"{path}: {' and '.join(missing)} missing; {expected}.")
    return dict(content)


def _checked_words(content: dict[str, Any], name: str) -> tuple[str, ...]:
    """The words in the order of their numbers, after a check that both maps agree."""
    numbers, words, size = content["word2idx"], content["idx2word"], content["idx"]
    if not isinstance(numbers, dict) or not isinstance(words, dict):
        raise DataError(f"{name}: word2idx and idx2word must both be JSON objects; build the vocabulary again.")
    ordered = tuple(word for number in range(len(words)) if isinstance(word := words.get(str(number)), str))
    if len(ordered) < len(words):
        raise DataError(
            f"{name}: the numbers in idx2word are not 0 to {len(words) - 1:,} with a word each; "
            "number the words without gaps."
        )
    if numbers != {word: number for number, word in enumerate(ordered)}:
        different = next((word for number, word in enumerate(ordered) if numbers.get(word) != number), None)
        detail = f"have {len(numbers):,} and {len(words):,} words" if different is None else f"differ at {different!r}"
        raise DataError(f"{name}: word2idx and idx2word {detail}; they must be each other's inverse.")
    if size != len(ordered):
        raise DataError(f"{name}: idx is {size!r} but there are {len(ordered):,} words; idx must be the next number.")
    if ordered[:4] != SPECIAL_WORDS:
        raise DataError(
            f"{name}: the first words are {list(ordered[:4])}; numbers 0 to 3 must be {', '.join(SPECIAL_WORDS)}."
        )
    return ordered
