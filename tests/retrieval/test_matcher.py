"""The model as users hold it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import mispair
from mispair.errors import (
    ConflictError,
    DamagedError,
    DataError,
    InvalidValueError,
    NotFoundError,
    ShapeError,
    TooFewError,
)
from mispair.models import SideSpec
from mispair.models.inference import similarities
from mispair.pairs.batches import SideLoader
from mispair.pairs.pairs import Regions, Tokens
from mispair.pairs.vocabulary import Vocabulary
from mispair.retrieval.evaluation import evaluate
from mispair.support.tensor_files import load_tensors, save_tensors
from refusals import refused
from tiny import REGIONS, WIDTH, tiny_pairs

SMALL: dict[str, Any] = {
    "embed_size": 16,
    "word_size": 8,
    "sim_size": 8,
    "batch_size": 16,
    "epochs": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module", params=["vse", "sgr", "saf", "scan"])
def matcher(request: pytest.FixtureRequest) -> mispair.Matcher:
    return mispair.fit(tiny_pairs(8), model=request.param, **SMALL)


def test_save_and_load_give_the_same_scores(matcher: mispair.Matcher, tmp_path: Path) -> None:
    matcher.save(tmp_path / "model.safetensors")
    loaded = mispair.Matcher.load(tmp_path / "model.safetensors", "cpu")
    pairs = tiny_pairs(7, seed=3)
    assert np.array_equal(matcher.score(pairs.left, pairs.right), loaded.score(pairs.left, pairs.right))
    assert loaded.config == matcher.config


def test_arrays_and_texts_are_taken_as_they_come(matcher: mispair.Matcher) -> None:
    pairs = tiny_pairs(5, seed=3)
    assert isinstance(pairs.right, Tokens)
    features = pairs.left.features  # type: ignore[union-attr]
    assert np.array_equal(matcher.score(features, pairs.right.texts), matcher.score(pairs.left, pairs.right))
    assert np.allclose(np.linalg.norm(matcher.encode(["a b", "c"], "right"), axis=1), 1, atol=1e-5)


def test_one_text_scores_the_same_alone_and_in_company(matcher: mispair.Matcher) -> None:
    left = tiny_pairs(5, seed=3).left
    together = matcher.score(left, ["a", "b c d e f g h", "c d"])
    assert np.allclose(together[:, 1:2], matcher.score(left, ["b c d e f g h"]), atol=1e-6)


def test_texts_of_another_vocabulary_are_read_again(matcher: mispair.Matcher) -> None:
    pairs = tiny_pairs(5)
    assert isinstance(pairs.right, Tokens)
    other = Vocabulary(("<pad>", "<start>", "<end>", "<unk>", *reversed("abcdefghijklmnopqrstuvwxyz")))
    foreign = Tokens(*other.encode(pairs.right.texts), other, pairs.right.texts)
    assert np.array_equal(matcher.score(pairs.left, foreign), matcher.score(pairs.left, pairs.right))
    with refused(ShapeError, "right", "texts"):
        matcher.score(pairs.left, Tokens(foreign.ids, foreign.offsets, other))


def test_wrong_items_are_refused(matcher: mispair.Matcher) -> None:
    wide = np.zeros((2, REGIONS, WIDTH + 1), np.float32)
    with refused(ShapeError, "left", f"width {WIDTH + 1}"):
        matcher.score(wide, ["a"])
    with refused(ShapeError, "left", f"width {WIDTH}"):
        matcher.score(["a"], ["a"])
    with refused(ShapeError, "right", "texts"):
        matcher.score(wide[..., :WIDTH], "a")
    with refused(TooFewError, "right"):
        matcher.score(wide[..., :WIDTH], [])


def test_only_sgr_and_saf_are_bound_to_their_number_of_regions(matcher: mispair.Matcher) -> None:
    more = np.ones((2, REGIONS + 2, WIDTH), np.float32)
    if matcher.config.model in ("vse", "scan"):
        assert matcher.score(more, ["a"]).shape == (2, 1)
    else:
        with refused(ShapeError, "left", f"{REGIONS + 2} regions"):
            matcher.score(more, ["a"])


def test_odd_values_are_refused(matcher: mispair.Matcher) -> None:
    with refused(DamagedError, "The left side"):
        matcher.score(np.full((2, REGIONS, WIDTH), np.nan, np.float32), ["a"])
    with refused(InvalidValueError, "side", "text"):
        matcher.encode(["a"], "text")  # type: ignore[arg-type]
    with refused(ShapeError, "right", "texts"):
        matcher.encode([1, 2], "right")  # type: ignore[list-item]


@pytest.mark.parametrize(
    "texts", [{"a", "b"}, {"a": 1}, (text for text in "ab"), torch.ones(3), b"ab"], ids=lambda x: type(x).__name__
)
def test_what_is_no_list_of_texts_is_refused(matcher: mispair.Matcher, texts: Any) -> None:
    with refused(ShapeError, "right", type(texts).__name__):
        matcher.encode(texts, "right")


def test_sides_with_odd_values_are_refused(matcher: mispair.Matcher) -> None:
    pairs = tiny_pairs(5)
    assert isinstance(pairs.right, Tokens)
    features = np.array(pairs.left.features)  # type: ignore[union-attr]
    features[3] = np.nan
    with refused(DamagedError, "The left side", "row 3"):
        matcher.evaluate(replace(pairs, left=Regions(features)))
    offsets = pairs.right.offsets.copy()
    offsets[7] = offsets[6]
    with refused(ShapeError, "The right side", "text 6"):
        matcher.score(pairs.left, replace(pairs.right, offsets=offsets))
    with refused(ShapeError, "The right side", "0 to 29"):
        matcher.score(pairs.left, replace(pairs.right, ids=pairs.right.ids + 20))


def test_large_sets_are_evaluated_in_blocks(matcher: mispair.Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = tiny_pairs(8)
    whole = matcher.evaluate(pairs, folds=2)
    monkeypatch.setattr("mispair.retrieval.matcher.HELD", 319)
    monkeypatch.setattr("mispair.retrieval.matcher.evaluate", None)
    assert matcher.evaluate(pairs, folds=2) == whole


def test_only_pairs_are_evaluated(matcher: mispair.Matcher) -> None:
    with refused(ShapeError, "evaluate: pairs", "str"):
        matcher.evaluate("shapes")  # type: ignore[arg-type]
    with refused(ShapeError, "evaluate_together: pairs", "None"):
        mispair.evaluate_together([matcher], None)  # type: ignore[arg-type]


@pytest.mark.parametrize("folds", [0, 8, "2", 2.5, None])
def test_wrong_folds_are_refused_before_any_work(
    matcher: mispair.Matcher, folds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mispair.retrieval.matcher.similarities", lambda *_: pytest.fail("scored first"))
    for call in (matcher.evaluate, lambda *rest: mispair.evaluate_together([matcher], *rest)):
        with refused(InvalidValueError, "folds", repr(folds)):
            call(tiny_pairs(7), folds)


def test_whole_numbers_are_features_too(matcher: mispair.Matcher) -> None:
    whole = np.arange(2 * REGIONS * WIDTH).reshape(2, REGIONS, WIDTH) % 7
    assert np.array_equal(matcher.score(whole, ["a"]), matcher.score(whole.astype(np.float32), ["a"]))


@pytest.mark.parametrize(
    ("items", "got"),
    [
        (np.zeros(WIDTH), f"({WIDTH},)"),
        (np.full((2, REGIONS, WIDTH), "a"), "<U1"),
        ([[0.5]], "list"),
    ],
)
def test_a_refusal_says_what_came(matcher: mispair.Matcher, items: Any, got: str) -> None:
    with refused(ShapeError, "left", got):
        matcher.score(items, ["a"])


@pytest.fixture(scope="module")
def sgr_and_saf() -> list[mispair.Matcher]:
    """SGRAF: two networks of the one kind, one of the other."""
    sgr = mispair.fit(tiny_pairs(8), model="sgr", networks=2, **SMALL)
    return [sgr, mispair.fit(tiny_pairs(8), model="saf", **{**SMALL, "sim_size": 4, "seed": 1})]


def test_models_that_were_trained_apart_are_averaged(sgr_and_saf: list[mispair.Matcher]) -> None:
    pairs = tiny_pairs(9, seed=3)
    found = mispair.evaluate_together(sgr_and_saf, pairs, folds=3)
    assert found.networks == [matcher.evaluate(pairs).averaged for matcher in sgr_and_saf]
    mean = np.mean([matcher.score(pairs.left, pairs.right) for matcher in sgr_and_saf], axis=0)
    expected = evaluate([torch.from_numpy(mean)], pairs, folds=3)
    assert found.averaged == expected.averaged
    assert found.folds == expected.folds
    assert len({result.rsum for result in (*found.networks, found.averaged)}) > 1
    alone = mispair.evaluate_together(sgr_and_saf[1:], pairs)
    assert alone.averaged == sgr_and_saf[1].evaluate(pairs).averaged
    three = mispair.evaluate_together([*sgr_and_saf, sgr_and_saf[0]], pairs)
    assert len(three.metrics()) == 4


def test_sigmoids_and_cosines_are_averaged_on_one_scale(sgr_and_saf: list[mispair.Matcher]) -> None:
    pairs, sgr = tiny_pairs(9, seed=3), sgr_and_saf[0]
    vse = mispair.fit(tiny_pairs(8), model="vse", **SMALL)
    found = mispair.evaluate_together([sgr, vse], pairs)
    sides = (SideLoader(side, torch.device("cpu")) for side in (pairs.left, pairs.right))
    raw = [torch.logit(S, eps=1e-6).tanh() for S in similarities(sgr.networks, *sides)]
    cosine = torch.from_numpy(vse.score(pairs.left, pairs.right)).tanh()
    mean = torch.stack([torch.stack(raw).mean(dim=0), cosine]).mean(dim=0)
    assert found.averaged == evaluate([mean], pairs).averaged


def test_models_of_other_data_are_not_averaged(sgr_and_saf: list[mispair.Matcher]) -> None:
    pairs, (sgr, saf) = tiny_pairs(9, seed=3), sgr_and_saf

    def like(specs: tuple[SideSpec, SideSpec] = saf.specs, words: Vocabulary | None = saf.vocabulary) -> Any:
        return mispair.Matcher(saf.config, specs, saf.networks, words, saf.device)

    assert saf.vocabulary is not None
    wide = replace(saf.specs[0], size=WIDTH + 1), saf.specs[1]
    with refused(ConflictError, "the left side", f"width {WIDTH + 1}"):
        mispair.evaluate_together([sgr, like(wide)], pairs)
    words = (*saf.vocabulary.words[:4], *reversed(saf.vocabulary.words[4:]))
    with refused(ConflictError, names="vocab"):
        mispair.evaluate_together([sgr, like(words=Vocabulary(words))], pairs)
    with refused(TooFewError, "evaluate_together"):
        mispair.evaluate_together([], pairs)


def test_a_damaged_or_foreign_file_is_refused(matcher: mispair.Matcher, tmp_path: Path) -> None:
    matcher.save(tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    (tmp_path / "foreign.safetensors").write_bytes(b"hello world, this is no model")
    for name in ("cut", "foreign", "absent"):
        with pytest.raises(DataError):
            mispair.Matcher.load(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"networks": 0}, "0 networks"),
        ({"networks": 2}, ""),
        ({"networks": 2**31}, "2147483648 networks"),
        ({"config": {"embed_size": 65_536}}, ""),
        ({"specs": [{"kind": "regions", "size": 2**40, "count": 9}] * 2}, ""),
        ({"config": 3}, ""),
        ({"vocabulary": None}, "0 words, not 30"),
        ({"vocabulary": ["a", "b", "c"]}, "3 words, not 30"),
        ({"format": 2}, "format"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_in_a_sentence(
    matcher: mispair.Matcher, tmp_path: Path, changes: dict[str, Any], names: str
) -> None:
    path = tmp_path / "model.safetensors"
    matcher.save(path)
    tensors, about = load_tensors(path)
    save_tensors(path, tensors, {**(about or {}), **changes})
    with pytest.raises(DamagedError) as refusal:
        mispair.Matcher.load(path, "cpu")
    assert refusal.value.where == path
    assert names in refusal.value.what
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_weights_that_are_not_finite_or_not_ours_are_refused(matcher: mispair.Matcher, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    matcher.save(path)
    with safetensors.safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors, about = load_tensors(path)
    name = next(iter(tensors))
    tensors[name] = tensors[name] * torch.nan
    without_digest = {"mispair": json.dumps(about)}
    for header in (metadata, without_digest, {"format": "pt"}):
        safetensors.torch.save_file(tensors, path, header)
        with refused(DamagedError, path):
            mispair.Matcher.load(path, "cpu")
    save_tensors(path, tensors, about)
    with refused(DamagedError, path, name):
        mispair.Matcher.load(path, "cpu")


def test_a_file_that_may_not_be_read_is_a_sentence(
    matcher: mispair.Matcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    matcher.save(tmp_path / "model.safetensors")
    monkeypatch.setattr(Path, "open", deny)
    with refused(DamagedError, tmp_path / "model.safetensors", "Permission denied"):
        mispair.Matcher.load(tmp_path / "model.safetensors", "cpu")


def test_a_run_without_a_model_yet_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with refused(NotFoundError, tmp_path):
        mispair.Matcher.load(tmp_path)


def test_a_notebook_shows_the_model_and_what_it_reached(matcher: mispair.Matcher) -> None:
    pairs = replace(tiny_pairs(7), name="<b>mine</b>")
    matcher.evaluations.clear()
    assert "<caption>" not in matcher._repr_html_()
    found = matcher.evaluate(pairs)
    page = matcher._repr_html_()
    assert matcher.models[0] in page
    assert f"{found.averaged.rsum:.1f}" in page
    assert f"{found.averaged.rsum:.1f}" in found._repr_html_()
    assert "&lt;b&gt;mine" in page
    assert "<b>" not in page
