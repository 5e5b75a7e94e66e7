"""A suite: the trainings of a comparison, as a TOML file.

    title = "Flickr8k"
    data = "f8k_precomp"

    [[part]]
    name = "noise"
    title = "Retrieval under noise"
    kind = "retrieval"
    noise_ratio = [0.2, 0.4]
    [part.rows]
    plain = "f8k/plain-vse"
    REPAIR = "f8k/repair-vse"
    "hard + drop" = { recipe = "f8k/repair-vse", labels = "hard", noisy = "drop" }

A part is one table or figure. Its rows are recipes, some with other settings; each is trained at every noise ratio, for
every seed, and in a sweep with every value of one setting. A training that several parts need is made once: a cell is
identified by its settings, not by where it is shown.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass

from mispair.config import Config, find_packaged, read_toml
from mispair.errors import InvalidValueError, UnknownNameError
from mispair.support.formatting import slug
from mispair.support.validation import sentences
from mispair.training.run_folder import FREE
from mispair.training.settings import every_setting, override, read_recipe

PartKind = Literal["retrieval", "ablation", "sweep", "cost", "validation", "labels", "eta", "examples"]
LOCATIONS = ("data", "device", "vocab", "noise_file")  # settings that say where things are, not what is trained
NOT_PART_OF_A_CELL = (*FREE, *LOCATIONS)
OF_THE_SUITE = {  # settings that a row cannot have, and how they are given
    "noise_ratio": "noise_ratio = [...] of the part",
    "seed": "`seeds`",
    "data": "`data`",
    "device": "`device`",
    "noise_file": "`noise_file`",
}
LONGEST_NAME = 200  # characters of a folder's name, before noise ratio, seed and hash
FORBID = ConfigDict(extra="forbid")
NoiseRatio = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
T = TypeVar("T")


@dataclass(frozen=True)
class Cell:
    """One training of a suite."""

    name: str  # of its folder
    label: str  # of its row in the first part that has it
    config: Config


@dataclass(frozen=True, config=FORBID)
class SuiteRow:
    """A row of a table: a recipe and changed settings."""

    label: str
    recipe: str  # as the suite names it
    settings: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None  # of a recipe that does not come with mispair

    @cached_property
    def config(self) -> Config:
        """The settings of the recipe itself."""
        return read_recipe(self.file or self.recipe)


@dataclass(frozen=True)
class CellKey:
    """Position of a cell in a part."""

    row: str
    noise_ratio: float
    value: Any  # of the setting that is swept; None elsewhere
    seed: int


def _rows(content: Any) -> Any:
    """The rows of a TOML table: each a recipe, or a table of a recipe and settings."""
    if not isinstance(content, dict):
        return content
    rows = []
    for label, value in content.items():
        if not label.strip():
            raise ValueError(f"the row of {value!r} has no name")
        table = {"recipe": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or not isinstance(table.get("recipe"), str):
            raise ValueError(f'row {label} is {value!r} but must be a recipe, or {{ recipe = "...", epochs = 3 }}')
        settings = {name: setting for name, setting in table.items() if name != "recipe"}
        _refuse_of_the_suite(settings, f"row {label}: ")
        rows.append({"label": label, "recipe": table["recipe"], "settings": settings})
    return rows


def _refuse_of_the_suite(settings: Iterable[str], where: str = "") -> None:
    for name in settings:
        if name in OF_THE_SUITE:
            raise ValueError(f'{where}"{name}" is not a setting of a row; it is given by {OF_THE_SUITE[name]}')


@dataclass(frozen=True, config=FORBID)
class Part:
    """One table or figure."""

    name: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
    title: str
    kind: PartKind
    rows: Annotated[tuple[SuiteRow, ...], Field(min_length=1), BeforeValidator(_rows)]
    noise_ratio: Annotated[tuple[NoiseRatio, ...], Field(min_length=1)] = (0.0,)
    setting: str | None = None  # that is swept
    values: Annotated[tuple[Any, ...], Field(min_length=1)] = (None,)
    paper: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # published rSum by row and noise ratio
    folds: Annotated[bool, Strict()] = False  # the mean over five folds of 1,000 test images: MS-COCO 1K

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        swept = {self.setting is not None, self.values != (None,)}
        if swept != {self.kind == "sweep"}:
            raise ValueError('a sweep, and nothing else, needs "setting" and "values"')
        _refuse_of_the_suite([self.setting] if self.setting else [])
        for label, rsums in self.paper.items():
            if label not in [row.label for row in self.rows] or len(rsums) != len(self.noise_ratio):
                raise ValueError(f'paper: "{label}" must be a row, with a number for each noise ratio')
        return self

    def cells(self, suite: Suite, seeds: int) -> dict[CellKey, Cell]:
        """All trainings of this part."""
        return {
            CellKey(row.label, noise_ratio, value, seed): suite.cell(row, noise_ratio, {self.setting: value}, seed)
            for noise_ratio in self.noise_ratio
            for row in self.rows
            for value in self.values
            for seed in range(seeds)
        }


@dataclass(frozen=True, config=FORBID)
class Suite:
    """A comparison on one data set."""

    name: str
    title: str
    data: str
    parts: tuple[Part, ...]
    noise_file: str | None = None  # index files to use, with {ratio} in their name
    device: str = "auto"

    def noise_file_of(self, noise_ratio: float) -> str | None:
        """The index file of a noise ratio."""
        return self.noise_file.replace("{ratio}", f"{noise_ratio:g}") if self.noise_file and noise_ratio else None

    def cell(self, row: SuiteRow, noise_ratio: float, swept: Mapping[str | None, Any], seed: int) -> Cell:
        settings = {**row.settings, **{name: value for name, value in swept.items() if name is not None}}
        recipe = row.config
        config = override(recipe, settings, f"{self.name}: {row.label}")
        before, after = every_setting(recipe), every_setting(config)
        changed = {name for name in settings if after[name] != before[name]} - set(FREE)
        config = replace(config, data=self.data, device=self.device, noise_ratio=noise_ratio, seed=seed)
        config = replace(config, noise_file=self.noise_file_of(noise_ratio))
        differences = sorted(f"{name.replace('_', '-')}-{after[name]}" for name in changed)
        start = "-".join([Path(row.recipe).stem, *differences]).replace("/", "-").replace(" ", "")[:LONGEST_NAME]
        name = f"{start}-noise-{noise_ratio * 100:.0f}-seed-{seed}-{digest(config)[:8]}"
        return Cell(name, row.label, config)

    def cells(self, seeds: int, only: Sequence[str] = ()) -> list[Cell]:
        """All trainings, each once, seed by seed: a stopped suite has complete tables of the first seeds.

        `only` are methods, recipes, rows or parts; all if empty.
        """
        named: list[tuple[set[str], Cell]] = []
        for part in self.parts:
            recipes = {row.label: row.recipe for row in part.rows}
            for key, cell in part.cells(self, seeds).items():
                recipe = recipes[key.row]
                named.append(({part.name, key.row, cell.config.method, recipe, Path(recipe).stem}, cell))
        known = set().union(*(names for names, _ in named))
        wanted = set(only)
        if unknown := sorted(wanted - known):
            raise UnknownNameError("; ".join(unknown), where="only", expected=f"some of: {'; '.join(sorted(known))}")
        chosen = dict[str, Cell]()
        for names, cell in named:
            if not wanted or names & wanted:
                chosen.setdefault(cell.name, cell)
        return sorted(chosen.values(), key=lambda cell: cell.config.seed)


def digest(config: Config) -> str:
    """A hash of the training, independent of the place of the data.

    Only settings that differ from the default count, so a new setting changes no hash.
    """
    defaults = every_setting(Config())
    changed = {name: value for name, value in every_setting(config).items() if value != defaults[name]}
    settings = {name: value for name, value in changed.items() if name not in NOT_PART_OF_A_CELL}
    settings["noise_file"] = config.noise_file is not None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_suite(path: str | Path) -> Suite:
    """Read a suite, by file name or by the short name of a built-in one, such as `f8k`."""
    file = find_packaged("suite", path)
    content = read_toml(file)
    parts = content.pop("part", [])
    if not isinstance(parts, list) or not parts:
        raise InvalidValueError("no [[part]]", where=file, expected="one for each table or figure")
    if unknown := sorted(content.keys() & {"name", "parts", "device"}):  # fields that no file can set
        raise UnknownNameError(f'unknown key "{unknown[0]}"', where=file)
    read = [_read_part(part, number, file) for number, part in enumerate(parts, start=1)]
    suite = _validated(Suite, {**content, "name": file.stem, "parts": read}, file)
    names = [slug(part.name) for part in suite.parts]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidValueError(
            f"several parts are called {', '.join(doubled)}, apart from punctuation and case", where=file
        )
    suite.cells(seeds=1)  # refuses recipes and settings that do not exist
    return suite


def _read_part(content: Any, number: int, file: Path) -> Part:
    if not isinstance(content, dict):
        raise InvalidValueError(f"part {number} is {content!r}", where=file, expected="a table")
    name = str(content.get("name", "")).strip() or number
    part = _validated(Part, {"title": content.get("name"), **content}, file, f"part {name}: ")
    return replace(part, rows=tuple(replace(row, file=_own_file(row.recipe, file.parent)) for row in part.rows))


def _own_file(recipe: str, folder: Path) -> Path | None:
    """The user's own recipe: in a results folder, beside the suite, or relative to the working directory."""
    candidates = (folder / kept_as(recipe), folder / recipe, Path(recipe))
    return next((path for path in candidates if os.path.isfile(path)), None)


def _validated(kind: type[T], content: dict[str, Any], file: Path, which: str = "") -> T:
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        raise InvalidValueError(f"{which}{sentences(error)}", where=file) from None


def kept_as(recipe: str) -> Path:
    """Place of a user's own recipe: a copy inside the results folder.

    >>> kept_as("mine.toml").as_posix(), kept_as("../mine.toml").as_posix(), kept_as("/a/mine.toml").as_posix()
    ('mine.toml', 'up/mine.toml', 'root/a/mine.toml')
    """
    names = {"..": "up", Path(recipe).anchor: "root"}
    return Path(*(names.get(part, part) for part in Path(recipe).parts))
