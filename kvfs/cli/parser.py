"""The command line's parser: a mistake is one line, and every verb shows an example."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from kvfs.core.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def add_verb(
    subparsers: "Subparsers",
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str = "",
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add the verb *name*; ``args.run`` is what to call.

    *summary* is for verbs of a verb, such as ``kvfs bench jobs``; main.py has the others.
    """
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation in a script breaks when a flag is added
    )
    parser.set_defaults(run=run)
    return parser
