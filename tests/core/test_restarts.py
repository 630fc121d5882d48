"""When a server that died is started again: soon, ever less soon, and no more when it is no use."""

from mount.supervisor.restarts import (
    FIRST_PAUSE_S,
    GIVE_UP_S,
    PAUSE_MAX_S,
    SHORT_LIFE_S,
    SHORT_LIVES_FREE,
    SHORT_LIVES_MAX,
    TRIES_MAX,
    TRIES_MIN,
    Restarts,
)

LONG_S = 1000.0


def lived(restarts: Restarts, now_s: float, life_s: float) -> float | None:
    """Return what is to be done after a server's life from *now_s* on."""
    restarts.started(now_s)
    restarts.ready(now_s)
    return restarts.died(now_s + life_s)


def failed(restarts: Restarts, now_s: float, takes_s: float) -> tuple[int, float]:
    """Let each start fail, after *takes_s*; return how many there were, and when it was over."""
    for tries in range(1, 100):
        restarts.started(now_s)
        now_s += takes_s
        pause_s = restarts.died(now_s)
        if pause_s is None:
            return tries, now_s
        now_s += pause_s
    raise AssertionError("it never gives up")


def test_after_a_life_the_next_starts_at_once() -> None:
    restarts = Restarts()
    assert [lived(restarts, LONG_S * n, LONG_S / 2) for n in range(50)] == [0.0] * 50


def test_who_kills_at_random_finds_it_again_each_time() -> None:
    """Every second life is short: that tells nothing."""
    restarts = Restarts()
    for n in range(500):
        assert lived(restarts, LONG_S * n, SHORT_LIFE_S * (0.5, 2.0)[n % 2]) == 0.0


def test_a_request_that_kills_each_server_ends_the_calls() -> None:
    restarts = Restarts()
    pauses: list[float | None] = []
    while not pauses or pauses[-1] is not None:
        pauses.append(lived(restarts, 0.0, SHORT_LIFE_S / 2))
    assert len(pauses) == SHORT_LIVES_MAX
    told = [pause_s for pause_s in pauses if pause_s is not None]
    assert told[:SHORT_LIVES_FREE] == [0.0] * SHORT_LIVES_FREE
    assert told == sorted(told)
    assert told[-1] == PAUSE_MAX_S


def test_starts_that_fail_are_over_in_time() -> None:
    for takes_s in (0.0, 0.01, 0.3, 0.6, 0.9):
        restarts = Restarts()
        assert lived(restarts, 0.0, LONG_S) == 0.0
        tries, over_s = failed(restarts, LONG_S, takes_s)
        assert TRIES_MIN <= tries <= TRIES_MAX
        assert over_s - LONG_S <= GIVE_UP_S


def test_slow_starts_have_a_second_chance_and_no_third() -> None:
    restarts = Restarts()
    assert lived(restarts, 0.0, LONG_S) == 0.0
    assert failed(restarts, LONG_S, 60.0) == (TRIES_MIN, LONG_S + 120.0 + FIRST_PAUSE_S)


def test_who_says_that_it_comes_on_has_time() -> None:
    restarts = Restarts()
    assert lived(restarts, 0.0, LONG_S) == 0.0
    now_s = LONG_S
    for _ in range(TRIES_MAX - 1):
        restarts.started(now_s)
        restarts.alive(now_s + LONG_S)
        now_s += LONG_S + 0.1
        assert restarts.died(now_s) is not None
    restarts.started(now_s)
    assert restarts.died(now_s) is None


def test_a_start_that_works_forgets_those_that_failed() -> None:
    restarts = Restarts()
    assert lived(restarts, 0.0, LONG_S) == 0.0
    for n in range(1, 10):
        restarts.started(LONG_S * n)
        assert restarts.died(LONG_S * n) == FIRST_PAUSE_S
        assert lived(restarts, LONG_S * n, LONG_S / 2) == 0.0
