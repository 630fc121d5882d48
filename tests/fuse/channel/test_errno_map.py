"""The one door for errors: every error of the engine has its errno, everything else is EIO."""

import errno
import logging

import pyfuse3
import pytest

from kvfs.core import errors
from mount.fuse import errno_map
from mount.fuse.errno_map import ERRNO, answered, awaited, counted_errno, errno_of

ENGINE = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type)
    and issubclass(kind, errors.KvfsError)
    and not issubclass(kind, errors.CommandError)
    and kind is not errors.KvfsError
]


@pytest.fixture(autouse=True)
def counts(monkeypatch: pytest.MonkeyPatch) -> errno_map.ErrorCounts:
    """Fresh counters."""
    fresh = errno_map.ErrorCounts()
    monkeypatch.setattr(errno_map, "counts", fresh)
    return fresh


@pytest.mark.parametrize("kind", ENGINE)
def test_every_error_of_the_engine_has_its_errno(kind: type[errors.KvfsError]) -> None:
    """None of them is logged: an announced error is no news."""
    assert errno_of(kind("why")) == ERRNO[kind]


def test_a_dead_inode_is_stale_and_damage_is_a_miss() -> None:
    """ENOENT would leave the name in the kernel's cache; EIO would stay on it."""
    assert errno_of(errors.DeadInode()) == errno_of(errors.Damaged()) == errno.ESTALE


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EFBIG])
def test_what_the_backing_file_system_says_is_passed_on(code: int) -> None:
    assert errno_of(OSError(code, "why")) == code


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "an extent that should be there"),
        OSError(errno.EPERM, "no"),
        OSError("without errno"),
        KeyError(3),
        MemoryError(),
        errors.KvfsError("of no kind"),
        errors.ServeFailed("a command's error inside a handler"),
    ],
    ids=repr,
)
def test_what_nobody_foresaw_is_logged_and_eio(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert errno_of(error) == errno.EIO
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_only_surprises_are_counted(counts: errno_map.ErrorCounts) -> None:
    """A miss is what a cache says all day."""
    for error in (
        errors.NotFound(),
        errors.NoSuchAttribute(),
        errors.NoSpace(),
        errors.NoSpace(),
        errors.DeadInode(),
    ):
        counted_errno(error)
    assert counts == {"ENOSPC": 2, "ESTALE": 1}


def failing(error: Exception) -> None:
    """Raise *error*, as a handler does."""
    raise error


async def failing_late(error: Exception) -> None:
    """The same in a handler that waits."""
    raise error


@pytest.mark.parametrize("handler", [answered(failing), awaited(failing_late)])
async def test_a_handlers_error_becomes_fuses(handler: object) -> None:
    """In pyfuse3 any other exception ends the mount."""
    assert callable(handler)
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await handler(errors.NotEmpty())
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await handler(pyfuse3.FUSEError(errno.ENOSYS))
    assert caught.value.errno == errno.ENOSYS


@pytest.mark.parametrize("handler", [answered(failing), awaited(failing_late)])
async def test_a_bug_in_a_handler_fails_one_call(
    handler: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(handler)
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await handler(ZeroDivisionError("a bug"))
    assert caught.value.errno == errno.EIO
    assert "a bug" in caplog.text


async def test_handlers_without_an_error_return_what_they_return() -> None:
    async def late(value: int) -> int:
        return value

    assert await answered(lambda value: value)(3) == 3
    assert await awaited(late)(4) == 4
