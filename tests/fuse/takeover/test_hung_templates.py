"""Templates that hang, by the clock: how long each is waited for, and who is tried next."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.machine.held_files import link_pair, receive
from mount.supervisor.births import Births, NoServer, Upgrades
from mount.supervisor.last_lines import ServersLog
from mount.supervisor.server import Server
from mount.supervisor.templates import Program, Template
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import ROOT

#: A template that says which version it is if that is one of its arguments, and nothing after.
HANGS: Final = f"""
import signal, socket, sys
sys.path.insert(0, {str(ROOT)!r})
from kvfs.machine.held_files import send
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--template-fd") + 1]))
if sys.argv[1] == "imports":
    send(link, {{"waits": "1.0", "tree": "digest"}})
signal.pause()
"""
#: What bounds the imports of one, or its look at the tables of another; and a fork.
PREPARED_S: Final = 60.0
FORK_S: Final = 3.0
FORMATS: Final = {"table": 7}


def program_of(what: str) -> Program:
    """Return the program of templates that hang before they have imported all, or after it."""
    return Program([sys.executable, "-S", "-c", HANGS, what], [], dict(os.environ))


@pytest.fixture
def ended() -> Iterator[list[Template]]:
    """Templates to be ended, and reaped."""
    made: list[Template] = []
    yield made
    for template in made:
        template.end()
        os.waitpid(template.pid, 0)


def imported(ended: list[Template]) -> Template:
    """Return one that has said its version, and hangs."""
    template = program_of("imports").start(own_group=True)
    ended.append(template)
    until(
        lambda: not template.check(time.monotonic()) and bool(template.version), "it has imported"
    )
    return template


def assert_bound(template: Template, most_s: float) -> None:
    """It is given so long from now, and no longer."""
    now_s = time.monotonic()
    assert template.check(now_s + most_s - 1.0) == ""
    assert template.check(now_s + most_s + 0.1) == "it says nothing"


def test_one_that_never_imports_all_is_given_a_minute(ended: list[Template]) -> None:
    template = program_of("nothing").start(own_group=True)
    ended.append(template)
    assert_bound(template, PREPARED_S)


def test_one_that_has_imported_all_may_be_silent(ended: list[Template]) -> None:
    template = imported(ended)
    assert template.check(time.monotonic() + 1e6) == ""


def test_one_that_does_not_say_whether_it_can_take_over_is_given_a_minute(
    ended: list[Template],
) -> None:
    template = imported(ended)
    template.ask(FORMATS)
    assert_bound(template, PREPARED_S)


def test_one_that_does_not_fork_is_given_three_seconds(ended: list[Template]) -> None:
    template = imported(ended)
    template.fork(-1)
    assert_bound(template, FORK_S)


def test_one_that_does_not_fork_the_first_server_is_given_a_minute(ended: list[Template]) -> None:
    """A loaded machine may take longer than three seconds, and nobody waits but who mounts."""
    template = imported(ended)
    reading_fd, writing_fd = os.pipe()
    try:
        template.fork(writing_fd)
        assert_bound(template, PREPARED_S)
    finally:
        os.close(reading_fd)
        os.close(writing_fd)


def test_one_that_was_stopped_is_not_waited_for(ended: list[Template]) -> None:
    template = imported(ended)
    template.signal(signal.SIGSTOP)
    until(lambda: template.check(time.monotonic()) == "it was stopped", "it has stopped")


@pytest.mark.parametrize("what", ["nothing", "imports"])
def test_a_server_is_asked_of_another_one_after_one_that_hangs(what: str) -> None:
    """Who was tried counts: the one that hung is not asked again."""
    births = Births(program_of(what), ServersLog(), -1)
    tried: list[int] = []
    for _ in range(2):
        births.begin(None)
        assert births.template is not None
        tried.append(births.template.pid)
        if what == "imports":
            until(lambda: births.advance(time.monotonic()) is None and _forks(births), "it is told")
        with pytest.raises(NoServer, match="it says nothing"):
            births.advance(time.monotonic() + PREPARED_S + 0.1)
        assert births.template is None
        assert not births.is_awaited
    for pid in tried:
        os.waitpid(pid, 0)
    assert tried[0] != tried[1]


def _forks(births: Births) -> bool:
    return births.template is not None and births.template.forks


@pytest.mark.usefixtures("capfd")
def test_a_spare_that_hangs_is_replaced_while_a_server_serves() -> None:
    """Once; and if the next one dies too, after a minute."""
    births = Births(program_of("nothing"), ServersLog(), -1)
    now_s = time.monotonic()
    births.keep_template(now_s)
    first = births.template
    assert first is not None
    births.keep_template(now_s + PREPARED_S - 1.0)
    assert births.template is first
    births.keep_template(now_s + PREPARED_S + 1.0)
    assert births.template is None
    births.keep_template(now_s + PREPARED_S + 1.0)
    second = births.template
    assert second is not None
    births.lose_template()
    births.keep_template(now_s + 2 * PREPARED_S)
    assert births.template is None, "the last one began less than a minute ago"
    births.keep_template(now_s + 2 * PREPARED_S + 1.0)
    third = births.template
    assert third is not None
    births.lose_template()
    for template in (first, second, third):
        os.waitpid(template.pid, 0)


@pytest.mark.usefixtures("capfd")
@pytest.mark.parametrize("what", ["nothing", "imports"])
def test_an_upgrade_to_one_that_hangs_is_refused_after_a_minute(what: str) -> None:
    """The server serves on all the while, and is told."""
    upgrades = Upgrades(ServersLog(), own_group=True)
    ours, theirs = link_pair()
    server = Server(os.getpid(), ours)
    server.formats = FORMATS
    try:
        upgrades.begin(program_of(what), server, "", to_any=True)
        (template,) = upgrades.templates()
        if what == "imports":
            until(
                lambda: not upgrades.run_due(server, time.monotonic()) and template.is_asked,
                "it is asked",
            )
        now_s = time.monotonic()
        assert not upgrades.run_due(server, now_s + PREPARED_S - 1.0)
        assert upgrades.templates() == [template]
        assert not upgrades.run_due(server, now_s + PREPARED_S + 0.1)
        assert upgrades.templates() == []
        assert upgrades.follower is None
        told = receive(theirs)
        assert told is not None
        assert "it says nothing" in str(told[0]["upgrade_failed"])
        os.waitpid(template.pid, 0)
    finally:
        server.close()
        theirs.close()
