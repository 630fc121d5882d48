"""What a rest costs is measured in CPU time, and against the same work in a loop."""

from kvfs.bench.comparison import REST_S, rest_factor


class Machine:
    """A machine where work takes 100 ns, and eight times that after a rest."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.rested = False
        self.rested_s: list[float] = []

    def work(self) -> None:
        """Take time."""
        self.now_ns += 800 if self.rested else 100
        self.rested = False

    def rest(self, rest_s: float) -> None:
        """Take none: another thread's."""
        self.rested = True
        self.rested_s.append(rest_s)


def test_the_factor_is_that_of_the_machine() -> None:
    machine = Machine()
    assert rest_factor(machine.work, lambda: machine.now_ns, machine.rest) == 8.0
    assert set(machine.rested_s) == {REST_S}


def test_here_it_is_a_number() -> None:
    """Whatever the load of this machine is."""
    assert rest_factor() > 0
