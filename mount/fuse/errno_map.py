"""Errors of the engine become errnos here, and nowhere else.

In pyfuse3 any exception other than FUSEError ends the mount; an unmapped one is therefore logged
with its traceback and fails that call alone.
"""

import errno
import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

import pyfuse3

from kvfs.core import errors

_log: Final = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

ERRNO: Final[dict[type[errors.KvfsError], int]] = {
    errors.NotFound: errno.ENOENT,
    errors.Exists: errno.EEXIST,
    errors.NotADirectory: errno.ENOTDIR,
    errors.IsADirectory: errno.EISDIR,
    errors.NotEmpty: errno.ENOTEMPTY,
    errors.InvalidRequest: errno.EINVAL,
    errors.NameTooLong: errno.ENAMETOOLONG,
    errors.NotPermitted: errno.EPERM,
    errors.TooManyLinks: errno.EMLINK,
    errors.AccessDenied: errno.EACCES,
    errors.Unsupported: errno.EOPNOTSUPP,
    errors.NoSuchAttribute: errno.ENODATA,
    errors.AttributeTooLarge: errno.E2BIG,
    errors.NoSpace: errno.ENOSPC,
    errors.OverShare: errno.EDQUOT,
    errors.DeviceSilent: errno.EIO,
    # Not EAGAIN: for a read of a file Python takes that for "no bytes now", and raises nothing.
    errors.TooManyWaiting: errno.EIO,
    errors.TooLarge: errno.EFBIG,
    errors.BadHandle: errno.EBADF,
    errors.TooManyOpen: errno.EMFILE,
    errors.DeadInode: errno.ESTALE,
    errors.ReadOnly: errno.EROFS,
    # A name whose bytes are gone is a miss: the caller looks it up again and finds nothing.
    errors.Damaged: errno.ESTALE,
}

#: Errors of the backing file system that are passed on, as a caller may know how to react.
_BACKING_ERRNO: Final = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.ENOMEM,
        errno.EMFILE,
        errno.ENFILE,
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.EOVERFLOW,
        errno.ENXIO,
    }
)


class ErrorCounts(dict[str, int]):
    """How many requests failed with each errno, by its name; shown by `kvfs status`."""

    def add(self, code: int) -> None:
        """Count one answer *code*."""
        name = errno.errorcode.get(code, str(code))
        self[name] = self.get(name, 0) + 1


counts: Final = ErrorCounts()


def errno_of(error: Exception) -> int:
    """Return the errno for *error*; an unforeseen exception is logged and is EIO."""
    if isinstance(error, errors.KvfsError):
        code = ERRNO.get(type(error))
        if code is not None:
            return code
    if isinstance(error, OSError) and error.errno in _BACKING_ERRNO:
        return error.errno
    _log.error("request failed: %r", error, exc_info=error)
    return errno.EIO


def counted_errno(error: Exception) -> int:
    """Return the errno for *error* and count it, unless it is a usual ENOENT or ENODATA."""
    code = errno_of(error)
    if code not in (errno.ENOENT, errno.ENODATA):
        counts.add(code)
    return code


def fuse_error(error: Exception) -> pyfuse3.FUSEError:
    """Return the exception that makes pyfuse3 answer *error*'s errno."""
    return pyfuse3.FUSEError(counted_errno(error))


class Asks(Protocol):
    """What brings to a request what it lacks, and does it again."""

    async def at_hand(self, call: Callable[[], R | Awaitable[R]]) -> R:
        """Return what *call* returns; it is repeated once the device has brought what it lacks."""


class Handlers(Protocol):
    """A class of handlers that may lack something."""

    @property
    def asks(self) -> Asks:
        """What brings what a handler lacks."""


H = TypeVar("H", bound=Handlers)


def answered(
    handler: Callable[Concatenate[H, P], R],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, R]]:
    """Make a coroutine of a handler that waits only for what it lacks.

    Its exceptions become FUSEError.
    """

    @functools.wraps(handler)
    async def door(handlers: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return handler(handlers, *args, **kwargs)
            except errors.NotAtHand:
                again = functools.partial(handler, handlers, *args, **kwargs)
                return await handlers.asks.at_hand(again)
        except pyfuse3.FUSEError:
            raise
        except Exception as error:
            raise fuse_error(error) from None

    return door


def awaited(
    handler: Callable[Concatenate[H, P], Awaitable[R]],
) -> Callable[Concatenate[H, P], Coroutine[Any, Any, R]]:
    """Wrap a handler that may wait; its exceptions become FUSEError."""

    @functools.wraps(handler)
    async def door(handlers: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return await handler(handlers, *args, **kwargs)
            except errors.NotAtHand:
                again = functools.partial(handler, handlers, *args, **kwargs)
                return await handlers.asks.at_hand(again)
        except pyfuse3.FUSEError:
            raise
        except Exception as error:
            raise fuse_error(error) from None

    return door
