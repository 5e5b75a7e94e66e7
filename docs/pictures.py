"""Make the pictures of these pages from the made-up photos of the tutorial; needs the extras and Chromium.

    python docs/pictures.py [FOLDER]

FOLDER keeps the photos, the audit and the training, so that a second call is fast.
"""

from __future__ import annotations

import csv
import json
import os
import runpy
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.patches import FancyBboxPatch
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from mispair.reviewing.page import ReviewPage

DOCS = Path(__file__).resolve().parent
SHEET = (0, 6, 13, 14, 5, 7, 4, 12, 2, 19)  # photos of the contact sheet
QUERY = "a red tent in the snow"
STYLE = {"font.size": 10, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
MATCHED, MISMATCHED = "#0f766e", "#c2410c"
BOXES: dict[str, tuple[float, float, str]] = {
    "files": (0, 1, "photos and captions,\nor vectors"),
    "vectors": (1, 1, "vectors\n(any two encoders)"),
    "audit": (2, 1, "audit: match score,\nnoise rate, partners"),
    "review": (3, 1.6, "review:\ndecisions"),
    "export": (4, 1.6, "mended set,\nsame layout"),
    "train": (3, 0.4, "training\n(mend, repair, ...)"),
    "model": (4, 0.4, "model:\nsearch, scores"),
}
ARROWS = (
    ("files", "vectors"), ("vectors", "audit"), ("audit", "review"), ("audit", "train"),
    ("review", "export"), ("review", "train"), ("train", "model"),
)  # fmt: skip


def mispair(*arguments: str | Path) -> str:
    """Run a command of mispair and return what it prints."""
    command = [sys.executable, "-m", "mispair", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def save(picture: Image.Image, name: str, quality: int = 72) -> None:
    """Write a picture of the pages as WebP."""
    (DOCS / "pictures").mkdir(exist_ok=True)
    picture.save(DOCS / "pictures" / f"{name}.webp", quality=quality, method=6)


def row_of_photos(photos: list[Path], columns: int) -> Image.Image:
    """Put photos side by side."""
    tiles = [Image.open(photo).resize((240, 180)) for photo in photos]
    sheet = Image.new("RGB", (columns * 244 - 4, -(-len(tiles) // columns) * 184 - 4), "white")
    for place, tile in enumerate(tiles):
        sheet.paste(tile, (place % columns * 244, place // columns * 184))
    return sheet


def screenshot(page: Page, url: str, name: str, height: int) -> None:
    """Save the part of a page that is seen first."""
    page.set_viewport_size({"width": 1200, "height": height})
    page.goto(url)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(500)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    save(picture, name)


def draw_data_flow() -> None:
    """Draw where the data goes."""
    figure, axes = plt.subplots(figsize=(9, 2.3), layout="constrained")
    axes.set(xlim=(-0.45, 4.45), ylim=(0, 2))
    axes.axis("off")
    for x, y, words in BOXES.values():
        axes.add_patch(
            FancyBboxPatch((x - 0.36, y - 0.26), 0.72, 0.52, boxstyle="round,pad=0.03", fc="#f0fdfa", ec=MATCHED)
        )
        axes.text(x, y, words, ha="center", va="center", fontsize=8)
    for start, end in ARROWS:
        (x, y, _), (to_x, to_y, _) = BOXES[start], BOXES[end]
        a, b = ((x + 0.4, y), (to_x - 0.4, to_y)) if to_x > x else ((x, y - 0.3), (to_x, to_y + 0.3))
        axes.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": "0.35"})
    figure.savefig(DOCS / "figures" / "data-flow.svg", facecolor="white", metadata={"Date": None})


def draw_scores(table: list[dict[str, str]], wrong: npt.NDArray[np.bool_]) -> None:
    """Draw one measure and the match score of matched and of mismatched pairs."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained")
    for axes, name, label in zip(
        panels,
        ("contrast", "match_score"),
        ("contrast, one of the measures", "match score (flagged below 0.5)"),
        strict=True,
    ):
        values = np.array([float(row[name]) for row in table])
        parts, colours = [values[~wrong], values[wrong]], [MATCHED, MISMATCHED]
        axes.hist(parts, bins=30, stacked=True, color=colours, label=["matched", "mismatched"])
        axes.set(xlabel=label, ylabel="pairs", yscale="symlog")
        axes.legend(frameon=False, fontsize=8, loc="upper center")
    panels[1].axvline(0.5, color="0.3", linestyle="--", linewidth=1)
    figure.savefig(DOCS / "figures" / "scores.svg", facecolor="white", metadata={"Date": None})


def main(folder: Path) -> None:
    """Make all pictures."""
    script = runpy.run_path(str(DOCS.parent / "examples/tutorial/make_photos.py"))
    os.chdir(folder)  # so that the pages name no folder of this machine
    photos, audit, run = Path("photos"), Path("audit"), Path("runs")
    if not Path("photos.csv").exists():
        script["main"](Path())
    mispair("audit", "photos.csv", "--images", photos, "--out", audit)
    mispair("train", audit, "--out", run)
    found = json.loads(mispair("search", run, "--query", QUERY, "--json"))
    save(row_of_photos([photos / f"holiday-{row:03}.jpg" for row in SHEET], 5), "photos")
    save(row_of_photos([Path(one["image"]) for one in found["hits"]], 5), "search")

    plt.rcParams.update(STYLE)
    with (audit / "pairs.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    draw_data_flow()
    wrong = set(script["wrong_captions"](np.random.default_rng(1)))
    draw_scores(table, np.array([row in wrong for row in range(len(table))]))

    browser_path = os.environ.get("MISPAIR_CHROMIUM") or shutil.which("chromium")
    with ReviewPage(audit, images=photos).start() as review, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        report = (audit / "report.html").resolve().as_uri()
        screenshot(page, report, "report", 1000)
        screenshot(page, f"{report}#worst", "worst", 760)
        screenshot(page, review.url, "review", 900)
        browser.close()


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(place))
