"""Decisions in SQLite: nothing is lost, undoing adds, killing the process keeps what was acknowledged."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mispair.errors import DamagedError, DataError, InvalidValueError
from mispair.reviewing.decisions import FILE, Decision, Decisions, Mode, Verdict
from refusals import refused


def keep(name: str, session: str = "s") -> Decision:
    return Decision(name, Verdict.KEEP, session=session)


def drop(name: str, session: str = "s") -> Decision:
    return Decision(name, Verdict.DROP, session=session)


@pytest.fixture
def decisions(tmp_path: Path) -> Decisions:
    return Decisions(tmp_path / FILE)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    first = Decisions(tmp_path / FILE)
    given = [
        Decision("a", Verdict.REPAIR, "right", "b", reviewer="ana", session="s", mode=Mode.TEACH),
        Decision("b", Verdict.REWRITE, caption="a 'new' caption; DROP TABLE decisions", session="s"),
        Decision("c", Verdict.UNSURE, mode=Mode.RATE, inclusion=0.25, draw="d1", session="s"),
    ]
    added = first.add(given)
    assert [one.number for one in added] == [1, 2, 3]
    assert {one.batch for one in added} == {1}
    again = Decisions(tmp_path / FILE).current
    for one in given:
        found = again[one.id]
        times = found.time, one.time
        assert abs((times[0] - times[1]).total_seconds()) < 0.01
        assert replace(found, time=one.time, number=0, batch=0) == one


def test_undoing_adds_a_row_and_brings_back_what_was_before(decisions: Decisions) -> None:
    decisions.add([keep("a")])
    decisions.add([drop("a"), drop("b")])
    assert [one.id for one in decisions.undo("s")] == ["a", "b"]
    assert {name: one.verdict for name, one in decisions.current.items()} == {"a": Verdict.KEEP}
    assert [one.id for one in decisions.undo("s")] == ["a"]
    assert not decisions.undo("s")
    assert not decisions.current
    with sqlite3.connect(decisions.path) as file:
        assert file.execute("SELECT count(*), count(undoes) FROM decisions").fetchone() == (6, 3)


def test_undoing_concerns_ones_own_session(decisions: Decisions) -> None:
    decisions.add([keep("a", "one")])
    decisions.add([drop("b", "two")])
    assert [one.id for one in decisions.undo("one")] == ["a"]
    assert list(decisions.current) == ["b"]


actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("xy"), st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)),
        st.tuples(st.sampled_from("xy"), st.none()),
    ),
    max_size=12,
)


@given(actions=actions)
def test_the_last_decision_that_was_not_undone_counts(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, list[str] | None]]
) -> None:
    decisions = Decisions(tmp_path_factory.mktemp("d") / FILE)
    history: list[tuple[str, list[str], str]] = []  # session, ids, verdict: what still counts, in order
    verdicts = list(Verdict)
    for number, (session, names) in enumerate(actions):
        if names is None:
            own = [entry for entry in history if entry[0] == session]
            assert [one.id for one in decisions.undo(session)] == (own[-1][1] if own else [])
            if own:
                history.reverse()
                history.remove(own[-1])
                history.reverse()
        else:
            verdict = (Verdict.KEEP, Verdict.DROP, Verdict.UNSURE)[number % 3]
            assert verdict in verdicts
            decisions.add([Decision(name, verdict, session=session) for name in names])
            history.append((session, names, verdict))
    expected = {name: verdict for _, names, verdict in history for name in names}
    assert {name: str(one.verdict) for name, one in decisions.current.items()} == expected
    assert {name: str(one.verdict) for name, one in Decisions(decisions.path).current.items()} == expected
    decisions.close()


def test_changes_are_read_since_a_row(decisions: Decisions) -> None:
    other = Decisions(decisions.path)
    decisions.add([keep(str(number), "imported") for number in range(50)])
    decisions.add([drop("7"), drop("new")])
    last, changed = other.since(50)
    assert (last, {name: one and one.verdict for name, one in changed.items()}) == (
        52,
        {"7": Verdict.DROP, "new": Verdict.DROP},
    )
    assert [one.id for one in other.undo("s")] == ["7", "new"]
    last, changed = decisions.since(last)
    assert (last, {name: one and one.verdict for name, one in changed.items()}) == (
        54,
        {"7": Verdict.KEEP, "new": None},
    )
    assert decisions.since(last) == (last, {})


def test_two_processes_and_many_threads_lose_nothing(tmp_path: Path) -> None:
    both = Decisions(tmp_path / FILE), Decisions(tmp_path / FILE)

    def work(number: int) -> None:
        for step in range(10):
            both[number % 2].add([keep(f"{number}-{step}", session=str(number))])

    threads = [Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Decisions(tmp_path / FILE).current) == 60
    assert both[0].current == both[1].current  # each sees what the other has written
    both[1].undo("0")
    assert both[0].get("0-9") is None
    assert len(both[0].current) == 59


WRITER = """
import sys
from pathlib import Path
from mispair.reviewing.decisions import Decision, Decisions, Verdict
decisions, number = Decisions(Path(sys.argv[1])), int(sys.argv[2])
while True:
    decisions.add([Decision(f"{number}", Verdict.KEEP)])
    print(number, flush=True)
    number += 1
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_writer_loses_no_acknowledged_decision(tmp_path: Path) -> None:
    path, number = tmp_path / FILE, 0
    for kill in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(number)], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        assert writer.stdout is not None
        for _ in range(1 + 7 * kill):
            number = int(writer.stdout.readline()) + 1
        writer.kill()
        number = max([number, *(int(line) + 1 for line in writer.stdout.read().split())])
        writer.wait()
        current = Decisions(path).current
        assert all(str(before) in current for before in range(number))
        number = len(current)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"verdict": Verdict.REPAIR}, "partner"),
        ({"verdict": Verdict.REPAIR, "partner": "b"}, "replaced"),
        ({"verdict": Verdict.REPAIR, "partner": "b", "replaced": "top"}, "replaced"),
        ({"verdict": Verdict.KEEP, "partner": "b", "replaced": "left"}, "partner"),
        ({"verdict": Verdict.KEEP, "replaced": "left"}, "replaced"),
        ({"verdict": Verdict.REWRITE}, "caption"),
        ({"verdict": Verdict.DROP, "caption": "a dog"}, "caption"),
    ],
)
def test_what_is_no_decision_is_refused(wrong: dict[str, str], where: str) -> None:
    with refused(InvalidValueError, where, "'a'"):
        Decision("a", **wrong)  # type: ignore[arg-type]


def test_a_failed_action_leaves_nothing(decisions: Decisions) -> None:
    def broken() -> object:
        yield keep("a")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        decisions.add(broken())  # type: ignore[arg-type]
    assert not decisions.current
    assert not decisions.history()


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\x00" + b"x" * 200])
def test_another_file_is_refused_with_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with refused(DamagedError, tmp_path / FILE):
        Decisions(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == content
    with refused(DataError, tmp_path / "none" / FILE):
        Decisions(tmp_path / "none" / FILE)


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    Decisions(tmp_path / FILE).close()
    with sqlite3.connect(tmp_path / FILE) as file:
        file.execute("PRAGMA user_version = 7")
    with refused(DamagedError, tmp_path / FILE, "7"):
        Decisions(tmp_path / FILE)


def test_a_setting_is_written_once(tmp_path: Path) -> None:
    assert Decisions(tmp_path / FILE).setting("seed", "1") == "1"
    assert Decisions(tmp_path / FILE).setting("seed", "2") == "1"
