"""A suite: which trainings make the tables and figures of a comparison, as a TOML file.

    title = "Flickr8k"
    data = "f8k_precomp"

    [[part]]
    name = "noise"
    title = "Retrieval under noise"
    kind = "retrieval"
    noise = [0.2, 0.4]
    [part.rows]
    plain = "f8k/plain-vse"
    REPAIR = "f8k/repair-vse"
    "hard + drop" = { recipe = "f8k/repair-vse", labels = "hard", noisy = "drop" }

A part is one table or figure. Its rows are recipes, with other settings where asked for; each is trained at every share
of noise, for every seed, and in a sweep with every value of one setting. Trainings that several parts ask for are made
once: a cell is known by its settings, not by where it is shown.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from mispair.bench import paper
from mispair.config import RENAMED, Config, find_packaged, flat, override, read_recipe
from mispair.errors import ConfigError
from mispair.support.formatting import slug
from mispair.training.run_folder import FREE

PartKind = Literal["retrieval", "ablation", "sweep", "cost", "validation", "labels", "eta", "examples"]
WHERE = ("data", "device", "vocab", "noise_file")  # where things are, not what is trained
NOT_PART_OF_A_CELL = (*FREE, *WHERE)
OF_THE_SUITE = {  # settings that a row cannot have, and how they are given
    "noise_ratio": "noise = [...]",
    "seed": "--seeds",
    "data": "--data",
    "device": "--device",
    "noise_file": "--noise-file",
}
LONGEST = 200  # letters of a folder's name


@dataclass(frozen=True)
class Cell:
    """One training of a suite."""

    name: str  # of its folder
    label: str  # of its row, as the first part that asks for it has it
    config: Config


@dataclass(frozen=True)
class Row:
    """A line of a table: a recipe and what is different from it."""

    label: str
    recipe: str  # as the suite names it
    settings: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None  # of a recipe that does not come with mispair

    def read(self) -> Config:
        return read_recipe(self.file or self.recipe)


@dataclass(frozen=True)
class CellKey:
    """Where a cell stands in a part."""

    row: str
    noise: float
    value: Any  # of the setting that is swept; None elsewhere
    seed: int


@dataclass(frozen=True)
class Part:
    """One table or figure."""

    name: str
    title: str
    kind: PartKind
    rows: tuple[Row, ...]
    noise: tuple[float, ...] = (0.0,)
    setting: str | None = None  # that is swept
    values: tuple[Any, ...] = (None,)
    paper: str | None = None  # name of the table of the paper whose numbers stand beside ours
    folds: bool = False  # the mean over five slices of 1,000 test images: MS-COCO 1K

    def cells(self, suite: Suite, seeds: int) -> dict[CellKey, Cell]:
        """All trainings of this part."""
        return {
            CellKey(row.label, noise, value, seed): suite.cell(row, noise, {self.setting: value}, seed)
            for noise in self.noise
            for row in self.rows
            for value in self.values
            for seed in range(seeds)
        }


@dataclass(frozen=True)
class Suite:
    """A comparison on one data set."""

    name: str
    title: str
    data: str
    parts: tuple[Part, ...]
    paper_data: str | None = None  # name of the paper's data set whose numbers are shown though it is another one
    noise_file: str | None = None  # index files to use, with {ratio} in their name
    device: str = "auto"
    images: int = 29_000  # for training, in the data set that it is meant for

    def noise_file_of(self, noise: float) -> str | None:
        """The index file of a share of noise."""
        return self.noise_file.replace("{ratio}", f"{noise:g}") if self.noise_file and noise else None

    def cell(self, row: Row, noise: float, swept: Mapping[str | None, Any], seed: int) -> Cell:
        settings = {**row.settings, **{name: value for name, value in swept.items() if name is not None}}
        recipe = row.read()
        config = override(recipe, settings, f"{self.name}: {row.label}")
        before, after = flat(recipe), flat(config)
        other = [name for name in settings if after[name] != before[name]]
        config = replace(config, data=self.data, device=self.device, noise_ratio=noise, seed=seed)
        config = replace(config, noise_file=self.noise_file_of(noise))
        said = [f"{name.replace('_', '-')}-{after[name]}" for name in sorted(set(other) - set(FREE))]
        start = "-".join([Path(row.recipe).stem, *said]).replace("/", "-").replace(" ", "")[:LONGEST]
        name = f"{start}-noise-{noise * 100:.0f}-seed-{seed}-{digest(config)[:8]}"
        return Cell(name, row.label, config)

    def cells(self, seeds: int, only: Sequence[str] = ()) -> list[Cell]:
        """All trainings, each once, seed by seed: so a suite that is stopped has complete tables of the first seeds.

        Args:
            seeds: How many of each.
            only: Methods, recipes, rows or parts; all if empty.

        Raises:
            ConfigError: There is nothing of such a name.
        """
        known, chosen = set[str](), dict[str, Cell]()
        for part in self.parts:
            for place, cell in part.cells(self, seeds).items():
                recipe = next(row.recipe for row in part.rows if row.label == place.row)
                names = {part.name, place.row, cell.config.method, recipe, Path(recipe).stem}
                known |= names
                if not only or names & set(only):
                    chosen.setdefault(cell.name, cell)
        if strangers := sorted(set(only) - known):
            raise ConfigError(
                f"--only: nothing here is called {', '.join(strangers)}; there are {', '.join(sorted(known))}."
            )
        return sorted(chosen.values(), key=lambda cell: cell.config.seed)


def digest(config: Config) -> str:
    """A hash of what is trained, the same wherever the data is.

    Only settings that are not the default count, by the names that they had first: so neither a new setting nor a new
    name changes a hash.
    """
    usual, former = flat(Config()), {new: old for old, new in RENAMED.items()}
    own = {former.get(name, name): value for name, value in flat(config).items() if value != usual[name]}
    settings = {name: value for name, value in own.items() if name not in NOT_PART_OF_A_CELL}
    settings["noise_file"] = config.noise_file is not None
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_suite(path: str | Path) -> Suite:
    """Reads a suite, by file name or by the short name of one that comes with mispair, such as `f8k`.

    Raises:
        ConfigError: It is not there, or is not a suite; the message says what is wrong and where.
    """
    file = find_packaged("suite", path)
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}.") from None
    where = str(file)
    parts = found.pop("part", [])
    _refuse_unknown(found, ("title", "data", "paper_data", "noise_file", "images"), where)
    for name in ("title", "data"):
        if not isinstance(found.get(name), str):
            raise ConfigError(f'{where}: "{name}" must be given, as a text.')
    for name in ("paper_data", "noise_file"):
        if not isinstance(found.get(name, ""), str):
            raise ConfigError(f'{where}: "{name}" is {found[name]!r}; expected a text.')
    if not _is_number(found.get("images", 1)) or found.get("images", 1) < 1:
        raise ConfigError(f'{where}: "images" is {found["images"]!r}; expected how many there are for training.')
    if not isinstance(parts, list) or not parts:
        raise ConfigError(f"{where}: there is no [[part]]; each table or figure is one.")
    suite = Suite(name=file.stem, parts=tuple(_part(part, file) for part in parts), **found)
    names = [slug(part.name) for part in suite.parts]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{where}: several parts are called {', '.join(doubled)}, but for signs and large letters.")
    suite.cells(seeds=1)  # refuses recipes and settings that are not there
    return suite


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _part(found: Any, file: Path) -> Part:
    where = str(file)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ConfigError(f'{where}: every [[part]] needs a "name", as a text.')
    where = f"{where}: part {found['name']}"
    fields = ("name", "title", "kind", "rows", "noise", "setting", "values", "paper", "folds")
    _refuse_unknown(found, fields, where)
    if found.get("kind") not in get_args(PartKind):
        raise ConfigError(f'{where}: "kind" is {found.get("kind")!r}; expected one of {", ".join(get_args(PartKind))}.')
    rows = found.get("rows")
    if not isinstance(rows, dict) or not rows:
        raise ConfigError(
            f'{where}: there are no rows; expected [part.rows] with lines such as REPAIR = "f8k/repair-vse".'
        )
    noise = found.get("noise", [0.0])
    if not isinstance(noise, list) or not noise or not all(_is_number(x) and 0 <= x <= 1 for x in noise):
        raise ConfigError(f'{where}: "noise" is {noise!r}; expected shares between 0 and 1, such as [0.2, 0.4].')
    setting, values = found.get("setting"), found.get("values")
    if (found["kind"] == "sweep") != (setting is not None) or (setting is None) != (values is None):
        raise ConfigError(f'{where}: a sweep, and nothing else, needs "setting" and "values".')
    if setting is not None and not isinstance(setting, str):
        raise ConfigError(f'{where}: "setting" is {setting!r}; expected the name of one, such as "tau".')
    _refuse_of_the_suite([setting] if setting else [], where)
    if not isinstance(found.get("folds", False), bool):
        raise ConfigError(f'{where}: "folds" is {found["folds"]!r}; expected true or false.')
    if (table := found.get("paper")) is not None and table not in paper.tables():
        raise ConfigError(f'{where}: "paper" is {table!r}; expected one of {", ".join(paper.tables())}.')
    if values is not None and (not isinstance(values, list) or not values):
        raise ConfigError(f'{where}: "values" is {values!r}; expected a list of at least one.')
    return Part(
        name=found["name"],
        title=str(found.get("title", found["name"])),
        kind=found["kind"],
        rows=tuple(_row(label, row, where, file.parent) for label, row in rows.items()),
        noise=tuple(float(share) for share in noise),
        setting=setting,
        values=(None,) if values is None else tuple(values),
        paper=found.get("paper"),
        folds=found.get("folds", False),
    )


def _row(label: str, found: Any, where: str, folder: Path) -> Row:
    if isinstance(found, str):
        found = {"recipe": found}
    if not isinstance(found, dict) or not isinstance(found.get("recipe"), str):
        raise ConfigError(f'{where}: row {label} is {found!r}; expected a recipe, or {{ recipe = "...", epochs = 3 }}.')
    recipe = found["recipe"]
    settings = {name: value for name, value in found.items() if name != "recipe"}
    _refuse_of_the_suite(list(settings), f"{where}: row {label}")
    places = (folder / kept_as(recipe), folder / recipe, Path(recipe))
    own = next((path for path in places if path.is_file()), None)
    return Row(label, recipe, settings, own)


def kept_as(recipe: str) -> Path:
    """Where a results folder keeps somebody's own recipe: inside it, wherever the recipe comes from.

    >>> kept_as("mine.toml").as_posix(), kept_as("../mine.toml").as_posix(), kept_as("/a/mine.toml").as_posix()
    ('mine.toml', 'up/mine.toml', 'root/a/mine.toml')
    """
    names = {"..": "up", Path(recipe).anchor: "root"}
    return Path(*(names.get(part, part) for part in Path(recipe).parts))


def _refuse_of_the_suite(settings: Sequence[str], where: str) -> None:
    for name in settings:
        if name in OF_THE_SUITE:
            raise ConfigError(f'{where}: "{name}" is not a setting of a row; it is given by {OF_THE_SUITE[name]}.')


def _refuse_unknown(found: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    if strangers := sorted(set(found) - set(known)):
        raise ConfigError(f"{where}: unknown key {', '.join(strangers)}; the keys are {', '.join(known)}.")
