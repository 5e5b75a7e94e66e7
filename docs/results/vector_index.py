"""Approximate against exact search: python vector_index.py FOLDER [VECTORS]

Unit vectors of 64 numbers in 2,000 clusters; 200 queries near one of them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from mispair.pairs.pairs import FloatArray
from mispair.retrieval.vector_index import build_index, open_index

WIDTH, CLUSTERS, QUERIES, TOP = 64, 2000, 200, 10


def units(vectors: FloatArray) -> FloatArray:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


folder, count = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 1_000_000
rng = np.random.default_rng(0)
clusters = rng.standard_normal((CLUSTERS, WIDTH), dtype=np.float32)
vectors = units(clusters[rng.integers(CLUSTERS, size=count)] + rng.standard_normal((count, WIDTH), dtype=np.float32))
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
print(
    f"exact {1e3 * seconds[True]:.2f} ms a query, approximate {1e3 * seconds[False]:.2f} ms, recall@{TOP} {recall:.4f}"
)
