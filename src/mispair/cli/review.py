"""The commands `mispair review`, `mispair annotate` and `mispair export`. Heavy imports wait until they run."""

from __future__ import annotations

import getpass
import os
import sys
import webbrowser
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

from mispair.cli.output import console, print_json, say
from mispair.errors import ConfigError, InvalidValueError, NotFoundError
from mispair.support.flags import OrNone

if TYPE_CHECKING:
    from mispair.reviewing.annotate import Forecast
    from mispair.reviewing.annotators import Command, Endpoint

KEY_VARIABLE = "MISPAIR_API_KEY"


def review(
    out: Positional[Path],
    *,
    port: int = 8700,
    images: OrNone[Path] = None,
    host: str = "127.0.0.1",
    reviewer: OrNone[str] = None,
    export_decisions: OrNone[Path] = None,
    import_decisions: OrNone[Path] = None,
    open: bool = True,  # noqa: A002 (the name of the flag)
) -> int:
    """Decide on the doubtful pairs of an audit, in your browser, on this machine.

    Args:
        out: Folder that an audit has written.
        port: Port of the page.
        images: Folder of the images, if they have been moved since the audit.
        host: Address to listen at, 0.0.0.0 for all of this machine; unless it is 127.0.0.1, the page asks for a token.
        reviewer: Name beside the decisions; by default the name of the user.
        export_decisions: Write all decisions to this CSV, and end.
        import_decisions: Add the decisions of this CSV, or of what Label Studio or Argilla has exported, and end.
        open: Open the page in a browser.
    """
    from mispair.reviewing.decisions import FILE
    from mispair.reviewing.page import EVERYWHERE, LOOPBACK, ReviewPage
    from mispair.reviewing.review import Review
    from mispair.reviewing.transfer import read_decisions, write_decisions
    from mispair.support.memory import spare_memory
    from mispair.support.progress import heartbeat

    name = reviewer or _user()
    if import_decisions is not None:
        with closing(Review(out)) as found:
            captions = found.data.takes_captions
            count = read_decisions(found.decisions, import_decisions, name, found.table, takes_captions=captions)
        say(f"{count:,} decisions were added to {out / FILE}.")
    if export_decisions is not None:
        count = write_decisions(out, export_decisions)
        say(f"{count:,} decisions were written to {export_decisions}.")
    if export_decisions is not None or import_decisions is not None:
        return 0
    spare_memory()
    page = ReviewPage(out, images=images, port=port, host=host, reviewer=name)
    say(f"Review of {out}: {page.url}\nDecisions are kept in {out / FILE}. Ctrl-C ends the server.", flush=True)
    if host in EVERYWHERE:
        say(f"On other machines write this machine's name or address in the place of {host}.", flush=True)
    if page.images_gone is not None:
        say(
            f"Note: {page.images_gone} is not there any more, so images are missing; move it back, or give the folder "
            "of the images with --images.",
            flush=True,
        )
    if open and host in LOOPBACK and sys.stdout.isatty():
        webbrowser.open(page.url)
    with heartbeat(console(), lambda: True):  # a server has no progress
        page.run()
    return 0


def annotate(
    out: Positional[Path],
    *,
    annotator: str,
    model: str = "",
    prompt: OrNone[str] = None,
    key_variable: OrNone[str] = None,
    half_width: float = 0.015,
    price_per_call: float = 0.0,
    limit: OrNone[float] = None,
    calls: OrNone[int] = None,
    rate: OrNone[float] = None,
    workers: int = 4,
    timeout: float = 60.0,
    images: OrNone[Path] = None,
    yes: bool = False,
) -> int:
    """Ask a model about drawn pairs of an audit, to estimate the noise rate with fewer decisions of people.

    Prints what will be sent where, the number of calls and the price, and asks before it begins. The same command again
    goes on where it was stopped.

    Args:
        out: Folder that an audit has written.
        annotator: Base URL of an API like OpenAI's that takes images, as http://127.0.0.1:8000/v1; or a program that
            answers each JSON line (image, caption, prompt) with yes or no.
        model: Name of the model of an API.
        prompt: The question; by default whether the caption describes the image, yes or no.
        key_variable: Environment variable with the key of the API; MISPAIR_API_KEY by default, if there is one.
        half_width: Stop when the 95 % interval of the noise rate is this wide to either side; 0.015 are 1.5 points.
        price_per_call: Price of a call in any currency; retries count as well.
        limit: Highest cost of this review, earlier runs included.
        calls: Number of calls, earlier runs of this model included; by default as many as pay off.
        rate: Most calls a minute.
        workers: Calls at a time.
        timeout: Seconds without an answer.
        images: Folder of the images, if they have been moved since the audit.
        yes: Begin without asking.
    """
    from mispair.reviewing.annotate import annotate as annotate_audit

    who = _annotator(annotator, model, prompt, key_variable, timeout)

    def agree(forecast: Forecast) -> bool:
        say(forecast, flush=True)
        if yes or not forecast.calls:
            return True
        if not sys.stdin.isatty():
            raise ConfigError("Nothing was sent.", advice="Give `yes` to begin")
        return input("Begin? [y/N] ").strip().lower() in ("y", "yes")

    done = annotate_audit(
        out, who, images=images, half_width=half_width, price_per_call=price_per_call, limit=limit, calls=calls,
        rate=rate, workers=workers, agree=agree, console=console(),
    )  # fmt: skip
    if done is None:
        say("Nothing was sent.")
    else:
        say(done)
        if done.decisions_left:
            say(f"About {done.decisions_left:,} more decisions are needed: mispair review {out}")
    return 0


def _annotator(
    given: str, model: str, prompt: str | None, key_variable: str | None, timeout: float
) -> Endpoint | Command:
    from mispair.reviewing.annotators import PROMPT, Command, Endpoint

    if not timeout > 0:
        raise InvalidValueError(str(timeout), where="timeout", expected="greater than 0")
    if "://" not in given.split(" ", 1)[0]:
        return Command(given, prompt or PROMPT, timeout)
    if key_variable and key_variable not in os.environ:
        raise NotFoundError("no such environment variable", where=key_variable, advice="Set it to the key of the API")
    key = os.environ.get(key_variable or KEY_VARIABLE, "")
    return Endpoint(given, model, key, prompt or PROMPT, timeout)


def export(
    out: Positional[Path],
    *,
    to: Path,
    policy: Literal["flagged", "decided"] = "flagged",
    mend: bool = False,
    overwrite: bool = False,
    images: OrNone[Path] = None,
    device: str = "auto",
    json: bool = False,
) -> int:
    """Write an audited data set with your decisions, in the layout of the input.

    Args:
        out: Folder that an audit has written.
        to: Folder for the data set, with a manifest that lists what happened to each pair.
        policy: Pairs without a decision: flagged leaves out the flagged and unreadable ones, decided keeps all.
        mend: Give flagged pairs a better partner, if its probability is at least 0.9.
        overwrite: Replace an earlier copy in the folder.
        images: Folder of the images, if they have been moved since the audit.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print the counts as JSON.
    """
    from mispair.reviewing.reviewed import export as export_set

    counts = export_set(out, to, policy=policy, mend=mend, overwrite=overwrite, images=images, device=device)
    if json:
        print_json({"folder": str(to), **counts})
    else:
        say(f"{to}: {', '.join(f'{count:,} {what}' for what, count in sorted(counts.items()))}.")
        if mend and counts.get("dropped") and not counts.get("re-paired"):
            say(f"No better partner reaches the probability that --mend needs; decide with: mispair review {out}")
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user, as in some containers
        return ""
