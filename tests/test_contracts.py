"""The contracts of pyproject.toml fail on a forbidden import, and only `cli` prints."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/mispair"


def lint(source: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONUTF8": "1"}
    return subprocess.run(command, env=environment, cwd=source, capture_output=True, text=True, encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE, tmp_path / "mispair", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("pairs/pairs.py", "from mispair.models import base", "Packages are layers"),
        ("models/base.py", "from mispair.methods import plain", "Packages are layers"),
        ("auditing/audit.py", "def late():\n    from mispair.training import fit", "Packages are layers"),
        ("new_package.py", "", "Packages are layers"),
        ("methods/plain.py", "from mispair.support import files", "Methods touch no files"),
        ("methods/plain.py", "from pathlib import Path", "Methods touch no files"),
        ("auditing/audit.py", "from mispair.retrieval import matcher", "The audit sees trained models through"),
        ("training/trainer.py", "from mispair.auditing import audit", "Training calls the audit from"),
        ("functional/metrics.py", "from mispair.functional import losses", "No package has modules that import"),
        ("bench/suite/suite.py", "from mispair.bench.report import tables", "bench: report reads"),
    ],
)  # fmt: skip
def test_a_forbidden_import_breaks_its_contract(copy: Path, module: str, line: str, contract: str) -> None:
    if "losses" in line:  # a circle needs two arrows
        with (copy / "mispair/functional/losses.py").open("a", encoding="utf-8") as file:
            file.write("\nfrom mispair.functional import metrics\n")
    with (copy / "mispair" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    (broken,) = [one for one in result.stdout.splitlines() if contract in one and ("BROKEN" in one or "KEPT" in one)]
    assert "BROKEN" in broken


def layers() -> list[list[str]]:
    """The packages from the highest to the lowest; those of one layer may not import each other."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return [layer.split(" | ") for layer in contracts[0]["layers"]]


def test_no_package_may_import_one_above_it_or_beside_it(copy: Path) -> None:
    """One import from each package of every other that it may not import; each must be named."""
    forbidden = []
    for place, layer in enumerate(layers()):
        for package in layer:
            others = [name for above in layers()[:place] for name in above] + [
                name for name in layer if name != package
            ]
            folder = copy / "mispair" / package
            lines = "".join(f"import mispair.{name}\n" for name in others)
            if folder.is_dir():
                (folder / "forbidden.py").write_text(lines, encoding="utf-8")
            else:
                with folder.with_suffix(".py").open("a", encoding="utf-8") as file:
                    file.write(f"\n{lines}")
            forbidden += [(package, name) for name in others]
    printed = lint(copy).stdout
    named = set(re.findall(r"mispair\.(\w+) is not allowed to import mispair\.(\w+):", printed))
    assert len(forbidden) > 100
    assert named == set(forbidden)


def test_the_contracts_hold(copy: Path) -> None:
    result = lint(copy)
    assert result.returncode == 0, result.stdout + result.stderr


def prints(code: str) -> list[int]:
    """Lines that print or write to the terminal themselves instead of using a console that they were given."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            quiet = any(keyword.arg == "quiet" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
            if node.func.id == "print" or (node.func.id == "Console" and not quiet):
                lines.append(node.lineno)
        if isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr") and ast.unparse(node.value) == "sys":
            lines.append(node.lineno)
    return lines


def test_only_cli_prints() -> None:
    assert prints("import sys\nprint(1)\nsys.stderr.write('')\nConsole()\nConsole(quiet=True).print(2)") == [2, 4, 3]
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "cli" not in path.relative_to(SOURCE).parts and prints(path.read_text(encoding="utf-8"))
    }
    assert not found
