"""Profiles: pairs of encoders, by `benchmarks/results/encoders.md`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from mispair.errors import MissingPackageError, UnknownNameError

IMAGE_MODEL, TEXT_MODEL = "efficientnet-lite0", "all-minilm-l6-v2"
Profile = Literal["fast", "best", "multilingual", "clip"]
_TWO = f"{IMAGE_MODEL}+efficientnet-lite2"
_FROM_PACKAGES = {
    "fast": (IMAGE_MODEL, TEXT_MODEL),
    "best": (_TWO, f"{TEXT_MODEL}+use-multilingual"),
    "multilingual": (_TWO, "use-multilingual"),
}
_CLIPS = (
    "google/siglip2-base-patch16-224",
    "google/siglip-base-patch16-224",
    "openai/clip-vit-large-patch14",
    "openai/clip-vit-base-patch16",
    "openai/clip-vit-base-patch32",
)
_OPEN_CLIPS = {  # the model of each repository of open_clip
    "timm/ViT-B-16-SigLIP": "ViT-B-16-SigLIP",
    "laion/CLIP-ViT-L-14-laion2B-s32B-b82K": "ViT-L-14",
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": "ViT-B-16",
    "laion/CLIP-ViT-B-32-laion2B-s34B-b79K": "ViT-B-32",
}


class Chosen(NamedTuple):
    """The encoders of both sides on this machine."""

    image: str
    text: str
    note: str = ""  # requirements of better encoders


def _hub() -> Path:
    """Download folder of Hugging Face's libraries and of open_clip."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _downloaded(repository: str, *files: str) -> Path | None:
    """The last snapshot of a repository with these files."""
    snapshots = (_hub() / f"models--{repository.replace('/', '--')}" / "snapshots").glob("*")
    whole = [folder for folder in snapshots if all((folder / file).exists() for file in files)]
    return max(whole, key=lambda folder: folder.stat().st_mtime, default=None)


def find_clip() -> str | None:
    """Find a downloaded CLIP or SigLIP and name it by the path of its files, so loading it asks no server."""
    for repository in _CLIPS:
        if folder := _downloaded(repository, "config.json", "preprocessor_config.json", "model.safetensors"):
            return f"transformers:{folder}"
    for repository, model in _OPEN_CLIPS.items():
        if folder := _downloaded(repository, weights := "open_clip_model.safetensors"):
            return f"open_clip:{model}/{folder / weights}"
    return None


def choose(name: str) -> Chosen:
    """Choose the encoders of both sides, by a profile or by one encoder; load and download nothing.

    Raises:
        UnknownNameError: The profile does not exist.
        MissingPackageError: The profile is `clip`, and its weights are missing.
    """
    if ":" in name:
        return Chosen(name, name)
    if name not in get_args(Profile):
        expected = " or ".join([*get_args(Profile), "an encoder with a common space, such as open_clip:MODEL/WEIGHTS"])
        raise UnknownNameError(f'there is no profile "{name}"', where="encoder", expected=expected)
    clip = find_clip() if name in ("best", "clip") else None
    if clip is not None:
        return Chosen(clip, clip)
    missing = f"no weights of CLIP or SigLIP in {_hub()}"
    if name == "clip":
        advice = f"Download them: hf download {_CLIPS[-1]}"
        raise MissingPackageError(missing, where="the profile clip", advice=advice)
    return Chosen(*_FROM_PACKAGES[name], missing if name == "best" else "")
