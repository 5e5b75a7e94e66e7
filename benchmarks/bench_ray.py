"""Measure audits on Ray: two simulated machines, and an S3 store that makes mistakes: `make bench-ray`.

The store is moto's server. Each machine and the driver reach it by a proxy of their own, which counts what they read.
The driver is a process of its own, so its peak memory is known. Needs ray, moto[server], boto3 and s3fs.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from bench_scale import generate
from common import at_least, run
from faulty_server import Handler, Proxy, running
from layouts import write_tar
from mispair import Auditor
from mispair.auditing.audit import Settings, audit_source
from mispair.cli.output import print_json
from mispair.errors import DataError
from mispair.pairs.layouts.arrays import open_arrays
from mispair.support.arrays import FloatArray
from s3_store import BUCKET, S3Store, s3_store

BLOCK = 16_384  # pairs of vectors
TAR = 100  # photos
COPIES = 1_000  # left items that are copied to other blocks
SIZE = 224  # pixels of a side of a photo
COMPARED = 100_000  # scores that are compared with the auditor's


class CountingProxy(Proxy):
    """A proxy that counts the bytes of answers; every `every`-th request fails, but none waits."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.read = Counter[str]()  # by the first folder of the path

    def fault(self) -> str:
        found = super().fault()
        return "busy" if found == "slow" else found

    def answer(self, request: Handler) -> Any:
        found = super().answer(request)
        if request.command == "GET":
            _, _, *folder = request.path.partition("?")[0].split("/")  # of the bucket; a list has none
            self.read[folder[0] if folder else "lists"] += len(found[2])
        return found


@dataclass
class Place:
    """A store, and a cluster of two machines with one core each."""

    store: S3Store
    address: str
    proxies: list[CountingProxy]  # of both machines, and of the driver

    def command(self, *given: str) -> dict[str, Any]:
        """Run a command of mispair on the cluster; say its time, its peak memory and what each machine has read."""
        before, failed = [proxy.read.copy() for proxy in self.proxies], sum(proxy.injected for proxy in self.proxies)
        environment = os.environ | {"AWS_ENDPOINT_URL": self.proxies[2].url}
        where = ["--engine", "ray", "--address", self.address, "--device", "cpu"]
        since = time.monotonic()
        line = [sys.executable, "-m", "mispair", *given, *where, "--json"]
        with Popen(line, env=environment, stdout=PIPE) as process:
            assert process.stdout is not None
            process.stdout.read()
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 3):
            raise DataError(f"mispair {given[0]} ended with the code {process.returncode}")
        return {
            "seconds": round(time.monotonic() - since, 1),
            "driver_peak_mb": round(used.ru_maxrss / 1e3),
            "read_mb": [
                {name: round(count / 1e6, 1) for name, count in (proxy.read - old).items()}
                for proxy, old in zip(self.proxies, before, strict=True)
            ],
            "failed_requests": sum(proxy.injected for proxy in self.proxies) - failed,
        }

    def fail(self, every: int) -> None:
        for proxy in self.proxies:
            proxy.every = every

    def table(self, name: str) -> pyarrow.Table:
        return pyarrow.parquet.read_table(io.BytesIO(self.store.read(name)))


@contextmanager
def two_machines() -> Iterator[Place]:
    from ray.cluster_utils import Cluster

    with ExitStack() as stack:
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        store = stack.enter_context(s3_store(patches))
        proxies = [stack.enter_context(running(CountingProxy(store.proxy.port))) for _ in range(3)]
        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 1 << 28}
        urls = [{"AWS_ENDPOINT_URL": proxy.url} for proxy in proxies]
        cluster = Cluster(initialize_head=True, head_node_args={**node, "env_vars": urls[0]})
        stack.callback(cluster.shutdown)
        cluster.add_node(**node, env_vars=urls[1])
        yield Place(store, cluster.address, proxies)


def vectors(place: Place, pairs: int, width: int, folder: Path, local: bool) -> dict[str, Any]:
    """Audit generated vectors in the store; compare some scores with the auditor's, and all with an audit here."""
    generate(folder, pairs, width, 0.2)
    left, right = (np.load(folder / f"{side}.npy", mmap_mode="r+") for side in ("left", "right"))
    rng = np.random.default_rng(0)
    copied, origin = np.split(rng.permutation(pairs)[: 2 * COPIES], 2)
    left[copied] = left[origin]
    for number, start in enumerate(range(0, pairs, BLOCK)):
        for stem, side in (("img_emb", left), ("text_emb", right)):
            file = io.BytesIO()
            np.save(file, side[start : start + BLOCK])
            place.store.put(f"{pairs}/{stem}/{stem}_{number}.npy", file.getvalue())
    found = place.command("audit", f"s3://{BUCKET}/{pairs}", "--out", f"s3://{BUCKET}/audit-{pairs}")
    table = place.table(f"audit-{pairs}/pairs.parquet")
    score = table["match_score"].to_numpy()
    (folder / "auditor.safetensors").write_bytes(place.store.read(f"audit-{pairs}/auditor.safetensors"))
    some = np.sort(rng.permutation(pairs)[:COMPARED])
    same = Auditor.load(folder / "auditor.safetensors", "cpu").score(left[some], right[some])
    return {
        "pairs": pairs,
        **found,
        "data_mb": round((left.nbytes + right.nbytes) / 1e6, 1),
        "compared_with_the_auditor": len(some),
        "equal_to_the_auditor": int((score[some] == same).sum()),
        "flagged": int((score < 0.5).sum()),
        **(_beside_local(folder, score, table) if local else {}),
    }


def _beside_local(folder: Path, score: FloatArray, table: pyarrow.Table) -> dict[str, Any]:
    """Audit the same vectors by the local engine."""
    since = time.monotonic()
    found = audit_source(open_arrays(folder / "left.npy", folder / "right.npy"), Settings(device="cpu"))
    difference = np.abs(score - found.match_score)
    sides = (("left_item", found.items.left), ("right_item", found.items.right))
    return {
        "local_seconds": round(time.monotonic() - since, 1),
        "near_duplicates_locally": [len(side.rows) for side in found.items.near_duplicates],
        "pairs_with_the_same_items": [int((table[name].to_numpy() == side).sum()) for name, side in sides],
        "flagged_locally": int(found.is_mismatch.sum()),
        "flagged_by_both": int(((score < 0.5) & found.is_mismatch).sum()),
        "mean_difference": float(difference.mean()),
        "difference_of_99_percent": float(np.quantile(difference, 0.99)),
        "largest_difference": float(difference.max()),
    }


def write_photos(place: Place, table: Path, count: int) -> float:
    """Put different crops of the photos of a table, with their captions, into tars in the store; give their MB."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rng, written = np.random.default_rng(0), 0
    samples = ((number, rows[number % len(rows)]) for number in range(count))
    with tempfile.TemporaryDirectory() as folder:
        for tar in range(-(-count // TAR)):
            made = []
            for number, row in islice(samples, TAR):
                with Image.open(table.parent / "photos" / row["image_path"]) as photo:
                    side = int(min(photo.size) * rng.uniform(0.7, 1))
                    x, y = (int(rng.integers(0, room - side + 1)) for room in photo.size)
                    file_ = io.BytesIO()
                    photo.convert("RGB").crop((x, y, x + side, y + side)).resize((SIZE, SIZE)).save(file_, "JPEG")
                made.append({f"{number:07d}.jpg": file_.getvalue(), f"{number:07d}.txt": row["caption"].encode()})
            write_tar(Path(folder, "one.tar"), made)
            content = Path(folder, "one.tar").read_bytes()
            place.store.put(f"photos/{tar:05d}.tar", content)
            written += len(content)
    return round(written / 1e6, 1)


def photos(place: Place, table: Path, count: int) -> dict[str, Any]:
    """Encode and audit photos in the store; encode them again from a store that fails at every fifth request."""
    size = write_photos(place, table, count)
    plain = place.command("encode", f"s3://{BUCKET}/photos", "--out", f"s3://{BUCKET}/vectors")
    place.fail(5)
    faulty = place.command("encode", f"s3://{BUCKET}/photos", "--out", f"s3://{BUCKET}/again")
    place.fail(0)
    first, second = (place.store.files(name) for name in ("vectors", "again"))
    names = [name for name in first if name.endswith((".npy", ".parquet"))]
    ids = [
        row
        for name in names
        if name.endswith(".parquet")
        for row in pyarrow.parquet.read_table(io.BytesIO(second[name]))["id"].to_pylist()
    ]
    return {
        "photos": count,
        "tars_mb": size,
        "encoding": plain,
        "photos_a_second": round(count / plain["seconds"], 1),
        "encoding_with_faults": faulty,
        "rows_with_faults": len(ids),
        "different_ids_with_faults": len(set(ids)),
        "equal_files": sum(first[name] == second.get(name) for name in names),
        "files": len(names),
        "audit": place.command("audit", f"s3://{BUCKET}/photos", "--out", f"s3://{BUCKET}/audit-photos"),
    }


def main(
    *,
    pairs: tuple[int, ...] = (100_000, 1_000_000),
    width: int = 128,
    local: int = 1_000_000,
    table: Path | None = None,
    count: int = 20_000,
) -> None:
    """Measure audits on two simulated machines with data in S3; print the numbers as JSON.

    Args:
        pairs: Numbers of pairs of vectors.
        width: Numbers a vector.
        local: Largest number of pairs that the local engine audits as well.
        table: CSV of photos (image_path, caption), which are in the folder photos beside it; crops of them are encoded.
        count: Number of crops.
    """
    at_least(2 * COPIES, pairs=pairs)
    at_least(TAR, count=count)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's server prints every request
    with two_machines() as place:
        for size in pairs:
            with tempfile.TemporaryDirectory() as folder:
                print_json(vectors(place, size, width, Path(folder), size <= local))
        if table is not None:
            print_json(photos(place, table, count))


if __name__ == "__main__":
    sys.exit(run(main))
