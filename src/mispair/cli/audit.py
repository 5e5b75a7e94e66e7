"""The commands `mispair audit` and `mispair encode`. Heavy imports wait until they run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from mispair.cli.output import console, print_json, say
from mispair.errors import ConfigError, DataError, StoppedError

if TYPE_CHECKING:
    from mispair.auditing.audit import Settings
    from mispair.auditing.findings import AuditSummary
    from mispair.auditing.inputs import AuditInput
    from mispair.pairs.origin import Projection
    from mispair.pairs.tables import Roles

IMAGE_MODEL, TEXT_MODEL = "efficientnet-lite0", "all-minilm-l6-v2"
BAD_CODE = 3  # exit code where more than 1 % of the pairs could not be read


def audit(
    source: Positional[Path | None] = None,
    *,
    out: Path = Path("audit"),
    left: Path | None = None,
    right: Path | None = None,
    ids: Path | None = None,
    images: Path | None = None,
    allow_outside: bool = False,
    split: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    id_column: str | None = None,
    encoder: str | None = None,
    image_model: str = IMAGE_MODEL,
    text_model: str = TEXT_MODEL,
    cache: Path | None = None,
    vectors: str | None = None,
    joint: bool = False,
    checked: Path | None = None,
    decisions: Path | None = None,
    clean: Path | None = None,
    mended: Path | None = None,
    tools: Annotated[tuple[Literal["fiftyone", "label-studio", "argilla"], ...], tyro.conf.arg(name="for")] = (),
    flag_below: float | None = None,
    keep_best: str | None = None,
    by: str | None = None,
    overwrite: bool = False,
    review: bool = False,
    device: str = "auto",
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    shard: str | None = None,
    merge: Path | None = None,
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Find the mismatched pairs of a data set, with a report. The same command again goes on where it was stopped.

    Args:
        source: Images and captions, as for encode; or a folder of embeddings (clip-retrieval), of features (SCAN) or of
            a training run. It may be at a URL, as --left, --right and --ids may: https:// (files), s3:// or gs://.
        out: Folder for the table of all pairs, the suggestions and the report; it may be at s3:// or gs://.
        left: Vectors of one side as .npy, instead of a source.
        right: Vectors of the other side.
        ids: Table (CSV, TSV, parquet) with a row for each vector: id, caption, image_path, group.
        images: Folder of the images.
        allow_outside: Read images outside that folder too, which the source may name; they can get into the report.
        split: Part of the data set; train by default, where it has parts.
        image_column: Column of images, if its name is not a usual one; its number in a table without a header.
        caption_column: Column of captions, likewise.
        id_column: Column of ids, likewise.
        encoder: One encoder with a common space for both sides: open_clip:MODEL/WEIGHTS, or transformers:FOLDER of a
            CLIP or SigLIP.
        image_model: Encoder of the images: efficientnet-lite0, or open_clip:MODEL/WEIGHTS.
        text_model: Encoder of the captions: all-minilm-l6-v2, transformers:NAME_OR_FOLDER, or open_clip:MODEL/WEIGHTS.
        cache: Folder of encodings; by default MISPAIR_CACHE, or that of the user.
        vectors: Which vectors of a DataComp folder: l14 (the default) or b32.
        joint: The vectors come from encoders that share a space, as CLIP's do.
        checked: CSV of pairs that you have checked: id, and right (yes or no).
        decisions: Folder of an audit with decisions of a review; the audit learns from them and prints what changed.
        clean: Write a copy of the input without the flagged and the unreadable pairs to this folder.
        mended: The same, but flagged pairs get their better partners where these are sure enough.
        tools: Write the pairs for these tools to the folder as well.
        flag_below: Flag pairs with a match score below this; 0.5 by default.
        keep_best: Flag all but the best of the pairs instead: 80% or 0.8.
        by: Column of the input, or shard for its files: a noise rate for each of its values.
        overwrite: Replace what is in the folders.
        review: Open the page to decide on the doubtful pairs when the audit has ended.
        device: auto, cpu, cuda, cuda:1, mps.
        workers: Threads, or processes of Ray; as many as there are cores (for Ray on GPUs: GPUs) by default.
        engine: What measures the pairs: this process, or the machines of a Ray cluster.
        address: Of the Ray cluster, as auto or ray://host:10001; by default RAY_ADDRESS, else this machine alone.
        shard: Measure only this part of the pairs, as 3/64: other processes or machines measure the others.
        merge: Folder in which all shards were measured: makes the audit of them, with no other input.
        dry_run: Print the expected time and memory on this machine and on several, from audits of small samples.
            Nothing is written.
        json: Print the metrics as JSON.
    """
    from mispair.auditing.audit import Settings
    from mispair.auditing.cuts import share_of
    from mispair.auditing.folder import audit_path, audit_shard, merge_shards
    from mispair.auditing.inputs import AuditInput
    from mispair.auditing.scoring.scan import Shard
    from mispair.encoders.encode import Encoders
    from mispair.pairs.remote import url_of
    from mispair.reviewing.decisions import read_partnered

    _check_sharing(source or left, shard, merge, engine, address, dry_run)
    _check_urls(merge or out, source, {"--images": images, "--clean": clean, "--mended": mended, "--checked": checked,
        "--decisions": decisions, "--cache": cache}, review or decisions is not None)  # fmt: skip
    encoders = Encoders(encoder or image_model, encoder or text_model, device)
    columns = columns_of(image_column, caption_column, id_column)
    data = AuditInput(
        source, left, right, ids, images, split, columns, encoders, cache, vectors, allow_outside
    ).fetched()
    if overwrite and url_of(out) is None:
        _check_overwritten(out, data)
    gone: Collection[str] = ()
    if decisions is not None and merge is None:
        from mispair.reviewing.compare import check_decided

        gone = check_decided(decisions, data, "audit without --decisions.")
    answers = _answers(checked, decisions, gone)
    best = None if keep_best is None else share_of(keep_best)
    lefts, rights = ((), ()) if decisions is None else read_partnered(decisions)
    partnered = tuple(name for name in lefts if name not in gone), tuple(name for name in rights if name not in gone)
    settings = Settings(
        joint or encoder is not None, answers, device, workers, flag_below, best, by, partnered=partnered
    )  # fmt: skip
    command = shlex.join(["mispair", *sys.argv[1:]])
    try:
        if dry_run:
            return _forecast(data, settings, json)
        if shard is not None:
            audit_shard(data, out, settings, Shard.of(shard), console())
            say(f"Shard {shard} is measured. When all are, go on with: mispair audit --merge {shlex.quote(shown(out))}")
            return 0
        others: Any = {
            "clean": clean, "mended": mended, "tools": tools, "overwrite": overwrite, "console": console(),
            "command": command,
        }  # fmt: skip
        if merge is not None:
            out = merge
            summary = merge_shards(merge, device, cache=cache, **others)
        elif engine == "ray":
            from mispair.auditing.ray_engine import connect

            with connect(address, url_of(out)) as ray:
                summary = audit_path(data, out, replace(settings, engine=ray), **others)
        else:
            summary = audit_path(data, out, settings, **others)
    except KeyboardInterrupt:
        raise StoppedError("The audit was stopped; the same command goes on where it was.", 130) from None
    if json:
        print_json({"out": shown(out), **summary.model_dump()})
    else:
        say("\n".join(_lines(summary, out, clean, mended)))
        if decisions is not None:
            say(_changes(decisions, out))
    if summary.too_many_unreadable:
        _say_bad_code(summary.pairs - summary.scored, summary.pairs, f"{shown(out / 'pairs.csv')} and report.html say")
    if review:
        from mispair.cli.review import review as review_page

        return review_page(out, images=images)
    return BAD_CODE if summary.too_many_unreadable else 0


def _check_overwritten(out: Path, data: AuditInput) -> None:
    """Refuses to replace an audit with decisions by one of other pairs: they would count for these.

    Decisions on pairs that are gone count for none; those on pairs that stay go on to count.
    """
    from mispair.auditing.folder import read_input
    from mispair.auditing.output_files import AUDIT
    from mispair.reviewing.compare import check_decided
    from mispair.reviewing.decisions import FILE, read_current
    from mispair.support.owned_folder import read_mark

    mark = read_mark(out, AUDIT)
    if mark is None or not mark.finished or not (out / FILE).exists():
        return
    before, now = (
        [None if place is None else Path(place).resolve() for place in (one.source, one.left, one.right)]
        for one in (read_input(out), data)
    )
    how = (
        f"choose another --out; or keep what was decided with `mispair review {shlex.quote(str(out))} "
        f"--export-decisions FILE`, and then delete {out / FILE}."
    )
    if before != now and (decided := len(read_current(out / FILE))):
        raise DataError(
            f"{out} has {'a decision' if decided == 1 else f'{decided:,} decisions'} on the pairs of "
            f"{before[0] or before[1]}, which would count for those of {now[0] or now[1]}, too; {how}"
        )
    check_decided(out, data, how)


def _check_sharing(
    source: Path | None, shard: str | None, merge: Path | None, engine: str, address: str | None, dry_run: bool
) -> None:
    if engine == "ray" and (shard is not None or merge is not None):
        raise ConfigError("--engine ray measures all pairs; leave --shard and --merge out.")
    if engine != "ray" and address is not None:
        raise ConfigError("--address is that of a Ray cluster; give --engine ray as well, or leave it out.")
    if merge is not None and dry_run:
        raise ConfigError("--dry-run says what an audit will take, and --merge ends one; leave one of them out.")
    if merge is not None and (source is not None or shard is not None):
        raise ConfigError("--merge takes the folder of the shards alone: its input is known.")


def _check_urls(out: Path, source: Path | None, others: Mapping[str, Path | None], reviewed: bool) -> None:
    """Refuses URLs where only folders of this machine will do."""
    from mispair.pairs.remote import url_of

    for option, place in others.items():
        if place is not None and url_of(place) is not None:
            raise ConfigError(f"{option} {url_of(place)} is a URL; give a path of this machine.")
    url = url_of(out)
    if url is None:
        return
    if url.startswith("http"):
        raise ConfigError(
            f"--out {url} cannot be written; give a folder of this machine, or of a store (s3://, gs://)."
        )
    if reviewed:
        raise ConfigError(f"--review and --decisions need a folder of this machine, and --out is {url}; copy it here.")
    if source is not None and (out == source or source in out.parents):
        raise ConfigError(f"--out {url} lies in the audited data {url_of(source)}; give another --out.")


def shown(path: Path) -> str:
    """A path, or the URL that it was made of."""
    from mispair.pairs.remote import url_of

    return url_of(path) or str(path)


def _forecast(data: AuditInput, settings: Settings, json: bool) -> int:
    from mispair.auditing.forecast import forecast

    data.check()
    if data.open_raw() is not None:
        raise ConfigError("--dry-run is for vectors; make them with `mispair encode`, and give what it has written.")
    found = forecast(data.open(None, settings.device, console()), settings)
    if json:
        print_json(asdict(found))
    else:
        say("\n".join(found.lines()))
    return 0


def _answers(checked: Path | None, decisions: Path | None, gone: Collection[str]) -> dict[str, bool] | None:
    """Whether pairs match, from a CSV and from a review without pairs that are gone; what a CSV says comes first."""
    from mispair.auditing.folder import read_checked
    from mispair.reviewing.decisions import read_answers

    if checked is None and decisions is None:
        return None
    found = {} if decisions is None else read_answers(decisions)
    reviewed = {name: matched for name, matched in found.items() if name not in gone}
    return reviewed | ({} if checked is None else read_checked(checked))


def _changes(before: Path, now: Path) -> str:
    """What the decisions have changed, in words."""
    from mispair.reviewing.compare import compare

    return compare(before, now).sentence()


def columns_of(image: str | None, caption: str | None, name: str | None) -> Roles:
    """Columns of a table that were named."""
    named: Roles = {"image_path": image or "", "caption": caption or "", "id": name or ""}
    return {role: column for role, column in named.items() if column}


def _close(summary: AuditSummary) -> list[str]:
    if summary.close_rate is None:
        return []
    return [
        f"Another {summary.close_rate:.1%} ({summary.close_rate_low:.1%} to {summary.close_rate_high:.1%}) are close, "
        "but other partners of their left item say something else, or they seem exchanged with a similar pair."
    ]


def _seen(summary: AuditSummary) -> list[str]:
    """What the audit can see, in words."""
    named = {"random": "any", "similar": "similar", "most_similar": "the most similar"}
    return [
        f"Exchanged with {named[one.kind]} items on purpose, {one.found:.0%} would be flagged "
        f"({one.found_at_1_percent:.0%} at 1 % false alarms); up to {one.at_most:.1%} of the pairs can be such."
        for one in summary.detections
    ]


def _lines(summary: AuditSummary, out: Path, clean: Path | None, mended: Path | None) -> list[str]:
    """The result in words."""
    from mispair.auditing.findings import NOTHING_IN_COMMON
    from mispair.pairs.remote import url_of

    doubtful = summary.flagged > 0 and url_of(out) is None
    return [
        *([f"{NOTHING_IN_COMMON}."] if summary.nothing_in_common else []),
        f"{summary.flagged:,} of {summary.scored:,} pairs are flagged as mismatched. Estimated noise rate "
        f"{summary.noise_rate:.1%} ({summary.noise_rate_low:.1%} to {summary.noise_rate_high:.1%}).",
        *_close(summary),
        *_seen(summary),
        *(
            f"{part.value}: {part.flagged:,} of {part.pairs:,} flagged, noise rate {part.noise_rate:.1%} "
            f"({part.noise_rate_low:.1%} to {part.noise_rate_high:.1%})."
            for part in summary.parts
        ),
        *(f"{count:,} could not be read: {status}." for status, count in summary.unreadable.items()),
        f"Report: {shown(out / 'report.html')}",
        f"Table:  {shown(out / 'pairs.parquet')} and pairs.csv; better partners in suggestions.csv",
        *([] if clean is None else [f"Without the flagged pairs: {clean}"]),
        *([] if mended is None else [f"With better partners: {mended}"]),
        *([f"Decide on the doubtful pairs: mispair review {shlex.quote(str(out))}"] if doubtful else []),
    ]


def encode(
    source: Positional[Path],
    *,
    out: Path,
    images: Path | None = None,
    allow_outside: bool = False,
    grid: int | None = None,
    pca: str | None = None,
    dev: float | None = None,
    test: float | None = None,
    split: str | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    id_column: str | None = None,
    image_model: str = IMAGE_MODEL,
    text_model: str = TEXT_MODEL,
    cache: Path | None = None,
    device: str = "auto",
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Turn images and captions into embeddings, or into region features. The same command again goes on.

    Args:
        source: CSV, TSV or parquet of images and captions, COCO or Karpathy JSON, JSON lines, tars, or folder of images
            and texts.
        out: Folder for the embeddings in the clip-retrieval layout; with --grid, for the features in the SCAN layout.
        images: Folder that the image paths start from; the one of the source by default.
        allow_outside: Read images outside that folder too, which the source may name.
        grid: Region features instead of one vector an image: 6 for 6 x 6 cells of the feature map.
        pca: With --grid, numbers a cell by principal components of the training images; or a basis.npz made before.
        dev: With --grid, the share of the images that validate, or how many; by default a tenth, at most 5,000. A
            column split of the source comes first.
        test: With --grid, the share of the images that test, or how many; by default as for --dev.
        split: With --grid, write all pairs as this split.
        image_column: Column of images, if its name is not a usual one; its number in a table without a header.
        caption_column: Column of captions, likewise.
        id_column: Column of ids, likewise.
        image_model: efficientnet-lite0, open_clip:MODEL/WEIGHTS, timm:NAME, or transformers:NAME_OR_FOLDER.
        text_model: all-minilm-l6-v2, transformers:NAME_OR_FOLDER, or open_clip:MODEL/WEIGHTS. Not with --grid, which
            leaves captions as words.
        cache: Folder of encodings; by default MISPAIR_CACHE, or that of the user.
        device: auto, cpu, cuda, cuda:1, mps.
        overwrite: Start over in a folder that was made from something else.
        json: Print the metrics as JSON.
    """
    from mispair.encoders.cache import writable_cache
    from mispair.encoders.encode import Encoders, encode_to_folder
    from mispair.pairs.layouts.opening import open_raw

    if grid is None and (pca, dev, test, split) != (None, None, None, None):
        raise ConfigError("--pca, --dev, --test and --split are for region features; give --grid 6, or leave them out.")
    columns = columns_of(image_column, caption_column, id_column)
    pairs = open_raw(source, images, columns, allow_outside=allow_outside)
    for note in pairs.notes:
        say(f"Note: {note}", file=sys.stderr)
    place = writable_cache(cache)
    if grid is None:
        encoders = Encoders(image_model, text_model, device).load()
        outcome = encode_to_folder(
            pairs, out, encoders, place, overwrite=overwrite, console=console()
        )  # fmt: skip
    else:
        from mispair.encoders.encoders import GridEncoder, image_encoder
        from mispair.encoders.regions import SplitRule, encode_regions

        rule, projection = SplitRule(dev, test, split), _projection(pca)
        outcome = encode_regions(
            pairs, out, GridEncoder(image_encoder(image_model, device), grid), place, pca=projection,
            splits=rule, overwrite=overwrite, console=console(),
        )  # fmt: skip
    if json:
        print_json({"out": str(out), **outcome.metrics()})
    else:
        say("\n".join([*outcome.lines(), f"{'Embeddings' if grid is None else 'Region features'}: {out}"]))
    if outcome.too_many_bad:
        listed = "metadata/" if grid is None else "rows.parquet"
        _say_bad_code(outcome.bad, outcome.rows, f"{out / listed} says")
    return BAD_CODE if outcome.too_many_bad else 0


def _say_bad_code(bad: int, pairs: int, listed: str) -> None:
    """Explains the exit code, on stderr: results on stdout may be JSON."""
    say(
        f"Note: {bad:,} of {pairs:,} pairs could not be read, which is more than 1 %, so the exit code is {BAD_CODE}; "
        f"{listed} which ones, and why.",
        file=sys.stderr,
    )


def _projection(pca: str | None) -> int | Projection | None:
    from mispair.pairs.origin import Projection

    if pca is None or pca.isdecimal():
        return None if pca is None else int(pca)
    return Projection.load(Path(pca))
