#!/usr/bin/env bash
# A Docker engine of its own for compose-check: Debian 13's, in a root of its own. Nothing of it is
# installed into this machine, and the engine that may run here already is left alone.
#
#   deploy/compose/engine.sh start   # root, debootstrap, iptables; prints what to export
#   deploy/compose/engine.sh stop    # ends it, and takes back what has come with it: nothing else's
#
# COMPOSE_CHECK_HOME holds it all (default: ~/.cache/sluice/compose-check), some 6 GB. Remove the folder
# to begin anew. DEBIAN_MIRROR: where packages come from; by default where this machine's come from.
set -euo pipefail
repository=$(cd "$(dirname "$0")/../.." && pwd)
home=${COMPOSE_CHECK_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/sluice/compose-check}
socket="$home/docker.sock"
# Apart from those that engines take by default.
bridge=172.31.250.1/24
pool=base=172.31.128.0/18,size=26
say() { echo "compose-check: $*"; }

mirror() { # of this machine; DEBIAN_MIRROR comes before it
  apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 2>/dev/null | grep -m1 '/debian$' \
    || say "apt knows no Debian mirror here: set DEBIAN_MIRROR to the URL of one" >&2
}

root_of() { # suite, packages: a minimal Debian in $home/<suite>
  [ -e "$home/$1/.complete" ] && return
  say "debootstrap of $1"
  rm -rf "${home:?}/$1"
  debootstrap --variant=minbase --include="$2" "$1" "$home/$1" "${DEBIAN_MIRROR:-$(mirror)}" \
    > "$home/debootstrap-$1.log" 2>&1 || { tail -n 5 "$home/debootstrap-$1.log"; exit 1; }
  umount "$home/$1/proc" 2>/dev/null || true
  rm -f "$home/$1"/var/cache/apt/archives/*.deb
  touch "$home/$1/.complete"
}

engine_root() { # the stand-ins' Debian, and the engine
  [ -e "$home/engine/.complete" ] && return
  say "packages of the engine"
  rm -rf "$home/engine" && cp -a "$home/trixie" "$home/engine" && rm "$home/engine/.complete"
  cp -L /etc/resolv.conf "$home/engine/etc/resolv.conf"
  { chroot "$home/engine" apt-get update \
      && chroot "$home/engine" env DEBIAN_FRONTEND=noninteractive apt-get install -y \
        --no-install-recommends docker.io docker-cli docker-buildx docker-compose iptables; } \
    > "$home/packages.log" 2>&1 || { tail -n 5 "$home/packages.log"; exit 1; }
  touch "$home/engine/.complete"
}

run_engine() {
  # A mount namespace of its own: its mounts end with it, and the host sees none of them.
  setsid unshare --mount --propagation private bash -euc '
    home=$1 root=$2 repository=$3; shift 3
    mount --bind "$root" "$root" # pivot_root takes only what is mounted
    for name in proc sys dev; do mount --rbind "/$name" "$root/$name"; done
    for folder in "$home" "$repository"; do
      mkdir -p "$root$folder"; mount --bind "$folder" "$root$folder"
    done
    touch "$root/etc/resolv.conf"; mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
    mkdir -p "$root/host"; cd "$root"; pivot_root . host; cd /; umount -l /host
    mount -t tmpfs tmpfs /run
    exec dockerd "$@"
  ' engine "$home" "$home/engine" "$repository" \
    --data-root "$home/data" --exec-root "$home/exec" --pidfile "$home/docker.pid" \
    --host "unix://$socket" --bip "$bridge" --default-address-pool "$pool" \
    < /dev/null > "$home/dockerd.log" 2>&1 &
  for _ in $(seq 120); do
    docker version > /dev/null 2>&1 && return
    sleep 0.5
  done
  tail -n 5 "$home/dockerd.log"; exit 1
}

clients() { # the commands of the engine's root run on this machine, if its libc is not too old
  mkdir -p "$home/bin" "$home/client"
  ln -sf "$home/engine/usr/bin/docker" "$home/bin/docker"
  printf '{"cliPluginsExtraDirs": ["%s"]}\n' "$home/engine/usr/libexec/docker/cli-plugins" \
    > "$home/client/config.json"
  export DOCKER_HOST="unix://$socket" DOCKER_CONFIG="$home/client" PATH="$home/bin:$PATH"
}

base_images() { # DEBIAN_IMAGE and PYTHON_IMAGE of the check, where no registry is
  local name
  for name in bookworm trixie; do
    docker image inspect "sluice-check/$name:base" > /dev/null 2>&1 && continue
    say "image sluice-check/$name:base"
    tar -C "$home/$name" --numeric-owner --exclude='./proc/*' --exclude='./sys/*' -c . \
      | docker import - "sluice-check/$name:base" > /dev/null
  done
  docker image inspect sluice-check/python:3.11-bookworm > /dev/null 2>&1 && return
  say "image sluice-check/python:3.11-bookworm"
  # Trusted is what this machine trusts.
  mkdir -p "$home/python" && cp -L /etc/ssl/certs/ca-certificates.crt "$home/python/"
  docker build --quiet -t sluice-check/python:3.11-bookworm -f - "$home/python" > /dev/null <<'RECIPE'
FROM sluice-check/bookworm:base
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv libpython3.11 \
 && ln -s python3 /usr/bin/python \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
RECIPE
}

start() {
  [ "$(id -u)" = 0 ] || { say "an engine of its own needs root"; exit 2; }
  for tool in debootstrap iptables unshare; do
    command -v "$tool" > /dev/null || { say "apt-get install --no-install-recommends $tool"; exit 2; }
  done
  mkdir -p "$home"
  clients
  if ! docker version > /dev/null 2>&1; then
    stop # what one that was killed has left
    refuse_beside_another
    root_of trixie ca-certificates
    root_of bookworm ca-certificates
    engine_root
    record
    run_engine
    # All containers together count as one process by default, which starves them beside others.
    if [ -w /sys/fs/cgroup/cpu/cpu.shares ]; then # cgroup v1
      mkdir -p "${shares%/*}" && echo 10240 > "$shares"
    fi
    say "engine $(docker version --format '{{.Server.Version}}'), compose $(docker compose version --short)"
  fi
  base_images
}

ours() { # pid, empty if ours is not running: a pid file may outlive its process
  local pid
  pid=$(cat "$home/docker.pid" 2>/dev/null || true)
  [ -n "$pid" ] && [ -r "/proc/$pid/cmdline" ] || return 0
  if [[ $(tr '\0' ' ' < "/proc/$pid/cmdline") == *"--data-root $home/data "* ]]; then echo "$pid"; fi
}

rules() { # a line for each chain and rule: program, table, and what makes it
  local program table
  for program in iptables ip6tables; do
    for table in raw mangle nat filter; do
      "$program" -t "$table" -S 2>/dev/null | sed "s/^/$program -t $table /" || true
    done
  done
}

bridges() { ip -o link show type bridge 2>/dev/null | awk -F': ' '{print $2}'; }

refuse_beside_another() { # two engines write the same chains
  local found=
  grep -qx dockerd /proc/[0-9]*/comm 2>/dev/null && found="a dockerd runs"
  [[ $'\n'$(bridges)$'\n' == *$'\ndocker0\n'* ]] && found="the bridge docker0 is there"
  [[ $(rules) == *"-N DOCKER"* ]] && found="iptables has chains of Docker"
  [ -n "$found" ] || return 0
  say "$found: an engine of its own would get in its way. Start that Docker, or name it in" \
    "DOCKER_HOST; or remove what a Docker that is gone has left (a restart of the machine does)"
  exit 2
}

shares=/sys/fs/cgroup/cpu/docker/cpu.shares
record() { # what `stop` goes by; the last file says that all are there
  cat /proc/sys/net/ipv4/ip_forward > "$home/ip_forward.before"
  iptables -S FORWARD | head -n 1 > "$home/forward.before"
  cat "$shares" > "$home/shares.before" 2>/dev/null || true
  bridges > "$home/bridges.before"
  rules > "$home/rules.before"
}

stop() {
  local pid name
  pid=$(ours)
  if [ -n "$pid" ] && kill "$pid" 2>/dev/null; then
    for _ in $(seq 60); do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
    if [ -n "$(ours)" ]; then kill -9 "$pid" 2>/dev/null || true; fi
  fi
  [ -e "$home/rules.before" ] || return 0 # it has not begun: nothing here is its own
  for name in $(bridges | grep -E '^(docker0|br-[0-9a-f]{12})$' | grep -vxFf "$home/bridges.before"); do
    ip link delete "$name" 2>/dev/null || true
  done
  # Rules of Docker that have come since, then the chains that they led into.
  rules | grep -vxFf "$home/rules.before" > "$home/rules.new" || true
  sed -nE '/ -A .*(DOCKER|docker0|br-[0-9a-f]{12}|172\.31\.)/s/ -A / -D /p' "$home/rules.new" \
    | while read -r name; do eval "$name" 2>/dev/null || true; done
  sed -n '/ -N DOCKER/s/ -N / -X /p' "$home/rules.new" \
    | while read -r name; do $name 2>/dev/null || true; done
  if [ -s "$home/forward.before" ]; then eval "iptables $(cat "$home/forward.before")"; fi
  if [ -s "$home/ip_forward.before" ]; then
    cat "$home/ip_forward.before" > /proc/sys/net/ipv4/ip_forward
  fi
  if [ -s "$home/shares.before" ]; then
    cat "$home/shares.before" > "$shares" || true
  elif [ -e "$shares" ]; then
    find "${shares%/*}" -depth -type d -exec rmdir {} + 2>/dev/null || true
  fi
  rm -f "$home"/*.before "$home/rules.new"
}

case "${1:-}" in
  start)
    start 1>&2
    # The engine sees this folder and the repository of this machine, and mounts come from there.
    printf 'export DOCKER_HOST=%q DOCKER_CONFIG=%q PATH=%q:"$PATH" COMPOSE_CHECK_WORK=%q\n' \
      "$DOCKER_HOST" "$DOCKER_CONFIG" "$home/bin" "$home/work"
    ;;
  stop) clients; stop ;;
  *) echo "usage: engine.sh start|stop"; exit 2 ;;
esac
