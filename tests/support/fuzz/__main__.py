"""Fuzzes one decoder in this process: ``python -m tests.support.fuzz NAME [LIBFUZZER-OPTION]...``.

It ends with 0 when its time is over (``-max_total_time``), or with the input that was decoded
wrongly: libFuzzer prints it, and leaves it as a file ``crash-...`` in the present folder. What it
found on its way stays in the folder KVFS_FUZZ_CORPORA, if that is set; the next run begins there.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris

with atheris.instrument_imports(include=["kvfs"]):
    from tests.support.fuzz.targets import clear, targets


@contextlib.contextmanager
def corpus_of(name: str) -> Iterator[str]:
    """Yield the folder with the inputs that reach something in the decoder *name*."""
    if not (kept := os.environ.get("KVFS_FUZZ_CORPORA")):
        with TemporaryDirectory(prefix="kvfs-fuzz-") as corpus:
            yield corpus
        return
    (place := Path(kept, name)).mkdir(parents=True, exist_ok=True)
    yield str(place)


def main() -> None:
    """Fuzz what the command line names; libFuzzer ends the process."""
    target = targets()[sys.argv[1]]
    with corpus_of(sys.argv[1]) as corpus:
        for number, example in enumerate(target.examples):
            (Path(corpus) / f"{number}").write_bytes(example)
        atheris.Setup([sys.argv[0], corpus, *sys.argv[2:]], target.feed)
        try:
            atheris.Fuzz()
        finally:
            clear()


main()
