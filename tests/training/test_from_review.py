"""A training from a review: each decision does what it says, whatever the layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest

import mispair
from audited import columns_after, write_audit_of
from mispair.auditing import audit as audit_module
from mispair.auditing.inputs import AuditInput
from mispair.auditing.output_files import TABLE
from mispair.config import Config
from mispair.encoders.options import Files
from mispair.errors import ChangedError, ConflictError, DataError
from mispair.pairs.audited import AuditColumns
from mispair.pairs.pairs import Pairs, Tokens
from mispair.reviewing.decisions import FILE, Decision, Decisions, Verdict
from mispair.reviewing.reviewed import Reviewed
from mispair.training import from_files as train_module
from mispair.training.from_files import train_from_files
from mispair.training.run_folder import AUDITED

SPLITS = ("train", "dev", "test")
COUNT = 60
FLAGGED = (0, 1, 2, 3)  # nobody decides on 0
Scores = dict[tuple[int, str], float]  # by left item and caption


class TrainedError(Exception):
    """Stands for a training."""


@pytest.fixture(autouse=True)
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(config: Config, *_: object) -> None:
        raise TrainedError(config.data, config.model)

    monkeypatch.setattr(train_module, "train_and_test", stop)


def sides() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], list[str]]:
    """Left vectors that begin with their row, right ones, and captions."""
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((COUNT, width)).astype(np.float32) for width in (4, 3))
    left[:, 0] = np.arange(COUNT)
    return left, right, [f"caption {row}" for row in range(COUNT)]


def write_embeddings(folder: Path) -> None:
    left, right, captions = sides()
    for stem, values in (("img_emb", left), ("text_emb", right)):
        (folder / stem).mkdir(parents=True)
        np.save(folder / stem / f"{stem}_0.npy", values)
    (folder / "metadata").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"caption": captions}), folder / "metadata/metadata_0.parquet")


def embeddings(folder: Path) -> AuditInput:
    write_embeddings(folder)
    return AuditInput(folder)


def splits(folder: Path) -> AuditInput:
    for split in ("train", "dev", "test"):
        write_embeddings(folder / split)
    return AuditInput(folder)


def arrays(folder: Path) -> AuditInput:
    left, right, captions = sides()
    folder.mkdir()
    np.save(folder / "left.npy", left)
    np.save(folder / "right.npy", right)
    (folder / "ids.csv").write_text("caption\n" + "".join(f"{caption}\n" for caption in captions))
    return AuditInput(left=(folder / "left.npy",), right=(folder / "right.npy",), ids=folder / "ids.csv")


def regions(folder: Path) -> AuditInput:
    left, _, captions = sides()
    folder.mkdir()
    np.save(folder / "train_ims.npy", np.repeat(left[:, None], 2, axis=1))
    (folder / "train_caps.txt").write_text("".join(f"{caption}\n" for caption in captions))
    return AuditInput(folder)


def audited(data: AuditInput, out: Path) -> tuple[Path, list[str]]:
    ids = data.open("cpu").ids(range(COUNT))
    return write_audit_of(out, data, ids, FLAGGED), ids


def decide(audit: Path, *decided: Decision) -> None:
    decisions = Decisions(audit / FILE)
    decisions.add(decided)
    decisions.close()


def usual(ids: list[str]) -> list[Decision]:
    return [
        Decision(ids[1], Verdict.DROP),
        Decision(ids[2], Verdict.KEEP),
        Decision(ids[3], Verdict.REPAIR, "left", ids[30]),
        Decision(ids[5], Verdict.UNSURE),
        Decision(ids[10], Verdict.REPAIR, "right", ids[40]),
    ]


def expected() -> Scores:
    """By the decisions above, with the dropped pair."""
    found = {(row, f"caption {row}"): 0.1 if row in FLAGGED else 0.9 for row in range(COUNT)}
    del found[3, "caption 3"], found[10, "caption 10"]
    return found | {(1, "caption 1"): 0, (2, "caption 2"): 1, (30, "caption 3"): 1, (10, "caption 40"): 1}


def train(source: Path, out: Path, method: str = "mend") -> tuple[str, str]:
    with pytest.raises(TrainedError) as found:
        train_from_files(source, Config(method=method, device="cpu"), out, given={"method", "device"})
    data, model = found.value.args
    return data, model


def found_scores(pairs: Pairs, scores: Path) -> Scores:
    assert not isinstance(pairs.left, Tokens)
    lefts = pairs.left.features[pairs.link].reshape(len(pairs), -1)[:, 0].astype(int)
    texts = pairs.right.texts if isinstance(pairs.right, Tokens) else pairs.right_ids
    values = AuditColumns.read(scores).match_score if scores.exists() else np.zeros(len(pairs), dtype=np.float32)
    return dict(zip(zip(lefts.tolist(), texts, strict=True), values.tolist(), strict=True))


@pytest.mark.parametrize("layout", [embeddings, splits, arrays, regions])
def test_mend_gets_dropped_pairs_as_flagged_ones(
    layout: Callable[[Path], AuditInput], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "score_splits", lambda parts, *_: [np.full(len(one), 0.7) for one in parts])
    audit, ids = audited(layout(tmp_path / "data"), tmp_path / "audit")
    decide(audit, *usual(ids))
    data, model = train(audit, tmp_path / "run")
    assert Path(data) == tmp_path / "run/features"
    assert model == ("vse" if layout is regions else "two-tower")
    found: Scores = {}
    for split, name in zip(("train",) if layout in (splits, regions) else SPLITS, AUDITED, strict=False):
        found |= found_scores(mispair.load(data, split), tmp_path / "run" / name)
    assert found == pytest.approx(expected())
    if layout is splits:
        assert set(AuditColumns.read(tmp_path / "run" / AUDITED[1]).match_score) == {
            np.float32(0.7)
        }  # of dev, which was not audited before
        assert len(mispair.load(data, "test")) == COUNT


def test_no_item_is_both_in_a_pair_and_unmatched(tmp_path: Path) -> None:
    audit, ids = audited(regions(tmp_path / "data"), tmp_path / "audit")
    decide(audit, *usual(ids), Decision(ids[40], Verdict.DROP), Decision(ids[30], Verdict.REPAIR, "right", ids[3]))
    data, _ = train(audit, tmp_path / "run")
    found = found_scores(mispair.load(data), tmp_path / "run" / AUDITED[0])
    wanted = expected()
    del wanted[40, "caption 40"], wanted[30, "caption 30"]
    # 10 has the caption of 40, and 3 is the same pair as 30 now.
    assert found == pytest.approx(wanted | {(40, "caption 10"): 0, (3, "caption 30"): 0})
    train(audit, tmp_path / "other", "repair")
    pairs = found_scores(mispair.load(tmp_path / "other/features"), tmp_path / "none")
    assert pairs.keys() == wanted.keys() - {(1, "caption 1")}


@pytest.mark.parametrize("layout", [embeddings, arrays, regions])
def test_other_methods_train_without_dropped_pairs(layout: Callable[[Path], AuditInput], tmp_path: Path) -> None:
    audit, ids = audited(layout(tmp_path / "data"), tmp_path / "audit")
    decide(audit, *usual(ids))
    data, _ = train(audit, tmp_path / "run", "repair")
    pairs: set[tuple[int, str]] = set()
    for split in ("train",) if layout is regions else SPLITS:
        pairs |= found_scores(mispair.load(data, split), tmp_path / "none").keys()
    assert pairs == expected().keys() - {(1, "caption 1")}
    assert not (tmp_path / "run" / AUDITED[0]).exists()


def test_captions_of_an_image_stand_together_with_their_scores(tmp_path: Path) -> None:
    data = regions(tmp_path / "data")
    np.save(tmp_path / "data/train_ims.npy", np.load(tmp_path / "data/train_ims.npy")[::2])
    audit, ids = audited(data, tmp_path / "audit")
    decide(audit, *usual(ids), Decision(ids[7], Verdict.REWRITE, caption="a new one"))
    folder, _ = train(audit, tmp_path / "run")
    found = found_scores(mispair.load(folder), tmp_path / "run" / AUDITED[0])
    wanted = {(row // 2 * 2, text): score for (row, text), score in expected().items() if text != "caption 7"}
    assert found == pytest.approx(wanted | {(6, "a new one"): 1})
    source = data.open("cpu")
    edits = Reviewed.read(audit).plan(source)[0].with_unmatched(source.groups)
    assert (np.diff(source.order(edits)) < 0).any()  # it was no accident


def test_a_run_goes_on_with_the_decisions_it_began_with(tmp_path: Path) -> None:
    audit, ids = audited(embeddings(tmp_path / "data"), tmp_path / "audit")
    decide(audit, *usual(ids))
    train(audit, tmp_path / "run")
    before = (tmp_path / "run/features/img_emb/img_emb_0.npy").stat()
    train(audit, tmp_path / "run")
    assert (tmp_path / "run/features/img_emb/img_emb_0.npy").stat() == before
    with pytest.raises(ChangedError):
        train_from_files(audit, Config(method="repair", device="cpu"), tmp_path / "run", given={"method"})
    decide(audit, Decision(ids[20], Verdict.DROP))
    with pytest.raises(ChangedError):
        train_from_files(audit, Config(device="cpu"), tmp_path / "run")
    with pytest.raises(ChangedError):
        train_from_files(tmp_path / "data", Config(device="cpu"), tmp_path / "run")
    (tmp_path / "run/made_from.json").unlink()  # then nobody knows what the features are of
    with pytest.raises(ChangedError):
        train_from_files(audit, Config(device="cpu"), tmp_path / "run")


def test_what_cannot_be_trained_on_is_refused_before_any_work(tmp_path: Path) -> None:
    data = embeddings(tmp_path / "data")
    audit, ids = audited(data, tmp_path / "audit")
    out = tmp_path / "run"
    with pytest.raises(ConflictError):
        train_from_files(audit, Config(device="cpu"), out, files=Files(caption_column="text"))
    with pytest.raises(ConflictError):
        train_from_files(audit, Config(device="cpu"), out, files=Files(grid=2))
    decide(audit, Decision(ids[7], Verdict.REWRITE, caption="a new one"))
    with pytest.raises(ConflictError):
        train_from_files(audit, Config(device="cpu"), out)
    parts = splits(tmp_path / "parts")
    dev = AuditInput(parts.source, split="dev")
    with pytest.raises(DataError, match="an audit of the split dev; training needs one of train"):
        train_from_files(audited(dev, tmp_path / "dev")[0], Config(device="cpu"), out)
    assert not out.exists()


def test_other_captions_under_the_same_ids_are_refused(tmp_path: Path) -> None:
    data = embeddings(tmp_path / "data")
    audit, _ = audited(data, tmp_path / "audit")
    table = pyarrow.parquet.read_table(audit / TABLE)
    captions = [f"caption {row}" for row in range(COUNT)]
    pyarrow.parquet.write_table(table.append_column("caption", pyarrow.array(captions)), audit / TABLE)
    (audit / "audit.json").write_text((audit / "audit.json").read_text().replace(f'"{TABLE}"', '"moved"'))
    Reviewed.read(audit).open("cpu")
    written = tmp_path / "data/metadata/metadata_0.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"caption": captions[::-1]}), written)
    with pytest.raises(DataError, match="not the one that was audited"):
        Reviewed.read(audit).open("cpu")


def test_the_audits_own_threshold_decides_what_is_flagged(tmp_path: Path) -> None:
    audit, _ = audited(embeddings(tmp_path / "data"), tmp_path / "audit")
    table = pyarrow.parquet.read_table(audit / TABLE)
    score = np.linspace(0, 1, COUNT, dtype=np.float32)
    columns = {"match_score": pyarrow.array(score), "is_mismatch": pyarrow.array(score < 0.2)}
    for name, column in columns.items():
        table = table.set_column(table.column_names.index(name), name, column)
    pyarrow.parquet.write_table(table, audit / TABLE)
    (audit / "audit.json").write_text((audit / "audit.json").read_text().replace(f'"{TABLE}"', '"moved"'))
    found = columns_after(audit)
    np.testing.assert_array_equal(found.flagged, score < 0.2)
    np.testing.assert_array_equal(found.match_score, score)
