"""A model that looks at images and captions over HTTP, as OpenAI's API does, and errs as often as it is told to."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from audited import write_audit
from faulty_server import Answer, FaultyServer, Handler
from mispair.reviewing.decisions import Decision, Mode, Verdict
from mispair.reviewing.review import Review


class AnnotatorServer(FaultyServer):
    """Answers by the caption.

    Attributes:
        asked: How often each caption was answered, and charged for.
        most_at_a_time: Requests at a time.
        bodies: What was sent.
        headers: Of the requests.
        seconds: That an answer takes.
    """

    def __init__(self, answer: Callable[[str], str | Answer]) -> None:
        super().__init__()
        self.says = answer
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.seconds = 0.0
        self._now = self.most_at_a_time = 0
        self._own = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, request: Handler) -> Answer:
        assert (request.command, request.path) == ("POST", "/v1/chat/completions")
        body = json.loads(request.body)
        text, image = body["messages"][0]["content"]
        caption = text["text"].partition("Caption: ")[2]
        sent = base64.b64decode(image["image_url"]["url"].removeprefix("data:image/jpeg;base64,"))
        with Image.open(io.BytesIO(sent)) as shown:
            assert (shown.format, max(shown.size) <= 512) == ("JPEG", True)
        with self._own:
            self._now += 1
            self.most_at_a_time = max(self._now, self.most_at_a_time)
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
        time.sleep(self.seconds)
        said = self.says(caption)
        with self._own:
            self._now -= 1
            if isinstance(said, str):
                self.asked[caption] += 1
        if not isinstance(said, str):
            return said
        return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()


def write_photos(folder: Path, count: int) -> tuple[Path, dict[str, bool]]:
    """Writes an audit of photos; and whether each caption is wrong, as its match score says."""
    images = folder / "images"
    images.mkdir(parents=True)
    for number in range(4):
        Image.new("RGB", (900, 300), (60 * number, 80, 90)).save(images / f"{number}.jpg")
    audit = write_audit(folder / "audit", count, images=True)
    with closing(Review(audit, images)) as review:
        review.decisions.setting("seed", "1")  # the draw of the noise rate is random otherwise
        wrong = np.random.default_rng(0).random(count) > review.table.score
        return audit, {pair.caption: bool(wrong[pair.row]) for pair in review.table.read(range(count))}


def decide_drawn(audit: Path, wrong: dict[str, bool], count: int) -> None:
    """A person who knows the truth decides on the first drawn pairs."""
    with closing(Review(audit)) as review:
        for pair in review.table.read(review.drawn_rows[:count]):
            verdict = Verdict.DROP if wrong[pair.caption] else Verdict.KEEP
            review.decisions.add([Decision(pair.id, verdict, mode=Mode.RATE, draw=review.draw_key, inclusion=1.0)])
