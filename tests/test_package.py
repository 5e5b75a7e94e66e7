"""The wheel: built from the tree, installed into an empty environment, it must run on its own."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_runs_the_demo(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT], check=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for file in ("recipes/shapes/plain.toml", "templates/demo.html", "py.typed"):
        assert f"mispair/{file}" in names
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel], check=True)
    subprocess.run([tmp_path / "empty/bin/mispair", "demo", "--out", tmp_path / "demo"], check=True, cwd=tmp_path)
    assert (tmp_path / "demo/index.html").stat().st_size > 100_000
