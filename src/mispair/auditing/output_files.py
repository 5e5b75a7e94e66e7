"""Names of the files of an audit; imports nothing heavy."""

from __future__ import annotations

from mispair.pairs.layouts import SUBSET as SUBSET
from mispair.pairs.result_tables import TABLE as TABLE
from mispair.support.owned_folder import FolderKind

CSV = "pairs.csv"
SUGGESTIONS, SUGGESTIONS_CSV = "suggestions.parquet", "suggestions.csv"
REPORT, SUMMARY = "report.html", "summary.json"
LEARNED = "auditor.safetensors"  # for `mispair.Auditor.load`; by Ray
SHARDS = "shards"  # folder of a table for each shard of the input
EXPORTS = ("fiftyone.csv", "label-studio.json", "label-studio.xml", "argilla.json")  # for other tools
READ_BACK = (TABLE, SUGGESTIONS, SUMMARY)  # what later commands rest on; the others are for people
AUDIT = FolderKind(
    "an audit",
    "audit.json",
    (TABLE, CSV, SUGGESTIONS, SUGGESTIONS_CSV, REPORT, SUMMARY),
    optional=(f"{SHARDS}/*.parquet", SUBSET, *EXPORTS, LEARNED),
    says_place=True,
)
