"""What happens between the two tries of an open(2) with O_TRUNC: others swap names meanwhile."""

import os
from pathlib import Path

from tests.support.clients.stepping import Stepping
from tests.support.kernel.calls import read_file, write_file

ATTACKS = 4000


def test_who_owns_one_file_empties_no_other(kv: Path) -> None:
    """[life-rewrite] A link to another's file is put in place of the refused one, 4,000 times.

    The kernel looked the name up again, and the file behind the link was gone.
    """
    write_file(kv / "victim", b"theirs")
    os.chmod(kv / "victim", 0o600)
    (kv / "own").mkdir()
    os.chmod(kv / "own", 0o777)
    with Stepping(
        "tests.support.clients.swapped_link", kv / "own", kv / "victim", str(ATTACKS)
    ) as attack:
        assert attack.at() == "swapped"
    assert read_file(kv / "victim") == b"theirs"
