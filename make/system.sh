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
    # No server of a package starts by itself: a test starts its own, in a network of its own.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    apt-get update -qq
    # shellcheck disable=SC2086 # the list is meant to be split
    apt-get install -qq -y --no-install-recommends $missing </dev/null
    # Nor at the next start of a machine that had none of them.
    case " $missing " in *" nfs-ganesha "*) off=nfs-ganesha.service ;; *) off="" ;; esac
    case " $missing " in *" nfs-kernel-server "*) off="$off nfs-server.service" ;; esac
    case " $missing " in *" rpcbind "*) off="$off rpcbind.service rpcbind.socket" ;; esac
    case " $missing " in *" prometheus "*) off="$off prometheus.service" ;; esac
    case " $missing " in *" prometheus-node-exporter "*) off="$off prometheus-node-exporter.service" ;; esac
    # shellcheck disable=SC2086
    [ -z "$off" ] || systemctl disable --quiet $off 2>/dev/null || true
fi

[ -e /dev/fuse ] || modprobe fuse 2>/dev/null || echo "make: no /dev/fuse on this machine" >&2
