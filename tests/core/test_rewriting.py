"""What O_TRUNC is answered: the table is total, empties nobody's bytes, and ends."""

import itertools

import pytest

from kvfs.core.rewriting import (
    CONTENDED,
    DISPLACED,
    FORMER_NAME,
    LOOKUP,
    LOSES_NAME,
    OPEN,
    REFUSAL,
    Answer,
    Found,
    Kept,
    Loser,
    Recent,
    Refusal,
    Refusals,
    Try,
)
from kvfs.core.types import InodeNo
from tests.support.rules.rewrite_drawing import ANSWERS, KEEPS, KEPT

INO, OTHER = InodeNo(2), InodeNo(3)
PLACE = (InodeNo(1), b"K")
LEADING = {Answer.LEAD, Answer.JOIN, Answer.LEAD_BACK, Answer.REPLACE, Answer.SHOW}
OPENING = {Answer.EMPTY, Answer.SHARE, Answer.RETRY, Answer.STALE, Answer.REPLACE}


def test_every_try_has_an_answer_to_whatever_is_found() -> None:
    assert set(OPEN) == set(Try)
    assert set(LOOKUP) == {Try.REFUSED, Try.LOOKED}, "a LOOKUP before a refusal is anybody's"
    for table, answers in ((OPEN, OPENING), (LOOKUP, LEADING)):
        founds = {frozenset(row) for row in table.values()}
        assert len(founds) == 1
        assert {answer for row in table.values() for answer in row.values()} == answers
    assert {found for table in (OPEN, LOOKUP) for row in table.values() for found in row} == set(
        Found
    )


def test_what_others_have_is_emptied_only_by_number() -> None:
    for tried, found in itertools.product(Try, (Found.TAKEN, Found.NAMELESS)):
        emptied = OPEN[tried][found] is Answer.EMPTY
        assert emptied == (tried is Try.REFUSED), (tried, found)


def test_a_caller_gets_its_own_file_at_any_try() -> None:
    for tried, found in itertools.product(Try, (Found.FREE, Found.LOST)):
        assert OPEN[tried][found] is Answer.EMPTY


def test_a_lock_file_is_one_file_for_all_at_any_try() -> None:
    """And an empty file is not cut: its other writer may have written since."""
    for tried in Try:
        assert OPEN[tried][Found.SHARED] is Answer.SHARE
        assert OPEN[tried][Found.LOCKED] is Answer.EMPTY


def test_there_is_no_third_try() -> None:
    assert Answer.RETRY not in OPEN[Try.LOOKED].values()
    assert Answer.RETRY not in OPEN[Try.UNKNOWN].values(), "nobody would know its second"
    assert not {Answer.REPLACE, Answer.SHOW} & set(LOOKUP[Try.LOOKED].values())


def test_a_name_that_was_not_meant_changes_nothing() -> None:
    for row in LOOKUP.values():
        assert {row[Found.ANOTHER], row[Found.ON_THE_WAY]} == {Answer.LEAD}


def test_whatever_loses_its_name_is_looked_after() -> None:
    assert set(LOSES_NAME) == set(Loser)
    finished = {Loser.ANOTHERS, Loser.FINAL}
    assert {loser for loser, keeps in LOSES_NAME.items() if keeps.stands_in} == finished
    assert not LOSES_NAME[Loser.FINAL].for_rename, "its writer is done with it"


# ---- what is remembered ----


@pytest.mark.parametrize(
    ("led_to", "ino", "late", "tried"),
    [
        (None, INO, False, Try.REFUSED),
        (None, INO, True, Try.FIRST),
        (None, OTHER, False, Try.FIRST),
        (INO, INO, False, Try.LOOKED),
        (INO, INO, True, Try.LOOKED),
        (OTHER, INO, False, Try.FIRST),
        (InodeNo(0), INO, False, Try.FIRST),
    ],
)
def test_which_try_an_open_is(led_to: InodeNo | None, ino: InodeNo, late: bool, tried: Try) -> None:
    refusal = Refusal(INO, 10.0, (PLACE,), led_to=led_to)
    assert refusal.at_open(ino, 10.0 if late else 9.9) is tried
    assert refusal.at_lookup is (Try.REFUSED if led_to is None else Try.LOOKED)


def test_a_refusal_ends_with_its_time_or_its_open() -> None:
    refusals = Refusals()
    for thread in (7, 8):
        refusals.remember(thread, INO, (PLACE,), 1.0, reads=True)
    refusals.looked(7, OTHER)
    refusals.looked(9, OTHER)
    assert [refusals.get(thread) and refusals.get(thread).led_to for thread in (7, 8, 9)] == [
        OTHER,
        None,
        None,
    ]
    assert refusals.forget(7).led_to == OTHER
    assert refusals.forget(7) is None
    refusals.forget_expired(1.0 + REFUSAL.wait_s - 0.01)
    assert refusals
    refusals.forget_expired(1.0 + REFUSAL.wait_s)
    assert not refusals


@pytest.mark.parametrize("kept", [FORMER_NAME, CONTENDED, DISPLACED], ids=lambda kept: kept.what)
def test_what_is_kept_has_bounds(kept: Kept) -> None:
    recent: Recent[int, str] = Recent(kept)
    recent.remember(0, "old", 0.0)
    recent.remember(0, "new", 1.0)
    assert recent.of(0, 0.9 + kept.wait_s) == "new"
    assert recent.of(0, 1.0 + kept.wait_s) is None
    for key in range(1, kept.most + 1):
        recent.remember(key, "", 1.0)
    assert recent.of(0, 1.0) is None, "the oldest is forgotten"
    assert recent.of(1, 1.0) == ""


def test_the_document_draws_the_tables() -> None:
    """If not: python -m tests.support.rules.rewrite_drawing."""
    assert ANSWERS.shown() == ANSWERS.make()
    assert KEEPS.shown() == KEEPS.make()
    assert KEPT.shown() == KEPT.make()
