"""The command `mispair encode`. Heavy imports wait until it runs."""

from __future__ import annotations

from pathlib import Path

from tyro.conf import Positional

from mispair.cli_common import console, print_json


def encode(
    source: Positional[Path],
    *,
    out: Path,
    images: Path | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    image_model: str = "efficientnet-lite0",
    text_model: str = "all-minilm-l6-v2",
    device: str = "auto",
    overwrite: bool = False,
    json: bool = False,
) -> int:
    """Turn raw images and captions into embeddings. The same command again goes on where it was stopped.

    Args:
        source: CSV, TSV or parquet of image paths and captions, COCO or Karpathy JSON, or folder of images and texts.
        out: Folder for the embeddings, in the clip-retrieval layout.
        images: Folder that the image paths start from; the one of the source by default.
        image_column: Column of image paths, if its name is not a usual one.
        caption_column: Column of captions, if its name is not a usual one.
        image_model: efficientnet-lite0, or open_clip:MODEL/WEIGHTS.
        text_model: all-minilm-l6-v2, transformers:NAME_OR_FOLDER, or open_clip:MODEL/WEIGHTS.
        device: auto, cpu, cuda, cuda:1, mps.
        overwrite: Start over in a folder that was made from something else.
        json: Print figures for machines.
    """
    from mispair.auditing.encode import BAD_CODE, encode_source

    outcome = encode_source(
        source, out, images=images, image_column=image_column, caption_column=caption_column, image_model=image_model,
        text_model=text_model, device=device, overwrite=overwrite,
        console=console(),
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **outcome.figures()})
    else:
        for line in outcome.lines():
            print(line)
        print(f"Embeddings: {out}")
    return BAD_CODE if outcome.too_many_bad else 0
