#!/bin/bash
# Try the units of deploy/ under a systemd of its own: in namespaces, on an overlay of this machine's files.
#
#     sudo PYTHON=.venv/bin/python bash scripts/try_units.sh          # from the checkout; five minutes
#
# Needs root, Linux, systemd 247 or newer, nginx, curl, and cgroups that may be mounted. The commands are those of
# docs/deploy.md, with systemd; one machine is server, device and operator. Nothing of this machine changes:
# files are written to the overlay, in memory, and the network is a namespace with lo alone.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "error: try_units.sh: got user $(id -un), expected root; call it with sudo" >&2; exit 1; }

if [ "${1:-}" = boot ]; then # process 1 of the namespaces: prepare the file system, and become systemd
    T=$2 PREFIX=$3 SITE=$4 R=$2/root
    mount --make-rprivate /
    ip link set lo up
    mount -t tmpfs -o mode=755 tmpfs "$T"
    mkdir -p "$T"/{up,work,root}
    mount -t overlay overlay -o "lowerdir=/,upperdir=$T/up,workdir=$T/work" "$R"
    mount -t proc proc "$R/proc"
    mount --bind "$R/proc/sys" "$R/proc/sys" && mount -o remount,bind,ro "$R/proc/sys"
    mount -t sysfs -o ro sysfs "$R/sys"
    mount -t tmpfs -o mode=755 tmpfs "$R/sys/fs/cgroup"
    if [ -d /sys/fs/cgroup/systemd ]; then # version 1
        mkdir "$R/sys/fs/cgroup/systemd"
        mount -t cgroup -o none,name=systemd cgroup "$R/sys/fs/cgroup/systemd"
    else
        mount -t cgroup2 cgroup "$R/sys/fs/cgroup"
    fi
    for folder in dev run; do mount -t tmpfs -o mode=755 tmpfs "$R/$folder"; done
    mount -t tmpfs -o mode=1777 tmpfs "$R/tmp"
    for name in null zero full random urandom tty; do
        touch "$R/dev/$name" && mount --bind "/dev/$name" "$R/dev/$name"
    done
    mkdir "$R"/dev/{pts,shm}
    mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=0666 devpts "$R/dev/pts"
    ln -s pts/ptmx "$R/dev/ptmx"
    ln -s /proc/self/fd "$R/dev/fd"
    # Only the journal starts with it: no unit of this machine, which might set its clock or its kernel.
    rm -rf "$R"/lib/systemd/system/*.wants/* "$R"/etc/systemd/system/*.wants/*
    mkdir -p "$R"/lib/systemd/system/{sysinit,sockets}.target.wants
    ln -s ../systemd-journald.service "$R/lib/systemd/system/sysinit.target.wants/"
    ln -s ../systemd-journald.socket "$R/lib/systemd/system/sockets.target.wants/"
    for unit in tmp.mount systemd-remount-fs.service systemd-tmpfiles-setup.service; do
        ln -sf /dev/null "$R/etc/systemd/system/$unit"
    done
    echo "127.0.0.1 localhost server.example.org" >"$R/etc/hosts"
    tr -d - </proc/sys/kernel/random/uuid >"$R/etc/machine-id"
    # Python and the packages are those of this machine, outside of home directories.
    V=$R/opt/ravan-flwr/.venv
    mkdir -p "$V/bin" "$V/lib" "$R/opt/python" "$R/opt/packages"
    git -c safe.directory='*' archive HEAD | tar -x -C "$R/opt/ravan-flwr"
    mount --bind "$PREFIX" "$R/opt/python"
    mount --bind "$SITE" "$R/opt/packages"
    echo "home = /opt/python/bin" >"$V/pyvenv.cfg"
    own=$V/lib/$(basename "$(dirname "$SITE")")/site-packages
    mkdir -p "$own" && printf '/opt/ravan-flwr\n/opt/packages\n' >"$own/app.pth"
    ln -s "/opt/python/bin/$(basename "$(dirname "$SITE")")" "$V/bin/python"
    for script in "$(dirname "$5")"/{flower-*,flwr*,ravan-flwr}; do
        sed '1s|.*|#!/opt/ravan-flwr/.venv/bin/python|' "$script" >"$V/bin/$(basename "$script")"
        chmod 755 "$V/bin/$(basename "$script")"
    done
    echo /opt/python/lib >"$R/etc/ld.so.conf.d/python.conf"
    cd "$R" && mkdir -p old && pivot_root . old && umount -l /old
    mount --make-rshared / # as a container's manager does: copies of keys are mounts
    ldconfig
    exec env -i container=other PATH=/usr/sbin:/usr/bin /lib/systemd/systemd --unit=multi-user.target </dev/null
fi

python=$(realpath -s "${PYTHON:-.venv/bin/python}")
read -r prefix site < <("$python" -c 'import sys, sysconfig; print(sys.base_prefix, sysconfig.get_path("purelib"))')
folder=$(mktemp -d)
# A cgroup of its own in each hierarchy, which is the root that this systemd sees.
cgroups=()
while IFS=: read -r _ controllers path; do
    hierarchy=/sys/fs/cgroup/${controllers#name=}
    [ -n "$controllers" ] || [ ! -d /sys/fs/cgroup/unified ] || hierarchy=/sys/fs/cgroup/unified
    cgroups+=("${hierarchy%/}${path%/}/try-units")
done </proc/self/cgroup
mkdir "${cgroups[@]}"
(
    for cgroup in "${cgroups[@]}"; do
        for key in cpus mems; do # of cpuset, version 1: empty at first
            [ ! -e "$cgroup/cpuset.$key" ] || cat "$cgroup/../cpuset.$key" >"$cgroup/cpuset.$key"
        done
        echo "$BASHPID" >"$cgroup/cgroup.procs"
    done
    exec unshare -m -p -u -n -i -C -f --kill-child bash "$0" boot "$folder" "$prefix" "$site" "$python"
) >"$folder.log" 2>&1 &
unshared=$!
end() {
    kill -KILL "$unshared" 2>/dev/null || true
    wait "$unshared" 2>/dev/null || true
    sleep 2
    find "${cgroups[@]}" -depth -type d -exec rmdir {} \; || true
    rm -rf "$folder" "$folder.log"
}
trap end EXIT
sleep 10
systemd=$(pgrep -P "$unshared") || { cat "$folder.log" >&2; exit 1; }

nsenter -t "$systemd" -m -p -n -u -i -C -r -w env -i HOME=/root HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 \
    PATH=/opt/ravan-flwr/.venv/bin:/usr/sbin:/usr/bin FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_DISABLE_UPDATE_CHECK=1 FLWR_TELEMETRY_ENABLED=0 bash -euo pipefail <<'END'
cd /opt/ravan-flwr
systemctl --version | head -1
ravan-flwr keys ~/keys --host server.example.org --nodes 1
mkdir -p /etc/ravan-flwr ~/.flwr
cp -rp ~/keys/superlink ~/keys/node-0 /etc/ravan-flwr/
useradd --system --home-dir /var/lib/ravan-flwr --shell /usr/sbin/nologin ravan
useradd --system --home-dir /var/lib/ravan-serverapp --shell /usr/sbin/nologin ravan-app
useradd --system --home-dir /nonexistent --shell /usr/sbin/nologin ravan-proxy
cp deploy/*.service /etc/systemd/system/
systemctl enable --now ravan-superlink ravan-serverapp ravan-proxy
sleep 20
ravan-flwr doctor /etc/ravan-flwr/superlink --user ravan-app --write /var/lib/ravan-serverapp
cat >~/.flwr/config.toml <<CONFIG
[superlink.edge]
address = "localhost:8001"
root-certificates = "$HOME/keys/authority/ca.crt"
CONFIG
flwr supernode register ~/keys/node-0/node.pub edge
cat >/etc/ravan-flwr/node-0.env <<CONFIG
SUPERLINK=server.example.org:8000
RUNTIME_PORT=9094
NODE_CONFIG='partition-id=0 num-partitions=1 result-path="/var/lib/ravan-flwr/node-0/results"'
CONFIG
systemctl enable --now ravan-supernode@node-0 ravan-supernode-check@node-0
run() { flwr run . edge --stream -c "num-rounds=1 local-steps=1 clients-per-round=1 $1 output-dir='/var/lib/ravan-serverapp/runs'"; }
run deliver=true
ls /var/lib/ravan-flwr/node-0/results/*/adapter
for unit in ravan-superlink ravan-serverapp ravan-proxy ravan-supernode@node-0; do
    process=$(systemctl show -p MainPID --value "$unit")
    echo "$unit: user $(stat -c %U "/proc/$process"), limit $(systemctl show -p MemoryMax --value "$unit")"
    grep -E "^(Seccomp|NoNewPrivs|CapBnd):" "/proc/$process/status"
    as_unit="nsenter -t $process -m setpriv --reuid $(stat -c %u "/proc/$process") --clear-groups"
    for forbidden in "ls /root" "touch /etc/written"; do
        ! $as_unit $forbidden 2>/dev/null || { echo "error: $unit may $forbidden" >&2; exit 1; }
    done
done
echo "Both are killed, and start again:"
systemctl kill -s KILL ravan-supernode@node-0 ravan-superlink
sleep 110
systemctl is-active ravan-superlink ravan-serverapp ravan-proxy ravan-supernode@node-0 ravan-supernode-check@node-0
flwr supernode list edge --format json | grep '"status": "online"'
echo "A run that takes more memory than its service may have:"
mkdir /etc/systemd/system/ravan-serverapp.service.d
printf '[Service]\nMemoryMax=400M\n' >/etc/systemd/system/ravan-serverapp.service.d/limit.conf
systemctl daemon-reload && systemctl restart ravan-serverapp
timeout 150 bash -c "$(declare -f run); run ''" || true
flwr ls edge --format json | grep '"status": "finished:failed"'
systemctl is-active ravan-superlink ravan-serverapp ravan-proxy ravan-supernode@node-0
END
echo "ok"
