"""The command line's parser: a mistake is one line, and every verb shows an example."""

import argparse
import difflib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvfs.core.errors import UsageError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        """Refuse a value that is no choice, with the one that was probably meant."""
        if action.choices is None or value in action.choices:
            return
        near = meant(str(value), map(str, action.choices))
        known = "" if near else f" (choose from {', '.join(map(str, action.choices))})"
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near or known}")

    def refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Raise UsageError if the command line *words* has a flag that no verb on it knows.

        To be called before argparse parses, which would first complain of what is missing.
        """
        known, parser = set[str](), self
        for word in words:
            if word == "--":
                return
            verbs = parser.verbs()
            if word in verbs:
                parser = verbs[word]
            known = known.union(parser.flags())
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                parser.error(f"unknown flag {flag}{meant(flag, parser.flags())}")

    def verbs(self) -> dict[str, "OneLineParser"]:
        """Return the parsers of its verbs, by name."""
        nested = (one for one in self._actions if isinstance(one, argparse._SubParsersAction))
        return next((dict(one.choices) for one in nested), {})

    def flags(self) -> Collection[str]:
        """Return the names of its flags."""
        return self._option_string_actions.keys()


def meant(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" if *word* is almost one of *known*, else an empty text."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


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
