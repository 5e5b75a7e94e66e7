"""Hours and bytes of audits up to 12.8 billion pairs, from the measured stages of one million: prints a table.

python examples/cluster/arithmetic.py
"""

from __future__ import annotations

from collections.abc import Mapping

from mispair.auditing.blocks import ROWS
from mispair.auditing.forecast import BOUNDED, MEASURING
from mispair.auditing.ray_engine import TOGETHER
from mispair.auditing.ray_workers import CODES, QUARTERS
from mispair.support.formatting import byte_size

MILLION = 1_000_000
VECTORS = 2 * 512 * 2  # bytes of a pair: two sides of 512 numbers in half precision
SHUFFLED = 2 * 8 * (CODES + 2)  # of a pair: two sides, each with its sketches, its number and its key
RESULT = 37  # bytes a pair in pairs.parquet, without captions: 300,000 pairs have 11.2 MB
NEAR, LEARN, PARTNERS = "searching near-duplicates", "learning", "searching better partners"
SIMILAR = "comparing with similar pairs"
# Measured by `make bench-scale ARGS="--pairs 1000000"`: docs/performance.md.
MEASURED: dict[str, dict[str, float]] = {
    "two CPU cores": {NEAR: 13.3, LEARN: 13.3, MEASURING: 43.0, PARTNERS: 3.4, SIMILAR: 0.4},
    "one H200": {NEAR: 4.2, LEARN: 1.8, MEASURING: 2.4, PARTNERS: 0.8, SIMILAR: 0.3},
}


def seconds(pairs: int, million: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each stage of an audit of at least a million pairs, by the stages of a million."""
    return {stage: time * (1 if stage in BOUNDED else pairs / MILLION) for stage, time in million.items()}


def hours(pairs: int, million: Mapping[str, float]) -> float:
    """Hours of one machine for all stages of so many pairs."""
    return sum(seconds(pairs, million).values()) / 3600


def main() -> None:
    """Prints the table."""
    print("| pairs | blocks | vectors | shuffled | result | machine hours |")
    print("|---|---|---|---|---|---|")
    for pairs in (MILLION, 10 * MILLION, 128 * MILLION, 1280 * MILLION, 12_800 * MILLION):
        taken = ", ".join(f"{name} {hours(pairs, million):,.3g}" for name, million in MEASURED.items())
        shuffled = pairs * SHUFFLED * (1 if pairs <= TOGETHER else QUARTERS)
        sizes = " | ".join(byte_size(size) for size in (pairs * VECTORS, shuffled, pairs * RESULT))
        print(f"| {pairs:,} | {-(-pairs // ROWS):,} | {sizes} | {taken} |")


if __name__ == "__main__":
    main()
