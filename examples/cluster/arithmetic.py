"""Hours and bytes of audits up to 12.8 billion pairs, from the measured stages of one million: prints a table.

    python examples/cluster/arithmetic.py

An audit holds about 100 bytes a pair in the process that learns, so more than 100 million pairs are audited as several
data sets, each by one machine. Near-duplicates are then found inside each of them only.
"""

from __future__ import annotations

from collections.abc import Mapping

from mispair.auditing.forecast import BOUNDED, HELD, MEASURING
from mispair.auditing.scoring.scan import PART
from mispair.support.formatting import byte_size

MILLION = 1_000_000
MOST = 100 * MILLION  # pairs of one audit
VECTORS = 2 * 512 * 2  # bytes of a pair: two sides of 512 numbers in half precision
READ = 2  # times that all vectors are read: for near-duplicates, and to measure
RESULT = 37  # bytes a pair in pairs.parquet, without captions: 300,000 pairs have 11.2 MB
NEAR, LEARN, PARTNERS = "searching near-duplicates", "learning", "searching better partners"
SIMILAR = "comparing with similar pairs"
# Measured by `make bench-scale ARGS="--pairs 1000000"`: docs/performance.md.
MEASURED: dict[str, dict[str, float]] = {
    "two CPU cores": {NEAR: 13.3, LEARN: 13.3, MEASURING: 43.0, PARTNERS: 3.4, SIMILAR: 0.4},
    "one H200": {NEAR: 4.2, LEARN: 1.8, MEASURING: 2.4, PARTNERS: 0.8, SIMILAR: 0.3},
}


def seconds(pairs: int, million: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage of one audit of at least a million pairs, by the stages of a million."""
    return {stage: time * (1 if stage in BOUNDED else pairs / MILLION) for stage, time in million.items()}


def hours(pairs: int, million: Mapping[str, float]) -> float:
    """Hours of one machine for all audits of so many pairs."""
    full, rest = divmod(pairs, MOST)
    one = full * sum(seconds(MOST, million).values())
    return (one + (sum(seconds(rest, million).values()) if rest else 0.0)) / 3600


def main() -> None:
    """Prints the table."""
    print("| pairs | audits | parts | vectors | read | result | memory of an audit | machine hours |")
    print("|---|---|---|---|---|---|---|---|")
    for pairs in (MILLION, 10 * MILLION, 128 * MILLION, 1280 * MILLION, 12_800 * MILLION):
        audits, held = -(-pairs // MOST), 1.3e9 + HELD * min(pairs, MOST)
        taken = ", ".join(f"{name} {hours(pairs, million):,.3g}" for name, million in MEASURED.items())
        sizes = " | ".join(byte_size(pairs * size) for size in (VECTORS, READ * VECTORS, RESULT))
        print(f"| {pairs:,} | {audits:,} | {-(-pairs // PART):,} | {sizes} | {byte_size(int(held))} | {taken} |")


if __name__ == "__main__":
    main()
