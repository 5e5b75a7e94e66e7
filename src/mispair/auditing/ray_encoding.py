"""Encode images and captions block by block with Ray: a worker reads a block and writes its vectors as a shard."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console

from mispair.auditing.blocks import Block, opened
from mispair.auditing.inputs import AuditInput
from mispair.auditing.ray_cluster import Batch, each
from mispair.encoders.encode import OK, Encoders, Loaded, Outcome, encode, shard_files, write_shard
from mispair.errors import DamagedError, MispairError, NotFoundError, ShapeError, TooFewError
from mispair.pairs.edits import Edits
from mispair.pairs.origin import MARK
from mispair.pairs.remote import Store
from mispair.pairs.row_ids import RowIds, Texts, as_texts
from mispair.pairs.source import Source
from mispair.support.progress import progress


def encode_blocks(
    ray: Any,
    data: AuditInput,
    blocks: Sequence[Block],
    place: str,
    encoders: Encoders,
    *,
    views: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> Outcome:
    """Encode images and captions block by block with Ray; write a shard a block to a folder or URL.

    Blocks with a shard are not encoded again. The mark `encode.json` must be there. For `views` see `write_shard`;
    there are as many `workers` as GPUs by default.
    """
    there = Store(place).files()
    done = frozenset(number for number in range(len(blocks)) if shard_files(number)[-1] in there)
    gpus = 0 if encoders.device == "cpu" else int(ray.cluster_resources().get("GPU", 0))
    call = _Encoding(data, tuple(blocks), place, encoders, views, done)
    found: dict[int, Outcome] = {}
    with progress(console, len(blocks), "encoding blocks") as show:
        for batch in each(ray, call, range(len(blocks)), gpus and (workers or gpus)):
            for number, outcome in zip(batch["number"].tolist(), map(pickle.loads, batch["outcome"]), strict=True):
                if isinstance(outcome, MispairError):
                    raise outcome
                found[number] = outcome
                show.step(1)
    return reduce(add, (found[number] for number in sorted(found)))


@dataclass(frozen=True)
class _Encoding:
    """What a worker does: encode a block, unless it is done; return its outcome, or the error of the user."""

    data: AuditInput
    blocks: tuple[Block, ...]
    place: str
    encoders: Encoders
    views: bool
    done: frozenset[int]

    def __call__(self, batch: Batch) -> Batch:
        number = int(batch["number"][0])
        found: Outcome | MispairError
        try:
            found = self.outcome(number)
        except MispairError as error:
            found = error
        return {"number": np.array([number]), "outcome": np.array([pickle.dumps(found)], dtype=object)}

    def outcome(self, number: int) -> Outcome:
        """Write the shard of a block, the table last; an unreadable block becomes one row, with a status."""
        store, block = Store(self.place), self.blocks[number]
        *arrays, table = shard_files(number)
        if number in self.done:
            rows = store.table(table, ["id", "status"])
            problems = {row: status for row, status in enumerate(rows["status"].to_pylist()) if status != OK}
            return Outcome.of(problems, len(rows), Source(names=RowIds(as_texts(rows["id"].to_pylist()))))
        self.data.check()
        _check_shared(store)
        with ExitStack() as stack:
            folder, problem = Path(stack.enter_context(TemporaryDirectory(prefix="mispair-"))), ""
            try:
                here = stack.enter_context(opened(self.data, block))
                pairs = here.source
                if not block.files and not block.table:
                    every = np.arange(len(pairs))
                    pairs = pairs.edited(Edits.keeping((every >= here.start) & (every < here.stop)))
            except (DamagedError, ShapeError, TooFewError) as error:
                nothing, problem = Texts.of([""]), str(error)
                pairs = Source(names=RowIds(as_texts([block.name])), captions=nothing, image_names=nothing)
            encoded = encode(pairs, _loaded(self.encoders), folder)
            if problem:
                encoded = replace(encoded, problems={0: problem})
            write_shard(folder, number, pairs, encoded, np.arange(len(pairs)), views=self.views)
            for name in (*arrays, table):
                store.put(folder / name, name)
            return Outcome.of(encoded.problems, 0, pairs)


def _check_shared(store: Store) -> None:
    try:
        store.open(MARK).close()
    except NotFoundError:
        advice = "Give `out` on a disk that all machines share, or in a store."
        raise NotFoundError("a worker does not find this folder", where=store.url, advice=advice) from None


@lru_cache(maxsize=1)
def _loaded(encoders: Encoders) -> Loaded:
    """Load encoders once a process."""
    return encoders.views()
