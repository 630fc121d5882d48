#!/bin/sh
# connectors.sh DIR: makes the second virtual environment, in which the real connectors live. Their
# pins (torch above all) shall not decide what kvfs itself runs with. tests/connectors brings
# requirements.txt and, where a wheel needs more than pip, install.sh, which is given DIR.
set -eu
venv=$1
from=tests/connectors

if [ ! -x "$venv/bin/python" ]; then
    echo "Making $venv"
    .venv/bin/python -m venv "$venv"
fi
if [ -f $from/requirements.txt ]; then
    echo "Installing the connectors"
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input install --quiet \
        -r $from/requirements.txt
fi
if [ -f $from/install.sh ]; then
    sh $from/install.sh "$venv"
fi
