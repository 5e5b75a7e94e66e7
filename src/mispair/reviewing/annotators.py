"""Annotators beside people: an OpenAI-compatible endpoint, a command, or a Python function."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import shlex
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from mispair.errors import DataError, InvalidValueError, NotFoundError
from mispair.reviewing.answers import AnswerKind
from mispair.support.formatting import beginning, clean

PROMPT = "Does this caption describe this image? Answer with one word: yes or no."
MOST_BYTES = 1 << 20  # of a response
SHOWN = 200  # characters of an answer that are kept
BUSY, PAIR_REFUSED = (429, 503), (400, 413, 422)  # status codes: asked too often; something about this pair
TEMPORARY = (408, 425, 500, 502, 504)
_ANSWER = re.compile(r"\W*(yes|no)\b\W*($|(?<=[.,:;!\n])\s.*)", re.IGNORECASE | re.DOTALL)
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_WORDS = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


class NoAnswerError(Exception):
    """There was no answer.

    Attributes:
        again: Whether another attempt may help.
        busy: Whether the annotator did nothing, so the call is free.
        seconds: Pause that a busy annotator asks for; None if it did not say.
    """

    def __init__(self, text: str, *, again: bool = True, busy: bool = False, seconds: float | None = None) -> None:
        super().__init__(text)
        self.again, self.busy, self.seconds = again, busy, seconds


class Annotator:
    """A judge of images and captions.

    Args:
        name: Name on the page.
        identity: Identifies the annotator and its prompt, so no question is asked twice.
        receiver: Destination of the questions, in words.
    """

    def __init__(self, name: str, identity: Sequence[str], receiver: str) -> None:
        self.name, self.identity, self.receiver = name, json.dumps(identity), receiver

    def ask(self, image: bytes, caption: str) -> object:
        """The answer on a JPEG and its caption, for `read_answer`; a call may be paid for even if this raises."""
        raise NotImplementedError

    def close(self) -> None:
        """End all started programs."""


def read_answer(answer: object) -> AnswerKind:
    """Read true or false, or a text that begins with yes or no and does not contain the other one.

    >>> [str(read_answer(answer)) for answer in (True, " **No**.", "Yes, a dog.", "No idea", "Yes. Or no?", None)]
    ['matched', 'mismatched', 'matched', 'unclear', 'unclear', 'unclear']
    """
    if isinstance(answer, str):
        text = _THOUGHTS.sub("", answer)
        said = {word.lower() for word in _WORDS.findall(text)}
        answer = said == {"yes"} if _ANSWER.fullmatch(text) and len(said) == 1 else None
    if not isinstance(answer, bool):
        return AnswerKind.UNCLEAR
    return AnswerKind.MATCHED if answer else AnswerKind.MISMATCHED


class Endpoint(Annotator):
    """An endpoint with OpenAI's chat completions, such as vLLM, Ollama or a provider.

    Args:
        url: Its base, as http://127.0.0.1:8000/v1. Requests go nowhere else: redirects are not followed.
        model: Name of the model.
        key: API key; sent as a bearer token, never written.
        prompt: The question.
        timeout: Seconds without an answer after which an attempt ends.
    """

    def __init__(self, url: str, model: str, key: str = "", prompt: str = PROMPT, timeout: float = 60.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            expected = "http://HOST/v1 or https://HOST/v1, with a key only in an environment variable"
            raise InvalidValueError("not the base of an API", where="annotator", expected=expected)
        if not model:
            raise InvalidValueError("no model", where="model", expected="the name of a model of the endpoint")
        super().__init__(model, (url, model, prompt), f"{url} (model {model})")
        self.url, self.model, self.prompt, self.timeout, self._key = url, model, prompt, timeout, key

    def ask(self, image: bytes, caption: str) -> object:
        picture = f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
        content = [
            {"type": "text", "text": f"{self.prompt}\n\nCaption: {caption}"},
            {"type": "image_url", "image_url": {"url": picture}},
        ]
        body = json.dumps({"model": self.model, "messages": [{"role": "user", "content": content}]}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "mispair"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        place = self.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
        request = urllib.request.Request(place, body, headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                text = response.read(MOST_BYTES).decode("utf-8", "replace")
                if response.length:
                    raise NoAnswerError("the answer is not whole")
        except urllib.error.HTTPError as error:
            raise self._refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(str(getattr(error, "reason", error)) or type(error).__name__) from None
        try:
            return json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise NoAnswerError(f"not understood: {clean(beginning(text, SHOWN))}") from None

    def _refusal(self, error: urllib.error.HTTPError) -> Exception:
        text = ""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text = clean(beginning(error.read(MOST_BYTES).decode("utf-8", "replace"), SHOWN))
        said = f"status {error.code}: {text}"
        if error.code in BUSY:
            return NoAnswerError(said, busy=True, seconds=_seconds(error.headers.get("Retry-After")))
        if error.code in (*TEMPORARY, *PAIR_REFUSED):
            return NoAnswerError(said, again=error.code in TEMPORARY)
        return DataError(said, where=self.url, advice="Check the URL, the model and the key")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: pairs go only to the given address."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header: a number or a date."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(retry_after or "").timestamp() - time.time())
        except (ValueError, TypeError):
            return None


class Command(Annotator):
    """A program that reads a JSON line for each pair and writes an answer. Each thread starts its own.

    A line to it has `image` (a JPEG in base64), `caption` and `prompt`; a line from it is JSON with `answer` (yes, no,
    true or false), or just yes or no.

    Args:
        command: Arguments as in a shell, but run without a shell.
        prompt: The question.
        timeout: Seconds without an answer after which the program is ended and started again.
    """

    def __init__(self, command: str, prompt: str = PROMPT, timeout: float = 60.0) -> None:
        super().__init__(command, (command, prompt), command)
        self.arguments, self.prompt, self.timeout = shlex.split(command), prompt, timeout
        if not self.arguments or shutil.which(self.arguments[0]) is None:
            raise NotFoundError("no such program", where=command, advice="Give it with its path")
        self._own = threading.local()
        self._all: list[subprocess.Popen[str]] = []

    def ask(self, image: bytes, caption: str) -> object:
        process: subprocess.Popen[str] | None = getattr(self._own, "process", None)
        if process is None or process.poll() is not None:
            process = subprocess.Popen(
                self.arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
            )
            self._own.process = process
            self._all.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        question = {"image": base64.b64encode(image).decode(), "caption": caption, "prompt": self.prompt}
        timer = threading.Timer(self.timeout, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline(MOST_BYTES)
        except OSError as error:
            raise NoAnswerError(f"the command has ended ({error})") from None
        finally:
            timer.cancel()
        if not line.endswith("\n"):  # killed, ended, or longer than any answer
            process.kill()
            raise NoAnswerError("the command has ended, or taken too long")
        try:
            found = json.loads(line)
        except ValueError:
            return line
        return found.get("answer") if isinstance(found, dict) else found

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


class Function(Annotator):
    """A Python function of an image (a JPEG) and its caption, returning a match or not.

    Args:
        function: Returns true, false, a text with yes or no, or None. An exception ends the run.
        name: Name of the annotator; by default the name of the function. Give another one when its answers change.
    """

    def __init__(self, function: Callable[[bytes, str], object], name: str = "") -> None:
        name = name or getattr(function, "__name__", "function")
        super().__init__(name, ("function", name), f"the Python function {name}")
        self._function = function

    def ask(self, image: bytes, caption: str) -> object:
        return self._function(image, caption)
