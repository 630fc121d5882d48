"""What the envelope of hints of a request asks for. Pure: values in, values out.

The envelope is vLLM's ``vllm/v1/kv_hints/protocol.py`` (0.33), and the same in SGLang's
``python/sglang/srt/managers/kv_hints.py``. It does not define actions. The payloads are those of

- ``kv.retain`` 1.0: ``vllm/v1/kv_hints/retain.py`` of vLLM's pull request 38514 (open);
- ``kv.fetch`` 1.0: ``lib/kv-router/src/kv_hints.rs`` of Dynamo, which its router sends, and
  ``kvcr/hint_parser.py`` of KVCR 0.1.1;
- ``kv.deref`` 1.0: ``python/sglang/srt/kv_hints.py``, a proposal for SGLang, without a payload:
  the session of this request will not be asked for again.

An engine may ignore what it does not know. So do the bridges, and count it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvfs.core.hints import PRIORITY_MAX, Do

#: Bounds of what is read of one envelope, as in vllm/v1/kv_hints/retain.py.
ACTIONS_MAX: Final = 16
DIRECTIVES_MAX: Final = 128
#: Blocks that one envelope may ask to fetch: a prompt of a million tokens in blocks of 16.
FETCHED_MAX: Final = 1 << 16
#: Hashes in envelopes have so many bits; engines' own may have more.
HASH_MASK: Final = (1 << 64) - 1
_PROTOCOL: Final = "0"


class Directive(NamedTuple):
    """How much the blocks of some tokens of a request are worth."""

    #: 1 to 100; 0: earlier hints on these blocks count no more.
    priority: int
    #: Tokens, from the first to before the last.
    start: int = 0
    end: float = math.inf
    #: From when the blocks are hinted (s); None: until they go.
    duration_s: float | None = None
    #: In place of tokens: those that the request generates.
    covers_output: bool = False


class BlockWish(NamedTuple):
    """What is asked for one block."""

    do: Do
    priority: int = 0
    duration_s: float | None = None


class RequestHints(NamedTuple):
    """What one envelope asks for."""

    directives: tuple[Directive, ...] = ()
    #: The lowest 64 bits of the hashes of blocks that are wanted soon.
    fetched: frozenset[int] = frozenset()
    #: Whether the blocks of the request are of no use after it.
    once: bool = False
    #: Actions that are of no known type or version, or cannot be read.
    unknown: int = 0

    @property
    def says_nothing(self) -> bool:
        """Whether there is nothing to do for any block."""
        return not (self.directives or self.fetched or self.once)

    def wish_for(self, end_token: int, prompt_tokens: int) -> BlockWish | None:
        """Return what is asked for the block that ends with *end_token*; None: nothing.

        A block is covered by a range that it ends in. *prompt_tokens*: how many tokens the whole
        blocks of the prompt have; what comes after them is output. Of several directives that one
        counts that keeps the block longest.
        """
        best = max(
            (one for one in self.directives if _covers(one, end_token, prompt_tokens)),
            key=lambda one: (one.priority, one.duration_s or math.inf),
            default=None,
        )
        if best is not None and best.priority:
            return BlockWish(Do.RETAIN, best.priority, best.duration_s)
        if self.once:
            return BlockWish(Do.DEMOTE)
        return None if best is None else BlockWish(Do.RELEASE)


def hints_of(envelope: object) -> RequestHints:
    """Return what *envelope* asks for: an engine's object or the same as a dict. Never raises."""
    version, actions = _field(envelope, "protocol_version"), _field(envelope, "actions")
    if not isinstance(version, str) or _major(version) != _PROTOCOL:
        return RequestHints(unknown=1)
    if not isinstance(actions, (list, tuple)):
        return RequestHints(unknown=1)
    found = RequestHints(unknown=max(0, len(actions) - ACTIONS_MAX))
    for action in actions[:ACTIONS_MAX]:
        kind, version = _field(action, "action_type"), _field(action, "action_version")
        payload = _field(action, "payload")
        reads = _READS.get(kind) if isinstance(kind, str) else None
        known = reads is not None and isinstance(version, str) and _major(version) == "1"
        if reads is None or not known or not isinstance(payload, Mapping):
            found = found._replace(unknown=found.unknown + 1)
            continue
        try:
            found = reads(found, payload)
        except (ValueError, TypeError, OverflowError):
            found = found._replace(unknown=found.unknown + 1)
    return found


def _covers(directive: Directive, end_token: int, prompt_tokens: int) -> bool:
    if directive.covers_output:
        return end_token > prompt_tokens
    return directive.start < end_token <= directive.end


def _retain(found: RequestHints, payload: Mapping[str, Any]) -> RequestHints:
    directives = payload.get("directives")
    if not isinstance(directives, list):
        raise ValueError("directives")
    room = DIRECTIVES_MAX - len(found.directives)
    read = tuple(_directive(one) for one in directives[:room])
    lasting = tuple(one for one in read if one.duration_s != 0)
    beyond = int(len(directives) > room)
    return found._replace(directives=found.directives + lasting, unknown=found.unknown + beyond)


def _directive(said: object) -> Directive:
    if not isinstance(said, Mapping):
        raise ValueError("not a directive")
    output = said.get("covers_output", False)
    if not isinstance(output, bool) or (output and ("start" in said or "end" in said)):
        raise ValueError("covers_output")
    start, end = _number(said.get("start", 0)), said.get("end")
    priority = _number(said.get("priority"))
    if priority > PRIORITY_MAX or (end is not None and _number(end) <= start):
        raise ValueError("out of bounds")
    if not isinstance(priority, int) or not isinstance(start, int):
        raise ValueError("not whole")
    duration_s = said.get("duration")
    return Directive(
        priority,
        start,
        math.inf if end is None else _number(end),
        None if duration_s is None else _number(duration_s),
        output,
    )


def _fetch(found: RequestHints, payload: Mapping[str, Any]) -> RequestHints:
    hashes = payload.get("block_hashes")
    if not isinstance(hashes, list):
        raise ValueError("block_hashes")
    wanted = frozenset(
        int(_number(one, least=-(1 << 63))) & HASH_MASK for one in hashes[:FETCHED_MAX]
    )
    return found._replace(fetched=found.fetched | wanted)


def _deref(found: RequestHints, payload: Mapping[str, Any]) -> RequestHints:
    if payload:
        raise ValueError("it is about the whole request")
    return found._replace(once=True)


_READS: Final[Mapping[str, Callable[[RequestHints, Mapping[str, Any]], RequestHints]]] = {
    "kv.retain": _retain,
    "kv.fetch": _fetch,
    "kv.deref": _deref,
}


def _field(holder: object, name: str) -> object:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _major(version: str) -> str:
    return version.partition(".")[0]


def _number(said: object, least: float = 0) -> int | float:
    if isinstance(said, bool) or not isinstance(said, (int, float)):
        raise ValueError("not a number")
    if not (math.isfinite(said) and said >= least):
        raise ValueError("out of bounds")
    return said
