"""The commands `mispair data ...`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from mispair.cli.output import print_json, say, with_flags
from mispair.errors import ConflictError, ExistsError
from mispair.support.flags import OrNone
from mispair.support.formatting import byte_size, percent

if TYPE_CHECKING:
    from mispair.pairs.published.catalogue import DataSet
    from mispair.pairs.published.check import Finding


SUITES = {"flickr30k": "f30k", "coco": "coco", "cc152k": "cc152k"}  # which comparison trains on a data set


def data_check(
    data: Positional[str],
    *,
    vocab: OrNone[Path] = None,
    noise_file: tuple[Path, ...] = (),
    captions_per_image: OrNone[int] = None,
    json: bool = False,
) -> int:
    """Describe a data set and its problems.

    Args:
        data: Folder of the data set, or "shapes".
        vocab: Vocabulary file, if it is not beside the data.
        noise_file: Noise index files to examine.
        captions_per_image: Only where the files leave it open; found from the data by default.
        json: Print JSON.
    """
    from mispair.pairs.check import check

    found = check(data, vocabulary=vocab, noise_file=noise_file, captions_per_image=captions_per_image)
    if json:
        print_json(found.to_json())
    else:
        for line in found.lines:
            say(line)
        say()
        for problem in found.problems:
            say(f"PROBLEM  {with_flags(problem, ('vocab', 'captions_per_image'))}")
        say("This data set is ready." if not found.problems else f"{len(found.problems)} to fix before training.")
    return 1 if found.problems else 0


def data_noise(
    data: Positional[str],
    *,
    noise_ratio: float,
    out: Path,
    seed: int = 0,
    kind: Literal["caption", "image", "near", "group"] = "caption",
    captions_per_image: OrNone[int] = None,
    json: bool = False,
) -> int:
    """Make a noise index: the new image of each training caption.

    Args:
        data: Folder of the data set, or "shapes".
        noise_ratio: Share of the captions (or images) to move.
        out: File to write; NCR's, BiCro's and MSCN's code reads it (all kinds but image), or DECL's (kind image).
        seed: The same seed gives the same file.
        kind: caption: each caption on its own (NCR); image: all captions of an image together (DECL); near: exchanged
            between similar images; group: exchanged between whole groups of images.
        captions_per_image: Only where the files leave it open; found from the data by default.
        json: Print JSON.
    """
    from mispair.pairs.layouts.opening import load
    from mispair.pairs.noise import load_noise, mismatch, noise_index, save_noise

    if out.exists():
        raise ExistsError("the file exists", where=out, advice="Give another `out`, or remove it first.")
    pairs = load(data, "train", captions_per_image=captions_per_image, finite=False)
    save_noise(out, noise_index(pairs, noise_ratio=noise_ratio, seed=seed, kind=kind))
    found = mismatch(load_noise(out, pairs.link, len(pairs.left)), pairs.link, pairs.groups)
    if json:
        print_json({"file": str(out), "kind": kind, "pairs": len(pairs), "noise_ratio": noise_ratio, "mismatch": found})
    else:
        say(f"{out}: {len(pairs):,} pairs, of which {percent(found)} are now mismatched.")
    return 0


def data_make(
    name: Positional[Literal["shapes"]], out: Positional[Path], *, seed: int = 0, train: int = 600, dev: int = 200,
    test: int = 500,
) -> int:  # fmt: skip
    """Make the built-in data set as files to look at.

    Args:
        name: Only "shapes" so far.
        out: Folder to write.
        seed: The same seed gives the same files.
        train: Training images.
        dev: Validation images.
        test: Test images.
    """
    from mispair.pairs.shapes.dataset import make

    say(f"{name}: {train + dev + test:,} images in {make(out, seed=seed, train=train, dev=dev, test=test)}")
    return 0


def data_get(name: Positional[str], folder: Positional[OrNone[Path]] = None, *, json: bool = False) -> int:
    """List the files of a published data set and their sources, or check a folder against this list.

    Args:
        name: flickr30k, coco or cc152k; shapes is built in.
        folder: Folder to check: which files are there, missing or different.
        json: Print JSON.
    """
    from mispair.pairs.published.catalogue import BUILT_IN, find_data_set
    from mispair.pairs.published.check import check_folder, ready

    if name == BUILT_IN:
        return _print_built_in(folder, json)
    data_set = find_data_set(name)
    if folder is None:
        if json:
            print_json(data_set.model_dump(mode="json", by_alias=True))
        else:
            say(_list(data_set))
        return 0
    findings = check_folder(data_set, folder)
    steps = _next_steps(data_set, folder, findings)
    if json:
        files = [finding.to_json() for finding in findings]
        print_json({"name": name, "folder": str(folder), "ready": ready(findings), "files": files, "next": steps})
    else:
        _print_findings(data_set, folder, findings, steps)
    return 0 if ready(findings) else 1


def _print_built_in(folder: Path | None, as_json: bool) -> int:
    """Explain the built-in data set: there is nothing to fetch or compare."""
    if folder is not None:
        advice = f"See what a folder holds: mispair data check {folder}"
        raise ConflictError("shapes is drawn, not published", where=folder, advice=advice)
    command = "mispair data make shapes FOLDER"
    if as_json:
        print_json({"name": "shapes", "files": [], "next": [command]})
    else:
        say(f"shapes is built in: there is nothing to fetch. `{command}` draws it; `--data shapes` trains on it.")
    return 0


def _next_steps(data_set: DataSet, folder: Path, findings: list[Finding]) -> list[str]:
    """The next steps, a sentence or a command each."""
    from mispair.pairs.published.check import folder_inside, ready, to_fetch

    quoted = shlex.quote(str(folder))
    if ready(findings):
        return [f"mispair data check {quoted}", f"mispair bench run {SUITES[data_set.name]} --data {quoted}"]
    get = f"mispair data get {data_set.name}"
    inside = folder_inside(data_set, folder)
    deeper = [] if inside is None else [f"The files seem to be one folder deeper: {get} {shlex.quote(str(inside))}"]
    missing = to_fetch(data_set, findings).items()
    fetch = [f"Fetch {', '.join(names)} from {source.address}" for source, names in missing]
    return [*deeper, *fetch, f"Then again: {get} {quoted}"]


def _list(data_set: DataSet) -> str:
    """The files of a data set and their sources, in words."""
    from mispair.support.html import environment

    texts = environment(autoescape=False)
    texts.filters.update(count="{:,}".format, byte_size=byte_size)
    return texts.get_template("data_set.txt").render(data_set=data_set)


def _print_findings(data_set: DataSet, folder: Path, findings: list[Finding], steps: list[str]) -> None:
    for needed, title in ((True, f"{data_set.title} in {folder}, needed:"), (False, "optional:")):
        say(title)
        for finding in findings:
            if finding.file.needed == needed:
                say(f"  {finding.verdict:<14}  {finding.file.name}: {finding.sentence}")
    bad = sum(finding.file.needed and not finding.fits for finding in findings)
    to_fix = f"{bad} needed file{'s' * (bad != 1)} to fix"
    say(f"\n{to_fix if bad else 'All needed files are right'}. Next:")
    for step in steps:
        say(f"  {step}")
