"""The commands `mispair review` and `mispair export`. Heavy imports wait until they run."""

from __future__ import annotations

import getpass
import sys
import webbrowser
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from mispair.cli.output import console, print_json, say
from mispair.support.flags import OrNone


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
        port: Of the page.
        images: Folder of the images, if they have been moved since the audit.
        host: Address to listen at, 0.0.0.0 for all of this machine; unless it is 127.0.0.1, the page asks for a token.
        reviewer: Name beside the decisions; that of the user by default.
        export_decisions: Write all decisions to this CSV, and end.
        import_decisions: Add the decisions of this CSV, or of what Label Studio or Argilla has exported, and end.
        open: Open the page in a browser.
    """
    from mispair.reviewing.decisions import FILE
    from mispair.reviewing.page import EVERYWHERE, LOOPBACK, ReviewPage
    from mispair.reviewing.review import Review
    from mispair.reviewing.transfer import read_decisions, write_decisions
    from mispair.support.memory import spare_memory

    name = reviewer or _user()
    if import_decisions is not None:
        opened = Review(out, console=console())
        count = read_decisions(
            opened.decisions, import_decisions, name, opened.table, takes_captions=opened.data.takes_captions
        )
        opened.close()
        say(f"{count:,} decisions were added to {out / FILE}.")
    if export_decisions is not None:
        count = write_decisions(out, export_decisions)
        say(f"{count:,} decisions were written to {export_decisions}.")
    if export_decisions is not None or import_decisions is not None:
        return 0
    spare_memory()
    page = ReviewPage(out, images=images, port=port, host=host, reviewer=name, console=console())
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
    page.run()
    return 0


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
    """Write an audited data set as it is after the decisions, in the layout it came in.

    Args:
        out: Folder that an audit has written.
        to: Folder for the data set, with a manifest of what became of each pair.
        policy: Pairs that nobody has decided on: flagged leaves out the flagged and unreadable ones, decided keeps all.
        mend: Give flagged pairs their better partners where these are sure enough.
        overwrite: Replace an earlier copy in the folder.
        images: Folder of the images, if they have been moved since the audit.
        device: auto, cpu, cuda, cuda:1, mps.
        json: Print the counts as JSON.
    """
    from mispair.reviewing.export import export as export_set

    done = export_set(
        out, to, policy=policy, mend=mend, overwrite=overwrite, images=images, device=device, console=console()
    )
    if json:
        print_json({"folder": str(done.folder), **done.counts})
    else:
        say(f"{to}: {', '.join(f'{count:,} {what}' for what, count in sorted(done.counts.items()))}.")
        if mend and done.counts.get("dropped") and not done.counts.get("re-paired"):
            say(f"No better partner of a flagged pair is sure enough for --mend; decide with: mispair review {out}")
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such user, as in some containers
        return ""
