"""When a server that died is started again: soon, ever less soon, and no more when it is no use."""

from mount.supervisor.states import (
    FAILED_STARTS,
    FIRST_PAUSE_S,
    KILLED,
    SHORT_LIFE_S,
    SHORT_LIVES,
    Restarts,
)

LONG_S = 1000.0


def lived(
    restarts: Restarts, now_s: float, life_s: float, *, by_sigkill: bool = False
) -> float | None:
    """Return what is to be done after a server's life from *now_s* on."""
    restarts.started()
    restarts.ready(now_s)
    return restarts.died(now_s + life_s, by_sigkill=by_sigkill)


def failed(restarts: Restarts, *, by_sigkill: bool = False) -> list[float]:
    """Let each start fail until it is no use; return the pauses before all but the first."""
    pauses: list[float] = []
    for _ in range(100):
        restarts.started()
        pause_s = restarts.died(LONG_S, by_sigkill=by_sigkill)
        if pause_s is None:
            return pauses
        pauses.append(pause_s)
    raise AssertionError("it never gives up")


def test_after_a_life_the_next_starts_at_once() -> None:
    restarts = Restarts()
    assert [lived(restarts, LONG_S * n, LONG_S / 2) for n in range(50)] == [0.0] * 50


def test_who_kills_at_random_finds_it_again_each_time() -> None:
    """Every second life is short: that tells nothing."""
    restarts = Restarts()
    for n in range(500):
        life_s = SHORT_LIFE_S * (0.5, 2.0)[n % 2]
        assert lived(restarts, LONG_S * n, life_s, by_sigkill=n % 3 == 0) == 0.0


def test_a_request_that_kills_each_server_ends_the_calls() -> None:
    restarts = Restarts()
    pauses: list[float | None] = []
    while not pauses or pauses[-1] is not None:
        pauses.append(lived(restarts, 0.0, SHORT_LIFE_S / 2))
    assert len(pauses) == SHORT_LIVES.deaths_max
    told = [pause_s for pause_s in pauses if pause_s is not None]
    assert told[: SHORT_LIVES.at_once] == [0.0] * SHORT_LIVES.at_once
    assert told == sorted(told)
    assert told[-1] == SHORT_LIVES.pause_max_s


def test_starts_that_fail_by_themselves_are_given_up_by_attempts() -> None:
    """However long one takes; the pauses between them are short, for callers wait."""
    restarts = Restarts()
    assert lived(restarts, 0.0, LONG_S) == 0.0
    pauses = failed(restarts)
    assert len(pauses) == FAILED_STARTS.deaths_max - 1
    assert sum(pauses) < 2.0
    assert restarts.deaths == FAILED_STARTS.deaths_max


def test_servers_killed_before_they_serve_have_ten_tries_in_a_minute() -> None:
    """Somebody kills them, or there is no memory, and that passes."""
    restarts = Restarts()
    assert lived(restarts, 0.0, LONG_S) == 0.0
    pauses = failed(restarts, by_sigkill=True)
    assert len(pauses) == KILLED.deaths_max - 1
    assert len(pauses) >= 10
    assert 30.0 < sum(pauses) < 60.0
    assert pauses == sorted(pauses)


def test_kills_of_servers_that_serve_for_a_moment_count_with_those_of_starts() -> None:
    """As when there is no memory, again and again, just when it serves."""
    restarts = Restarts()
    pauses = [lived(restarts, 0.0, SHORT_LIFE_S / 2, by_sigkill=True) for _ in range(5)]
    restarts.started()
    pauses.append(restarts.died(0.0, by_sigkill=True))
    assert pauses == [KILLED.pause_s(deaths) for deaths in range(1, 7)]


def test_a_start_that_works_forgets_those_that_failed() -> None:
    restarts = Restarts()
    assert lived(restarts, 0.0, LONG_S) == 0.0
    for n in range(1, 10):
        restarts.started()
        assert restarts.died(LONG_S * n, by_sigkill=False) == FIRST_PAUSE_S
        assert lived(restarts, LONG_S * n, LONG_S / 2) == 0.0


def test_a_server_that_was_ended_for_another_one_has_not_died() -> None:
    restarts = Restarts()
    restarts.started()
    assert restarts.died(LONG_S, by_sigkill=False) == FIRST_PAUSE_S
    restarts.replaced()
    restarts.started()
    assert restarts.died(LONG_S, by_sigkill=False) == FIRST_PAUSE_S


def test_what_was_killed_before_an_upgrade_does_not_count_after_it() -> None:
    restarts = Restarts()
    for _ in range(KILLED.deaths_max - 1):
        restarts.started()
        assert restarts.died(LONG_S, by_sigkill=True) is not None
    restarts.replaced()
    assert restarts.deaths == 0
    restarts.started()
    assert restarts.died(LONG_S, by_sigkill=True) == 0.0
