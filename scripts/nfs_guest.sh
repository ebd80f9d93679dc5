#!/bin/sh
# Process 1 of the User-Mode Linux that nfs_check.py boots: an NFS server, two clients of it, and the checks on both.
# The root is the host's own, so everything that is changed lies on file systems of memory, except for CKPTD_WORK.
# CKPTD_WORK, CKPTD_PYTHON, CKPTD_REPO and CKPTD_VERSIONS come from the kernel's command line.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run PYTHONDONTWRITEBYTECODE=1
exec >"$CKPTD_WORK/guest.log" 2>&1

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm
for folder in /dev/shm /run /tmp /mnt /var/lib/nfs; do
    # what the host has there of ours must stay in sight
    case "$CKPTD_WORK/$CKPTD_REPO/$CKPTD_PYTHON" in *"$folder/"*) [ "$folder" = /run ] || continue ;; esac
    mount -t tmpfs tmpfs "$folder"
done
mkdir -p /mnt/lib /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery /var/lib/nfs/sm /var/lib/nfs/sm.bak
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
ln -s /usr/lib/uml/modules /mnt/lib/modules
for module in nfsd nfs nfsv3 nfsv4; do modprobe -d /mnt "$module"; done
ip link set lo up

mkdir -p /run/export /run/one /run/two
mount -t tmpfs tmpfs /run/export
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
rpcbind
rpc.statd
exportfs -o rw,no_root_squash,insecure,no_subtree_check,fsid=0 127.0.0.1:/run/export
rpc.nfsd --grace-time 10 --lease-time 10 4 # else nobody is served for the first 90 s
rpc.mountd

cd "$CKPTD_REPO" || exit 1
for version in $CKPTD_VERSIONS; do
    case "$version" in 3) source=127.0.0.1:/run/export ;; *) source=127.0.0.1:/ ;; esac
    out="$CKPTD_WORK/v$version"
    mkdir -p "$out"
    # Without nosharecache both would be one client with one memory.
    for host in one two; do
        mount -t nfs -o "vers=$version,nosharecache" "$source" "/run/$host" || echo "no mount v$version" >"$out/failed"
    done
    grep " /run/one \| /run/two " /proc/mounts >"$out/mounts"
    "$CKPTD_PYTHON" -m pytest -q --noconftest -p no:cacheprovider -o addopts=--import-mode=importlib \
        --junit-xml "$out/tests.xml" tests/crash/nfs_two_mounts.py >"$out/tests.log" 2>&1
    mkdir -p "/run/export/doctor-$version"
    "$CKPTD_PYTHON" -m ckptd init "file:///run/one/doctor-$version/root" >"$out/doctor.log" 2>&1
    "$CKPTD_PYTHON" -m ckptd doctor "file:///run/one/doctor-$version/root" --json --racers 8 --rounds 20 \
        --other "file:///run/two/doctor-$version/root" >"$out/doctor.json" 2>>"$out/doctor.log"
    echo $? >"$out/doctor.code"
    umount /run/one /run/two
done
echo done >"$CKPTD_WORK/done"
sync
echo o >/proc/sysrq-trigger
sleep 10
