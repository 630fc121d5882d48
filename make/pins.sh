#!/bin/sh
# pins.sh: writes into constraints.txt the hashes of the versions that stand there, and of what these
# need besides. Change a version there, or add a line NAME==VERSION, and run it.
# pins.sh --plain: prints the versions alone, for what is built here and so has no known hash.
set -eu

plain() { sed -n 's/^\([^#[:space:]]*==[^[:space:]]*\).*/\1/p' constraints.txt; }
if [ "${1:-}" = --plain ]; then
    plain
    exit
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
plain >"$place/pins.in"
"${PYTHON:-python3}" -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet pip-tools
"$place/venv/bin/pip-compile" --quiet --generate-hashes --allow-unsafe --no-annotate --no-header \
    --strip-extras --no-emit-index-url --no-emit-options --extra test -o "$place/pins.txt" \
    "$place/pins.in" pyproject.toml
{ grep '^#' constraints.txt && cat "$place/pins.txt"; } >"$place/new"
cp "$place/new" constraints.txt
