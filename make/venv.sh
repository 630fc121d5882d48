#!/bin/sh
# venv.sh DIR EXTRAS: makes the virtual environment DIR and installs this tree into it, editable,
# with the versions that constraints.txt pins, and files that have its hashes. EXTRAS is "" or
# "[test]".
set -eu
venv=$1
extras=$2

if [ ! -x "$venv/bin/python" ]; then
    python=""
    for candidate in "${PYTHON:-}" /usr/bin/python3 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "make: no Python 3.11 or later; name one with PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "Making $venv with $python"
    "$python" -m venv "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
# Debian's pip takes no hashes from constraints.
sed -n '/^pip==/,/[^\\]$/p' constraints.txt >"$venv/pip.txt"
pip install --quiet --require-hashes -r "$venv/pip.txt"
# Asked for by name: hashes hold for all that pip brings, and this tree can have none.
"$venv/bin/python" - "$extras" >"$venv/wanted.txt" <<'END'
import sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"]
if sys.argv[1]:
    wanted += project["optional-dependencies"][sys.argv[1].strip("[]")]
print("\n".join(wanted))
END
pip install --quiet --require-hashes -c constraints.txt -r "$venv/wanted.txt"
# setuptools warns at length of what an editable installation is.
# compat: a line in a .pth file. The default imports a finder at each start of Python, 10 ms.
PYTHONWARNINGS=ignore pip install --quiet --no-deps --build-constraint constraints.txt \
    --config-settings editable_mode=compat \
    -e .
