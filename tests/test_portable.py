"""Windows and macOS: no module needs what they lack, and text files have an encoding."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src/mispair"
MODULES = sorted(
    ".".join(("mispair", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
)
NEED_TRANSFORMERS = ["mispair.robust.hugging_face"]
ELSEWHERE = ["fcntl", "grp", "pwd", "resource", "termios"]  # modules of Unix; Triton is for Linux


@pytest.mark.slow
def test_every_module_imports_without_those_of_unix() -> None:
    program = f"""
import importlib, sys
import torch, rich.console, pydantic  # theirs is their own business
for name in {[*ELSEWHERE, "triton"]}:
    sys.modules[name] = None
for name in {[name for name in MODULES if name not in NEED_TRANSFORMERS]}:
    importlib.import_module(name)
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def without_encoding(code: str) -> list[int]:
    """Lines that open a text file in the encoding of the system, which on Windows is not UTF-8."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        modes = [text for text in texts if set(text) <= set("rwxabt+")]
        binary = any("b" in mode for mode in modes)
        path_open = name == "open" and isinstance(node.func, ast.Attribute) and not node.args and not node.keywords
        opens = (name == "open" and (isinstance(node.func, ast.Name) or bool(modes))) or name == "fdopen" or path_open
        if name in ("read_text", "write_text") or (opens and not binary and not _is_library(node.func)):
            found.append(node.lineno)
    return found


def _is_library(function: ast.expr) -> bool:
    """`os.open`, `Image.open`, `tarfile.open` and the like are no text files."""
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) in ("os", "Image", "tarfile", "zipfile")


def test_text_files_have_an_encoding() -> None:
    assert without_encoding("p.open()\np.open('rb')\np.read_text()\nopen(p, 'w')\nos.open(p, 0)") == [1, 3, 4]
    found = {
        path.relative_to(SOURCE).as_posix(): lines
        for path in SOURCE.rglob("*.py")
        if (lines := without_encoding(path.read_text(encoding="utf-8")))
    }
    assert not found
