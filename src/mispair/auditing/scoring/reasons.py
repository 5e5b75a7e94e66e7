"""Find captions without a description and images without content; no vectors are needed.

They tell a person why a pair may be bad, and how often that is. Only captions without a word about an image lower a
match score.
"""

from __future__ import annotations

import io
import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mispair.auditing.scoring.folds import sample
from mispair.compute.threads import parallel_map
from mispair.support.arrays import IntArray
from mispair.support.thumbnails import FORMATS, TooManyPixelsError, on_white, open_image, upright

EMPTY, FILE_NAME, URL, NO_WORDS, SHORT, LANGUAGE, UNREADABLE, TINY, UNIFORM = (
    "caption is empty",
    "caption is a file name",
    "caption is a web address",
    "caption has no words",
    "caption is too short to tell",
    "caption is in another language than most",
    "image cannot be read",
    "image is tiny",
    "image is of one colour",
)
KINDS = (EMPTY, FILE_NAME, URL, NO_WORDS, SHORT, LANGUAGE, UNREADABLE, TINY, UNIFORM)  # by bit
WORDLESS = (FILE_NAME, URL, NO_WORDS)  # captions that say nothing about an image
Bits = npt.NDArray[np.uint16]

SAMPLED = 8192  # captions by which the language and the usual length are found
USUAL = 4  # words; where captions usually have fewer, none is too short
FEW_WORDS = 1  # a caption with so many words is too short
MOST = 0.8  # share of the captions in one language or script, from which on others are odd
USUALLY = 0.2  # share of wordless captions from which on they are what the data set has, such as codes of products
AT_ONCE = 1 << 16  # captions at a time
SMALLEST = 32  # pixels; an image with a shorter side is tiny
EVEN = 3.0  # standard deviation of each colour, of 255, below which an image is of one colour
SIMPLE = 0.05  # bytes a pixel; files with more (and larger than a header) cannot be of one colour
HEADER = 4096  # bytes of a file that are not pixels, at most

_FILE = re.compile(r"[\w\-+().,%#&@ ]{1,120}\.(?:jpe?g|png|gif|webp|bmp|tiff?|heic|svg|avif)", re.IGNORECASE)
_CAMERA = re.compile(
    r"(?:img|dscn?|dscf|dsc|image|photo|pict?|p|screenshot|screen shot|untitled|scan|mvc)[-_ ]?\d{3,}\w*", re.IGNORECASE
)
_URL = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")

# Where a script begins; letters in between belong to the one before. Han and kana are one, as Japanese uses both.
_SCRIPTS = (
    (0, "Latin"), (0x370, "Greek"), (0x400, "Cyrillic"), (0x530, "Armenian"), (0x590, "Hebrew"), (0x600, "Arabic"),
    (0x780, "Indic"), (0xE00, "Thai"), (0xE80, "other"), (0x10A0, "Georgian"), (0x1100, "Hangul"), (0x1200, "other"),
    (0x1E00, "Latin"), (0x1F00, "Greek"), (0x2000, "Latin"), (0x2E80, "Han"), (0x3130, "Hangul"), (0x3190, "Han"),
    (0xA000, "other"), (0xAC00, "Hangul"), (0xD7B0, "other"), (0xF900, "Han"), (0xFB00, "Latin"), (0xFB1D, "Hebrew"),
    (0xFB50, "Arabic"), (0xFE00, "Latin"), (0x20000, "Han"),
)  # fmt: skip
_BITS = {"": 0, **{kind: 1 << bit for bit, kind in enumerate(KINDS)}}
_STARTS = [start for start, _ in _SCRIPTS]

# Words that nearly every sentence of a language has.
_FUNCTION_WORDS = {
    "English": "the a an of in on with and is are to at by for from this that his her their its it as two three "
    "while near over up out into through down has was be or not you your we our my i he she they",
    "German": "der die das ein eine einen einem einer und ist sind mit auf im den dem von zu für auch nicht wird "
    "zwei aus bei sich vor über ich wir sie es",
    "French": "le la les un une des du de et est sont avec dans sur pour au aux en qui deux par ce cette son sa ses "
    "pas plus il elle nous vous",
    "Spanish": "el la los las un una unos unas de del y es son con en por para al que dos se su sus como más no lo",
    "Italian": "il lo la gli le un uno una di del della dei delle e è sono con in per che due nel nella su al alla "
    "non si più",
    "Portuguese": "o os as um uma uns umas de do da dos das e é são com em no na nos nas por para ao que dois duas "
    "se seu sua não mais",
    "Dutch": "de het een van en is zijn met op in voor naar aan te bij die dat twee niet ook om uit over ik wij",
    "Swedish": "en ett och är på med av för till som i det den de två inte sig från vid",
    "Polish": "i w na z do jest są się nie to że dwa dwie przez przy od dla oraz jego jej",
    "Turkish": "ve bir bu ile için da de mi çok olan olarak iki gibi daha en ne var",
}
_LANGUAGES = {
    word: frozenset(name for name, words in _FUNCTION_WORDS.items() if word in words.split())
    for words in _FUNCTION_WORDS.values()
    for word in words.split()
}


@dataclass(frozen=True)
class Usual:
    """Language, script and length of most captions of a data set."""

    script: str = ""  # script of most captions; empty where there is no such one
    language: str = ""  # language of most captions; empty where there is no such one, or none of those that are known
    words: float = 0.0  # median number of words

    @classmethod
    def of(cls, captions: Sequence[str]) -> Usual:
        """Learn from captions, a random sample."""
        scripts, languages, lengths = Counter[str](), Counter[str](), []
        for caption in captions:
            words = _words(caption)
            if words:
                scripts[_script(caption)] += 1
                lengths.append(len(words))
                languages.update(_spoken(words))
        if not lengths:
            return cls()
        script, count = scripts.most_common(1)[0]
        found, of_language = languages.most_common(1)[0] if languages else ("", 0)
        told = sum(1 for caption in captions if _spoken(_words(caption)))
        return cls(
            script if count >= MOST * len(lengths) else "",
            found if script == "Latin" and of_language >= MOST * max(1, told) else "",
            float(np.median(lengths)),
        )


def caption_reason(caption: str, usual: Usual) -> str:
    """Name the fault of a caption, one of `KINDS`, or return an empty string.

    >>> usual = Usual("Latin", "English", 9)
    >>> caption_reason("IMG_2041.JPG", usual), caption_reason("A dog runs over the grass .", usual)
    ('caption is a file name', '')
    """
    text = caption.strip()
    if not text:
        return EMPTY
    words = _words(text)
    # A file name with more words than programs usually put there describes its image.
    if _CAMERA.fullmatch(text) or (_FILE.fullmatch(text) and len(words) <= USUAL + 1):
        return FILE_NAME
    address = _URL.search(text) if "www." in text.lower() or "://" in text else None
    if address and 2 * len(address.group()) > len(text):
        return URL
    if not words:
        return NO_WORDS
    if _is_other_language(text, words, usual):
        return LANGUAGE
    unspaced = _script(text) in ("Han", "Thai")  # scripts without spaces between words
    return SHORT if len(words) <= FEW_WORDS and usual.words >= USUAL and not unspaced else ""


def caption_reasons(rows: IntArray, captions: Callable[[IntArray], list[str]]) -> Bits:
    """(n,) bits of `KINDS` by the captions of ascending rows; there may be millions."""
    usual = Usual.of(captions(sample(rows, SAMPLED)))
    found = np.zeros(len(rows), dtype=np.uint16)
    for start in range(0, len(rows), AT_ONCE):
        part = captions(rows[start : start + AT_ONCE])
        found[start : start + len(part)] = [_BITS[caption_reason(text, usual)] for text in part]
    return found


def wordless(seen: Bits) -> npt.NDArray[np.bool_]:
    """(n,) captions without a word about an image, by bits of `KINDS`; none if many are like this."""
    found = seen & sum(_BITS[kind] for kind in WORDLESS) > 0
    return np.asarray(found & (found.mean() < USUALLY)) if len(found) else found


def image_reason(content: bytes) -> str:
    """Name the fault of an image file, one of `KINDS`, or return an empty string.

    Most images are only opened: an image of one colour is a small file.
    """
    try:
        with warnings.catch_warnings(action="ignore"), open_image(content, 2 * SMALLEST) as image:
            size = _size(content)
            if min(size) < SMALLEST:
                return TINY
            if len(content) > HEADER + SIMPLE * size[0] * size[1]:
                return ""
            small = on_white(upright(image)).resize((SMALLEST, SMALLEST))
            return UNIFORM if np.asarray(small).reshape(-1, 3).std(axis=0).max() < EVEN else ""
    except TooManyPixelsError:
        return ""
    except Exception:  # Pillow raises almost anything for a damaged file
        return UNREADABLE


def _size(content: bytes) -> tuple[int, int]:
    """Pixels as stored; `open_image` may have made a JPEG smaller already."""
    from PIL import Image

    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        return image.size


def image_reasons(rows: IntArray, read: Callable[[int], bytes | None]) -> Bits:
    """(n,) bits of `KINDS` by the images of rows; 0 for rows without one."""

    def bit(row: int) -> int:
        content = read(row)
        return _BITS[""] if content is None else _BITS[image_reason(content)]

    return np.fromiter(parallel_map(bit, rows.tolist()), dtype=np.uint16, count=len(rows))


def in_words(bits: int) -> list[str]:
    """Names of the bits.

    >>> in_words(5)
    ['caption is empty', 'caption is a web address']
    """
    return [kind for bit, kind in enumerate(KINDS) if bits >> bit & 1]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _script(text: str) -> str:
    """The script of most letters."""
    if text.isascii():
        return "Latin"
    counts = Counter(_SCRIPTS[bisect_right(_STARTS, ord(letter)) - 1][1] for letter in text if letter.isalpha())
    return counts.most_common(1)[0][0] if counts else "Latin"


def _spoken(words: Sequence[str]) -> list[str]:
    """Languages with the most function words among these words."""
    counts = Counter(language for word in set(words) for language in _LANGUAGES.get(word, ()))
    most = max(counts.values(), default=0)
    return [language for language, count in counts.items() if count == most]


def _is_other_language(text: str, words: Sequence[str], usual: Usual) -> bool:
    if usual.script and (usual.script != "Latin" or not text.isascii()) and _script(text) != usual.script:
        return True
    known = [_LANGUAGES[word] for word in set(words) if word in _LANGUAGES] if usual.language else []
    if any(usual.language in languages for languages in known):
        return False
    counts = Counter(language for languages in known for language in languages)
    return max(counts.values(), default=0) >= 2
