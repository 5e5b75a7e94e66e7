"""`make fuzz`: damaged files for everything that reads files.

A reader may refuse a file with a `MispairError`. Another exception, more than ten seconds or more than a gigabyte is a
find; the file is kept. Exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType

from tests.fuzz.readers import READERS

from mispair.errors import MispairError
from mispair.pairs.vocabulary import tokenize

SECONDS, BYTES = 10, 1 << 30
_WORDS = [
    b"\x00", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b"'", b",", b"[", b"{", b"}", b"]", b"-1",
    b"1e999", b"NaN", b"null", b"true", b"9" * 40, b"\xc3\x28", b"\xed\xa0\x80", b"=1+1", b"../", b"/etc/passwd",
    b"\x1b[2J", b"0x7fffffffffffffff", b"\\u0000", b"\x80\x02", b"PK\x03\x04", b"[" * 3000, b"(" * 300,
    b" " * 5000, b"a" * 5000,
]  # fmt: skip


def damaged(content: bytes, chance: random.Random) -> bytes:
    """The content with one to four changes: bits, bytes, words, cuts, repetitions, moved parts."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        place, length = chance.randrange(len(data) + 1), chance.choice((1, 2, 4, 8, 64))
        change = chance.randrange(7)
        if change == 0 and data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        elif change == 1:
            data[place : place + length] = chance.randbytes(length)
        elif change == 2:
            data[place:place] = chance.choice(_WORDS)
        elif change == 3:
            data[place : place + length] = chance.choice(_WORDS)
        elif change == 4:
            del data[place:]
        elif change == 5:
            del data[place : place + length]
        else:
            start = chance.randrange(len(data) + 1)
            data[place:place] = data[start : start + 16 * length]
    return bytes(data)


class _TooLongError(BaseException):
    """No reader may catch it."""


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise _TooLongError


def attempt(read: Callable[[Path], object], folder: Path) -> tuple[str, str]:
    """Whether the file was "read" or "refused", or what else happened, and the details."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: the machine may have other work
    try:
        with warnings.catch_warnings(action="ignore"):
            read(folder)
    except MispairError:
        return "refused", ""
    except _TooLongError:
        return "too long", traceback.format_exc()
    except MemoryError:
        return "too much memory", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "read", ""


def fuzzed(name: str, cases: int, seed: int, kept: Path) -> tuple[str, Counter[str], list[str]]:
    """Damaged files for one reader."""
    signal.signal(signal.SIGPROF, _too_long)
    tokenize("it's")  # loads what takes long to load
    reader, chance = READERS[name], random.Random(f"{seed} {name}")
    counts, finds = Counter[str](), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        reader.make(folder)
        whole = (folder / reader.file).read_bytes()
        assert attempt(reader.read, folder) == ("read", ""), f"{name}: {attempt(reader.read, folder)}"
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
        for number in range(cases):
            content = damaged(whole, chance)
            (folder / reader.file).write_bytes(content)
            result, details = attempt(reader.read, folder)
            counts[result] += 1
            if details:
                finds.append(f"{name}, {result}, case {number}:\n{details}")
                kept.mkdir(parents=True, exist_ok=True)
                (kept / f"{name.replace(' ', '-')}-{seed}-{number}").write_bytes(content)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    return name, counts, finds


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(READERS), choices=list(READERS))
    parser.add_argument("--kept", type=Path, default=Path("build/fuzz"), help="folder for files that are finds")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started, each, total, bad = time.monotonic(), -(-options.cases // len(options.only)), 0, 0
    print("| reader | cases | read | refused | finds |\n|---|---|---|---|---|")
    all_finds: list[str] = []
    with ProcessPoolExecutor(options.workers) as pool:
        tasks = [pool.submit(fuzzed, name, each, options.seed, options.kept) for name in options.only]
        for task in tasks:
            name, counts, finds = task.result()
            total, bad = total + counts.total(), bad + len(finds)
            all_finds += finds
            print(f"| {name} | {counts.total()} | {counts['read']} | {counts['refused']} | {len(finds)} |", flush=True)
    print(f"\n{total:,} cases in {time.monotonic() - started:.0f} s, {bad} finds.")
    print("\n".join(all_finds[:40]))
    return 1 if bad or not total else 0


if __name__ == "__main__":
    sys.exit(main())
