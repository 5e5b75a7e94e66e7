"""The commands `mispair audit` and `mispair encode`. Heavy imports wait until they run."""

from __future__ import annotations

import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import OmitArgPrefixes, Positional

from mispair.auditing.options import AuditOptions, InputOptions
from mispair.cli.output import console, print_json, say, with_flags
from mispair.encoders.options import FileOptions
from mispair.errors import ConflictError, DataError, InvalidValueError, StoppedError
from mispair.support.flags import OrNone
from mispair.support.formatting import percent

if TYPE_CHECKING:
    from mispair.auditing.audit import Settings
    from mispair.auditing.inputs import AuditInput
    from mispair.auditing.summary import AuditSummary
    from mispair.encoders.encode import Outcome
    from mispair.pairs.origin import Projection

BAD_CODE = 3  # exit code where more than 1 % of the pairs could not be read


@dataclass(frozen=True)
class AuditArguments:
    """Find the mismatched pairs of a data set, with a report. Run it again to resume."""

    data: OmitArgPrefixes[InputOptions]
    settings: OmitArgPrefixes[AuditOptions]
    source: Positional[OrNone[Path]] = None
    """Images and captions, as for encode; or a folder of embeddings (clip-retrieval), of features (SCAN) or of
    a training run. A URL works here and for --left, --right and --ids: https:// (files), s3://, gs://
    or hf://."""
    out: Path = Path("audit")
    """Folder for the table of all pairs, the suggestions and the report; it may be at s3:// or gs://."""
    checked: OrNone[Path] = None
    """CSV of pairs that you have checked: id, and right (yes or no)."""
    decisions: OrNone[Path] = None
    """Folder of an audit with decisions of a review; the audit learns from them and prints what changed."""
    clean: OrNone[Path] = None
    """Write a copy of the input without the flagged and the unreadable pairs to this folder."""
    mended: OrNone[Path] = None
    """The same copy, but flagged pairs get their better partners if these are certain enough."""
    tools: Annotated[tuple[Literal["fiftyone", "label-studio", "argilla"], ...], tyro.conf.arg(name="for")] = ()
    """Write the pairs for these tools to the folder as well."""
    overwrite: bool = False
    """Replace the content of the folders."""
    review: bool = False
    """Open the review page after the audit."""
    engine: Literal["local", "ray"] = "local"
    """Where to measure the pairs: in this process, or on a Ray cluster."""
    address: OrNone[str] = None
    """Address of the Ray cluster, such as auto or ray://host:10001; by default RAY_ADDRESS, else this machine."""
    dry_run: bool = False
    """Print the expected time and memory on this machine and on several, from audits of small samples; photos and
    captions of a sample are encoded for it. Nothing is written."""
    json: bool = False
    """Print the metrics as JSON."""


def audit(arguments: AuditArguments) -> int:
    """Find the mismatched pairs of a data set, with a report. Run it again to resume."""
    from mispair.auditing.audit import Settings
    from mispair.auditing.folder import audit_path
    from mispair.auditing.inputs import AuditInput
    from mispair.pairs.remote import url_of

    out, clean, mended, decisions = arguments.out, arguments.clean, arguments.mended, arguments.decisions
    _check_arguments(arguments)
    data = AuditInput(arguments.source, **vars(arguments.data))
    if arguments.engine == "local":  # the workers of Ray read what is at URLs themselves
        for url in filter(None, map(url_of, data.places)):
            say(f"Fetching {url.partition('?')[0]}", file=sys.stderr)
        data = data.fetched()
    if arguments.overwrite and url_of(out) is None:
        _check_overwritten(out, data)
    settings = Settings(**vars(arguments.settings), **_known(arguments, data.fetched() if decisions else data))
    settings = replace(settings, joint=settings.joint or data.shares_a_space)
    command = shlex.join(["mispair", *sys.argv[1:]])
    try:
        if arguments.dry_run:
            return _forecast(data, settings, arguments)
        with _cluster(arguments.engine, arguments.address) as cluster:
            summary = audit_path(
                data, out, settings, clean=clean, mended=mended, tools=arguments.tools, cluster=cluster,
                overwrite=arguments.overwrite, console=console(), command=command,
            )  # fmt: skip
    except KeyboardInterrupt:
        raise StoppedError("The audit was stopped; run the command again to resume.", 130) from None
    if arguments.json:
        print_json({"out": shown(out), **summary.model_dump()})
    else:
        say(_in_words(summary, out, clean, mended))
        if decisions is not None:
            from mispair.reviewing.compare import compare

            say(compare(decisions, out).sentence())
    if summary.too_many_unreadable:
        _say_bad_code(summary.pairs - summary.scored, summary.pairs, f"{shown(out / 'pairs.csv')} and report.html say")
    if arguments.review:
        from mispair.cli.review import review

        return review(out, images=data.images)
    return BAD_CODE if summary.too_many_unreadable else 0


def _cluster(engine: str, address: str | None) -> AbstractContextManager[Any]:
    """The module of Ray, connected, or None for the local engine."""
    if engine == "local":
        return nullcontext()
    from mispair.auditing.ray_cluster import connect

    return connect(address)


def _check_address(engine: str, address: str | None) -> None:
    if engine != "ray" and address is not None:
        advice = "Give `engine=ray` as well, or leave it out."
        raise ConflictError("that of a Ray cluster", where="address", advice=advice)


def _check_overwritten(out: Path, data: AuditInput) -> None:
    """Refuse to replace an audit with decisions by one of other pairs: they would count for these.

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
    before, now = ([place.resolve() for place in one.places if place != one.ids] for one in (read_input(out), data))
    how = (
        f"choose another --out; or keep what was decided with `mispair review {shlex.quote(str(out))} "
        f"--export-decisions FILE`, and then delete {out / FILE}."
    )
    if before != now and (decided := len(read_current(out / FILE))):
        raise DataError(
            f"{out} has {'a decision' if decided == 1 else f'{decided:,} decisions'} on the pairs of "
            f"{before[0]}, which would count for those of {now[0]}, too; {how}"
        )
    check_decided(out, data, how)


def _known(arguments: AuditArguments, data: AuditInput) -> dict[str, Any]:
    """Answers of people, from a CSV and a review, without those on missing pairs."""
    from mispair.auditing.folder import read_checked
    from mispair.reviewing.compare import check_decided
    from mispair.reviewing.decisions import read_answers, read_partnered
    from mispair.reviewing.review import decided_rate

    checked, decisions = arguments.checked, arguments.decisions
    answers = {} if checked is None else read_checked(checked)
    if decisions is None:
        return {"checked": None if checked is None else answers}
    gone = check_decided(decisions, data, "audit without --decisions.")
    reviewed = {name: matched for name, matched in read_answers(decisions).items() if name not in gone}
    partnered = tuple(tuple(name for name in side if name not in gone) for side in read_partnered(decisions))
    # What a CSV says comes first.
    return {"checked": reviewed | answers, "partnered": partnered, "decided": decided_rate(decisions)}


def _check_arguments(arguments: AuditArguments) -> None:
    """Refuse contradicting flags, and URLs in place of local folders."""
    from mispair.pairs.remote import url_of

    _check_address(arguments.engine, arguments.address)
    local = {name: getattr(arguments, name) for name in ("clean", "mended", "checked", "decisions")}
    for name, place in {**local, "images": arguments.data.images, "cache": arguments.data.cache}.items():
        if place is not None and url_of(place) is not None:
            raise InvalidValueError(f"{url_of(place)} is a URL", where=name, expected="a path of this machine")
    out = arguments.out
    url = url_of(out)
    if url is None:
        return
    if url.startswith("http"):
        expected = "a folder of this machine, or of a store (s3://, gs://)"
        raise InvalidValueError(f"{url} cannot be written", where="out", expected=expected)
    if arguments.review or arguments.decisions is not None:
        what = f"`review` and `decisions` need a folder of this machine, and `out` is {url}"
        raise ConflictError(what, advice="Copy it here.")
    if arguments.source is not None and (out == arguments.source or arguments.source in out.parents):
        what = f"{url} lies in the audited data {url_of(arguments.source)}"
        raise ConflictError(what, where="out", advice="Give another `out`.")


def shown(path: Path) -> str:
    """A path, or its URL."""
    from mispair.pairs.remote import url_of

    return url_of(path) or str(path)


def _forecast(data: AuditInput, settings: Settings, arguments: AuditArguments) -> int:
    from mispair.auditing.blocks import find_blocks
    from mispair.auditing.forecast import forecast, forecast_blocks

    data.check()
    if arguments.engine == "ray":
        found = forecast_blocks(data, find_blocks(data), settings)
    else:
        found = forecast(data.open(settings.device), settings, replace(data.models, device=settings.device))
    if arguments.json:
        print_json(asdict(found))
    else:
        say("\n".join(found.lines()))
    return 0


def _in_words(summary: AuditSummary, out: Path, clean: Path | None, mended: Path | None) -> str:
    """The result in words."""
    from mispair.auditing.summary import NOTHING_IN_COMMON
    from mispair.pairs.remote import url_of
    from mispair.support.html import environment

    texts = environment(autoescape=False)
    texts.filters.update(count="{:,}".format, percent=percent)
    found = texts.get_template("audit.txt").render(
        summary=summary, nothing_in_common=NOTHING_IN_COMMON, report=shown(out / "report.html"),
        table=shown(out / "pairs.parquet"), quoted=shlex.quote(str(out)), is_local=url_of(out) is None,
        clean=clean, mended=mended,
    )  # fmt: skip
    return with_flags(found.rstrip().replace("\xa0", " "), {"encoder"})


@dataclass(frozen=True)
class EncodeArguments:
    """Turn images and captions into embeddings, or into region features. Run it again to resume."""

    source: Positional[Path]
    """CSV, TSV or parquet of images and captions, COCO or Karpathy JSON, JSON lines, tars, or folder of images
    and texts."""
    files: OmitArgPrefixes[FileOptions]
    out: Path
    """Folder for the embeddings in the clip-retrieval layout; with --grid, for the features in the SCAN layout.
    With --engine ray it may be at s3:// or gs://."""
    grid: OrNone[int] = None
    """Region features instead of one vector an image: 6 for 6 x 6 cells of the feature map. Captions stay words."""
    pca: OrNone[str] = None
    """With --grid, numbers a cell by principal components of the training images; or a basis.npz made before."""
    dev: OrNone[float] = None
    """With --grid, the share of the images that validate, or how many; by default a tenth, at most 5,000. A
    column split of the source comes first."""
    test: OrNone[float] = None
    """With --grid, the share of the images that test, or how many; by default as for --dev."""
    split: OrNone[str] = None
    """With --grid, write all pairs as this split."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    overwrite: bool = False
    """Start over in a folder that was made from something else."""
    engine: Literal["local", "ray"] = "local"
    """What encodes: this process, or the machines of a Ray cluster."""
    address: OrNone[str] = None
    """Address of the Ray cluster, such as auto or ray://host:10001; by default RAY_ADDRESS, else this machine."""
    json: bool = False
    """Print the metrics as JSON."""


def encode(arguments: EncodeArguments) -> int:
    """Turn images and captions into embeddings, or into region features. Run it again to resume."""
    from mispair.encoders.cache import writable_cache
    from mispair.encoders.encode import EMBEDDINGS, Encoders, encode_to_folder
    from mispair.encoders.regions import REGIONS
    from mispair.pairs.layouts.opening import open_raw
    from mispair.pairs.remote import url_of
    from mispair.support.owned_folder import check_place

    grid, out, files, device = arguments.grid, arguments.out, arguments.files, arguments.device
    splits = arguments.dev, arguments.test, arguments.split
    if grid is None and (arguments.pca, *splits) != (None, None, None, None):
        advice = "Give `grid=6`, or leave them out."
        raise ConflictError("`pca`, `dev`, `test` and `split` are for region features", advice=advice)
    _check_address(arguments.engine, arguments.address)
    if url_of(out) is None:  # before the encoders are loaded
        check_place(out, EMBEDDINGS if grid is None else REGIONS, overwrite=arguments.overwrite)
    if arguments.engine == "ray":
        return _said(arguments, _encode_by_ray(arguments))
    if url_of(out) is not None:
        expected = "a path of this machine, or `engine=ray`"
        raise InvalidValueError(f"{url_of(out)} is a URL", where="out", expected=expected)
    pairs = open_raw(arguments.source, files.images, files.columns, allow_outside=files.allow_outside)
    for note in pairs.notes:
        say(f"Note: {note}", file=sys.stderr)
    place = writable_cache(files.cache)
    if grid is None:
        encoders = Encoders(files.image_model, files.text_model, device).views()
        outcome = encode_to_folder(pairs, out, encoders, place, overwrite=arguments.overwrite, console=console())
    else:
        from mispair.encoders.encoders import GridEncoder, image_encoder
        from mispair.encoders.regions import encode_regions
        from mispair.pairs.splits import SplitRule

        outcome = encode_regions(
            pairs, out, GridEncoder(image_encoder(files.image_model, device), grid), place,
            pca=_projection(arguments.pca), splits=SplitRule(*splits), overwrite=arguments.overwrite, console=console(),
        )  # fmt: skip
    return _said(arguments, outcome)


def _encode_by_ray(arguments: EncodeArguments) -> Outcome:
    """Encode block by block on a cluster."""
    from mispair.auditing.blocks import find_blocks, state_of
    from mispair.auditing.inputs import AuditInput
    from mispair.auditing.output_store import encoded_folder
    from mispair.auditing.ray_encoding import Encoding, encode_blocks
    from mispair.encoders.encode import request_of

    if arguments.grid is not None:
        raise ConflictError("region features", where="engine", expected="`engine=local`, or no `grid`")
    data = AuditInput(arguments.source, **vars(arguments.files))
    data.check()
    blocks = find_blocks(data)
    if not blocks[0].raw:
        raise ConflictError("vectors", where=arguments.source, expected="images and captions")
    encoders = replace(data.models, device=arguments.device)
    loaded = replace(encoders, device="cpu").views()  # raises before any work
    request = request_of(loaded) | {"the images and captions": [state_of(data, blocks)]}
    with (
        _cluster(arguments.engine, arguments.address) as cluster,
        encoded_folder(arguments.out, request, overwrite=arguments.overwrite) as place,
    ):
        return encode_blocks(cluster, Encoding(data, blocks, place, encoders), console=console())


def _said(arguments: EncodeArguments, outcome: Outcome) -> int:
    """Print the outcome; return the exit code."""
    out, grid = arguments.out, arguments.grid
    if arguments.json:
        print_json({"out": shown(out), **asdict(outcome)})
    else:
        say(with_flags("\n".join(outcome.lines()), {"allow_outside"}))
        say(f"{'Embeddings' if grid is None else 'Region features'}: {shown(out)}")
    if outcome.too_many_bad:
        listed = "metadata/" if grid is None else "rows.parquet"
        _say_bad_code(outcome.bad, outcome.rows, f"{shown(out / listed)} says")
    return BAD_CODE if outcome.too_many_bad else 0


def _say_bad_code(bad: int, pairs: int, listed: str) -> None:
    """Explain the exit code, on stderr: results on stdout may be JSON."""
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
