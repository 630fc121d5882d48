#!/bin/sh
# venv.sh DIR EXTRAS: makes the virtual environment DIR and installs this tree into it, editable,
# with the versions that constraints.txt pins. EXTRAS is "" or "[test]".
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
pip install --quiet --upgrade pip -c constraints.txt
# setuptools warns at length of what an editable installation is.
# compat: a line in a .pth file. The default imports a finder at each start of Python, 10 ms.
PYTHONWARNINGS=ignore pip install --quiet -c constraints.txt --build-constraint constraints.txt \
    --config-settings editable_mode=compat \
    -e ".$extras"
