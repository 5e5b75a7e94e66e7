"""Runs the commands and the Python code of README and of the task pages, in the order in which a reader meets them.

A comment before a block changes how it is run here. It is invisible on the page:

    <!-- test: skip: REASON -->               checked, but not run
    <!-- test: replace "A" with "B" -->       for smaller networks and fewer epochs
    <!-- test: before: CODE -->               Python that runs first and makes what the reader has
    <!-- test: after: CODE -->                Python that runs after it and checks what it made
    <!-- test: file NAME -->                  the block is written to this file
    <!-- test: install -->                    pip installs into the folder of the test
    <!-- test: needs PACKAGE -->              not run where the package is not installed
    <!-- test: slow -->                       run with -m slow; so are the blocks after it

What is skipped is still checked: its commands and flags must exist.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import bench_coverage
import bench_encoders
import bench_views
import common
from audit_cases import make_case, write_clip
from forked import ThreadsForProcesses, fork_server
from mispair.bench.suite import runner
from mispair.cli.main import COMMANDS, main
from mispair.pairs.shapes.dataset import make

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = sorted((ROOT / "benchmarks").rglob("*.md"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("bench_*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"<!-- test: (.*?) -->\s*", re.DOTALL)
INLINE = re.compile(r"`((?:mispair |make bench-)[^`]+)`", re.DOTALL)
VERBS = ("skip", "replace", "before", "after", "file", "install", "needs", "slow")


@dataclass(frozen=True)
class Block:
    """A fenced block with the notes that stand before it."""

    language: str
    code: str
    line: int
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        there = importlib.util.find_spec(self.notes["needs"]) is not None if "needs" in self.notes else True
        return self.language in ("bash", "python") and "skip" not in self.notes and there

    def text(self) -> str:
        """The code as it is run here."""
        code = self.code
        for old, new in re.findall(r'"([^"]*)" with "([^"]*)"', self.notes.get("replace", "")):
            assert old in code, f"line {self.line}: {old!r} is not in the block"
            code = code.replace(old, new)
        return code


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text, end, found = page.read_text(encoding="utf-8"), 0, []
    for fence in FENCE.finditer(text):
        notes: dict[str, str] = {}
        for note in NOTE.finditer(text, end, fence.start()):
            verb, _, rest = note[1].partition(" ")
            assert verb.rstrip(":") in VERBS, f"{page.name}: unknown note {note[1]!r}"
            notes[verb.rstrip(":")] = rest
        found.append(Block(fence[1], fence[2], text.count("\n", 0, fence.start()) + 1, notes))
        end = fence.end()
    return found


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block, one a line."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture(scope="session")
def reader_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages call your data: small, but of the right kind."""
    folder = tmp_path_factory.mktemp("reader")
    data = make(folder / "my_data", train=40, dev=20, test=20)
    ids = (data / "test_ids.txt").read_text().splitlines()
    names = {name: "1000092795" if name == ids[0] else name for name in ids}
    (data / "test_ids.txt").write_text("".join(f"{names[name]}\n" for name in ids))
    case = make_case(120, 0.3)
    np.save(folder / "images.npy", case.left)
    np.save(folder / "texts.npy", case.right)
    photos = sorted((data / "images").glob("*train*.png"))
    (folder / "photos").mkdir()
    for photo in photos:
        shutil.copy(photo, folder / "photos")
    rows = [f"pair-{row},{photos[row % len(photos)].name},caption {row}" for row in range(len(case))]
    (folder / "ids.csv").write_text("\n".join(["id,image_path,caption", *rows]) + "\n")
    (folder / "checked.csv").write_text("id,right\npair-0,yes\npair-1,no\n")
    write_clip(folder / "my_embeddings", case.left, case.right)
    return folder


@pytest.fixture
def workplace(reader_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the reader's files, in which the commands run."""
    folder = shutil.copytree(reader_files, tmp_path / "work")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    if sys.platform != "win32":
        monkeypatch.setattr(runner, "CONTEXT", fork_server())
    for benchmark in (bench_coverage, bench_encoders, bench_views):
        monkeypatch.setattr(benchmark, "ProcessPoolExecutor", ThreadsForProcesses)
    return folder


def run(block: Block, names: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    where = f"line {block.line}"
    if "file" in block.notes:
        path = Path(block.notes["file"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text(), encoding="utf-8")
    if not block.runs:
        return
    exec(block.notes.get("before", ""), names)
    if block.language == "python":
        exec(compile(block.text(), where, "exec"), names)
    for words in commands(block.text()) if block.language == "bash" else []:
        if words[0] == "mispair":
            code = main(words[1:])
            error = capsys.readouterr().err
            assert code == 0, f"{where}: {shlex.join(words)} exits with {code}: {error}"
        elif benchmark := benchmark_of(words):
            assert common.run(*benchmark) == 0, f"{where}: {shlex.join(words)}"
        elif words[:2] == ["pip", "install"] and "install" in block.notes:
            install(words[2:])
        else:
            subprocess.run([sys.executable if words[0] == "python" else words[0], *words[1:]], check=True)
    exec(block.notes.get("after", ""), names)


def benchmark_of(words: list[str]) -> tuple[Callable[..., None], list[str]] | None:
    """The script of `make bench-NAME ARGS="..."` and its arguments."""
    if words[0] != "make" or not words[1].startswith("bench-"):
        return None
    main = importlib.import_module(words[1].replace("-", "_")).main
    return main, shlex.split(" ".join(words[2:]).removeprefix("ARGS="))


def install(arguments: list[str]) -> None:
    """Installs a package for this test alone, from what is on this machine."""
    offline = ["--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", "installed", *arguments]
    subprocess.run(command, check=True)
    sys.path.insert(0, str(Path("installed").resolve()))


def pages(*, slow: bool) -> list[Path]:
    """Pages with something to run."""
    return [page for page in PAGES if any(block.runs and ("slow" in block.notes) == slow for block in blocks(page))]


@pytest.mark.parametrize("page", pages(slow=False), ids=lambda page: page.stem)
@pytest.mark.usefixtures("workplace")
def test_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"np": np, "Path": Path}
    for block in blocks(page):
        if "slow" in block.notes:
            break
        run(block, names, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(slow=True), ids=lambda page: page.stem)
@pytest.mark.usefixtures("workplace")
def test_a_page_runs_to_its_end(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"np": np, "Path": Path}
    for block in blocks(page):
        run(block, names, capsys)


@cache
def flags(command: str) -> frozenset[str]:
    """The flags that a command has, by its help."""
    benchmark = benchmark_of(command.split())
    with redirect_stdout(StringIO()) as shown, pytest.raises(SystemExit, match="0"):
        common.run(benchmark[0], ["--help"]) if benchmark else main([*command.split(), "--help"])
    return frozenset(re.findall(r"--[a-z][a-z0-9-]*", shown.getvalue()))


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=lambda page: page.stem)
def test_every_command_and_flag_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    defined = re.findall(r"^    (\w+): [A-Z]\w+ = ", "".join(block.code for block in blocks(page)), re.MULTILINE)
    own = {f"--{name.replace('_', '-')}" for name in defined}  # settings of a method that the page adds
    written = [words for block in blocks(page) if block.language == "bash" for words in commands(block.code)]
    written += [shlex.split(" ".join(code.split())) for code in INLINE.findall(FENCE.sub("", text))]
    for words in written:
        if benchmark := benchmark_of(words):
            command, given = " ".join(words[:2]), benchmark[1]
        elif words[0] != "mispair" or words[1] in ("COMMAND", "--help", "--version"):
            continue
        else:
            command, given = " ".join(words[1:3] if words[1] in ("data", "bench") else words[1:2]), words
            assert command in COMMANDS, f"{page.name}: {shlex.join(words)}"
        found = {word.partition("=")[0] for word in given if word.startswith("--") and word != "--"}
        unknown = found - flags(command) - own - {"--help"}
        assert not unknown, f"{page.name}: {command} has no {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_every_benchmark_is_listed(script: Path) -> None:
    target = f"make {script.stem.replace('_', '-')}"
    assert f"`{target}" in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert "--help" in flags(target)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
