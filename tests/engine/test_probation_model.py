"""A store with room in memory against dicts: blocks move to their drives at any time, or never."""

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.engine.test_store_model import EVICTABLE, PICKS, StoreMachine
from tests.support.store.store_model import Node

_ENDS = st.sampled_from(["stop", "stop and check", "kill", "kill and repair", "power"])


class ProbationMachine(StoreMachine):
    """What is in memory may go when it is full, at a stop, and with the power."""

    ROOM_BYTES: ClassVar = 256 << 10

    @initialize()
    def begin(self) -> None:
        super().begin()
        self.host.stop()
        self.host.give_memory(self.ROOM_BYTES)
        self.host.start()

    def held(self, pick: int) -> Node | None:
        """Return a block that is in memory."""
        there = self.store.in_memory
        found = [node for _, node in self.model.walk() if node.is_file and node.ino in there]
        return found[pick % len(found)] if found else None

    def forget_evicted(self) -> None:
        """What has no name any more was evicted."""
        for parent, name in self.model.places():
            if self.store.name_row(parent.ino, name) is None:
                node = parent.children[name]
                assert node.state in EVICTABLE, node.state
                assert not node.writers
                self.model.remove(parent, name)

    @rule(pick=PICKS)
    def move(self, pick: int) -> None:
        """A block leaves memory, unless somebody has it open."""
        node = self.held(pick)
        if node is not None:
            self.store.move(node.ino)

    @rule(pick=PICKS, counts=st.booleans())
    def kill_in_a_move(self, pick: int, counts: bool) -> None:
        """The server is killed when the copy is there, or when it counts already."""
        node = self.held(pick)
        if node is None or node.writers or node.readers or node.is_torn_by_an_end:
            return
        self.store.copy_only(node.ino, counts=counts)
        self.end("kill")

    @rule()
    def tick(self) -> None:
        super().tick()
        self.store.drain()
        self.forget_evicted()

    @rule()
    def settle(self) -> None:
        super().settle()
        self.forget_evicted()

    @rule(end=_ENDS)
    def end(self, end: str) -> None:
        before = self.store.in_memory
        super().end(end)
        for parent, name in self.model.places():
            node = parent.children[name]
            if node.ino in before and self.store.name_row(parent.ino, name) is None:
                assert not end.startswith("kill"), "it outlives the server"
                self.model.remove(parent, name)


TestProbation = pytest.mark.usefixtures("caplog")(ProbationMachine.TestCase)
TestProbation.settings = settings(max_examples=30, stateful_step_count=60)


class ProbationOfSeveralMachine(ProbationMachine):
    """The same on three drives, with the gate."""

    drives = 3
    eviction = "gate"


TestProbationOfSeveral = pytest.mark.usefixtures("caplog")(ProbationOfSeveralMachine.TestCase)
TestProbationOfSeveral.settings = settings(max_examples=15, stateful_step_count=60)
