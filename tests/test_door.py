"""What `import mispair` gives: the public names, each with its documentation, and nothing heavy before it is used."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mispair
from mispair import errors
from mispair.errors import MispairError


def test_dir_shows_the_public_names() -> None:
    assert sorted(name for name in dir(mispair) if not name.startswith("__")) == sorted(mispair.__all__)
    assert "__version__" in dir(mispair)
    assert len(set(mispair.__all__)) == len(mispair.__all__)


@pytest.mark.parametrize("name", mispair.__all__)
def test_a_public_name_says_what_it_is(name: str) -> None:
    value = getattr(mispair, name)
    about = inspect.getdoc(value) or ""
    assert len(about.splitlines()[0]) > 20
    assert not about.startswith(f"{name}(")  # what a dataclass without a docstring has
    if inspect.isfunction(value) or inspect.isclass(value):
        assert value.__name__ == name


def test_the_reference_has_every_name() -> None:
    page = (Path(__file__).parent.parent / "docs/reference.md").read_text(encoding="utf-8").splitlines()
    families = "ConfigError", "DataError", "MispairError", "TrainingError"  # they are in mispair.errors
    assert [name for name in mispair.__all__ if f"::: mispair.{name}" not in page and name not in families] == []


def test_type_checkers_see_the_names_that_python_has() -> None:
    tree = ast.parse(Path(mispair.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        name.asname: (node.module or "").removeprefix("mispair.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert seen == mispair._HOME


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="audti"):
        mispair.audti  # noqa: B018


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_is_light() -> None:
    heavy = "torch", "numpy", "scipy", "sklearn", "pyarrow", "pydantic", "PIL", "matplotlib", "rich", "tyro"
    found = run(f"import mispair, sys; dir(mispair); print(*(name for name in {heavy} if name in sys.modules))")
    assert not found.strip()


def test_no_module_hides_a_public_name() -> None:
    """Importing `mispair.audit` as a module would replace the function `mispair.audit`."""
    names = [name for name in mispair.__all__ if name != "errors"]
    for name in names:
        getattr(mispair, name)  # each is imported before any is looked at
    assert not [name for name in names if inspect.ismodule(getattr(mispair, name))]


# ---------------------------------------------------------------------- errors

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, MispairError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_another_process(kind: type[MispairError]) -> None:
    error = kind("3 rows", where=Path("a.npy"), expected="4 rows", advice="Copy it again")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (again.what, again.where, again.expected, again.advice) == (
        "3 rows",
        Path("a.npy"),
        "4 rows",
        "Copy it again",
    )
    assert str(again) == str(error)
    assert again.code == error.code


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_of_a_family_at_the_door(kind: type[MispairError]) -> None:
    families = mispair.DataError, mispair.ConfigError, mispair.TrainingError
    assert kind is MispairError or sum(issubclass(kind, family) for family in families) == 1


def test_a_message_is_made_of_its_fields() -> None:
    assert str(MispairError("There is none.")) == "There is none."
    assert str(MispairError("no file", where="a/b.npy")) == "a/b.npy: no file."
    full = MispairError("3 rows", where=Path("a.npy"), expected="4 rows", advice="Is it the right file?")
    assert str(full) == "a.npy: 3 rows; expected 4 rows. Is it the right file?"


def test_settings_are_named_as_in_python() -> None:
    assert str(errors.InvalidValueError("it is 2", where="keep_best")) == "`keep_best`: it is 2."
    assert str(errors.ConflictError("no such key", where="a recipe.toml")) == "a recipe.toml: no such key."
