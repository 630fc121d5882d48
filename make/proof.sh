#!/bin/sh
# Runs the long proofs, a file at a time, and keeps what each printed as docs/dev/proof-NAME.txt,
# headed by the commit and the machine. PROOF=tests/path.py runs one.
set -eu

files=${PROOF:-$(.venv/bin/pytest --collect-only -q -m proof --no-header tests |
    sed -n 's/::.*//p' | sort -u)}
if [ -z "$files" ]; then
    echo "make: no test is marked as a proof" >&2
    exit 1
fi

commit=$(git describe --always --abbrev=12 2>/dev/null || echo unknown)
# What an earlier proof printed is no change of what this one shows.
git diff --quiet HEAD -- . ':!docs/dev/proof-*.txt' 2>/dev/null || commit=$commit-dirty
failed=0
for file in $files; do
    name=$(basename "$file" .py | sed 's/^test_//; s/^proof_//; s/_/-/g')
    output=docs/dev/proof-$name.txt
    {
        echo "commit   $commit"
        echo "date     $(date -u +%Y-%m-%dT%H:%MZ)"
        echo "machine  Linux $(uname -r), $(nproc) cores, $(awk '/MemTotal/ {printf "%.0f GiB", $2 / 1048576}' /proc/meminfo)"
        echo "command  pytest -m proof $file"
        echo
    } >"$output"
    # The pipe would hide pytest's status, so it goes through a file; not after one that fails, where
    # the shell would end (set -e) and the status of the file before would be read.
    {
        status=0
        .venv/bin/pytest -m proof -s --no-header -o faulthandler_timeout=7200 "$file" 2>&1 ||
            status=$?
        echo "$status" >.venv/proof-status
    } | tee -a "$output"
    [ "$(cat .venv/proof-status)" = 0 ] || failed=1
done
exit $failed
