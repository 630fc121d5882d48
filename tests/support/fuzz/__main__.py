"""Fuzzes one decoder in this process: ``python -m tests.support.fuzz NAME [LIBFUZZER-OPTION]...``.

It ends with 0 when its time is over (``-max_total_time``), or with the input that was decoded
wrongly: libFuzzer prints it, and leaves it as a file ``crash-...`` in the present folder.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["kvfs"]):
    from tests.support.fuzz.targets import clear, targets


def main() -> None:
    """Fuzz what the command line names; libFuzzer ends the process."""
    target = targets()[sys.argv[1]]
    with TemporaryDirectory(prefix="kvfs-fuzz-") as corpus:
        for number, example in enumerate(target.examples):
            (Path(corpus) / f"{number}").write_bytes(example)
        atheris.Setup([sys.argv[0], corpus, *sys.argv[2:]], target.feed)
        try:
            atheris.Fuzz()
        finally:
            clear()


main()
