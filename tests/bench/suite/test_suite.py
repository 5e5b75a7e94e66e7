"""Suites: which trainings they ask for, and what is refused."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mispair.bench.suite.suite import CellKey, Suite, SuiteRow, digest, read_suite
from mispair.config import Config, find_packaged
from mispair.errors import ConfigError, InvalidValueError, MispairError, UnknownNameError
from mispair.training.settings import override, read_recipe
from refusals import refused

PACKAGED = ("shapes", "f8k", "coco-small", "vectors", "f30k", "coco", "cc152k")
PART = '[[part]]\nname = "a"\nkind = "retrieval"\nnoise_ratio = [0.2, 0.4]\n[part.rows]\n'
SWEEP = '[[part]]\nname = "a"\nkind = "sweep"\nsetting = "tau"\nvalues = [0.1]\n[part.rows]\nx = "shapes/repair"\n'
MANY = {
    "checkpoint_seconds": 7.0, "embed_size": 9, "word_size": 9, "sim_size": 9, "dropout": 0.11, "batch_size": 9,
    "epochs": 9, "lr": 0.0123, "weight_decay": 0.0123, "grad_clip": 9.0, "margin": 0.123, "negatives_start": 9,
    "negatives_end": 8, "hardening_steps": 999, "bank_size": 999, "gamma_share": 0.123,
    "eta": 0.123, "neighbours": 9, "margin_base": 9.5,
}  # fmt: skip
HEAD = 'title = "T"\ndata = "shapes"\n'


def suite_of(tmp_path: Path, text: str) -> Suite:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return read_suite(file)


@pytest.mark.parametrize("name", PACKAGED)
def test_suites_that_come_with_mispair_can_be_read(name: str) -> None:
    suite = read_suite(name)
    cells = suite.cells(seeds=2)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(suite.cells(seeds=1))
    assert len({digest(cell.config) for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.config.data == suite.data


def test_the_docs_say_how_many_trainings_each_suite_has() -> None:
    page = (Path(__file__).parents[3] / "docs/compare.md").read_text(encoding="utf-8")
    told = {name: int(count) for name, count in re.findall(r"^\| `([\w-]+)` \| [^|]+ \| (\d+) \|", page, re.M)}
    assert told == {name: len(read_suite(name).cells(seeds=1)) for name in PACKAGED}


def test_all_systems_of_the_paper_are_there() -> None:
    noise = read_suite("f30k").parts[0]
    assert [row.label for row in noise.rows] == ["SCAN", "SGR", "VSE-inf", "NCR", "DECL", "BiCro", "MSCN", "REPAIR"]
    assert noise.noise_ratio == (0.2, 0.4, 0.6)


def test_a_cell_is_a_recipe_with_other_settings(tmp_path: Path) -> None:
    rows = 'plain = "shapes/plain"\nshort = { recipe = "shapes/repair", epochs = 1, tau = 0.5 }\n'
    suite = suite_of(tmp_path, HEAD + PART + rows)
    cells = suite.parts[0].cells(suite, seeds=2)
    assert len(cells) == 2 * 2 * 2
    config = cells[CellKey("short", 0.4, None, 1)].config
    assert config == override(read_recipe("shapes/repair"), {"epochs": 1, "tau": 0.5, "noise_ratio": 0.4, "seed": 1})
    assert cells[CellKey("short", 0.4, None, 1)].name.startswith("repair-epochs-1-tau-0.5-noise-40-seed-1-")


def test_trainings_that_several_parts_need_are_made_once(tmp_path: Path) -> None:
    sweep = (
        '[[part]]\nname = "tau"\nkind = "sweep"\nnoise_ratio = [0.4]\nsetting = "tau"\nvalues = [0.15, 0.3]\n'
        '[part.rows]\nREPAIR = "shapes/repair"\n'
    )
    same = '[part.rows]\nREPAIR = { recipe = "shapes/repair", labels = "rank" }\n'
    ablation = f'[[part]]\nname = "ablation"\nkind = "ablation"\nnoise_ratio = [0.4]\n{same}'
    suite = suite_of(tmp_path, HEAD + PART + 'REPAIR = "shapes/repair"\n' + sweep + ablation)
    assert len(suite.cells(seeds=1)) == 3  # at 20 % and at 40 %, and with tau 0.3
    assert [cell.config.seed for cell in suite.cells(seeds=2)] == [0, 0, 0, 1, 1, 1]


def test_only_some(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, HEAD + PART + 'plain = "shapes/plain"\nREPAIR = "shapes/repair"\n')
    assert {cell.config.method for cell in suite.cells(1, ["repair"])} == {"repair"}
    assert {cell.config.method for cell in suite.cells(1, ["shapes/plain"])} == {"plain"}
    assert {cell.config.method for cell in suite.cells(1, ["REPAIR"])} == {"repair"}
    assert len(suite.cells(1, ["a"])) == 4
    with refused(UnknownNameError, "only", "ncr"):
        suite.cells(1, ["plain", "ncr"])


def test_rows_with_commas_in_their_names_can_be_chosen() -> None:
    suite = read_suite("vectors")
    chosen = suite.cells(1, ["plain, audit first", "Mend, matched pairs only"])
    assert {cell.label for cell in chosen} == {"plain, audit first", "Mend, matched pairs only"}
    with refused(UnknownNameError, "only", "plain, audit first"):
        suite.cells(1, ["audit first"])


def test_a_digest_depends_on_what_is_trained_not_where() -> None:
    config = Config()
    for same in ({"data": "elsewhere"}, {"device": "cpu"}, {"checkpoint_seconds": 1.0}, {"vocab": "words.json"}):
        assert digest(override(config, same)) == digest(config)
    for other in ({"seed": 1}, {"tau": 0.2}, {"noise_ratio": 0.1}, {"noise_file": "x.npy"}):
        assert digest(override(config, other)) != digest(config)
    assert digest(replace(config, noise_file="a.npy")) == digest(replace(config, noise_file="b.npy"))


def test_noise_files_are_named_by_their_ratio(tmp_path: Path) -> None:
    suite = replace(suite_of(tmp_path, HEAD + PART + 'plain = "shapes/plain"\n'), noise_file="n/{ratio}.npy")
    row = SuiteRow("plain", "shapes/plain")
    assert suite.cell(row, 0.4, {}, 0).config.noise_file == "n/0.4.npy"
    assert suite.cell(row, 0.0, {}, 0).config.noise_file is None


ROW = 'x = "shapes/plain"\n'


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (HEAD.replace('"T"', "3") + PART + ROW, "title is 3"),
        (HEAD, "[[part]]"),
        (HEAD + "[[part]]\n", '"name"'),
        (HEAD + '[[part]]\nname = "a"\nkind = "pie"\n', "'pie'"),
        (HEAD + '[[part]]\nname = "a"\nkind = "eta"\n', '"rows"'),
        (HEAD + PART.replace("0.4", "4") + ROW, "noise_ratio[2] is 4"),
        (HEAD + PART + "x = 3\n", "row x is 3"),
        (HEAD + PART.replace("retrieval", "sweep") + ROW, '"setting"'),
        (HEAD + PART.replace("noise_ratio", 'setting = "tau"\nnoise_ratio') + ROW, '"setting"'),
        (HEAD + 2 * (PART + ROW), "called a"),
        (HEAD + PART + ROW + PART.replace('"a"', '"A!"') + ROW, "called a"),
        (HEAD + PART + 'x = { recipe = "shapes/plain", seed = 3 }\n', "`seeds`"),
        (HEAD + PART + 'x = { recipe = "shapes/plain", noise_ratio = 0.1 }\n', "noise_ratio = [...]"),
        (HEAD + SWEEP.replace("tau", "noise_ratio"), '"noise_ratio"'),
        (HEAD + SWEEP.replace('"tau"', "3"), "setting is 3"),
        (HEAD + SWEEP.replace('"tau"', '["tau"]'), "setting"),
        (HEAD + "noise_file = 3\n" + PART + ROW, "noise_file is 3"),
        (HEAD + PART.replace("0.4", "true") + ROW, "noise_ratio[2] is True"),
        (HEAD + PART.replace("noise_ratio", 'folds = "no"\nnoise_ratio') + ROW, "folds is 'no'"),
        (HEAD + PART + ROW + "[part.paper]\ny = [1.0, 2.0]\n", 'paper: "y"'),
        (HEAD + PART + ROW + "[part.paper]\nx = [1.0]\n", 'paper: "x"'),
        (HEAD + PART.replace('"a"', '" "') + ROW, "name is ' '"),
        (HEAD + PART.replace("0.2, 0.4", "nan") + ROW, "noise_ratio[1] is nan"),
        (HEAD + PART.replace("0.4", "inf") + ROW, "noise_ratio[2] is inf"),
        (HEAD + SWEEP.replace("[0.1]", "[]"), "values is []"),
        (HEAD + PART + '"" = "shapes/plain"\n', "'shapes/plain'"),
    ],
)
def test_suites_with_mistakes_are_refused(tmp_path: Path, text: str, names: str) -> None:
    with refused(InvalidValueError, tmp_path / "mine.toml", names):
        suite_of(tmp_path, text)


@pytest.mark.parametrize(
    ("row", "names"),
    [
        ('x = "shapes/none"\n', "shapes/none"),
        ('x = "f8k/mendsgr"\n', "f8k/mend-sgr"),
        (f'x = "shapes/{"a" * 5000}"\n', "shapes/aaa"),  # longer than any file's name
        ('x = { recipe = "shapes/plain", epoch = 3 }\n', "`epochs`"),
    ],
)
def test_unknown_recipes_and_settings_are_refused(tmp_path: Path, row: str, names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        suite_of(tmp_path, HEAD + PART + row)
    assert names in str(caught.value)


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MispairError) as caught:
        suite_of(tmp_path, "title = \n")
    assert "mine.toml" in str(caught.value)


@pytest.mark.parametrize("key", ["device", "name", "parts"])
def test_keys_that_only_the_program_sets_are_unknown(tmp_path: Path, key: str) -> None:
    with refused(UnknownNameError, tmp_path / "mine.toml", key):
        suite_of(tmp_path, HEAD + f'{key} = "cpu"\n' + PART + ROW)


def test_keys_that_nobody_knows_are_refused(tmp_path: Path) -> None:
    with refused(InvalidValueError, tmp_path / "mine.toml", "colour"):
        suite_of(tmp_path, HEAD + "colour = 1\n" + PART + ROW)


def test_names_of_cells_are_no_longer_than_a_folder_may_be_called(tmp_path: Path) -> None:
    settings = ", ".join(f"{name} = {value}" for name, value in MANY.items())
    suite = suite_of(tmp_path, HEAD + PART + f'x = {{ recipe = "shapes/repair", {settings} }}\n')
    names = [cell.name for cell in suite.cells(2)]
    assert len(set(names)) == 4
    assert max(map(len, names)) < 250
    assert all("checkpoint" not in name for name in names)  # it changes nothing about the result


def test_the_noise_file_of_a_recipe_is_not_used_for_every_noise_ratio(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(find_packaged("recipe", "shapes/plain").read_text() + 'noise_file = "noise_0.4.npy"\n')
    suite = suite_of(tmp_path, HEAD + PART + 'x = "own.toml"\n')
    assert {cell.config.noise_file for cell in suite.cells(1)} == {None}


def test_an_unknown_suite_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        read_suite("flickr")
    assert "cc152k, coco, coco-small, f30k, f8k, shapes" in str(caught.value)


def test_a_digest_holds_nothing_but_what_is_not_the_default() -> None:
    expected = hashlib.sha256(b'{"noise_file": false, "seed": 2, "tau": 0.2}').hexdigest()
    assert digest(override(Config(), {"tau": 0.2, "seed": 2})) == expected  # so a new setting changes no digest
