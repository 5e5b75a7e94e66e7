"""`mispair.audit` takes paths, lists, and the tables of other libraries."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import mispair
from audit_cases import make_case
from mispair.auditing.inputs import AuditInput, open_given
from mispair.encoders import encode
from mispair.encoders.encoders import parts_of
from mispair.errors import ConflictError, NotFoundError, ShapeError, TooFewError
from mispair.pairs.other_libraries import as_vectors
from mispair.pairs.shards import views_of
from refusals import refused

ROWS = 60


class Colours:
    """An image encoder: the mean colour."""

    name, width = "colours", 3
    pixels = 1024

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        return np.asarray(np.asarray(image).mean(axis=(0, 1)) / 100 - 1, dtype=np.float32)

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.stack(items)


class Numbers:
    """A text encoder: the three numbers in a caption."""

    name, width = "numbers", 3

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.array([[float(word) / 100 - 1 for word in text.split()] for text in items], dtype=np.float32)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pyarrow.Table:
    """60 photos of one colour and captions that name it, of which ten are exchanged."""
    monkeypatch.setattr(encode, "image_encoder", lambda *_: Colours())
    monkeypatch.setattr(encode, "text_encoder", lambda *_: Numbers())
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    colours = np.random.default_rng(1).integers(0, 256, (ROWS, 3))
    for row, colour in enumerate(colours):
        Image.new("RGB", (4, 3), tuple(colour.tolist())).save(f"photos/{row}.png")
    named = [" ".join(map(str, colours[row if row < 50 else 109 - row])) for row in range(ROWS)]
    return pyarrow.table({"image": [f"{row}.png" for row in range(ROWS)], "caption": named, "note": ["x"] * ROWS})


def csv_path(table: pyarrow.Table) -> Any:
    import pyarrow.csv

    pyarrow.csv.write_csv(table, "photos.csv")
    return "photos.csv"


def dataset(table: pyarrow.Table) -> Any:
    datasets = pytest.importorskip("datasets")
    columns = table.to_pydict()
    columns["image"] = [str(Path("photos", name).absolute()) for name in columns["image"]]
    made = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    return made.select(range(ROWS))


def pandas_frame(table: pyarrow.Table) -> Any:
    pytest.importorskip("pandas")
    return table.to_pandas()


def polars_frame(table: pyarrow.Table) -> Any:
    return pytest.importorskip("polars").from_arrow(table)


GIVEN: dict[str, Callable[[pyarrow.Table], Any]] = {
    "path": csv_path, "pandas": pandas_frame, "polars": polars_frame, "pyarrow": lambda table: table,
    "datasets": dataset,
}  # fmt: skip


SCORES: list[npt.NDArray[np.float32]] = []


def scores_of_lists(table: pyarrow.Table) -> npt.NDArray[np.float32]:
    """Of the photos and captions of `table`, which are always the same, given as lists."""
    if not SCORES:
        lists = table["image"].to_pylist(), table["caption"].to_pylist()
        SCORES.append(mispair.audit(*lists, images="photos", device="cpu").match_score)
    return SCORES[0]


@pytest.mark.parametrize("kind", GIVEN)
def test_tables_give_the_same_audit(table: pyarrow.Table, kind: str, tmp_path: Path) -> None:
    found = mispair.audit(GIVEN[kind](table), images="photos", device="cpu")
    np.testing.assert_array_equal(found.match_score, scores_of_lists(table))
    assert found.table["caption"].to_pylist() == table["caption"].to_pylist()
    copy = found.write_clean(tmp_path / "clean")
    name = "photos.csv" if kind == "path" else "pairs.parquet"
    again = AuditInput(copy / name, images=Path("photos")).open("cpu")
    assert again.texts(range(3)) == found.source.texts(np.flatnonzero(found.kept)[:3])
    assert found.write_mended(tmp_path / "mended").is_dir()


def test_lists_of_unequal_lengths_and_other_mistakes(table: pyarrow.Table) -> None:
    images, captions = table["image"].to_pylist(), table["caption"].to_pylist()
    with refused(ShapeError, names="59 of image, 60 of caption"):
        mispair.audit(images[1:], captions, images="photos")
    with pytest.raises(TooFewError, match="20 pairs"):
        mispair.audit(images[:20], captions[:20], images="photos")
    with refused(ConflictError, names="one list"):
        mispair.audit(images)
    with refused(NotFoundError, "the given table", "`caption_column`"):
        mispair.audit(table.rename_columns(["image", "words", "note"]), images="photos")
    found = mispair.audit(table.rename_columns(["image", "words", "note"]), images="photos", caption_column="words")
    assert len(found) == ROWS


def test_vectors_of_other_libraries() -> None:
    case = make_case(60, 0.2)
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    fixed = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(case.right.reshape(-1)), case.right.shape[1])
    for left, right in (
        (case.left.tolist(), list(case.right)),
        (pandas.DataFrame(case.left), fixed),
        (polars.DataFrame(case.left), pyarrow.array(case.right.tolist(), pyarrow.list_(pyarrow.float32()))),
        (pandas.Series(list(case.left)), pyarrow.Table.from_arrays(list(case.right.T), names=list("abcdefghijkl"))),
    ):
        np.testing.assert_array_equal(as_vectors(left), case.left)
        np.testing.assert_array_equal(as_vectors(right), case.right)
    shuffled = pandas.DataFrame(case.right).sample(frac=1, random_state=0)
    with refused(ShapeError, "right", "row 0 is "):
        mispair.audit(pandas.DataFrame(case.left), shuffled, device="cpu")
    names = shuffled.reset_index()["index"]
    mispair.audit(pandas.DataFrame(case.left), shuffled.reset_index(drop=True), ids=names, device="cpu")
    with refused(ShapeError):
        as_vectors([[1.0], [1.0, 2.0]])


def test_missing_vectors_of_other_libraries() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    rows = [[1.0, 2.0], None, [3.0, 4.0], None]
    fixed = pyarrow.array(rows, pyarrow.list_(pyarrow.float32(), 2))
    column = polars.Series(rows, dtype=polars.Array(polars.Float32, 2))
    tables = (rows, fixed, fixed.cast(pyarrow.list_(pyarrow.float32())), pyarrow.chunked_array([fixed[:1], fixed[1:]]))
    for vectors in (*tables, column, column.cast(polars.List(polars.Float32)), pandas.Series(rows)):
        found = as_vectors(vectors)
        np.testing.assert_array_equal(found, [[1, 2], [np.nan] * 2, [3, 4], [np.nan] * 2])
        assert found.dtype == np.float32


def test_two_paths(tmp_path: Path) -> None:
    case = make_case(60, 0.2)
    np.save(tmp_path / "a.npy", case.left)
    np.save(tmp_path / "b.npy", case.right)
    (tmp_path / "ids.csv").write_text("id,alt\n" + "".join(f"n{row},text {row}\n" for row in range(60)))
    found = mispair.audit(
        tmp_path / "a.npy", str(tmp_path / "b.npy"), tmp_path / "ids.csv", caption_column="alt", device="cpu"
    )
    np.testing.assert_array_equal(found.match_score, mispair.audit(case.left, case.right, device="cpu").match_score)
    assert found.source.ids([7]) == ["n7"]


def test_to_pandas(table: pyarrow.Table) -> None:
    pytest.importorskip("pandas")
    frame = mispair.audit(table, images="photos", device="cpu").to_pandas()
    assert list(frame.columns[:4]) == ["id", "image", "caption", "status"]
    assert len(frame) == ROWS


def test_other_libraries_are_not_imported() -> None:
    import subprocess

    code = (
        "import sys, numpy as np, mispair; x = np.random.default_rng(0).standard_normal((60, 4)).astype('f');"
        "mispair.audit(x, x, device='cpu'); print(sorted({'pandas', 'polars', 'datasets', 'PIL'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_folder_in_a_store(tmp_path: Path) -> None:
    store, case = pytest.importorskip("fsspec").filesystem("memory"), make_case(ROWS)
    for stem, vectors in (("img_emb", case.left), ("text_emb", case.right)):
        file = io.BytesIO()
        np.save(file, vectors)
        store.pipe(f"/inputs/data/{stem}/{stem}_0.npy", file.getvalue())
    data = AuditInput(cache=tmp_path)
    source = open_given("memory://inputs/data", None, None, None, None, data, lambda _: None, "cpu")
    np.testing.assert_array_equal(source.block(0, ROWS)[0], case.left)


class Squares(Colours):
    """Another image encoder."""

    name = "squares"

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.asarray(super().encode(items) ** 2 + 0.1, dtype=np.float32)


def test_several_encoders_of_images_are_views(table: pyarrow.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"colours": Colours(), "squares": Squares()}
    monkeypatch.setattr(encode, "image_encoder", lambda name, _: made[name])
    audit = mispair.audit(table, images="photos", image_model="colours+squares", cache="cache", device="cpu")
    views = views_of(audit.source.left)
    np.testing.assert_allclose(views[1].block(0, ROWS), views[0].block(0, ROWS) ** 2 + 0.1, atol=0.01)
    assert len(views_of(audit.source.right)) == 1
    assert not np.isnan(audit.match_score).any()
    with refused(ConflictError, where="image_model"):
        mispair.audit(table, images="photos", image_model="colours+colours", cache="cache", device="cpu")


def test_names_of_several_encoders() -> None:
    several = parts_of("efficientnet-lite0+timm:resnet50+transformers:c++/clip")
    assert several == ["efficientnet-lite0", "timm:resnet50", "transformers:c++/clip"]


def test_copies_of_photos_are_near_duplicates_whatever_their_size(table: pyarrow.Table) -> None:
    noise = np.random.default_rng(0)
    for row in range(ROWS):
        pixels = np.array(Image.open(f"photos/{row}.png").resize((8, 8))).astype(int)
        cells = np.clip(pixels + noise.integers(-60, 60, (8, 8, 1)), 0, 255).astype(np.uint8)
        Image.fromarray(cells).resize((120, 120)).save(f"photos/{row}.png")
    copies = {5: 40, 6: 41}
    for copy, row in copies.items():
        edited = Image.open(f"photos/{row}.png").resize((50, 60))
        edited.paste((250, 250, 250), (0, 0, 8, 60))  # so that the vectors differ
        edited.save(f"photos/{copy}.png", quality=40)
    audit = mispair.audit(table, images="photos", cache="cache", device="cpu")
    assert [group.tolist() for group in audit.near_duplicates[0]] == [[5, 40], [6, 41]]
    hashes = audit.source.hashes
    assert hashes is not None
    without = mispair.audit(audit.source.left.block(0, ROWS), audit.source.right.block(0, ROWS), device="cpu")
    assert len(without.near_duplicates[0]) == 0
    again = mispair.audit(table, images="photos", cache="cache", device="cpu")
    np.testing.assert_array_equal(again.source.hashes, hashes)
