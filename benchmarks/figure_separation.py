"""How well loss and rank correlation tell right pairs from wrong ones, epoch by epoch, from runs of method `repair`.

python benchmarks/figure_separation.py OUT.svg "TITLE=RUN_FOLDER" ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from mispair.training.events import MethodEvent
from mispair.training.run_folder import read_events

LINES = {
    "auroc_loss": ("loss of this epoch", "-", "o"),
    "auroc_rank": ("rank correlation", "--", "s"),
    "auroc_w": ("w of the mixture", ":", "^"),
}


def main(out: str, *runs: str) -> None:
    mpl.rcParams["svg.hashsalt"] = "mispair"
    figure, axes = plt.subplots(1, len(runs), figsize=(4.6 * len(runs), 3.6), sharey=True, layout="constrained")
    for axis, run in zip(axes if len(runs) > 1 else [axes], runs, strict=True):
        title, folder = run.rsplit("=", 1)
        events = read_events(Path(folder), MethodEvent)
        for key, (name, style, marker) in LINES.items():
            mean = [sum(getattr(event, key)) / len(getattr(event, key)) for event in events]
            axis.plot([event.epoch + 1 for event in events], mean, style, marker=marker, color="black", label=name)
        axis.set_title(title)
        axis.set_xlabel("epoch, warm-up included")
        axis.grid(alpha=0.3)
    (axes if len(runs) == 1 else axes[0]).set_ylabel("AUROC, right against wrong pairs")
    (axes if len(runs) == 1 else axes[-1]).legend(loc="lower left")
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
