import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer

from mispair.pairs import tfidf
from mispair.pairs.pairs import Tokens
from mispair.pairs.tfidf import word_vectors
from mispair.pairs.vocabulary import Vocabulary, tokenize


def corpus(n: int, different: int, seed: int = 0) -> list[str]:
    """Texts whose words follow topics, with frequent and rare words as in a language."""
    rng = np.random.default_rng(seed)
    often = 1 / np.arange(1, different + 1)
    topics = [rng.permutation(different) for _ in range(6)]
    lengths = rng.integers(0, 14, n)
    drawn = [
        topics[row % 6][rng.choice(different, length, p=often / often.sum())] for row, length in enumerate(lengths)
    ]
    return [" ".join(f"w{word}" for word in text) for text in drawn]


def reference(texts: list[str]) -> npt.NDArray[np.float64]:
    """The whole TF-IDF matrix by scikit-learn."""
    vectorizer = TfidfVectorizer(tokenizer=tokenize, lowercase=False, token_pattern=None, sublinear_tf=True, min_df=2)
    matrix: npt.NDArray[np.float64] = vectorizer.fit_transform(texts).toarray()
    return matrix


def test_all_directions_keep_all_similarities() -> None:
    texts = corpus(200, 60)
    full = reference(texts)
    vectors = word_vectors(texts, 80)
    assert vectors.shape == (200, full.shape[1])
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors @ vectors.T, full @ full.T, atol=1e-5)


def test_the_main_directions_are_those_of_the_exact_decomposition() -> None:
    texts = corpus(600, 400)
    full = reference(texts)
    assert full.shape[1] > 20 + tfidf._OVERSAMPLES  # so that directions are searched for
    left, values, _ = np.linalg.svd(full, full_matrices=False)
    vectors = word_vectors(texts, 20)
    exact = left[:, :20] * values[:20]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=0), values[:20], rtol=1e-4)
    np.testing.assert_allclose(vectors @ vectors.T, exact @ exact.T, atol=5e-3)


def test_no_worse_than_scikit_learn() -> None:
    texts = corpus(600, 400, seed=1)
    full = reference(texts)
    theirs = TruncatedSVD(32, random_state=0).fit_transform(full)
    assert (word_vectors(texts, 32) ** 2).sum() >= 0.999 * (theirs**2).sum()


def test_the_cut_into_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = corpus(300, 300)
    whole = word_vectors(texts, 16)
    np.testing.assert_array_equal(whole, word_vectors(texts, 16))
    monkeypatch.setattr(tfidf, "_ROWS", 37)
    np.testing.assert_allclose(word_vectors(texts, 16), whole, atol=1e-5)


def test_tokens_are_words_without_the_special_ones() -> None:
    texts = corpus(100, 40)
    vocabulary = Vocabulary.build(texts, 1)
    vectors = word_vectors(Tokens(*vocabulary.encode(texts), vocabulary), 50)
    np.testing.assert_allclose(vectors @ vectors.T, word_vectors(texts, 50) @ word_vectors(texts, 50).T, atol=1e-5)


def test_small_corpora() -> None:
    assert word_vectors([], 4).shape == (0, 1)
    assert not word_vectors(["alone"], 4).any()
    assert not word_vectors(["", ""], 4).any()
    one = word_vectors(["dog", "dog", "", "cat"], 3)
    np.testing.assert_allclose(one, [[1], [1], [0], [0]], atol=1e-6)


@given(
    st.lists(st.lists(st.sampled_from("abcdef"), max_size=5).map(" ".join), min_size=1, max_size=8), st.integers(1, 9)
)
def test_any_texts_have_vectors_of_at_most_unit_length(texts: list[str], width: int) -> None:
    vectors = word_vectors(texts, width)
    assert len(vectors) == len(texts)
    assert 1 <= vectors.shape[1] <= width
    assert np.isfinite(vectors).all()
    assert (np.linalg.norm(vectors, axis=1) <= 1 + 1e-5).all()
    same = dict(zip(texts, vectors, strict=True))
    assert all((vector == same[text]).all() for text, vector in zip(texts, vectors, strict=True))
