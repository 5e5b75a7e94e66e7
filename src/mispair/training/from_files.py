"""Train from images and captions, from a review of an audit, or from a data set."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mispair.compute.devices import pick_device
from mispair.compute.distributed import connect
from mispair.config import Config
from mispair.encoders.options import Files
from mispair.errors import ChangedError, ConflictError
from mispair.models import FOR_SETS, FOR_VECTORS, find
from mispair.pairs.layouts import opening
from mispair.support.files import Json, read_json
from mispair.support.owned_folder import changes
from mispair.training.defaults import check_method
from mispair.training.fit import TrainedRun, train_and_test
from mispair.training.preparing import FEATURES, MADE_FROM, open_work, prepare
from mispair.training.run_folder import check_place, read_result
from mispair.training.settings import override
from mispair.training.trainer import check_ranks

RECOMMENDED = "mend"


def train_from_files(
    source: Path,
    config: Config,
    out: Path,
    console: Console | None = None,
    given: Collection[str] = (),
    *,
    files: Files | None = None,
) -> TrainedRun:
    """Train and test a model from files; the same call resumes after an interruption.

    The source is any input of `mispair audit`, or its output: then the pairs as a review leaves them. Settings that are
    not `given` follow the data and the device; the method is then the recommended one.
    """
    files = files or Files()
    if "method" not in given:
        config = replace(config, method=RECOMMENDED)
    with connect(config.device) as ranks:
        check_ranks(config, ranks)
        check_method(config, given)
        pick_device(config.device)
        ranks.by_first(lambda: check_place(out))
        work = open_work(source, files, config)
        data_set, data = (source, source) if work is None else (work.data_set, (out / FEATURES).resolve())
        model = _model_for(config, given, data_set, grid=files.grid is not None)
        config = opening.with_absolute_paths(override(config, {"data": str(data), **model}))
        request = {} if work is None else work.request()
        ranks.by_first(lambda: _check_same(out, request))
        if work is not None and ranks.by_first(lambda: read_result(out)) is None:
            ranks.by_first(lambda: prepare(work, request, config, out, console))
        return train_and_test(config, out, console, given)


def _model_for(config: Config, given: Collection[str], data_set: Path | None, *, grid: bool) -> dict[str, str]:
    """Choose the model for a data set or for new features, unless it was given."""
    if data_set is not None:
        return {} if "model" in given or opening.layout(data_set) != "vectors" else {"model": FOR_VECTORS}
    if not grid:
        found = "images and captions are vectors without `grid`"
        opening.refuse_for_vectors(found, config.vocab, config.dev_protocol, config.captions_per_image)
    if "model" not in given:
        return {"model": FOR_SETS if grid else FOR_VECTORS}
    if find(config.model).takes_vectors == grid:
        how = "Leave out `grid`" if grid else "Give `grid=6` for region features"
        what = "a model for vectors" if grid else "a model for region features"
        raise ConflictError(f"{config.model}, {what}", where="model", advice=f"{how}, or give another `model`.")
    return {}


def _check_same(out: Path, request: Mapping[str, Json]) -> None:
    """Raise if the features of a run have another source, even in a finished run."""
    found, wanted = read_json(out / MADE_FROM), json.loads(json.dumps(request))
    if (out / FEATURES).exists() and found != wanted:
        different = changes(found if isinstance(found, dict) else {}, wanted)
        what = f"a training on other files or decisions, or with other encoders ({different})"
        raise ChangedError(what, where=out, advice="Give another `out`.")
