"""Compare approximate with exact search: `make bench-vector-index ARGS=FOLDER`.

Unit vectors of 64 numbers in 2,000 clusters; 200 queries near one of them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from tyro.conf import Positional

from common import run
from mispair.retrieval.vector_index import build_index, open_index
from mispair.support.arrays import FloatArray

WIDTH, CLUSTERS, QUERIES, TOP = 64, 2000, 200, 10


def units(vectors: FloatArray) -> FloatArray:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def main(folder: Positional[Path], count: Positional[int] = 1_000_000) -> None:
    """Print the time of building, and time and recall of searching.

    Args:
        folder: Folder of the index.
        count: Vectors in it.
    """
    rng = np.random.default_rng(0)
    clusters = rng.standard_normal((CLUSTERS, WIDTH), dtype=np.float32)
    vectors = units(
        clusters[rng.integers(CLUSTERS, size=count)] + rng.standard_normal((count, WIDTH), dtype=np.float32)
    )
    noise = 0.02 * rng.standard_normal((QUERIES, WIDTH), dtype=np.float32)
    queries = units(vectors[rng.integers(count, size=QUERIES)] + noise)
    start = time.process_time()
    build_index(vectors, np.asarray, folder, approximate=True)
    print(f"built in {time.process_time() - start:.0f} CPU seconds", flush=True)
    index = open_index(folder, np.asarray)
    found, seconds = {}, {}
    for exact in (True, False):
        start = time.perf_counter()
        found[exact] = [set(index.nearest(query, TOP, exact=exact)[0].tolist()) for query in queries]
        seconds[exact] = (time.perf_counter() - start) / QUERIES
    recall = np.mean([len(one & other) / TOP for one, other in zip(found[True], found[False], strict=True)])
    slow, fast = (f"{1e3 * seconds[kind]:.2f} ms" for kind in (True, False))
    print(f"exact {slow} a query, approximate {fast}, recall@{TOP} {recall:.4f}")


if __name__ == "__main__":
    sys.exit(run(main))
