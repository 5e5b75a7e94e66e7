"""Encode images and captions block by block with Ray: a worker reads a block and writes its vectors as a shard."""

from __future__ import annotations

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

from mispair.auditing.blocks import UNREADABLE, Block, opened
from mispair.auditing.inputs import AuditInput
from mispair.auditing.ray_cluster import each
from mispair.encoders.encode import OK, Encoders, Loaded, Outcome, encode, shard_files, write_shard
from mispair.errors import NotFoundError
from mispair.pairs.edits import Edits
from mispair.pairs.origin import MARK
from mispair.pairs.remote import Store
from mispair.pairs.row_ids import RowIds, Texts, as_texts
from mispair.pairs.source import Source
from mispair.support.progress import RowProgress


@dataclass(frozen=True)
class Encoding:
    """The images and captions to encode, and where their vectors go."""

    data: AuditInput
    blocks: Sequence[Block]
    place: str  # folder or URL, for all machines, with the mark `encode.json`
    encoders: Encoders
    views: bool = False  # see `write_shard`


def encode_blocks(ray: Any, job: Encoding, workers: int | None = None, console: Console | None = None) -> Outcome:
    """Encode images and captions block by block with Ray; blocks with a shard are not encoded again.

    By default there are as many `workers` as cores, or four for each GPU.
    """
    done = Store(job.place).files()
    gpu = job.encoders.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    numbers, found = range(len(job.blocks)), list[Outcome]()
    with RowProgress(console, len(numbers), "encoding blocks") as show:
        for outcome in each(ray, encode_block, numbers, job, frozenset(done), workers=workers, gpu=gpu):
            found.append(outcome)
            show.step(1)
    return reduce(add, found)


def encode_block(job: Encoding, done: frozenset[str], number: int) -> Outcome:
    """Write the shard of a block, the table last; an unreadable block becomes one row, with a status."""
    store, block = Store(job.place), job.blocks[number]
    *arrays, table = shard_files(number)
    if table in done:
        rows = store.table(table, ["id", "status"])
        problems = {row: status for row, status in enumerate(rows["status"].to_pylist()) if status != OK}
        return Outcome.of(problems, len(rows), Source(names=RowIds(as_texts(rows["id"].to_pylist()))))
    job.data.check()
    try:
        store.open(MARK).close()
    except NotFoundError:
        advice = "Give `out` on a disk that all machines share, or in a store."
        raise NotFoundError("a worker does not find this folder", where=store.url, advice=advice) from None
    with ExitStack() as stack:
        folder, problem = Path(stack.enter_context(TemporaryDirectory(prefix="mispair-"))), ""
        try:
            here = stack.enter_context(opened(job.data, block))
            pairs = here.source
            if not block.files and not block.table:
                every = np.arange(len(pairs))
                pairs = pairs.edited(Edits.keeping((every >= here.start) & (every < here.stop)))
        except UNREADABLE as error:
            nothing, problem = Texts.of([""]), str(error)
            pairs = Source(names=RowIds(as_texts([block.name])), captions=nothing, image_names=nothing)
        encoded = encode(pairs, _loaded(job.encoders), folder)
        if problem:
            encoded = replace(encoded, problems={0: problem})
        write_shard(folder, number, pairs, encoded, np.arange(len(pairs)), views=job.views)
        for name in (*arrays, table):
            store.put(folder / name, name)
        return Outcome.of(encoded.problems, 0, pairs)


@lru_cache(maxsize=1)
def _loaded(encoders: Encoders) -> Loaded:
    """Load encoders once a process."""
    return encoders.views()
