"""Where in the engine something is: the tables of the facade (driven.py) are made of these."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from kvfs.engine.store import Store

T_co = TypeVar("T_co", covariant=True)


class HasEngine(Protocol):
    """Those whose tables these are."""

    engine: Store


class At(Generic[T_co]):
    """An attribute that lies elsewhere: *find* looks it up in the engine, each time anew."""

    def __init__(self, find: Callable[[Store], T_co]) -> None:
        self._find = find

    def __get__(self, driven: HasEngine, _owner: type) -> T_co:
        return self._find(driven.engine)
