"""Validation rSum over the steps of trainings, from benchmarks/results/curves.csv.

python benchmarks/figure_curves.py benchmarks/results/curves.csv OUT.svg
"""

from __future__ import annotations

import csv
import sys
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

STYLES = ["-", "--", "-.", ":", (0, (1, 3))]


def main(table: str, out: str) -> None:
    mpl.rcParams["svg.hashsalt"] = "mispair"
    with Path(table).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    panels = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = plt.subplots(1, len(panels), figsize=(4.8 * len(panels), 3.8), layout="constrained")
    for axis, panel in zip(axes, panels, strict=True):
        here = [row for row in rows if row["data"] == panel]
        names = list(dict.fromkeys(row["method"] for row in here))
        for (name, seed), run in groupby(here, lambda row: (row["method"], row["seed"])):
            points = [(int(row["step"]), float(row["validation"])) for row in run]
            style = STYLES[names.index(name)]
            label = name if seed == "0" else None
            axis.plot(*zip(*points, strict=True), linestyle=style, color="black", linewidth=1, label=label)
        axis.set_title(panel)
        axis.set_xlabel("steps of all networks together")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize="small")
    axes[0].set_ylabel("validation rSum")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
