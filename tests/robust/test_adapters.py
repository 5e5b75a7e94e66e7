"""All adapters compute one loss, and train."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mispair.errors import MissingPackageError, NotFoundError, ShapeError
from mispair.robust.open_clip import RobustClipLoss
from mispair.robust.pytorch import RobustLoss
from mispair.robust.robust import Robust
from mispair.robust.sentence_transformers import RobustRankingLoss, batch_sampler
from refusals import refused

N, D = 48, 6
SCALES = [("infonce", 20, 0), ("siglip", 10, -10), ("triplet", 1, 0)]


def robust(**settings: Any) -> Robust:
    scores = np.random.default_rng(0).random(N)
    scores[0] = 0.9
    return Robust(scores, left_items=np.arange(N) // 2, **settings)


def embeddings(seed: int = 0) -> tuple[Tensor, Tensor]:
    left, right = torch.randn(2, N, D, generator=torch.Generator().manual_seed(seed))
    return left.requires_grad_(), right.requires_grad_()


class Output(NamedTuple):
    loss: Tensor | None
    image_embeds: Tensor
    text_embeds: Tensor


class Towers(nn.Module):
    """A table of vectors a side, in the form of transformers' CLIP."""

    main_input_name = "left"

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Embedding(N, D, _weight=side.detach().clone()) for side in embeddings(1))
        self.logit_scale = nn.Parameter(torch.tensor(20.0).log())

    def forward(self, left: Tensor, right: Tensor, return_loss: bool = False) -> Any:
        image, text = (nn.functional.normalize(side) for side in (self.left(left), self.right(right)))
        loss = (image - text).square().mean() if return_loss else None
        return Output(loss, image, text)


class PairNumbers(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return dict.fromkeys(("left", "right", "rows"), torch.tensor(row))


class Encoder(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features


@pytest.mark.parametrize(("kind", "scale", "bias"), SCALES)
def test_all_adapters_compute_the_same_loss(kind: Any, scale: float, bias: float) -> None:
    model, rows = Towers(), torch.tensor([0, 1, 5, 11, 30, 31, 47])
    left, right = model.left(rows), model.right(rows)
    units = [nn.functional.normalize(side) for side in (left, right)]
    expected = robust(loss=kind).loss(units[0] @ units[1].T, rows)
    assert torch.allclose(RobustLoss(robust(loss=kind))(left, right, rows), expected, rtol=1e-5)
    clip = RobustClipLoss(robust(loss=kind))
    found = clip(image_features=units[0], text_features=units[1], logit_scale=scale, logit_bias=bias, rows=rows)
    assert torch.allclose(found, expected, rtol=1e-5)
    clip.rows = rows
    found = clip(*units, scale, bias, output_dict=True)
    assert torch.allclose(found["contrastive_loss"], expected, rtol=1e-5)
    features = [{"sentence_embedding": side} for side in (left, right)]
    found = RobustRankingLoss(Encoder(), robust(loss=kind))(features, rows)
    assert torch.allclose(found, expected, rtol=1e-5)


def test_open_clip_needs_the_numbers_of_each_batch() -> None:
    loss = RobustClipLoss(robust())
    left, right = embeddings()
    loss.rows = torch.arange(N)
    loss(left, right, 20.0)
    with refused(NotFoundError, "rows"):
        loss(left, right, 20.0)


def test_sentence_transformers_needs_two_columns_and_labels() -> None:
    loss = RobustRankingLoss(nn.Identity(), robust())
    left, right = embeddings()
    for columns, labels in (([left], torch.arange(N)), ([left, right], None)):
        with refused(ShapeError, "the batch", f"{len(columns)} columns"):
            loss.compute_loss_from_embeddings(columns, labels)
    with refused(ShapeError, "dataset", "3 pairs"):
        batch_sampler(robust())(range(3), batch_size=2)


def test_a_missing_library_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mispair.robust.hugging_face", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused(MissingPackageError, "transformers"):
        importlib.import_module("mispair.robust.hugging_face")


def test_a_library_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers does beside a torchvision of another torch: its error names no library."""

    def broken(name: str) -> Any:
        raise ModuleNotFoundError(f"Could not import module '{name}'.") from RuntimeError("operator nms is not there")

    transformers = ModuleType("transformers")
    transformers.__getattr__ = broken  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.delitem(sys.modules, "mispair.robust.hugging_face", raising=False)
    with refused(MissingPackageError, "transformers", "operator nms is not there"):
        importlib.import_module("mispair.robust.hugging_face")


def test_mixed_precision_leaves_the_cosines_exact() -> None:
    left, right = embeddings()
    exact = RobustLoss(robust())(left, right, torch.arange(N), 100.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(RobustLoss(robust())(left, right, torch.arange(N), 100.0), exact)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scale", "bias"), SCALES)
def test_the_trainer_of_transformers_computes_the_same_loss(kind: Any, scale: float, bias: float) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    hugging_face = importlib.import_module("mispair.robust.hugging_face")
    model, rows = Towers(), torch.tensor([0, 1, 5, 11, 30, 31, 47])
    with torch.no_grad():
        model.logit_scale.fill_(scale).log_()
    model.logit_bias = nn.Parameter(torch.tensor(float(bias)))
    trainer = object.__new__(hugging_face.RobustTrainer)
    trainer.robust_loss = RobustLoss(robust(loss=kind))
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    found = trainer.compute_loss(model, {"left": rows, "right": rows, "rows": rows})
    expected = RobustLoss(robust(loss=kind))(model.left(rows), model.right(rows), rows)
    assert torch.allclose(found, expected, rtol=1e-5)
    with refused(NotFoundError, "the batch", "`rows`"):
        trainer.compute_loss(model, {"left": rows, "right": rows})
    own, outputs = trainer.compute_loss(model.eval(), {"left": rows, "right": rows}, return_outputs=True)
    assert own == outputs.loss != found


@pytest.mark.slow
def test_the_trainer_of_transformers_resumes_exactly(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    hugging_face = importlib.import_module("mispair.robust.hugging_face")
    steps = len(robust().sampler(8))

    def trained(folder: str, epochs: int, resume: bool = False, save: int = 0) -> tuple[Towers, Robust]:
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder), per_device_train_batch_size=8, num_train_epochs=2, remove_unused_columns=False,
            save_strategy="steps", save_steps=save or 99, report_to=[], disable_tqdm=True, use_cpu=True,
            learning_rate=0.1, lr_scheduler_type="constant", max_steps=epochs, logging_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        model, mine = Towers(), robust(method="mend")
        hugging_face.RobustTrainer(mine, model=model, args=arguments, train_dataset=PairNumbers()).train(
            resume_from_checkpoint=resume
        )
        return model, mine

    whole, expected = trained("whole", steps + 2)
    trained("cut", steps - 1, save=steps - 1)
    resumed, found = trained("cut", steps + 2, resume=True)
    assert torch.equal(resumed.left.weight, whole.left.weight)
    assert not torch.equal(whole.left.weight, Towers().left.weight)
    assert (found.epoch, found.step) == (expected.epoch, expected.step) == (2, 0)
    assert np.array_equal(found.weights, expected.weights)
