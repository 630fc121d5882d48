#!/bin/sh
# All that a release consists of, in dist/release: source package, wheel, Debian packages for each of
# SUITES (of this machine's architecture, and of arm64 by a cross-compiler), an OCI image, the Helm
# chart, a list of what is inside, checksums. Each is built in a bare root of its own from what is
# committed, so nothing of this machine gets in. docs/dev/release.md says what to do with them. Needs
# root, the network, and make/packages-release.txt.
set -eu

suites=${SUITES:-bookworm trixie}
# Where the wheel and the image come from: the oldest Debian that is supported.
oldest=${suites%% *}
place=build/release
out=dist/release
arch=$(dpkg --print-architecture)
# On a machine of arm64 nothing is left to be cross-compiled.
other=arm64
[ "$arch" != "$other" ] || other=""

git diff --quiet HEAD || echo "make: what is not committed is not in this release" >&2
# A tag says which version this is; a trial, of no tag, has the commit in its version.
if tag=$(git describe --tags --exact-match --match 'v[0-9]*' HEAD 2>/dev/null); then
    version=${tag#v}
else
    version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' kvfs/__init__.py)+g$(git rev-parse --short=9 HEAD)
fi
echo "Release $version"

rm -rf "$place" "$out"
mkdir -p "$place/tree" "$out"
git archive HEAD | tar -x -C "$place/tree"
python3 make/release_version.py "$place/tree" "$version"

packages=$(cat make/packages-runtime.txt make/packages-deb.txt ${other:+make/packages-cross.txt} |
    sed 's/#.*//' | tr -s ' \n' ',')

# in_root ROOT COMMAND: as root of a bare Debian, with processes and mounts of its own.
in_root() {
    unshare --mount --propagation private --pid --fork sh -euc '
        mount -t proc proc "$1/proc"
        mount -t tmpfs tmpfs "$1/dev/shm"
        exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
            PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore DEBIAN_FRONTEND=noninteractive \
            ${PIP_CERT:+PIP_CERT=/etc/ssl/certs/ca-certificates.crt} \
            ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
            ${https_proxy:+https_proxy="$https_proxy"} ${http_proxy:+http_proxy="$http_proxy"} \
            chroot "$1" sh -euc "$2"' sh "$1" "$2"
}

for suite in $suites; do
    echo "A bare $suite"
    root=$place/$suite
    mmdebstrap --quiet --variant=minbase --mode=root --architectures="$arch${other:+,$other}" \
        --include="${packages%,}" "$suite" "$root"
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    # The authorities that this machine's pip believes.
    [ -z "${PIP_CERT:-}" ] || cp "$PIP_CERT" "$root/etc/ssl/certs/ca-certificates.crt"
    release=$(. "$root/etc/os-release" && echo "$VERSION_ID")
    for each in $arch $other; do
        echo "The Debian package for $suite, $each"
        mkdir "$root/srv/$each"
        cp -r "$place/tree" "$root/srv/$each/kvfs"
        # The later Debian has the later version, so that its package follows an upgrade of the system.
        sed -i "1s/([^)]*)/($version+deb$release)/" "$root/srv/$each/kvfs/debian/changelog"
        in_root "$root" "cd /srv/$each/kvfs && dpkg-buildpackage -us -uc -b -a$each" \
            >"$place/$suite-$each.log" 2>&1 || { tail -40 "$place/$suite-$each.log" >&2; exit 1; }
        cp "$root/srv/$each"/kvfs_*.deb "$out/"
    done
done

echo "Source package and wheel"
root=$place/$oldest
rm -rf "$root/srv/source" "$root/srv/out"
cp -r "$place/tree" "$root/srv/source"
in_root "$root" '
    cd /srv/source
    python3 -m venv /srv/venv
    sh make/pins.sh --plain >/srv/pins.txt
    /srv/venv/bin/pip install --quiet -c /srv/pins.txt pip setuptools shtab
    /srv/venv/bin/python -c "from setuptools import build_meta; build_meta.build_sdist(\"/srv/out\")"
    KVFS_PURE=1 /srv/venv/bin/pip wheel --quiet --no-deps --no-build-isolation -w /srv/out /srv/out/kvfs-*.tar.gz
' >"$place/wheel.log" 2>&1 || { tail -40 "$place/wheel.log" >&2; exit 1; }
cp "$root"/srv/out/kvfs-* "$out/"

echo "The image"
deb=$(ls "$PWD/$out"/kvfs_*+deb*_"$arch".deb | head -1)
mmdebstrap --quiet --variant=minbase --mode=root \
    --customize-hook="copy-in $deb /tmp" \
    --customize-hook='chroot "$1" sh -c "apt-get install -qq -y --no-install-recommends /tmp/kvfs_*.deb && rm /tmp/kvfs_*.deb"' \
    "$oldest" "$place/image.tar" >"$place/image.log" 2>&1 || { tail -40 "$place/image.log" >&2; exit 1; }
python3 make/oci_image.py "$place/image.tar" "$version" "$arch" "$out/kvfs-image-$version-$arch.tar"

echo "The chart"
tar -C "$place/tree/docs/kubernetes" --dereference --owner=0 --group=0 --transform 's,^chart,kvfs,' \
    -czf "$out/kvfs-$version.tgz" chart

echo "What is inside, and checksums"
dpkg-deb -x "$deb" "$place/inside"
python3 make/sbom.py "$place/inside/usr/lib/kvfs" "$version" "$(dpkg-deb -f "$deb" Depends)" \
    >"$out/kvfs-$version.cdx.json"
(cd "$out" && sha256sum -- * >"../SHA256SUMS" && mv ../SHA256SUMS .)
ls -l "$out"
