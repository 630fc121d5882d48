"""What an image of a cut has, from a recording of a few writes that is written by hand."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.devices.power_cuts.images import Cut, Images, Mode, draw_cuts
from tests.support.devices.power_cuts.ledger import Block, Directory, Ledger, Listing, Publication
from tests.support.devices.power_cuts.proving_blocks import SECTOR_BYTES, fault_of, made
from tests.support.devices.power_cuts.recording import FLUSH, OP, Recording
from tests.support.mounts.mounting import workplace

PAGE = 4096
PAGES = 8


def written(place: Path, ops: Sequence[tuple[int, bytes] | None]) -> Recording:
    """Return a recording of *ops*: page number and bytes, or None for a flush; 1 ns apart."""
    record = place / "record"
    record.mkdir()
    (record / "base").write_bytes(bytes(PAGES * PAGE))
    rows, data = b"", b""
    for t_ns, op in enumerate(ops, 1):
        page, part = (0, b"") if op is None else op
        rows += OP.pack(t_ns, FLUSH if op is None else page * PAGE, len(part))
        data += part
    (record / "ops").write_bytes(rows)
    (record / "bytes").write_bytes(data)
    return Recording(record)


@pytest.fixture
def place() -> Iterator[Path]:
    with workplace() as made_place:
        yield made_place


def block(version: int) -> bytes:
    return made(1, (version,) * (PAGE // SECTOR_BYTES), PAGE)


#: Three pages flushed, then page 0 anew, page 3, and page 0 once more.
OPS = [
    *((page, block(page + 1)) for page in range(3)),
    None,
    (0, block(10)),
    (3, block(4)),
    (0, block(11)),
]


def pages_of(image: Path) -> list[bytes]:
    data = image.read_bytes()
    assert len(data) == PAGES * PAGE
    return [data[at : at + PAGE] for at in range(0, 4 * PAGE, PAGE)]


def all_images(place: Path, mode: Mode, end: int) -> Iterator[list[bytes]]:
    """Yield the first pages of 40 images of one mode and end, of different seeds."""
    images = Images(written(place, OPS), place)
    for seed in range(40):
        yield pages_of(images.make(Cut(seed, mode, end, seed)))


def test_in_order_everything_up_to_the_cut_is_there(place: Path) -> None:
    assert {tuple(pages) for pages in all_images(place, Mode.IN_ORDER, 6)} == {
        (block(10), block(2), block(3), block(4))
    }


def test_dropped_nothing_behind_the_last_flush_is_there(place: Path) -> None:
    assert {tuple(pages) for pages in all_images(place, Mode.DROPPED, 7)} == {
        (block(1), block(2), block(3), bytes(PAGE))
    }


def test_any_order_each_write_may_be_missing_but_no_flushed_one(place: Path) -> None:
    found = {tuple(pages) for pages in all_images(place, Mode.ANY_ORDER, 7)}
    assert {pages[0] for pages in found} == {block(1), block(10), block(11)}
    assert {pages[1:3] for pages in found} == {(block(2), block(3))}
    assert {pages[3] for pages in found} == {bytes(PAGE), block(4)}


def test_twice_the_older_write_may_be_the_one_that_is_kept(place: Path) -> None:
    found = {tuple(pages) for pages in all_images(place, Mode.TWICE, 7)}
    assert {pages[0] for pages in found} == {block(10), block(11)}
    assert {pages[3] for pages in found} == {block(4)}


def test_torn_a_write_is_cut_between_sectors(place: Path) -> None:
    firsts = {pages[0] for pages in all_images(place, Mode.TORN, 7)}
    torn = firsts - {block(1), block(10), block(11)}
    assert torn
    assert {fault_of(page, 1) for page in torn} == {"mixed"}


def test_lying_what_was_flushed_may_be_missing(place: Path) -> None:
    found = {tuple(pages) for pages in all_images(place, Mode.LYING, 7)}
    assert bytes(PAGE) in {pages[1] for pages in found}


def test_images_in_the_order_of_their_cuts_are_the_same_as_each_alone(place: Path) -> None:
    recording = written(place, OPS)
    cuts = draw_cuts(recording, 60, 1, len(OPS))
    assert {cut.mode for cut in cuts} == set(Mode)
    together = Images(recording, place)
    for cut in cuts:
        with workplace() as own:
            alone = pages_of(Images(recording, own).make(cut))
        assert pages_of(together.make(cut)) == alone


def test_faults_of_a_block_are_told_apart() -> None:
    whole = made(1, (1,) * 8, PAGE)
    assert fault_of(b"", 1) == "empty"
    assert fault_of(whole[:SECTOR_BYTES], 1) == "short"
    assert fault_of(whole[:2048] + bytes(2048), 1) == "zeros"
    assert fault_of(made(1, (1, 2, 1, 1), 2048), 1) == "mixed"
    assert fault_of(made(2, (1,) * 8, PAGE), 1) == "another's"
    assert fault_of(whole[2048:] + whole[:2048], 1) == "another's"
    assert fault_of(b"x" + whole[1:], 1) == "garbled"


def noted(*acknowledged_ns: int, disturbed_ns: tuple[int, ...] = ()) -> Ledger:
    """Return a ledger of one block with publications, a listing at 100 that has it, window 10."""
    publications = [
        Publication("renamed", (number,), SECTOR_BYTES, at_ns, at_ns)
        for number, at_ns in enumerate(acknowledged_ns)
    ]
    block_0 = Block(0, 0, publications, list(disturbed_ns))
    listing = Listing(100, frozenset({0}))
    return Ledger([block_0], [Directory(["a", "b"], 0)], [listing], window_s=10e-9)


def due(ledger: Ledger, cut_ns: int) -> list[int]:
    return [since for _, since in ledger.due(cut_ns)]


def test_what_was_acknowledged_before_the_window_is_due() -> None:
    assert due(noted(20), 29) == []
    assert due(noted(20), 30) == [0]
    assert due(noted(20, 40), 45) == [0]
    assert due(noted(20, 40), 50) == [1]


def test_what_was_disturbed_or_perhaps_evicted_is_not_due() -> None:
    assert due(noted(20, disturbed_ns=(25,)), 50) == []
    assert due(noted(20, disturbed_ns=(60,)), 50) == [], "it was not seen between 50 and 60"
    assert due(noted(20, disturbed_ns=(110,)), 50) == [0]
    assert due(noted(20), 101) == [], "it was not seen since"


def test_what_a_sync_waited_for_is_due_at_once() -> None:
    ledger = noted(20)
    ledger.synced_ns.append((21, 24))
    assert due(ledger, 23) == []
    assert due(ledger, 24) == [0]


def test_while_the_drive_hangs_no_block_gets_older() -> None:
    ledger = noted(20, 40)
    ledger.silences_ns += [(25, 28), (41, 60)]
    assert due(ledger, 32) == []
    assert due(ledger, 33) == [0], "30, and three that did not count"
    assert due(ledger, 60) == [0], "one of the window's ten has passed for the second"
    assert due(ledger, 68) == [0]
    assert due(ledger, 69) == [1]


def test_the_power_may_go_at_the_end_of_a_silence() -> None:
    ledger = noted(20)
    ledger.silences_ns.append((30, 50))
    assert ledger.latest_ns(25, 29) == 25
    assert ledger.latest_ns(25, 55) == 50
    assert ledger.latest_ns(31, 55) == 50, "its last write came in it"
    assert ledger.latest_ns(55, 60) == 55


def test_cuts_are_in_a_silence_or_right_behind_it(place: Path) -> None:
    recording = written(place, OPS)
    plain = [cut.end for cut in draw_cuts(recording, 200, 1, len(OPS))]
    silent = [cut.end for cut in draw_cuts(recording, 200, 1, len(OPS), [4])]
    assert max(silent) <= len(OPS)
    assert silent.count(3) > plain.count(3), "request number 3 came at 4"


def test_a_block_that_was_refused_in_the_middle_is_never_anothers() -> None:
    ledger = noted(20)
    ledger.blocks[0].spoilt = True
    whole = made(0, (0,), SECTOR_BYTES)
    assert ledger.fault("a/00000", whole[:100]) is None
    assert ledger.fault("a/00000", b"x" + whole[1:]) == "garbled"


def test_a_block_is_there_under_any_name_of_its_directory_and_not_older_than_due() -> None:
    ledger = noted(20, 40)
    old, new = (made(0, (number,), SECTOR_BYTES) for number in range(2))
    assert ledger.is_there(ledger.blocks[0], 0, {"b/00000": new})
    assert ledger.is_there(ledger.blocks[0], 0, {"a/00000": old})
    assert not ledger.is_there(ledger.blocks[0], 1, {"a/00000": old})
    assert not ledger.is_there(ledger.blocks[0], 0, {"c/00000": new})
    assert ledger.fault("a/00000", new) is None
    assert ledger.fault("a/00000.tmp", new) is None
    assert ledger.fault("a/00000", new[:100]) == "short"
    assert ledger.fault("c/00000", new) == "another's"
