#!/usr/bin/env bash
# Bring up a real Slurm cluster (munged + slurmctld + N slurmd) on this one host.
# Needs root, no systemd.  Idempotent.  Debian 12 packages: slurm-wlm munge iproute2.
#
#   start_slurm.sh [-d DIR] [-n NODES] [-c CPUS] [-m auto|netns|shared|plain] [-t SECONDS]
#
# netns : each node has its own network namespace (own IP, own ports, own
#         loopback), hostname and /etc/hosts.  Links can be cut: see env.sh.
# shared: each node has its own hostname and /etc/hosts, but shares the host's
#         network (addresses 127.0.1.N).
# plain : no namespaces (containers without CAP_SYS_ADMIN): every node has the host's
#         name; node names are put in /etc/hosts between markers, stop takes them out.
# auto  : the first of these three that this machine allows (default).
#
# Then:   . DIR/env.sh       (sets SLURM_CONF)
# shellcheck disable=SC2015,SC2086,SC2154,SC2016,SC2155  # style alone; no word here has blanks
set -euo pipefail

DIR=${TMPDIR:-/tmp}/slurmtest NODES=4 CPUS=8 MODE=auto WAIT=60
while getopts d:n:c:m:t:h o; do case $o in
  d) DIR=$OPTARG;; n) NODES=$OPTARG;; c) CPUS=$OPTARG;;
  m) MODE=$OPTARG;; t) WAIT=$OPTARG;; *) sed -n 2,18p "$0"; exit 2;; esac; done
HERE=$(cd "$(dirname "$0")" && pwd)
die() { echo "start_slurm: $*" >&2; exit 1; }
T0=${EPOCHREALTIME/[.,]/}
log() { local t=$(( ${EPOCHREALTIME/[.,]/} - T0 )); printf 'start_slurm: [%d.%02ds] %s\n' $((t/1000000)) $((t/10000%100)) "$*" >&2; }

[ "$(id -u)" = 0 ] || die "must be root (slurmd and namespaces need it)"
for b in munged slurmctld slurmd sinfo unshare; do
  command -v $b >/dev/null || PATH=$PATH:/usr/sbin:/sbin
  command -v $b >/dev/null || die "missing $b: apt-get install -y --no-install-recommends slurm-wlm munge iproute2"
done
if [ "$MODE" = auto ]; then
  if unshare --net --uts --mount true 2>/dev/null; then MODE=netns
    p=slprobe$$; { command -v ip && ip netns add $p && ip link add $p type bridge && ip link add ${p}v type veth peer name eth0 netns $p; } >/dev/null 2>&1 || MODE=shared
    ip link del ${p}v 2>/dev/null || true; ip link del $p 2>/dev/null || true; ip netns del $p 2>/dev/null || true
  elif unshare --uts --mount true 2>/dev/null; then MODE=shared; else MODE=plain; fi
fi
case $MODE in netns|shared|plain) ;; *) die "mode must be auto, netns, shared or plain";; esac
mkdir -p "$DIR"; DIR=$(cd "$DIR" && pwd -P)
[ "$NODES" -ge 1 ] && [ "$NODES" -le 80 ] || die "1 to 80 nodes"
[ ${#DIR} -le 60 ] || die "DIR too long for unix sockets (${#DIR} > 60): $DIR"

# one starter at a time; the lock is not inherited by daemons (8>&- 9>&- below)
exec 9>"$DIR.lock"; flock -w 120 9 || die "another start/stop holds $DIR.lock"

TAG=$(printf %s "$DIR" | cksum | cut -d' ' -f1)          # per-DIR: names, ports, subnet
BR=slbr$((TAG % 100000)); NS() { printf 'sl%d-%s' $((TAG % 100000)) "$1"; }
NAME() { printf 'node%03d' "$1"; }
WANT="$MODE $NODES $CPUS"

pid_alive() { # file holding "pid starttime"
  local p s; read -r p s <"$1" 2>/dev/null || return 1
  [ "$(awk '{print $22}' "/proc/$p/stat" 2>/dev/null)" = "$s" ]; }
save_pid() { echo "$2 $(awk '{print $22}' "/proc/$2/stat")" >"$DIR/pids/$1"; }
idle_count() { SLURM_CONF=$DIR/etc/slurm.conf timeout 5 sinfo -h -N -p batch -o '%N %t' 2>/dev/null \
  | awk '$2=="idle"||$2=="mix"||$2=="alloc"||$2=="comp"' | sort -u | wc -l; }

if [ -s "$DIR/want" ] && [ "$(cat "$DIR/want")" = "$WANT" ]; then
  ok=1; for f in "$DIR"/pids/*; do pid_alive "$f" || ok=0; done
  if [ $ok = 1 ] && [ "$(idle_count)" = "$NODES" ]; then log "already up: $DIR/env.sh"; echo "$DIR/env.sh"; exit 0; fi
fi
SLURM_STOP_LOCKED=1 "$HERE/stop_slurm.sh" "$DIR" 8>&- 9>&- >/dev/null || true
rm -rf "$DIR"; mkdir -p "$DIR"/{etc,munge,state,spool,log,pids,ns}
chmod 755 "$DIR"; chmod 700 "$DIR/munge"; chmod 711 "$DIR/munge"
trap 'rc=$?; if [ $rc != 0 ]; then echo "--- logs" >&2; tail -n 15 "$DIR"/log/*.log >&2 || true; SLURM_STOP_LOCKED=1 "$HERE/stop_slurm.sh" "$DIR" 8>&- 9>&- >/dev/null 2>&1 || true; fi' EXIT

# --- a block of 100 ports that nobody listens on (below ip_local_port_range) and a free 10.213.x.0/24;
# a second lock, over all DIRs, is held until our daemons listen
exec 8>"${TMPDIR:-/tmp}/slurmtest.ports.lock"; flock -w 120 8 || die "cannot get the port lock"
busy=" $(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ l _ st _; do [ "$st" = 0A ] && echo -n "$((16#${l##*:} / 100)) " || true; done)"
BASE=
for k in $(seq 0 99); do b=$((200 + (TAG + k) % 100)); case $busy in *" $b "*) ;; *) BASE=$((b * 100)); break;; esac
done; [ -n "$BASE" ] || die "no free block of ports"
SUB=$((TAG % 200 + 20)); while ip -o addr 2>/dev/null | grep -q " 10\.213\.$SUB\."; do SUB=$((SUB % 250 + 1)); done

# --- munge: own key, own socket
(umask 077; head -c 1024 /dev/urandom >"$DIR/munge/munge.key")
setsid munged -F --key-file="$DIR/munge/munge.key" --socket="$DIR/munge/sock" --pid-file="$DIR/munge/munged.pid" \
  --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed" --num-threads=10 \
  </dev/null >"$DIR/log/munged.out.log" 2>&1 8>&- 9>&- &
save_pid munged $!
for _ in $(seq 100); do [ -S "$DIR/munge/sock" ] && munge -S "$DIR/munge/sock" -n 2>/dev/null | unmunge -S "$DIR/munge/sock" >/dev/null 2>&1 && break; sleep .05; done
munge -S "$DIR/munge/sock" -n >/dev/null || die "munged did not come up"
log "munged up"

# --- addresses
SHORT=$(hostname -s)
if [ "$MODE" = netns ]; then CTL=10.213.$SUB.254; PFX=10.213.$SUB; else CTL=127.0.0.1; PFX=127.0.1; fi
{ echo "127.0.0.1 localhost"; echo "::1 ip6-localhost"; echo "$CTL $SHORT"
  for i in $(seq "$NODES"); do echo "$PFX.$i $(NAME $i)"; done; } >"$DIR/etc/hosts.common"
RANGE=$(printf 'node[%03d-%03d]' 1 "$NODES")

# name the plugin: autodetection fails where /sys/fs/cgroup is absent or hybrid
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n' >"$DIR/etc/cgroup.conf"
MEM=$(awk '/MemTotal/{print int($2/1024)}' /proc/meminfo)

{ cat <<CONF
ClusterName=t$((TAG % 100000))
SlurmctldHost=$SHORT($CTL)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
# ids never repeat from one cluster to the next: stale result files of an older job N are not picked up
FirstJobId=$(( $(date +%s) % 600000 * 100 + 1 ))
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again (default 120 s)
AuthInfo=socket=$DIR/munge/sock,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/log/slurmctld.pid
SlurmdPidFile=$DIR/log/slurmd-%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
# nothing from the host: no cgroups, no accounting db, no MPI, no mail
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
# more CPUs than the host has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# fast scheduling
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=2,bf_resolution=10
# preemption and requeue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# without this, --signal=USR2@N is not sent at preemption and submitit never checkpoints
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# short timeouts
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=20
InactiveLimit=0
MessageTimeout=10
BatchStartTimeout=10
UnkillableStepTimeout=20
CompleteWait=0
ReturnToService=2
# ended jobs stay visible to squeue -t all / scontrol for a day
MinJobAge=86400
MaxJobCount=5000
NodeName=DEFAULT CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEM State=UNKNOWN
CONF
  for i in $(seq "$NODES"); do
    if [ "$MODE" = netns ]; then echo "NodeName=$(NAME $i) NodeHostname=$(NAME $i) NodeAddr=$PFX.$i Port=$((BASE+1))"
    else echo "NodeName=$(NAME $i) NodeHostname=$SHORT NodeAddr=$PFX.$i Port=$((BASE+i))"; fi
  done
  cat <<CONF
PartitionName=DEFAULT Nodes=$RANGE MaxTime=INFINITE DefaultTime=00:30:00 State=UP OverSubscribe=NO
PartitionName=batch Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=10
PartitionName=low   PriorityTier=1  PreemptMode=REQUEUE GraceTime=10
PartitionName=high  PriorityTier=100 PreemptMode=OFF
CONF
} >"$DIR/etc/slurm.conf"
chmod 644 "$DIR"/etc/*
export SLURM_CONF=$DIR/etc/slurm.conf

cat >"$DIR/env.sh" <<ENV
export SLURM_CONF='$DIR/etc/slurm.conf'
export SLURM_TEST_DIR='$DIR' SLURM_TEST_MODE='$MODE' SLURM_TEST_NODES=$NODES
# netns mode: cut / restore a node's network:  slurm_link node002 down|up
slurm_link() { ip link set "\$(printf 'sv%d-%d' $((TAG % 100000)) "\$((10#\${1#node}))")" "\$2"; }
ENV

# --- network
if [ "$MODE" = netns ]; then
  command -v ip >/dev/null || die "missing ip (iproute2)"
  ip link add "$BR" type bridge; echo "$BR" >"$DIR/ns/bridge"
  ip addr add "$CTL/24" dev "$BR"; ip link set "$BR" up
  for i in $(seq "$NODES"); do
    n=$(NS "$i"); v=sv$((TAG % 100000))-$i
    ip netns add "$n"; echo "$n" >>"$DIR/ns/netns"
    ip link add "$v" type veth peer name eth0 netns "$n"
    ip link set "$v" master "$BR" up
    ip -n "$n" addr add "$PFX.$i/24" dev eth0; ip -n "$n" link set lo up; ip -n "$n" link set eth0 up
  done
  log "network up"
fi

# --- plain mode: names of the nodes
if [ "$MODE" = plain ]; then
  { echo "# slurmtest $TAG begin"; grep node "$DIR/etc/hosts.common"; echo "# slurmtest $TAG end"; } >>/etc/hosts; echo "$TAG" >"$DIR/ns/hosts"
fi

# --- slurmctld
setsid slurmctld -D -c -f "$SLURM_CONF" </dev/null >"$DIR/log/slurmctld.out.log" 2>&1 8>&- 9>&- &
save_pid slurmctld $!
# a slurmd registers once; if slurmctld does not listen yet, its node stays "unknown" for a long time
for _ in $(seq 300); do timeout 3 scontrol ping 2>/dev/null | grep -q 'is UP' && break; pid_alive "$DIR/pids/slurmctld" || die "slurmctld died"; sleep .1; done
log "slurmctld up"

# --- slurmds: private hostname, /dev/shm (a killed node leaves things there), /etc/hosts and /etc/slurm; the chain is exec only, so $! is slurmd
for i in $(seq "$NODES"); do
  h=$(NAME "$i"); mkdir -p "$DIR/spool/$h"; chmod 755 "$DIR/spool/$h"
  if [ "$MODE" = plain ]; then
    setsid slurmd -D -N "$h" -f "$SLURM_CONF" </dev/null >"$DIR/log/slurmd-$h.out.log" 2>&1 8>&- 9>&- &
    save_pid "slurmd-$h" $!; continue
  fi
  pre=(); [ "$MODE" = netns ] && pre=(nsenter --net="/run/netns/$(NS "$i")")   # not "ip netns exec": that remounts /sys
  setsid "${pre[@]}" unshare --uts --mount --propagation private bash -c '
    set -e; hostname "$1"; mount --bind "$2/etc/hosts.common" /etc/hosts
    mount -t tmpfs none /dev/shm
    [ -d /etc/slurm ] && mount --bind "$2/etc" /etc/slurm
    exec slurmd -D -N "$1" -f "$2/etc/slurm.conf"' _ "$h" "$DIR" \
    </dev/null >"$DIR/log/slurmd-$h.out.log" 2>&1 8>&- 9>&- &
  save_pid "slurmd-$h" $!
done
log "daemons launched"

# --- wait for idle
end=$((SECONDS + WAIT)); tries=0
while [ "$(idle_count)" != "$NODES" ]; do
  for f in "$DIR"/pids/*; do pid_alive "$f" || die "$(basename "$f") died"; done
  [ $SECONDS -lt $end ] || { sinfo -N -l >&2 || true; sinfo -R >&2 || true; die "nodes not idle after $WAIT s"; }
  sleep .2; tries=$((tries + 1)); [ $((tries % 25)) != 0 ] || timeout 5 scontrol reconfigure >/dev/null 2>&1 || true   # ask the nodes to register again
done
for f in "$DIR"/pids/slurmd-*; do read -r p _ <"$f"; readlink "/proc/$p/ns/uts" >>"$DIR/ns/uts"; done
echo "$WANT" >"$DIR/want"
log "cluster up: $NODES nodes x $CPUS cpus ($MODE)"
echo "$DIR/env.sh"
