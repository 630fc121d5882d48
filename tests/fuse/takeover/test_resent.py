"""Answers to requests that are sent again, as far as they need no kernel."""

import os

import pytest
import trio

from kvfs.storage.journal import RESENT
from mount.files.handles import Recalled
from mount.fuse.late import Late
from mount.fuse.wire import (
    IN_HEADER,
    IN_HEADER_BYTES,
    OPEN_IN,
    OPEN_OUT,
    OUT_HEADER,
    Opcode,
    data_reply,
)
from mount.requests.answers import Answers, Generations
from mount.requests.resent import ResentAnswers
from tests.support.store.counted_desk import counted_desk


async def test_an_open_waits_for_the_device_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that takes over reads the next request before the device has answered."""
    with counted_desk() as desk:
        files, number, done = desk.files, 8, list[str]()
        ino, flags = desk.identified(b"block"), os.O_WRONLY | os.O_APPEND
        monkeypatch.setattr(desk.store.syscalls, "fsync", lambda _: done.append("fsync"))
        answers = Answers(
            desk.store.engine, files, desk.store.settings, Generations(0), lambda _: None
        )
        fh, _ = files.open(ino, flags)
        opened_out = OPEN_OUT.pack(fh, *files.granted_again(desk.handles.get(fh)))

        def reply(header: bytes, body: bytes) -> None:
            assert OUT_HEADER.unpack(header) == (len(header) + len(body), 0, number | RESENT)
            assert body == opened_out
            done.append("reply")

        recalled = Recalled([], {number: desk.handles.get(fh)}, set())
        size_bytes = IN_HEADER_BYTES + OPEN_IN.size
        message = IN_HEADER.pack(size_bytes, Opcode.OPEN, number | RESENT, ino, 0, 0, 1, 0, 0)
        message += OPEN_IN.pack(flags, 0)
        async with trio.open_nursery() as nursery:
            late = Late(nursery, reply, lambda: lambda: None)
            resent = ResentAnswers(answers, files, {}, recalled, late)
            assert resent.of(message) == b""
            assert done == []
        assert done == ["fsync", "reply"]
        assert resent.of(message) == data_reply(number | RESENT, opened_out), (
            "nothing is left to do"
        )
        desk.close_file(fh)
        desk.assert_nothing_is_open()
