"""The examples for clusters: their syntax, and the commands in them."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from mispair.cli.main import _options

FOLDER = Path(__file__).parents[2] / "examples/cluster"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def commands(text: str) -> list[tuple[str, set[str]]]:
    """Commands of mispair in a text, and their flags."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"mispair (train|audit)\b([^\n]*)", joined)
    return [(name, set(re.findall(r"(?<=[\s\"])--[a-z-]+", rest))) for name, rest in found]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    subprocess.run([bash, "-n", str(script)], check=True)


@pytest.mark.parametrize("file", [*SCRIPTS, FOLDER / "kubernetes.yaml"], ids=lambda path: path.name)
def test_commands_have_flags_that_exist(file: Path) -> None:
    found = commands(file.read_text())
    assert found
    for name, flags in found:
        assert flags <= set(_options(name)), (name, flags)


def test_jobs_of_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert job["kind"] == "RayJob"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["workerGroupSpecs"][0]["template"] == cluster["headGroupSpec"]["template"]


def test_the_image_is_made_of_the_wheel() -> None:
    lines = [line.split(maxsplit=1) for line in (FOLDER / "Dockerfile").read_text().splitlines() if line[:1].isalpha()]
    assert {word for word, _ in lines} == {"FROM", "COPY", "RUN", "ENTRYPOINT", "CMD"}
    assert ["COPY", "dist/mispair-*.whl /tmp/"] in lines


def test_the_arithmetic_reproduces_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(FOLDER / "arithmetic.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    pages = [(FOLDER.parents[1] / "docs" / name).read_text() for name in ("scaling.md", "performance.md")]
    assert all(line in pages[0] for line in lines)
    for device, row, whole in (
        ("two CPU cores", "| 1,000,000 | two CPU cores | 73.4 s |", 73.4),
        ("one H200", "| 1,000,000 (two runs) | one H200, eight processor threads | 9.5, 9.9 s |", 9.5),
    ):
        assert row in pages[1]
        assert script["hours"](1_000_000, script["MEASURED"][device]) * 3600 == pytest.approx(whole, rel=0.01)
