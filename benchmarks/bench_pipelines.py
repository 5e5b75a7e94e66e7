"""Run every recipe of docs/pipelines.md in its own library, on the vectors of a folder: `make bench-pipelines`.

Each recipe scores all pairs by one auditor; the page itself compares its scores with `Auditor.score`, byte for byte.
Recipes whose package is not installed are left out. FiftyOne needs a MongoDB (FIFTYONE_DATABASE_URI).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mispair
from common import run
from mispair.auditing.inputs import AuditInput
from mispair.cli.output import print_json

PAGE = Path(__file__).parents[1] / "docs" / "pipelines.md"
PACKAGES = {"daft": "daft", "lance": "pylance", "data_juicer": "py-data-juicer", "nemo_curator": "nemo-curator"}
RECIPE = re.compile(r"((?:<!-- test: [^\n]* -->\n)+)```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"<!-- test: (\w+):? (.*) -->")


def main(*, data: Path, only: tuple[str, ...] = ()) -> None:
    """Run the recipes and print one line of JSON for each.

    Args:
        data: Folder of embeddings (clip-retrieval).
        only: Packages, such as ray and lance; all by default.
    """
    source = AuditInput(data.absolute()).open("cpu")
    left, right = source.block(0, len(source))
    audit = mispair.audit(data, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        audit.auditor.save("auditor.safetensors")
        auditor = mispair.Auditor.load("auditor.safetensors")
        expected = auditor.score(left, right)
        alone = audit.scores.alone()
        print_json({"pairs": len(audit), "equal to the audit's": int((np.abs(expected - alone) < 1e-6).sum())})
        names = {
            "np": np, "Path": Path, "mispair": mispair, "auditor": auditor, "images": left, "texts": right,
            "expected": expected,
        }  # fmt: skip
        for comments, recipe in RECIPE.findall(PAGE.read_text(encoding="utf-8")):
            notes = dict(NOTE.findall(comments))
            package = notes.get("needs", "")
            if "file" in notes:
                Path(notes["file"]).parent.mkdir(parents=True, exist_ok=True)
                Path(notes["file"]).write_text(recipe, encoding="utf-8")
            if not (package and importlib.util.find_spec(package) and (not only or package in only)):
                continue
            since = time.monotonic()
            for code in (notes["before"], recipe, notes["after"]):  # the last one compares
                exec(code, names)
            version = importlib.metadata.version(PACKAGES.get(package) or package)
            print_json({"package": package, "version": version, "seconds": round(time.monotonic() - since, 1)})


if __name__ == "__main__":
    sys.exit(run(main))
