"""The real commands, run as a user runs them."""

from __future__ import annotations

import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mispair
from forked import start_command
from mispair.cli.main import COMMANDS, main
from mispair.methods import METHODS
from mispair.pairs.vocabulary import SPECIAL_WORDS, Vocabulary
from mispair.training import checkpoint
from tiny import WORDS, tiny_arrays, tiny_folder, tiny_pairs, weights

SETTINGS = {
    "embed-size": 16, "word-size": 8, "sim-size": 8, "batch-size": 16, "epochs": 2, "warmup-epochs": 1, "lr": 1e-3,
    "hardening-steps": 10, "negatives-start": 8, "negatives-end": 2, "device": "cpu",
}  # fmt: skip
TINY = [part for name, value in SETTINGS.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("data") / "tiny_precomp")


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "first"
    assert main(["train", "--data", str(data), "--out", str(out), "--noise-ratio", "0.4", *TINY]) == 0
    return out


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_help_is_light_and_complete() -> None:
    script = "import sys; from mispair.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert f"mispair {command}" in printed
    assert "{None}" not in printed
    assert command == "train" or "None" not in printed


def test_train_writes_a_whole_run(run: Path) -> None:
    assert {path.name for path in run.iterdir()} >= {
        "config.toml", "environment.json", "metrics.jsonl", "checkpoints", "best.safetensors", "result.json",
    }  # fmt: skip
    assert 'data = "/' in (run / "config.toml").read_text()  # resumable from any folder
    assert json.loads((run / "environment.json").read_text())["device"] == "cpu"


def test_train_prints_the_measured_mismatch(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--data", str(data), "--out", str(tmp_path / "r"), "--noise-ratio", "0.4", "--json", *TINY]
    assert main(arguments) == 0
    result = printed(capsys)
    assert 0.3 < result["mismatch"] <= 0.4  # type: ignore[operator]
    assert result["tested_on"] == "tiny_precomp test"
    assert result["network"]["rsum"] >= 0  # type: ignore[index]


def test_train_reads_and_overrides_a_recipe(data: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'data = "{data}"\nmodel = "sgr"\nepochs = 1\n')
    out = tmp_path / "run"
    at = TINY.index("--epochs")
    flags = [*TINY[:at], *TINY[at + 2 :], "--seed", "3"]
    assert main(["train", "--recipe", str(recipe), "--out", str(out), *flags]) == 0
    settings = (out / "config.toml").read_text()
    assert 'model = "sgr"' in settings
    assert "epochs = 1\n" in settings
    assert "seed = 3" in settings


def test_eval_single_and_folds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--split", "test", "--folds", "2", "--json"]) == 0
    result = printed(capsys)
    assert result["images"] == 8
    assert set(result) >= {"network", "folds"}
    assert main(["eval", str(run)]) == 0
    assert "rSum" in capsys.readouterr().out


def test_eval_of_sgr_with_saf_is_sgraf(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tmp_path / "sgr", tmp_path / "saf"]
    for out in runs:
        assert main(["train", "--data", str(data), "--out", str(out), *TINY, "--model", out.name]) == 0
    capsys.readouterr()
    alone = []
    for out in runs:
        assert main(["eval", str(out), "--json"]) == 0
        alone.append(printed(capsys)["network"])
    assert main(["eval", str(runs[0]), "--with", str(runs[1]), "--folds", "2", "--json"]) == 0
    result = printed(capsys)
    assert [result[str(out)] for out in runs] == alone
    assert set(result) == {"run", "with", "data", "images", "texts", *map(str, runs), "averaged", "folds"}
    assert result["with"] == str(runs[1])
    assert main(["eval", str(runs[1]), "--with", str(runs[0])]) == 0
    table = capsys.readouterr().out
    assert all(f"│ {name} " in table for name in ("saf", "sgr", "averaged"))
    files = [str(out / "best.safetensors") for out in runs]
    assert main(["eval", files[0], "--with", files[1]]) == 0


def test_eval_refuses_partners_that_do_not_fit(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    captions = (folder / "train_caps.txt").read_text()
    (folder / "train_caps.txt").write_text(captions.replace("i", "ink"))
    assert main(["train", "--data", str(folder), "--out", str(tmp_path / "other"), *TINY]) == 0
    capsys.readouterr()
    for partner, words in {
        str(tmp_path / "other"): "vocabular",
        str(run): "the run itself",
        str(run / "best.safetensors"): "the run itself",
        str(data): str(data),
    }.items():
        assert main(["eval", str(run), "--with", partner]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert "Traceback" not in captured.err
        assert not captured.out


def test_runs_may_be_called_like_the_figures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("averaged", "data"):
        shutil.copytree(run, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "averaged", "--with", "data", "--json"]) == 0
    result = printed(capsys)
    assert result["data"] == "tiny_precomp test"
    assert {str(tmp_path / "averaged"), str(tmp_path / "data"), "averaged"} < set(result)
    assert main(["eval", "averaged", "--with", "data"]) == 0
    assert capsys.readouterr().out.count("averaged ") == 2


def test_data_of_other_words_is_noted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "test_caps.txt").write_text("zebra xylophone\n" * 40)
    assert main(["eval", str(run), "--data", str(folder)]) == 0
    assert (
        "Note: 100\N{NO-BREAK SPACE}% of the words of tiny test are not in the model's vocabulary"
        in capsys.readouterr().err
    )
    assert main(["eval", str(run), "--data", str(folder), "--split", "dev"]) == 0
    assert not capsys.readouterr().err


def test_data_that_has_gone_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    assert main(["train", "--data", str(folder), "--out", str(tmp_path / "run"), *TINY]) == 0
    folder.rename(tmp_path / "moved")
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert f"{folder}: the model was trained on this" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "run"), "--data", str(tmp_path / "moved")]) == 0


def test_captions_per_image_can_be_said_to_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that stand there twice, with a caption each, are one image with two captions only if somebody says so."""
    folder, run, noise = tmp_path / "twice", str(tmp_path / "run"), str(tmp_path / "noise.npy")
    folder.mkdir()
    for seed, split in enumerate(("train", "dev", "test")):
        features, captions = tiny_arrays(8, seed)
        np.save(folder / f"{split}_ims.npy", features.repeat(2, axis=0))
        (folder / f"{split}_caps.txt").write_text("".join(f"{captions[5 * (i // 2) + i % 2]}\n" for i in range(16)))
    Vocabulary((*SPECIAL_WORDS, *WORDS)).save(folder / "vocab.json")
    twice = ["--captions-per-image", "2"]
    assert main(["data", "check", str(folder), *twice]) == 0
    assert "test: 16 rows, each image repeated 2 times: 8 images with 2 captions each" in capsys.readouterr().out
    assert main(["data", "noise", str(folder), "--noise-ratio", "0.5", "--out", noise, *twice]) == 0
    assert main(["train", "--data", str(folder), "--noise-file", noise, "--out", run, *twice, *TINY]) == 0
    folder.rename(tmp_path / "moved")
    data = ["--data", str(tmp_path / "moved")]
    for flags, images in (([*data], 16), ([*data, *twice], 8)):
        capsys.readouterr()
        assert main(["eval", run, *flags, "--json"]) == 0
        assert printed(capsys)["images"] == images
    assert main(["search", run, *data, *twice, "--image", "8"]) == 2
    assert "a number from 0 to 7" in capsys.readouterr().err
    (tmp_path / "moved").rename(folder)
    assert main(["eval", run, "--data", str(folder), "--json"]) == 0
    assert printed(capsys)["images"] == 8  # its own data, as it was trained
    assert main(["eval", run, *twice]) == 2
    assert "--captions-per-image: " in capsys.readouterr().err


def test_search_shows_what_the_terminal_cannot(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "test_caps.txt").write_text("ñandú 🐶\n" * 40, encoding="utf-8")
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    assert main(["search", str(run), "--data", str(folder), "--query", "a b c d"]) == 0
    assert rb"\xf1and\xfa \U0001f436" in shown.getvalue()


@pytest.mark.parametrize("command", [["eval"], ["search", "--query", "a"]], ids=" ".join)
def test_a_model_from_python_asks_for_its_data(
    command: list[str], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = {name.replace("-", "_"): value for name, value in SETTINGS.items()}
    mispair.fit(tiny_pairs(16), out=tmp_path / "run", **settings)
    arguments = [command[0], str(tmp_path / "run"), *command[1:]]
    assert main(arguments) == 2
    assert "tiny: the model was trained from Python" in capsys.readouterr().err
    assert main([*arguments, "--data", str(data)]) == 0


def test_search_both_ways(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(run), "--query", "a b", "--top", "3", "--json"]) == 0
    hits = printed(capsys)["hits"]
    assert isinstance(hits, list)
    assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
    assert len(hits) == 3
    assert main(["search", str(run), "--image", "test2", "--top", "2"]) == 0
    assert "test2" in capsys.readouterr().out


def test_data_noise_is_read_back(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "noise_0.4.npy"
    arguments = ["data", "noise", str(data), "--noise-ratio", "0.4", "--seed", "0", "--out", str(out), "--json"]
    assert main(arguments) == 0
    figures = printed(capsys)
    assert np.load(out, allow_pickle=False).shape == (80,)
    assert main(["data", "check", str(data), "--noise-file", str(out), "--json"]) == 0
    assert printed(capsys)["noise"][str(out)]["mismatch"] == figures["mismatch"]  # type: ignore[index]
    assert main(arguments) == 2  # never overwrites


def test_data_make_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train", "6", "--dev", "2", "--test", "2"]
    assert main(["data", "make", "shapes", str(tmp_path / "shapes"), *sizes]) == 0
    assert main(["data", "check", str(tmp_path / "shapes")]) == 0
    assert "This data set is ready." in capsys.readouterr().out


def spoil(folder: Path, what: str) -> list[str]:
    """Damages a data set in one way; returns the flags to train on it with."""
    features = np.load(folder / "train_ims.npy", allow_pickle=False)
    match what:
        case "noise of the wrong length":
            np.save(folder / "noise.npy", np.arange(7))
            return ["--noise-file", str(folder / "noise.npy")]
        case "truncated":
            (folder / "train_ims.npy").write_bytes((folder / "train_ims.npy").read_bytes()[:-50])
        case "pickled":
            np.save(folder / "train_ims.npy", np.array([{}, []], dtype=object), allow_pickle=True)
        case "missing split":
            (folder / "train_ims.npy").unlink()
            (folder / "train_caps.txt").unlink()
        case "captions of the wrong length":
            (folder / "train_caps.txt").write_text("a b\nc d\n")
        case "NaN":
            features[3, 1, 2] = np.nan
            np.save(folder / "train_ims.npy", features)
        case "NaN in test":
            other = np.load(folder / "test_ims.npy", allow_pickle=False)
            other[0] = np.inf
            np.save(folder / "test_ims.npy", other)
        case "half a dev split":
            (folder / "dev_caps.txt").unlink()
        case "one image":
            np.save(folder / "train_ims.npy", features[:1])
            (folder / "train_caps.txt").write_text("a b\n" * 5)
            (folder / "train_ids.txt").unlink()
        case "unknown recipe":
            return ["--recipe", "nowhere/plain"]
        case "wrong device":
            return ["--device", "cuda:77"]
        case "wrong method":
            return ["--method", "plian"]
        case "ratio":
            return ["--noise-ratio", "1.5"]
    return []


REFUSALS = {
    "noise of the wrong length": ("7", "80", "16"),
    "truncated": ("truncated",),
    "pickled": ("pickled",),
    "missing split": ("train", "dev, test"),
    "captions of the wrong length": ("2 captions", "16 image rows"),
    "NaN": ("row 3", "not finite"),
    "NaN in test": ("row 0", "not finite"),
    "half a dev split": ("dev", "dev_caps.txt"),
    "one image": ("5 training pairs", "1 different left items"),
    "unknown recipe": ("nowhere/plain", "shapes/plain"),
    "wrong device": ("cuda:77",),
    "wrong method": ("plian", '"plain"'),
    "ratio": ("--noise-ratio", "1.5"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_mistakes_are_refused_in_a_sentence_before_any_work(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = spoil(folder := tiny_folder(tmp_path / "tiny"), what)
    out = tmp_path / "run"
    base = [flag for flag in TINY if what != "wrong device" or flag not in ("--device", "cpu")]
    try:
        code = main(["train", "--data", str(folder), "--out", str(out), *base, *flags])
    except SystemExit as stop:  # out of range by the parser
        code = int(str(stop.code))
    captured = capsys.readouterr()
    assert code == 2
    assert not out.exists()
    assert "Traceback" not in captured.err
    text = " ".join((captured.err + captured.out).split())
    assert all(part in text for part in REFUSALS[what]), text


def test_a_run_with_other_settings_is_refused_with_the_difference(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    flags = ["train", "--data", str(data), "--out", str(run), "--noise-ratio", "0.4", *TINY, "--lr", "0.5"]
    assert main(flags) == 2
    assert "lr: 0.001 -> 0.5" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_refused_setting_does_not_spoil_the_folder(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["train", "--data", str(data), "--out", str(tmp_path / "run"), *TINY, "--model"]
    assert main([*flags, "two-tower"]) == 2
    assert "--model vse" in capsys.readouterr().err
    assert main([*flags, "vse"]) == 0


def test_without_test_pairs_it_says_what_it_tested_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    for part in ("ims.npy", "caps.txt", "ids.txt"):
        (folder / f"test_{part}").unlink()
    assert main(["train", "--data", str(folder), "--out", str(tmp_path / "run"), *TINY]) == 0
    assert "tested on tiny dev" in capsys.readouterr().out


def test_places_that_cannot_be_written(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", str(data), "--out", str(data / "train_ims.npy" / "run"), *TINY]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_called_shapes_is_not_the_data_set_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tiny_folder(tmp_path / "tiny")
    monkeypatch.setattr("mispair.pairs.shapes.dataset.cached", lambda: folder)
    assert main(["train", "--out", "shapes", *TINY]) == 0
    assert main(["train", "--out", "shapes", *TINY]) == 0  # now that the run is a folder of that name
    assert "rSum" in capsys.readouterr().out


def test_a_foreign_folder_is_not_touched(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    assert main(["train", "--data", str(data), "--out", str(tmp_path), *TINY]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_wrong_commands_and_queries(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert '"mispair train"' in capsys.readouterr().err
    assert main(["search", str(run), "--query", "xylophone zebra"]) == 2
    assert "knows no word" in capsys.readouterr().err
    assert main(["search", str(run)]) == 2
    assert main(["search", str(run), "--image", ""]) == 2
    assert main(["search", str(run), "--query", "a", "--top", "0"]) == 2
    assert main(["search", str(run), "--query", "a [/b] [c]"]) == 0
    assert "a [/b] [c]" in capsys.readouterr().out
    assert main(["search", str(run), "--image", "nobody"]) == 2
    assert main(["eval", str(tmp_path)]) == 2
    assert main(["eval", str(run), "--split", "testall"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert main(["audit", str(tmp_path), "--for", "argilla", "--for=fiftyone"]) == 2
    assert "--for is given 2 times; give all its values after one: --for A B." in capsys.readouterr().err


# ---------------------------------------------------------------------- being killed


def start(data: Path, out: Path, *flags: str) -> BaseProcess:
    return start_command("train", "--data", str(data), "--out", str(out), *TINY, *flags, errors=out.with_name("errors"))


def steps_done(out: Path) -> int:
    newest = checkpoint.find(out / "checkpoints")
    return int(newest[0].name.split("-")[1]) if newest else 0


def wait_for(process: BaseProcess, out: Path, step: int) -> None:
    while steps_done(out) < step and process.is_alive():
        time.sleep(0.002)


@pytest.mark.posix
def test_sigkill_at_two_random_points_changes_nothing(data: Path, tmp_path: Path) -> None:
    flags = ("--checkpoint-seconds", "0", "--epochs", "6", "--noise-ratio", "0.2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    unbroken = start(data, whole, *flags)
    unbroken.join()
    assert unbroken.exitcode == 0
    total, killed = steps_done(whole), 0
    for step in sorted(random.Random(0).sample(range(1, total - 4), 2)):
        process = start(data, broken, *flags)
        wait_for(process, broken, step)
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    assert killed == 2
    last = start(data, broken, *flags)
    last.join()
    assert last.exitcode == 0
    assert weights(broken) == weights(whole)
    assert (broken / "best.safetensors").read_bytes() == (whole / "best.safetensors").read_bytes()


@pytest.mark.posix
def test_sigterm_saves_exits_143_and_says_how_to_go_on(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(data, out, "--epochs", "2000", "--checkpoint-seconds", "1000")
    log = out / "metrics.jsonl"
    while process.is_alive() and not (log.exists() and log.stat().st_size):
        time.sleep(0.01)
    process.terminate()
    process.join(60)
    errors = (tmp_path / "errors").read_text()
    assert process.exitcode == 143, errors
    assert "mispair train --recipe" in errors
    assert steps_done(out) > 0


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all(len(line.split()) > 3 and line.endswith(".") for line in lines)
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {name: about["networks"] for name, about in listed.items()} == {n: k.networks for n, k in METHODS.items()}


def test_completion_names_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("autoload -U +X bashcompinit")
    assert '"data") words="check noise make" ;;' in script
    train = next(line for line in script.splitlines() if line.strip().startswith('"train")'))
    assert {"--grid", "--embed-size", "--noise-ratio", "--images"} <= set(train.replace('"', " ").split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_leaves_values_to_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        ask = f'{script}\nCOMP_WORDS=(mispair "$@"); COMP_CWORD=$#; _mispair; echo "${{COMPREPLY[@]}}"'
        ended = subprocess.run(["bash", "-c", ask, "bash", *words], capture_output=True, text=True, check=True)
        return ended.stdout.split()

    assert completed("tr") == ["train"]
    assert completed("data", "m") == ["make"]
    assert completed("data", "make", "--tr") == ["--train"]
    assert "--method" in completed("train", "")
    assert completed("train", "--data", "") == []
    assert completed("train", "--data", "x", "--me") == ["--meta-lr", "--meta-share", "--method"]


def test_the_list_of_commands_stands_in_two_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) == len(COMMANDS)
    starts = {len(line) - len(line[2:].partition("  ")[2].lstrip()) for line in lines}
    assert len(starts) == 1


def test_an_error_about_a_hostile_name_is_shown_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "a\x1b[2Jb\u202e"]) == 2
    assert "mispair: a\ufffd[2Jb\ufffd: no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (MemoryError(), "memory."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "memory."),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "memory on the GPU."),
    ],
)
def test_too_little_memory_is_a_sentence(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setitem(COMMANDS, "methods", fail)
    assert main(["methods"]) == 2
    assert f"mispair: there was not enough {where}" in capsys.readouterr().err


def test_another_error_of_torch_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setitem(COMMANDS, "methods", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["methods"])
