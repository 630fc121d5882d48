#!/bin/sh
# Installs the Debian packages named in the given lists that are missing; touches apt only then.
set -eu

missing=""
for package in $(cat "$@" | sed 's/#.*//'); do
    status=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$status" = installed ] || missing="$missing $package"
done

if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "make: not a Debian machine; install the equivalents of:$missing" >&2
        exit 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        echo "make: not root; as root, run: apt-get install$missing" >&2
        exit 1
    fi
    echo "Installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 # the list is meant to be split
    apt-get install -qq -y --no-install-recommends $missing </dev/null
fi

[ -e /dev/fuse ] || modprobe fuse 2>/dev/null || echo "make: no /dev/fuse on this machine" >&2
