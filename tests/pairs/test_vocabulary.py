import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import DamagedError, NotFoundError
from mispair.pairs import vocabulary
from mispair.pairs.vocabulary import END, MOST_WORDS, SPECIAL_WORDS, START, UNK, Vocabulary, tokenize, tokenizer_name
from refusals import refused

PUBLISHED = Path(__file__).parents[3] / "shared/data/formats/f30k_precomp_vocab.json"

captions = st.text(alphabet="abcxyz019 ,.'-\"!?&;:()\n\té…“", max_size=40)
plain_words = st.sampled_from(
    ["a", "dog", "cannot", "gonna", "wanna", "t-shirt", "st.", "3,5", "--", ",", ".", ", ", "man's"]
)


def nltk_tokens(caption: str) -> list[str]:
    from nltk.tokenize import NLTKWordTokenizer, word_tokenize

    lower = caption.lower()
    return list(word_tokenize(lower) if tokenizer_name() == "word_tokenize" else NLTKWordTokenizer().tokenize(lower))


@given(captions | st.lists(plain_words).map(" ".join) | st.lists(plain_words).map("".join) | st.text(max_size=20))
def test_the_short_cut_of_the_tokeniser_never_differs_from_nltk(caption: str) -> None:
    assert tokenize(caption) == nltk_tokens(caption)


@pytest.mark.parametrize(
    ("caption", "tokens"),
    [
        ("", []),
        ("Two dogs, running.", ["two", "dogs", ",", "running", "."]),
        ("a t-shirt , 2 men", ["a", "t-shirt", ",", "2", "men"]),
        ("I cannot", ["i", "can", "not"]),
        ("1,000 men (tall)", ["1,000", "men", "(", "tall", ")"]),
    ],
)
def test_tokens_of_known_captions(caption: str, tokens: list[str]) -> None:
    assert tokenize(caption) == tokens


def test_tokenizing_takes_linear_time() -> None:
    """With backtracking over the spaces, the second text took minutes."""
    for text in ("a" + " " * 100_000 + ".", "a" + " " * 100_000 + "!"):
        assert tokenize(text) == ["a", text[-1]]


def test_networks_read_the_first_words_of_a_long_text() -> None:
    known = Vocabulary.build(["a dog"], threshold=1)
    ids, offsets = known.encode(["a dog", "a " * 3000 + "dog", "dog " * MOST_WORDS])
    assert np.diff(offsets).tolist() == [4, MOST_WORDS + 2, MOST_WORDS + 2]
    assert set(ids[offsets[1] + 1 : offsets[2] - 1]) == {known.index["a"]}
    assert ids[-1] == END


def test_tokenizer_name_says_which_one_is_used() -> None:
    assert tokenizer_name() in ("word_tokenize", "NLTKWordTokenizer")


def test_plain_captions_never_import_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_nltk_tokenizer", lambda: pytest.fail("nltk was asked"))
    assert tokenize("A red square .") == ["a", "red", "square", "."]


def test_tokenising_is_fast_enough_for_a_real_data_set() -> None:
    start = time.process_time()
    for _ in range(20_000):
        tokenize("two young guys with shaggy hair look at their hands while hanging out in the yard .")
    assert time.process_time() - start < 3  # 145,000 captions: below 22 s even on a busy machine


def test_build_is_deterministic_and_keeps_frequent_words() -> None:
    texts = ["b a c"] * 4 + ["c d"] * 3 + ["<unk> <unk> <unk> <unk>"]
    vocabulary = Vocabulary.build(texts)
    assert vocabulary.words[4:7] == ("c", "<", ">")
    assert vocabulary.words[7:] == ("a", "b", "unk")
    assert vocabulary == Vocabulary.build(list(reversed(texts)))
    assert hash(vocabulary) == hash(Vocabulary(vocabulary.words))


def test_an_empty_caption_is_start_and_end() -> None:
    ids, offsets = Vocabulary(SPECIAL_WORDS).encode([""])
    assert ids.tolist() == [START, END]
    assert offsets.tolist() == [0, 2]


@given(st.lists(captions, max_size=8))
def test_ragged_encode_holds_each_text(texts: list[str]) -> None:
    vocabulary = Vocabulary.build(texts, threshold=2)
    ids, offsets = vocabulary.encode(texts)
    assert ids.dtype == np.int32
    assert offsets.dtype == np.int64
    assert len(offsets) == len(texts) + 1
    assert offsets[-1] == len(ids)
    for i, caption in enumerate(texts):
        own = ids[offsets[i] : offsets[i + 1]].tolist()
        assert own[0] == START
        assert own[-1] == END
        known = [vocabulary.words.index(t) if t in vocabulary.words else UNK for t in tokenize(caption)]
        assert own[1:-1] == known


@given(words=st.lists(st.text(max_size=8), unique=True, max_size=20))
def test_save_and_load_give_the_same_words(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    path = tmp_path_factory.mktemp("words") / "vocab.json"
    vocabulary = Vocabulary((*SPECIAL_WORDS, *(w for w in words if w not in SPECIAL_WORDS and w.isprintable())))
    vocabulary.save(path)
    assert Vocabulary.load(path) == vocabulary
    assert [entry.name for entry in path.parent.iterdir()] == ["vocab.json"]
    content = json.loads(path.read_text())
    assert set(content) == {"word2idx", "idx2word", "idx"}
    assert content["idx"] == len(vocabulary)


def content(**changes: Any) -> dict[str, Any]:
    words = [*SPECIAL_WORDS, "dog"]
    whole = {"word2idx": {w: i for i, w in enumerate(words)}, "idx2word": {str(i): w for i, w in enumerate(words)}}
    return whole | {"idx": len(words)} | changes


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ("{", ""),
        ("[1]", "keys"),
        (json.dumps({"word2idx": {}}), "keys"),
        (json.dumps(content(word2idx=[])), "keys"),
        (json.dumps(content(idx2word={"0": "<pad>", "2": "dog"})), "keys"),
        (json.dumps(content(idx2word={str(i): i for i in range(5)})), "keys"),
        (json.dumps(content(word2idx=content()["word2idx"] | {"dog": 3})), "keys"),
        (json.dumps(content(word2idx=content()["word2idx"] | {"cat": 5})), "keys"),
        (json.dumps(content(idx=4)), "keys"),
        (json.dumps({"word2idx": {"dog": 0}, "idx2word": {"0": "dog"}, "idx": 1}), "['dog']"),
    ],
)
def test_a_wrong_vocabulary_is_refused_in_a_sentence(tmp_path: Path, written: str, names: str) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(written)
    with refused(DamagedError, path, names):
        Vocabulary.load(path)


def test_a_missing_vocabulary_is_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "vocab.json"):
        Vocabulary.load(tmp_path / "vocab.json")


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the published files")
def test_the_published_vocabulary_makes_the_round_trip(tmp_path: Path) -> None:
    vocabulary = Vocabulary.load(PUBLISHED)
    assert len(vocabulary) == 8481
    vocabulary.save(tmp_path / "vocab.json")
    assert json.loads((tmp_path / "vocab.json").read_text()) == json.loads(PUBLISHED.read_text())
