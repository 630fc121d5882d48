#!/bin/sh
# Makes dist/kvfs_VERSION_ARCH.deb from this tree, in a copy of it.
set -eu

place=build/deb
rm -rf "$place"
mkdir -p "$place/kvfs" dist
git ls-files -z --cached --others --exclude-standard |
    xargs -0 ls -d --zero 2>/dev/null |
    tar --null -T - -cf - | tar -xf - -C "$place/kvfs"
(cd "$place/kvfs" && dpkg-buildpackage -us -uc -b)
cp "$place"/kvfs_*.deb dist/
ls dist/kvfs_*.deb
