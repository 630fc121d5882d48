"""The messages between a server and its supervisor: what one holds, and what is too much for it."""

import os
import socket
from collections.abc import Iterator
from typing import Final

import pytest

from kvfs.machine.held_files import FILES_MAX, HeldFiles, link_pair, receive, send

#: linux/net/scm.h: no message of the kernel has more.
SCM_MAX_FD: Final = 253


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = link_pair()
    with ours, theirs:
        yield ours, theirs


def test_a_message_carries_so_many_files(link: tuple[socket.socket, socket.socket]) -> None:
    """What is more is closed, and not left open in a process that does not know it."""
    ours, theirs = link
    before = len(os.listdir("/proc/self/fd"))
    assert send(theirs, {"alive": {}}, [0] * SCM_MAX_FD)
    message = receive(ours)
    assert message is not None
    assert len(message.fds) == FILES_MAX
    assert len(os.listdir("/proc/self/fd")) == before + FILES_MAX
    for fd in message.fds:
        os.close(fd)


def test_a_file_that_came_is_closed_at_exec(link: tuple[socket.socket, socket.socket]) -> None:
    """Else the template of an upgrade, and all its servers, would have what a drive is held by."""
    ours, theirs = link
    assert send(theirs, {"hold": "pool"}, [0])
    message = receive(ours)
    assert message is not None
    (fd,) = message.fds
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_why_a_start_fails_is_cut_to_what_a_message_holds(
    link: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = link
    first: dict[str, object] = dict.fromkeys(
        ("restarts", "upgrades", "longest_pause_s", "died_s", "supervisor_pid", "alive_every_s"), 0
    )
    assert send(ours, {**first, "held": [], "next_server": ""})
    held = HeldFiles(os.dup(theirs.fileno()))
    assert held.say_fatal("\N{GRINNING FACE}" * 5000, 3)
    message = receive(ours)
    assert message is not None
    assert message.said == {"fatal": "\N{GRINNING FACE}" * 1000, "exit": 3}
    held.close()
