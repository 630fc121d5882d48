"""Run pytest, and what failed in it once more by itself: ``python -m make.second_look PYTEST...``.

The suite runs four workers on two cores, of which other programs of the machine may take a part. A
test that waited for a server which had no CPU fails then, once in thousands. A few such tests are
run again when no other test runs. The first failure stays in the output, and the end names each, so
that nobody has to guess. One that fails again fails the suite, and so do more than a few at once.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

#: More than so many are not chance.
AGAIN_MAX: Final = 3
#: Exit status of pytest when tests failed, and nothing else went wrong.
TESTS_FAILED: Final = 1
#: Where pytest lists the failures; ``--cache-clear`` has dropped those of former runs.
_FAILED: Final = ".pytest_cache/v/cache/lastfailed"
#: How pytest is told to run the tests in one process: the last -n counts.
_ALONE: Final = ("-n", "0")


def main(pytest: Sequence[str]) -> int:
    """Run the command *pytest* in the working directory; return the exit status."""
    first = subprocess.run([*pytest, "--cache-clear"], check=False).returncode
    if first != TESTS_FAILED:
        return first
    failed = sorted(json.loads(Path(_FAILED).read_text()))
    if len(failed) > AGAIN_MAX:
        print(f"{len(failed)} tests failed: too many to look at again", flush=True)
        return first
    print(f"\nonce more, by themselves: {', '.join(failed)}", flush=True)
    second = subprocess.run([pytest[0], *_ALONE, *failed], check=False).returncode
    verdict = "passed by themselves" if second == 0 else "failed again"
    print("\n".join(f"FAILED beside others, {verdict}: {name}" for name in failed), flush=True)
    return second


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
