"""Draws the calibration of an audit's match scores, and its time by the number of pairs.

python benchmarks/figure_audit.py AUDIT.json SCALE.json OUT.svg, with what `bench_audit.py --json` and
`bench_scale.py --json` printed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

STYLES = (("o", "-"), ("s", "--"), ("^", ":"), ("D", "-."))


def main(audit: Path, scale: Path, out: Path) -> None:
    plt.rcParams.update({"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    figure, (calibration, time) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    calibration.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    rows = json.loads(audit.read_text())["audits"]
    shown: set[float] = set()
    for row in rows:
        ratio = round(row["noise_ratio"], 2)
        if ratio in shown:
            continue
        marker, line = STYLES[len(shown) % len(STYLES)]
        shown.add(ratio)
        predicted, observed, _ = zip(*row["reliability"], strict=True)
        error = row["calibration_error"]
        label = f"{ratio:.0%} mismatched, error {error:.3f}"
        calibration.plot(predicted, observed, marker=marker, linestyle=line, color="k", label=label)
    calibration.set(xlabel="match score of the pairs (ten bins)", ylabel="share of them that match")
    calibration.set_title("Calibration of the match score", loc="left", fontsize=10)
    calibration.legend(frameon=False, fontsize=9)
    sizes = json.loads(scale.read_text())["audits"]
    for (name, key), (marker, line) in zip(
        (("whole audit", None), ("measuring all pairs", "measuring all pairs")), STYLES, strict=False
    ):
        seconds = [size["seconds"] if key is None else size["stages"][key] for size in sizes]
        time.plot([size["pairs"] for size in sizes], seconds, marker=marker, linestyle=line, color="k", label=name)
    time.set(xscale="log", yscale="log", xlabel="pairs", ylabel="seconds, two CPU cores")
    time.set_title("Vectors of 512 numbers on both sides", loc="left", fontsize=10)
    time.legend(frameon=False, fontsize=9)
    figure.savefig(out)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("Usage: python benchmarks/figure_audit.py AUDIT.json SCALE.json OUT.svg")
    main(*map(Path, sys.argv[1:]))
