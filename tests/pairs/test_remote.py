"""Files at URLs, from a server that makes mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty_server import FAULTS, Server, serve
from mispair.errors import ChangedError, DataError, InvalidValueError, MissingPackageError, NotFoundError
from mispair.pairs import remote
from mispair.pairs.remote import fetch, url_of
from refusals import refused

CONTENT = np.random.default_rng(0).bytes(1_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "RANGE", 300)
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    with serve(CONTENT) as running:
        yield running


@given(faults=st.lists(st.sampled_from(FAULTS[:-1]), max_size=5))
@settings(max_examples=15)
def test_faults_change_no_byte(server: Server, faults: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    server.faults = list(faults)
    path = fetch(server.url, tmp_path_factory.mktemp("cache"))
    assert path.read_bytes() == CONTENT
    assert path.name == "left.npy"


def test_time_outs_are_tried_again(server: Server, tmp_path: Path) -> None:
    server.faults = ["", "slow"]
    assert fetch(server.url, tmp_path).read_bytes() == CONTENT


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    path = fetch(server.url, tmp_path)
    server.served.clear()
    assert fetch(f"{server.url}?signature=2", tmp_path) == path
    assert server.served == []
    server.content, server.version = CONTENT[::-1], '"2"'
    other = fetch(server.url, tmp_path)
    assert other != path
    assert other.read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_what_never_comes_is_given_up_and_goes_on_later(server: Server, tmp_path: Path, fault: str) -> None:
    server.faults = ["", "", "", *[fault] * 99]  # the state and two ranges come
    with refused(DataError, server.url, f"{remote.ATTEMPTS} times"):
        fetch(server.url, tmp_path)
    assert not list(tmp_path.rglob("*.npy"))
    server.faults = []
    server.served.clear()
    assert fetch(server.url, tmp_path).read_bytes() == CONTENT
    assert server.served == [(600, 900), (900, 1000)]


def test_a_failed_attempt_is_noted_once_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    with refused(DataError, "http://127.0.0.1:9/a.npy", "Cannot connect to host 127.0.0.1:9"):
        fetch("http://127.0.0.1:9/a.npy", tmp_path)
    noted = [str(one.message) for one in recwarn if "127.0.0.1" in str(one.message)]
    assert len(noted) == 1
    assert "Cannot connect to host 127.0.0.1:9" in noted[0]


def test_what_cannot_be_fetched_is_said_at_once(server: Server, tmp_path: Path) -> None:
    for answer, error in (("404", NotFoundError), ("403", DataError)):
        server.faults = [answer] * 2
        with refused(error, server.url):
            fetch(server.url, tmp_path)
        assert not server.faults
        assert server.requests == 2
        server.requests = 0
    server.ranges = False
    with refused(DataError, server.url):
        fetch(server.url, tmp_path)


def test_a_file_that_changes_meanwhile_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = remote.Store._range

    def changing(self: remote.Store, name: str, start: int, stop: int, size: int) -> bytes:
        server.version = f'"{start}"'
        return read(self, name, start, stop, size)

    monkeypatch.setattr(remote.Store, "_range", changing)
    with refused(ChangedError, server.url):
        fetch(server.url, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]


def test_object_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setattr(remote, "RANGE", 300)
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/left.npy", CONTENT)
    read, short = type(store).cat_file, iter([True, False, True])
    monkeypatch.setattr(type(store), "cat_file", lambda *a, **k: read(*a, **k)[: 7 if next(short, False) else None])
    assert fetch("memory://bucket/left.npy", tmp_path).read_bytes() == CONTENT
    with refused(NotFoundError):
        fetch("memory://bucket/other.npy", tmp_path)


def test_folders_of_object_stores(tmp_path: Path) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    files = {"a/1.npy": CONTENT, "a/b/2.npy": CONTENT[:7], "3.txt": b""}
    for name, content in files.items():
        store.pipe(f"/folders/one/{name}", content)
    store.pipe("/folders/one-more/4.npy", CONTENT)

    def fetched() -> Path:
        return fetch("memory://folders/one", tmp_path)

    folder = fetched()
    assert folder.name == "one"
    assert {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")} == files
    assert fetched() == folder
    (folder / "a/1.npy").unlink()  # as if it had been stopped
    assert (fetched() / "a/1.npy").read_bytes() == CONTENT
    store.pipe("/folders/one/a/5.npy", CONTENT)
    assert fetched() != folder
    with refused(NotFoundError):
        fetch("memory://folders/none", tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with refused(MissingPackageError, "s3://bucket/a.npy", "pip install -c constraints.txt '.[remote]' s3fs"):
        fetch("s3://bucket/a.npy", tmp_path)


@pytest.mark.parametrize("name", ["../out.npy", "a/../../out.npy", "a//b.npy", "a\\b.npy"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    store = pytest.importorskip("fsspec").filesystem("memory")
    store.pipe("/names/one/a.npy", CONTENT)
    info = {"type": "file", "size": 3}
    monkeypatch.setattr(type(store), "find", lambda *_, **__: {f"/names/one/{name}": info})
    with refused(InvalidValueError, "memory://names/one", repr(name)):
        fetch("memory://names/one", tmp_path)
    assert not list(tmp_path.rglob("*.npy"))


@pytest.mark.parametrize("path", ["left.npy", "/a/left.npy", "http/a", "s3", "c:/a"])
def test_paths_are_no_urls(path: str) -> None:
    assert url_of(Path(path)) is None
    assert url_of(Path("s3://bucket/a.npy")) == "s3://bucket/a.npy"
