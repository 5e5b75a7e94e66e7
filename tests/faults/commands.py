"""The commands that faults are injected into, each with small inputs of its own."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import numpy.typing as npt
import torch._dynamo  # noqa: F401 (what commands import when they run takes seconds, and is imported once)
from PIL import Image
from torch.distributed import TCPStore  # type: ignore[attr-defined]

import mispair.auditing.audit
import mispair.auditing.folder
import mispair.auditing.report.page
import mispair.bench.suite.runner
import mispair.reviewing.reviewed
import mispair.training.from_files
from audit_cases import make_case, write_clip
from mispair.cli.main import main
from mispair.encoders import encode
from mispair.errors import DataError
from mispair.pairs.shapes import dataset
from mispair.pairs.vocabulary import tokenize
from tiny import tiny_folder

tokenize("it's")  # loads what takes long to load
HAS_SERVER = all(importlib.util.find_spec(name) for name in ("httpx", "starlette", "uvicorn"))
if HAS_SERVER:
    import starlette.testclient
    import uvicorn  # noqa: F401

    import mispair.reviewing.server
HAS_RAY = importlib.util.find_spec("ray") is not None
if HAS_RAY:
    import ray
SMALL = ("--epochs", "1", "--warmup-epochs", "1", "--embed-size", "8", "--word-size", "6", "--batch-size", "16")
TRAINING = (*SMALL, "--checkpoint-seconds", "0", "--device", "cpu")


class _Colours:
    """The mean colour of an image."""

    name, width = "colours", 3
    pixels = 1024

    def prepare(self, image: Image.Image) -> npt.NDArray[np.float32]:
        colour: npt.NDArray[np.float32] = np.asarray(image, dtype=np.float32).mean(axis=(0, 1))
        return colour

    def encode(self, items: Sequence[Any], /) -> npt.NDArray[np.float32]:
        return np.stack(items)


class _Letters:
    """How often a caption has its first letters of the alphabet."""

    name, width = "letters", 4

    def encode(self, items: Sequence[str], /) -> npt.NDArray[np.float32]:
        return np.array([[text.count(letter) + 1 for letter in "abcd"] for text in items], dtype=np.float32)


@dataclass(frozen=True)
class Command:
    """A command line of mispair.

    Attributes:
        arguments: Its words; paths are relative to the folder it runs in.
        prepare: Fills that folder with its inputs, and may run other commands in it first.
        ranks: Processes that run it together, as torchrun starts them.
        ray: Whether workers of Ray measure for it; they meet faults too.
        after: Words of the same command after a fault.
    """

    arguments: tuple[str, ...]
    prepare: Callable[[Path], None]
    ranks: int = 1
    ray: bool = False
    after: tuple[str, ...] = ()

    def again(self) -> Command:
        """The same command after a fault."""
        return replace(self, arguments=(*self.arguments, *self.after))

    @property
    def at_once(self) -> bool:
        """Whether many processes of it may start at once: each with a Ray of its own is too much for one machine."""
        return not self.ray

    def __call__(self) -> int:
        with ExitStack() as patches:
            for module, name, value in (
                (encode, "image_encoder", lambda *_: _Colours()),
                (encode, "text_encoder", lambda *_: _Letters()),
                (encode, "SHARD", 8),
                (mispair.bench.suite.runner, "CONTEXT", multiprocessing.get_context("fork")),
                (mispair.bench.suite.runner, "POLL_SECONDS", 0.2),
            ):
                patches.enter_context(patch.object(module, name, value))
            if HAS_SERVER:
                patches.enter_context(patch("uvicorn.Server.run", _decide))
                # several such processes may run at once
                address = Mock(getsockname=lambda: ("127.0.0.1", 8700))
                patches.enter_context(patch("mispair.reviewing.page.bound", lambda *_: address))
            patches.enter_context(patch.dict(os.environ, {"MISPAIR_CACHE": "cache"}))
            if self.ray:
                _small_ray(patches)
            return main([*self.arguments]) if self.ranks == 1 else _on_ranks(self.ranks, self.arguments)


def _small_ray(patches: ExitStack) -> None:
    """Ray will have two workers on this machine."""
    workers = {
        "worker_process_setup_hook": "tests.faults.inject.join",
        "env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)},
    }
    patches.enter_context(patch.object(ray, "init", partial(ray.init, num_cpus=2, runtime_env=workers)))


def _on_ranks(size: int, arguments: tuple[str, ...]) -> int:
    """Does what torchrun does: when a process fails, the others are stopped."""
    pipes = [os.pipe() for _ in range(size)]
    ranks = {}
    for rank, (reader, _) in enumerate(pipes):
        child = os.fork()
        if child == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.read(reader, 9).decode(), **agent}
            os.environ.update({name: str(value) for name, value in (place | where).items()})
            code = main([*arguments])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        ranks[child] = rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, writer in pipes:
        os.write(writer, str(store.port).encode())
    failed = 0
    while ranks:
        child, status = os.wait()
        del ranks[child]
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    if failed < 0:
        signal.signal(-failed, signal.SIG_DFL) if failed != -signal.SIGKILL else None
        os.kill(os.getpid(), -failed)
    return failed


def _embeddings(folder: Path) -> None:
    case = make_case(60, 0.3)
    write_clip(folder / "in", case.left, case.right, {"id": [f"p{row}" for row in range(60)]}, cuts=(20, 40))


def _audited(folder: Path) -> None:
    _embeddings(folder)
    assert main(["audit", str(folder / "in"), "--out", str(folder / "audit"), "--device", "cpu"]) == 0
    (folder / "decisions.csv").write_text("id,verdict\np1,drop\np2,keep\np3,drop\n")


def _features(folder: Path) -> None:
    tiny_folder(folder / "data", 24)


def _decide(server: Any, _: object) -> None:
    """In place of the server: requests of a reviewer, in this process."""
    app, address = server.config.app, "http://127.0.0.1:8700"
    page = starlette.testclient.TestClient(app, address, raise_server_exceptions=False, headers={"Origin": address})
    for row in range(5):
        answer = page.post("/decide", data={"row": str(row), "verdict": "drop" if row % 2 else "keep"})
        if answer.status_code in (422, 503):  # what the page shows
            raise DataError(answer.text)
        assert answer.status_code == 200, answer.text


def _photos(folder: Path) -> None:
    (folder / "photos").mkdir()
    for number in range(20):
        Image.new("RGB", (6, 5), (12 * number, 250 - 9 * number, 7)).save(folder / "photos" / f"{number}.png")
    rows = (f"{number}.png,{'abcd'[number % 4] * number} caption" for number in range(20))
    (folder / "photos.csv").write_text("image,caption\n" + "\n".join(rows) + "\n")


def _suite(folder: Path) -> None:
    dataset.make(folder / "made", train=16, dev=6, test=6)
    settings = "embed_size = 8, word_size = 8, epochs = 1, warmup_epochs = 1, batch_size = 16, checkpoint_seconds = 0"
    (folder / "suite.toml").write_text(
        'title = "Small"\ndata = "made"\n[[part]]\nname = "noise"\nkind = "retrieval"\nnoise_ratio = [0.4]\n'
        f'[part.rows]\nplain = {{ recipe = "shapes/plain", {settings} }}\n'
        f'DECL = {{ recipe = "shapes/plain", method = "decl", {settings} }}\n'
    )


_REPAIR = ("train", "--data", "data", "--out", "run", "--method", "repair", "--model", "vse", *TRAINING)
COMMANDS = {
    "audit with a clean copy": Command(
        ("audit", "in", "--out", "out", "--clean", "clean", "--device", "cpu"), _embeddings
    ),
    "training, two networks": Command(_REPAIR, _features),
    "training, two processes": Command(_REPAIR, _features, ranks=2),
    "training, mend": Command(
        ("train", "--data", "data", "--out", "run", "--method", "mend", "--model", "vse", *TRAINING), _features
    ),
    "export": Command(("export", "audit", "--to", "mended", "--mend", "--device", "cpu"), _audited),
    "encoding": Command(("encode", "photos.csv", "--images", "photos", "--out", "vectors", "--device", "cpu"), _photos),
    "comparison": Command(  # a training that has failed is a result, unless it is asked for once more
        ("bench", "run", "suite.toml", "--out", "results", "--device", "cpu"), _suite, after=("--retry",)
    ),
    "import of decisions": Command(("review", "audit", "--import-decisions", "decisions.csv"), _audited),
    "noise file": Command(("data", "noise", "data", "--noise-ratio", "0.4", "--out", "noise.npy"), _features),
}
SKIPPED = {}  # why
if HAS_SERVER:
    COMMANDS["review page"] = Command(("review", "audit", "--no-open"), _audited)
else:
    SKIPPED["review page"] = "httpx, starlette or uvicorn is not installed (pip install -c constraints.txt '.[dev]')"
if HAS_RAY:
    _BY_RAY = ("audit", "in", "--out", "out", "--engine", "ray", "--workers", "2", "--device", "cpu")
    COMMANDS["audit by Ray"] = Command(_BY_RAY, _embeddings, ray=True)
else:
    SKIPPED["audit by Ray"] = "ray is not installed (pip install -c constraints.txt '.[ray]')"
