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
for module in veth nfsd nfs nfsv3 nfsv4; do modprobe -d /mnt "$module"; done
ip link set lo up
# Two hosts: each has a network and a name of its own. One client with two mounts would get delegations that the server
# never takes back, as it only takes them back from others.
for host in one two; do
    case $host in one) net=10.98.1 ;; *) net=10.98.2 ;; esac
    ip netns add $host
    ip link add v$host type veth peer name eth0 netns $host
    ip addr add $net.1/24 dev v$host
    ip link set v$host up
    ip -n $host addr add $net.2/24 dev eth0
    ip -n $host link set eth0 up
    ip -n $host link set lo up
done

mkdir -p /run/export /run/one /run/two
mount -t tmpfs tmpfs /run/export
mount -t nfsd nfsd /proc/fs/nfsd
mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
rpcbind
rpc.statd
exportfs -o rw,no_root_squash,insecure,no_subtree_check,fsid=0 10.98.0.0/16:/run/export
rpc.nfsd --grace-time 10 --lease-time 10 4 # else nobody is served for the first 90 s
rpc.mountd

cd "$CKPTD_REPO" || exit 1
for version in $CKPTD_VERSIONS; do
    case "$version" in 3) export=/run/export ;; *) export=/ ;; esac
    out="$CKPTD_WORK/v$version"
    mkdir -p "$out"
    for host in one two; do
        case $host in one) server=10.98.1.1 ;; *) server=10.98.2.1 ;; esac
        nsenter --net=/run/netns/$host unshare --uts sh -c "hostname host-$host &&
            mount -t nfs -o vers=$version,nosharecache,nolock $server:$export /run/$host"
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
