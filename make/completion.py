"""Completion for bash, zsh and fish, made from the command line's parsers by shtab.

They lie where the shells look for them below a prefix such as /usr/local.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import shtab

from kvfs.cli.main import VERBS, parser_of
from kvfs.core.settings import Settings

#: Where each shell finds it below a prefix.
PLACES: Final = {
    "bash": "share/bash-completion/completions/kvfs",
    "zsh": "share/zsh/site-functions/_kvfs",
    "fish": "share/fish/vendor_completions.d/kvfs.fish",
}
#: What a value with such a name in the help is.
_FILES: Final = frozenset({"SOURCE", "FILE", "PATH", "LIST"})
_DIRECTORIES: Final = frozenset({"MOUNTPOINT", "MOUNT", "DIR"})


def completions() -> dict[str, str]:
    """Return the text of each by its place below a prefix."""
    return {place: shtab.complete(_parser(), shell) for shell, place in PLACES.items()}


def _parser() -> argparse.ArgumentParser:
    """Return the parser of every verb, which says of each value what may stand there."""
    parser = parser_of(VERBS)
    for nested in list(_all_of(parser)):
        for action in nested._actions:
            _say_what(action)
    return parser


def _say_what(action: Any) -> None:  # noqa: ANN401 - shtab looks for an attribute of its own
    if isinstance(action, argparse._SubParsersAction):
        for listed in action._choices_actions:  # the shells show the first line of it
            action.choices[listed.dest].description = listed.help or VERBS.get(listed.dest)
    elif choices := _CHOICES.get(action.dest):
        action.choices = action.choices or choices
    elif action.metavar in _FILES:
        action.complete = shtab.FILE
    elif action.metavar in _DIRECTORIES:
        action.complete = shtab.DIRECTORY


def _all_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                yield from _all_of(nested)


_CHOICES: Final = {
    declared.name: declared.metadata["choices"] for declared in dataclasses.fields(Settings)
}
