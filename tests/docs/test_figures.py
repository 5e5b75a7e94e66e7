"""The script that draws the figure of docs/results.md."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[2] / "docs/figures/audit.py"


@pytest.mark.parametrize("arguments", [[], ["audit.json"], ["a", "b", "c", "d"]])
def test_without_its_arguments_it_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit, match=r"Usage: python docs/figures/audit\.py AUDIT\.json SCALE\.json OUT\.svg"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
