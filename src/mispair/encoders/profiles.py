"""Profiles: encoders that go well together, by `benchmarks/results/encoders.md`."""

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
    """The encoders of a profile on this machine."""

    image: str
    text: str
    note: str = ""  # what better ones need


def _hub() -> Path:
    """Where Hugging Face's libraries and open_clip keep what they download."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _downloaded(repository: str, *files: str) -> Path | None:
    """The last snapshot of a repository that has these files."""
    snapshots = (_hub() / f"models--{repository.replace('/', '--')}" / "snapshots").glob("*")
    whole = [folder for folder in snapshots if all((folder / file).exists() for file in files)]
    return max(whole, key=lambda folder: folder.stat().st_mtime, default=None)


def find_clip() -> str | None:
    """The name of a downloaded CLIP or SigLIP. It is the path of its files, so that loading it asks no server."""
    for repository in _CLIPS:
        if folder := _downloaded(repository, "config.json", "preprocessor_config.json", "model.safetensors"):
            return f"transformers:{folder}"
    for repository, model in _OPEN_CLIPS.items():
        if folder := _downloaded(repository, weights := "open_clip_model.safetensors"):
            return f"open_clip:{model}/{folder / weights}"
    return None


def choose(profile: str) -> Chosen:
    """The encoders of a profile. Nothing is loaded or downloaded.

    Raises:
        UnknownNameError: There is no such profile.
        MissingPackageError: The profile is `clip`, and there are no such weights.
    """
    if profile not in get_args(Profile):
        expected = " or ".join(get_args(Profile))
        raise UnknownNameError(f'there is no profile "{profile}"', where="encoders", expected=expected)
    clip = find_clip() if profile in ("best", "clip") else None
    if clip is not None:
        return Chosen(clip, clip)
    missing = f"no weights of CLIP or SigLIP in {_hub()}"
    if profile == "clip":
        advice = f"Download them: hf download {_CLIPS[-1]}"
        raise MissingPackageError(missing, where="the profile clip", advice=advice)
    return Chosen(*_FROM_PACKAGES[profile], missing if profile == "best" else "")
