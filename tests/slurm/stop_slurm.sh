#!/usr/bin/env bash
# stop_slurm.sh [DIR]: end the cluster that start_slurm.sh made in DIR, and only that.
# Ends: the recorded daemon pids (checked against their start time), and what still
# runs in the nodes' own UTS namespaces (job steps).  Leaves logs in DIR/log.
# shellcheck disable=SC2015
set -uo pipefail
[ "${1:-}" = -d ] && shift
DIR=${1:-${TMPDIR:-/tmp}/slurmtest}; [ -d "$DIR" ] || exit 0; DIR=$(cd "$DIR" && pwd -P)
export PATH=$PATH:/usr/sbin:/sbin
if [ -z "${SLURM_STOP_LOCKED:-}" ]; then exec 9>"$DIR.lock"; flock -w 120 9 || exit 1; fi
alive() { local p s; read -r p s <"$1" 2>/dev/null || return 1; [ "$(awk '{print $22}' "/proc/$p/stat" 2>/dev/null)" = "$s" ]; }
stop() { # name signal seconds
  local f=$DIR/pids/$1 p; [ -e "$f" ] || return 0
  if alive "$f"; then read -r p _ <"$f"; kill -"$2" "$p" 2>/dev/null
    for _ in $(seq $(( $3 * 20 ))); do alive "$f" || break; sleep .05; done
    alive "$f" && kill -KILL "$p" 2>/dev/null; fi
  rm -f "$f"; }

# uts namespaces of the nodes: recorded at start, or read now (a start that failed half way)
own=$(readlink /proc/self/ns/uts); utsns=$( { cat "$DIR/ns/uts" 2>/dev/null; for f in "$DIR"/pids/slurmd-*; do
  [ -e "$f" ] && alive "$f" && read -r p _ <"$f" && readlink "/proc/$p/ns/uts"; done; } | sort -u | grep -vxF "$own")
# plain mode has no namespaces: there, processes whose environment says they are a job of this cluster
in_nodes() { if [ -z "$utsns" ]; then [ -e "$DIR/etc/slurm.conf" ] || return 0
    grep -lszxF "SLURM_CONF=$DIR/etc/slurm.conf" /proc/[0-9]*/environ | while read -r e; do
      grep -qszx 'SLURM_JOB_ID=.*' "$e" && e=${e#/proc/} && [ "${e%/*}" != $$ ] && echo "${e%/*}"; done; return 0; fi
  for d in /proc/[0-9]*; do
  u=$(readlink "$d/ns/uts" 2>/dev/null) && grep -qxF "$u" <<<"$utsns" && echo "${d#/proc/}"; done; }

if [ -e "$DIR/pids/slurmctld" ] && alive "$DIR/pids/slurmctld"; then
  export SLURM_CONF=$DIR/etc/slurm.conf
  timeout 5 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 5 scancel --signal=KILL --full 2>/dev/null
  timeout 5 squeue -h -o %A 2>/dev/null | sort -u | xargs -r timeout 5 scancel 2>/dev/null
fi
for f in "$DIR"/pids/slurmd-*; do [ -e "$f" ] && alive "$f" && read -r p _ <"$f" && kill -TERM "$p" 2>/dev/null; done
for f in "$DIR"/pids/slurmd-*; do [ -e "$f" ] && stop "$(basename "$f")" TERM 5; done
stop slurmctld TERM 10
stop munged TERM 5
for s in TERM KILL; do for p in $(in_nodes); do kill -$s "$p" 2>/dev/null; done; [ -z "$(in_nodes)" ] || sleep 1; done
[ -e "$DIR/ns/netns" ] && while read -r n; do ip netns del "$n" 2>/dev/null; done <"$DIR/ns/netns"
[ -e "$DIR/ns/bridge" ] && ip link del "$(cat "$DIR/ns/bridge")" 2>/dev/null
[ -e "$DIR/ns/hosts" ] && t=$(cat "$DIR/ns/hosts") && { h=$(sed "/^# slurmtest $t begin/,/^# slurmtest $t end/d" /etc/hosts) && printf '%s\n' "$h" >/etc/hosts; }
rm -rf "$DIR/ns" "$DIR/want" "$DIR/munge"; rmdir "$DIR/pids" 2>/dev/null
left=$(in_nodes); [ -z "$left" ] || { echo "stop_slurm: still running: $left" >&2; exit 1; }
exit 0
