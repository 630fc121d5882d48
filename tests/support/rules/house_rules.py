"""A house rule: one test that looks at every file, and names all that break it."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path


def of_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator: the test holds the rule against each of *paths*, and fails once for all.

    One test a file would be thousands, which cost more than what they look at.
    """

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            assert paths, "a rule over no file holds nothing"
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{path.name}: {error}")
            assert not broken, "\n".join(broken)

        # Not functools.wraps: pytest would see the rule's parameter and ask for a fixture.
        functools.update_wrapper(test, rule, assigned=("__module__", "__name__", "__doc__"))
        del test.__wrapped__  # type: ignore[attr-defined]
        return test

    return decorate
