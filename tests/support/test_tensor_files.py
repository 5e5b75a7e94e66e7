"""Files of tensors: what is written comes back, and any changed bit is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from mispair.errors import DamagedError, NotFoundError
from mispair.support.tensor_files import flattened, load_tensors, part_of, save_tensors
from refusals import refused

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7), "c": torch.ones(2, dtype=torch.bfloat16)}


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", TENSORS, {"about": "ü"})
    tensors, about = load_tensors(tmp_path / "x")
    assert about == {"about": "ü"}
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    safetensors.torch.save_file(TENSORS, tmp_path / "of others")
    assert load_tensors(tmp_path / "of others")[1] is None
    whole = (tmp_path / "x").read_bytes()
    for _ in range(5):
        save_tensors(tmp_path / "x", TENSORS, {"about": "ü"})
        assert (tmp_path / "x").read_bytes() == whole


def test_every_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_tensors(path, TENSORS, {"about": "text"})
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        try:
            tensors, about = load_tensors(path)
        except DamagedError:
            continue
        # What is left changes nothing, such as a blank of the header or the name of the digest.
        assert about is None or about["about"] == "text"
        assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
        assert place < 8 + int.from_bytes(whole[:8], "little")


def test_other_files_are_refused(tmp_path: Path) -> None:
    with refused(NotFoundError, tmp_path / "x"):
        load_tensors(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"hello" * 10)
    with refused(DamagedError, tmp_path / "x"):
        load_tensors(tmp_path / "x")


def test_parts_come_back_as_arrays_and_numbers() -> None:
    tensors = flattened({"": {"a": 1}, "one.": {"a": np.arange(3.0), "b": 0.5, "none": None}, "ones.": {"a": 2}})
    assert sorted(tensors) == ["a", "one.a", "one.b", "ones.a"]
    found = part_of(tensors, "one.")
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"] == 0.5
    assert type(found["b"]) is float
    assert part_of(tensors, "two.") == {}
