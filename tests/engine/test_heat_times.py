"""When a block was used last, by the wall clock: what the heat knows, and what it does not."""

from pathlib import Path

from kvfs.core.pool_layout import HEAT
from kvfs.core.types import InodeNo
from kvfs.storage.heat import Heat
from tests.engine.test_heat import filled, note, opened, order, pool_fd

__all__ = ["pool_fd"]

NS = 1_000_000_000


def test_when_blocks_were_used_survives_a_restart(pool_fd: int) -> None:
    heat = opened(pool_fd)
    note(heat, 20, 21)
    heat.mark(100 * NS)
    heat.touch(InodeNo(21))
    heat.mark(200 * NS)
    for again in (heat, saved_and_opened(heat, pool_fd)):
        assert [again.used_since(InodeNo(ino), 100 * NS) for ino in (20, 21, 22)] == [
            False,
            True,
            None,
        ]
        assert again.used_since(InodeNo(21), 200 * NS) is False
        assert again.used_since(InodeNo(20), 99 * NS) is None


def test_a_file_without_marks_tells_when_it_was_written(pool_fd: int, tmp_path: Path) -> None:
    """As an older kvfs wrote it: all its touches came before that."""
    filled(pool_fd)
    written_s = int((tmp_path / HEAT).stat().st_mtime)
    heat = opened(pool_fd, now_s=written_s + 100)
    (ino, *_) = order(heat)
    assert heat.used_since(InodeNo(ino), (written_s - 1) * NS) is None
    assert heat.used_since(InodeNo(ino), (written_s + 2) * NS) is False
    heat.touch(InodeNo(ino))
    assert heat.used_since(InodeNo(ino), (written_s + 2) * NS) is True


def saved_and_opened(heat: Heat, pool_fd: int) -> Heat:
    """Return the heat as the next start finds it."""
    heat.save()
    return opened(pool_fd)
