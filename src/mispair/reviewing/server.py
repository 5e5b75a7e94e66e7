"""The web page of a review: requests in, pages out. It listens on this machine only, unless another host is named.

Pages are whole; htmx replaces `#main` in them. Everything that a page shows is in its address, so that reloading and
going back work. No request goes to another machine, and the content security policy forbids it as well.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl, urlencode

from anyio import to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from mispair.errors import InvalidValueError, MispairError
from mispair.reviewing.decisions import Decision, Mode, Verdict
from mispair.reviewing.noise_estimate import LEAST
from mispair.reviewing.pair_table import Filter, Sort
from mispair.reviewing.review import PRECISION, Review, State
from mispair.reviewing.transfer import decisions_csv
from mispair.support.html import template
from mispair.support.memory import is_out_of_memory
from mispair.support.thumbnails import thumbnail

STATIC = Path(__file__).parent / "static"
PAGE = 24  # pairs of the grid
THREADS = 8  # each takes memory
SIZES = (200, 640)  # pixels of the images in the grid and alone
MOST_BYTES = 1 << 20  # of a request
MOST_IMAGE_BYTES = 200_000
LONGEST = 10_000  # characters of a new caption
COOKIE, TOKEN, ERROR = "mispair-session", "mispair-token", "mispair-error"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
SIDES = {"left item": "image", "right item": "caption"}  # what to call them where there are images or captions
View = Literal["one", "grid"]
ModeName = Literal["browse", "rate", "teach"]


@dataclass(frozen=True)
class Address(Filter):
    """The content of a page: the query of its address, with a filter."""

    mode: ModeName = "browse"  # browse freely, decide drawn pairs for the noise rate, or teach the audit
    view: View = "one"  # one pair, or many
    state: State = "any"  # only pairs with this state of decision
    at: int = -1  # row of the pair that is shown; -1 for the first
    page: int = 1  # page of the grid, from 1

    @property
    def filter(self) -> Filter:
        return Filter(**{field.name: getattr(self, field.name) for field in fields(Filter)})

    @classmethod
    def of(cls, given: dict[str, str]) -> Address:
        """Read a query; unknown values get their defaults."""
        found: dict[str, Any] = {}
        choices = {"mode": ModeName, "view": View, "sort": Sort, "state": State}
        for name, text in given.items():
            if name in choices and text in get_args(choices[name]):
                found[name] = text
            elif name in ("reason", "source", "text"):
                found[name] = text[:200].strip()
            elif name in ("low", "high") and re.fullmatch(r"\d{0,20}\.?\d{1,20}(e-\d{2,3})?", text):
                found[name] = min(1.0, float(text))
            elif name in ("at", "page") and text.isdecimal():
                found[name] = max(int(text[:18]), int(name == "page"))
            elif name == "flagged":
                found[name] = text not in ("0", "false")
        return cls(**found)

    def link(self, **changes: Any) -> str:
        """The address with changes, without default values."""
        changed, usual = replace(self, **changes), Address()
        given = {field.name: getattr(changed, field.name) for field in fields(self)}
        different = {name: value for name, value in given.items() if value != getattr(usual, name)}
        different = {name: int(value) if isinstance(value, bool) else value for name, value in different.items()}
        return f"/?{urlencode(different)}" if different else "/"


def make_app(review: Review, hosts: frozenset[str] | None, token: str | None = None, reviewer: str = "") -> Starlette:
    """The application.

    Args:
        review: What is reviewed.
        hosts: Names under which it may be called, with the port: others are refused, so that no web site reaches it
            through a name of its own. None for any; a token keeps web sites out then.
        token: Secret that a browser must bring; None for no secret.
        reviewer: Name that is written beside decisions.
    """
    server = _Server(review, reviewer)
    routes = [
        Route("/", server.page),
        Route("/decide", server.decide, methods=["POST"]),
        Route("/undo", server.undo, methods=["POST"]),
        Route("/image/{row:int}", server.image),
        Route("/decisions.csv", server.export),
        Route("/favicon.ico", lambda _: Response(status_code=204)),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        review.close()  # after SIGTERM, too: SQLite then leaves nothing beside the file

    guard = Middleware(BaseHTTPMiddleware, dispatch=_Guard(hosts, token))
    handlers: Any = {MispairError: _refused, MemoryError: _out_of_memory, RuntimeError: _out_of_memory}
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=running)


async def _refused(_: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), status_code=422, headers={ERROR: type(error).__name__})


async def _out_of_memory(_: Request, error: Exception) -> Response:
    if not is_out_of_memory(error):
        raise error
    return PlainTextResponse("There was not enough memory, and nothing was written; try it again.", status_code=503)


class _Guard:
    """Refuse requests of other web sites and, with a token, of strangers; adds the security headers."""

    def __init__(self, hosts: frozenset[str] | None, token: str | None) -> None:
        if hosts is None and token is None:
            raise ValueError("a server with any name needs a token")
        self.hosts, self.token = hosts, token

    async def __call__(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = self._refuse(request) or self._sign_in(request) or await call_next(request)
        response.headers.update(HEADERS)
        # A browser asks again each time: at the same address there may be another audit, or a later version of us.
        response.headers["Cache-Control"] = "no-store" if request.url.path == "/" else "private, no-cache"
        return response

    def _refuse(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self.hosts is not None and host not in self.hosts:
            return PlainTextResponse("This name is not one of this server's; use the address that it printed.", 421)
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("origin")
            if not host or origin is None or origin.partition("://")[2] != host:
                return PlainTextResponse("Decisions are taken from this server's own page only.", 403)
            if not request.headers.get("content-length", "").isdecimal():
                return PlainTextResponse("The length of the request is missing.", 411)
            if int(request.headers["content-length"]) > MOST_BYTES:
                return PlainTextResponse("The request is too long.", 413)
        return None

    def _sign_in(self, request: Request) -> Response | None:
        if self.token is None:
            return None
        given = request.query_params.get("token")
        if given is not None and hmac.compare_digest(given.encode(), self.token.encode()):
            signed_in = RedirectResponse("/", 303)
            signed_in.set_cookie(TOKEN, self.token, httponly=True, samesite="strict")
            return signed_in
        if not hmac.compare_digest(request.cookies.get(TOKEN, "").encode(), self.token.encode()):
            return PlainTextResponse("Open the address with the token that the server printed.", 401)
        return None


class _Server:
    """The pages; work on files and tables is done in threads."""

    def __init__(self, review: Review, reviewer: str) -> None:
        self.review, self.reviewer = review, reviewer
        self._image = lru_cache(maxsize=256)(self._read_image)
        self._reasons = _without_repeats(review.table.counts("reason", "reasons"))
        self._sources = review.table.counts("source")
        self._sides = {side: side for side in SIDES} if review.table.columns.isdisjoint(SIDES.values()) else SIDES
        self._page = template("review.html", named=self._named)

    def _named(self, text: str) -> str:
        """A reason in the words of the page; filters keep the stored one."""
        for stored, shown in self._sides.items():
            text = text.replace(stored, shown)
        return text

    async def page(self, request: Request) -> Response:
        session = request.cookies.get(COOKIE, "")
        known = re.fullmatch(r"[0-9a-f]{16}", session)
        session = session if known else secrets.token_hex(8)
        address = Address.of(dict(request.query_params))
        response = await run_in_threadpool(self._show, address, session, part="hx-request" in request.headers)
        if not known:
            response.set_cookie(COOKIE, session, httponly=True, samesite="strict", max_age=31_536_000)
        return response

    async def decide(self, request: Request) -> Response:
        form = parse_qsl((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
        return await run_in_threadpool(self._decide, form, request.cookies.get(COOKIE, ""))

    async def undo(self, request: Request) -> Response:
        form = dict(parse_qsl((await request.body()).decode("utf-8", "replace")))
        return await run_in_threadpool(self._undo, form, request.cookies.get(COOKIE, ""))

    async def image(self, request: Request) -> Response:
        size = SIZES[request.query_params.get("size") == "large"]
        content = await run_in_threadpool(self._image, request.path_params["row"], size)
        if not content:
            return PlainTextResponse("There is no image here that can be shown.", 404)
        tag = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if request.headers.get("if-none-match") == tag["ETag"]:
            return Response(status_code=304, headers=tag)
        return Response(content, media_type="image/jpeg", headers=tag)

    async def export(self, _: Request) -> Response:
        content = await run_in_threadpool(lambda: decisions_csv(self.review.decisions.current.values()))
        name = {"Content-Disposition": "attachment; filename=decisions.csv"}
        return Response(content, media_type="text/csv; charset=utf-8", headers=name)

    def _read_image(self, row: int, size: int) -> bytes:
        content = self.review.image(row)
        return b"" if content is None else thumbnail(content, size, MOST_IMAGE_BYTES).content

    def _show(self, address: Address, session: str, *, part: bool, message: str = "") -> HTMLResponse:
        review = self.review
        progress = review.progress()
        values: dict[str, Any] = {
            "address": address,
            "message": message,
            "name": review.folder.name,
            "flagged": int(review.table.flagged.sum()),
            "total": len(review.table),
            "progress": progress,
            "decided": progress.total(),
            "reasons": self._reasons,
            "sources": self._sources,
            "rate": review.rate() if address.mode == "rate" else None,
            "advice": review.advice(),
            "precision": PRECISION,
            "readable": len(review.table.readable),
            "least": min(LEAST, len(review.table.readable)),
            "usual": Filter(),
            "takes_captions": review.data.takes_captions,
            "left": self._sides["left item"],
            "right": self._sides["right item"],
            "pair": None, "pairs": [], "before": None, "after": None, "count": 0, "place": 0, "pages": 1,
            "filtered": 0, "decided_here": 0,
        }  # fmt: skip
        if address.mode != "browse" or address.view == "one":
            values |= self._one(address, session)
        else:
            values |= self._grid(address)
        if address.mode == "browse":
            values["filtered"] = len(review.rows(address.filter))
            values["decided_here"] = len(review.rows(address.filter, "decided"))
        content = self._page.render(values, part=part)
        return HTMLResponse(content, headers={"Vary": "HX-Request"})

    def _one(self, address: Address, session: str) -> dict[str, Any]:
        review = self.review
        if address.mode != "browse":
            row = review.next_drawn(session) if address.mode == "rate" else review.next_instructive()
            return {"pair": None if row is None else review.view(row)}
        rows = review.rows(address.filter, address.state)
        count = len(rows)
        inside = 0 <= address.at < len(review.table)
        if not inside and not count:
            return {"count": 0}
        row = address.at if inside else int(rows[0])
        before, after = review.neighbours(row, address.filter, address.state)
        place = (rows == row).argmax() + 1 if (rows == row).any() else 0
        return {"pair": review.view(row), "before": before, "after": after, "count": count, "place": int(place)}

    def _grid(self, address: Address) -> dict[str, Any]:
        rows = self.review.rows(address.filter, address.state)
        pages = max(1, -(-len(rows) // PAGE))
        page = min(address.page, pages)
        first = (page - 1) * PAGE
        pairs = self.review.views(rows[first : first + PAGE])
        address = replace(address, page=page)
        return {"pairs": pairs, "count": len(rows), "place": first + 1, "pages": pages, "address": address}

    def _decide(self, form: list[tuple[str, str]], session: str) -> Response:
        given = dict(form)
        rows = [int(value) for name, value in form if name == "row" and re.fullmatch(r"\d{1,18}", value)]
        verdict = given.get("verdict", "")
        if verdict not in list(Verdict):
            raise InvalidValueError(f"{verdict!r} is no decision", expected=", ".join(Verdict))
        if verdict == Verdict.REWRITE and not given.get("caption", "").strip():
            raise InvalidValueError("The new caption is empty", advice="Write one, or drop the pair")
        address = Address.of(dict(parse_qsl(given.get("address", "").partition("?")[2])))
        decision = Decision(
            "",
            Verdict(verdict),
            replaced=given.get("replaced", ""),
            partner=given.get("partner", ""),
            caption=given.get("caption", "").strip().replace("\r\n", "\n")[:LONGEST],  # as forms are sent
            reviewer=self.reviewer,
            accepted=given.get("accepted", ""),
            session=session,
            mode=Mode(address.mode),
        )
        if decision.mode is Mode.RATE and len(rows) == 1:
            decision = replace(decision, inclusion=self.review.inclusion(rows[0]), draw=self.review.draw_key)
        decided = self.review.decide(rows, decision)
        what = f"{len(decided)} pairs" if len(decided) > 1 else decided[0].id
        message = f"{what}: {decision.verdict.past}."
        if address.mode == "browse" and address.view == "one":
            _, after = self.review.neighbours(rows[0], address.filter, address.state)
            address = replace(address, at=rows[0] if after is None else after)
            message += "" if after is not None else " That was the last one."
        return self._moved(address, session, message)

    def _undo(self, form: dict[str, str], session: str) -> Response:
        address = Address.of(dict(parse_qsl(form.get("address", "").partition("?")[2])))
        if not session:  # as decisions that were imported
            raise InvalidValueError(
                "Undoing needs the cookie by which this page knows your browser", advice="Allow cookies for it"
            )
        rows = self.review.undo(session)
        if rows and address.mode == "browse" and address.view == "one":
            address = replace(address, at=rows[0])
        what = f"{len(rows)} decisions" if len(rows) > 1 else "the last decision"
        message = f"Undone: {what}." if rows else "There is nothing of yours to undo."
        return self._moved(address, session, message)

    def _moved(self, address: Address, session: str, message: str) -> Response:
        response = self._show(address, session, part=True, message=message)
        response.headers["HX-Push-Url"] = address.link()
        return response


def _without_repeats(counts: dict[str, int]) -> dict[str, int]:
    """Reasons without those contained in another one, whose filter finds the same pairs.

    >>> _without_repeats({"image is tiny": 3, "its image is tiny": 2, "its own": 1})
    {'image is tiny': 3, 'its own': 1}
    """
    repeats = {f"its {reason}" for reason in counts}
    return {reason: count for reason, count in counts.items() if reason not in repeats}
