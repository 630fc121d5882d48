#!/bin/busybox sh
# Process 1 of a guest of tests/support/machines/vm.py, first in its initramfs. It makes a root in memory,
# with the host's /usr and /etc and what else is shared on it by 9p, runs /out/command there, and
# turns the machine off. What the guest writes is in memory, but for /out.
export PATH=/bin:/usr/sbin:/usr/bin
share() { mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,"$3" "$1" "$2"; }
if [ "$1" != inside ]; then
    mkdir -p /proc /root
    mount -t proc proc /proc
    for module in /modules/*; do insmod "$module"; done
    umount /proc
    mount -t tmpfs -o size=90%,mode=755 root /root
    cd /root
    mkdir -p usr etc out proc sys dev run tmp root mnt var/tmp var/log var/lib .etc/lower .etc/upper .etc/work
    for name in bin sbin lib lib64; do ln -s usr/$name $name; done
    ln -s ../run var/run
    share usr usr ro,cache=loose
    share etc .etc/lower ro,cache=loose
    share out out rw,cache=none
    mount -t overlay -o lowerdir=.etc/lower,upperdir=.etc/upper,workdir=.etc/work etc etc
    for name in tmp run; do mount -t tmpfs -o mode=1777 tmpfs $name; done
    while read -r tag path; do
        mkdir -p ".$path"
        share "$tag" ".$path" ro,cache=loose
    done <out/shares
    mount -t proc proc proc
    mount -t sysfs sys sys
    mount -t devtmpfs dev dev
    mkdir -p dev/shm dev/pts
    mount -t tmpfs -o mode=1777 tmpfs dev/shm
    mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
    # Who mounts what is this kernel's to say, and the host's exports are not ours.
    rm -rf etc/mtab etc/exports etc/exports.d
    ln -s /proc/self/mounts etc/mtab
    mkdir etc/exports.d
    touch etc/exports
    cp /init .init
    cp /modprobe .modprobe
    exec switch_root /root /usr/bin/busybox sh /.init inside
fi
ip link set lo up
# The modules are not in /lib/modules: /usr is another machine's.
echo /.modprobe >/proc/sys/kernel/modprobe
echo 1 >/proc/sys/kernel/panic_on_oops
echo "guest: Linux $(uname -r), $(nproc) cores, up $(cut -d' ' -f1 /proc/uptime) s"
sh /out/command </dev/null
echo $? >/out/status
dmesg >/out/kernel.log
# No sync: what hangs on a server that is gone would hang it.
busybox poweroff -f
