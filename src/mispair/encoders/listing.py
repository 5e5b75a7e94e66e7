"""Describe each encoder and profile on this machine, for `mispair encoders`."""

from __future__ import annotations

from timeit import Timer
from typing import Any, get_args

import numpy as np

from mispair.encoders.encoders import KINDS, image_encoder, text_encoder
from mispair.encoders.profiles import Profile, choose
from mispair.errors import MissingPackageError

_TIMED = 16  # items


def profiles() -> dict[str, str]:
    """Describe each profile on this machine."""

    def line(profile: str) -> str:
        try:
            chosen = choose(profile)
        except MissingPackageError as error:
            return str(error)
        return f"{chosen.image} and {chosen.text}" + (f" ({chosen.note})" if chosen.note else "")

    return {profile: line(profile) for profile in get_args(Profile)}


def table() -> list[dict[str, Any]]:
    """Return a row for each packaged encoder: size, licence, measured AUROC, and speed on this machine."""
    return [
        {
            "name": name,
            "side": side,
            "about": kind.about,
            "installed": kind.is_installed,
            "install": kind.install,
            "megabytes": kind.megabytes,
            "licence": kind.licence,
            "auroc_random": kind.seen[0],
            "auroc_near": kind.seen[1],
            "per_second": _speed(side, name) if kind.is_installed else None,
        }
        for name, kind in KINDS.items()
        if kind.megabytes
        for side in kind.sides
    ]


def _speed(side: str, name: str) -> float:
    """Measure the images in memory, or short captions, a second on the processor."""
    from PIL import Image

    if side == "image":
        images = image_encoder(name, "cpu")
        noise = np.random.default_rng(0).integers(0, 256, (_TIMED, 256, 256, 3), dtype=np.uint8)
        pictures = [Image.fromarray(picture) for picture in noise]
        timer = Timer(lambda: images.encode([images.prepare(picture) for picture in pictures]))
    else:
        texts = text_encoder(name, "cpu")
        captions = [f"two dogs run over a green field near house {number}" for number in range(_TIMED)]
        timer = Timer(lambda: texts.encode(captions))
    timer.timeit(1)  # the first time sets things up
    return _TIMED / timer.timeit(1)
