"""Makes the picture of the review page in these pages, from the built-in data set; needs Chromium.

python docs/screenshots.py
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from playwright.sync_api import sync_playwright

from mispair.auditing.audit import Settings
from mispair.auditing.folder import audit_path
from mispair.auditing.inputs import AuditInput
from mispair.pairs.shapes.dataset import make
from mispair.reviewing.page import ReviewPage

OUT = Path(__file__).parent / "review.jpg"


def noisy_copy(data: Path, folder: Path) -> Path:
    """One caption an image, of which every fifth has that of another image."""
    folder.mkdir()
    names = (data / "train_ids.txt").read_text(encoding="utf-8").split()
    captions = (data / "train_caps.txt").read_text(encoding="utf-8").splitlines()
    captions = captions[:: len(captions) // len(names)]
    moved = np.arange(0, len(names), 5)
    shifted = {int(row): captions[other] for row, other in zip(moved, np.roll(moved, 1), strict=True)}
    captions = [shifted.get(row, caption) for row, caption in enumerate(captions)]
    shutil.copy(data / "train_ims.npy", folder)
    (folder / "train_ids.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    (folder / "train_caps.txt").write_text("\n".join(captions) + "\n", encoding="utf-8")
    return folder


def main() -> None:
    browser_path = os.environ.get("MISPAIR_CHROMIUM") or shutil.which("chromium")
    with TemporaryDirectory() as place:
        make(Path(place) / "shapes", seed=0, train=800, dev=4, test=4)
        data = noisy_copy(Path(place) / "shapes", Path(place) / "drawings")
        images = Path(place) / "shapes" / "images"
        audit_path(AuditInput(data, images=images), Path(place) / "audit", Settings())
        with ReviewPage(Path(place) / "audit", images=images).start() as review, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(review.url)
            page.wait_for_load_state("networkidle")
            page.screenshot(path=OUT, type="jpeg", quality=82)
            browser.close()


if __name__ == "__main__":
    main()
