#!/usr/bin/env bash
# Runs `python -m tlt_jax.train ARGS...` as N processes on this machine, each on its share of the cores: launch/local.sh N ARGS...
# Each output line starts with the number of its process. When one process ends, the others end too, and the script exits with its
# code. SIGTERM and Ctrl-C are sent to all as SIGTERM: they save and exit with 75; a second Ctrl-C kills them.
# CUDA_VISIBLE_DEVICES divides the GPUs of the machine. DRY_RUN=1 prints the commands without starting them; MODULE replaces
# tlt_jax.train.
set -uo pipefail
if [[ $# -lt 1 || ! "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: write launch/local.sh N ARGS..., N processes of python -m tlt_jax.train ARGS..." >&2
  exit 2
fi
count="$1"
shift

# Set up before any start: a signal at any moment reaches the running processes, and no more are started.
pids=() stopping=""
send() { ((${#pids[@]})) && kill "-$1" "${pids[@]}" 2> /dev/null; }
stop() { stopping=1; send TERM; }
trap stop TERM HUP
trap 'trap "send KILL" INT; stop' INT # background processes of a shell ignore SIGINT
trap 'send KILL' EXIT

here="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$here/.venv/bin/python}"
[[ -x "$python" ]] || python=python3
command=("$python" -u -m "${MODULE:-tlt_jax.train}" "$@")
cores=$(nproc)
cards=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')

for ((index = 0; index < count; index++)); do
  [[ -n "$stopping" ]] && break
  set -- env "JAX_COORDINATOR_ADDRESS=localhost:$port" "JAX_NUM_PROCESSES=$count" "JAX_PROCESS_ID=$index"
  if ((cards >= count)); then
    first=$((cards / count * index))
    set -- "$@" "CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + cards / count - 1)))"
  fi
  if ((cores >= count)) && command -v taskset > /dev/null; then
    first=$((cores / count * index))
    set -- "$@" taskset --cpu-list "$first-$((first + cores / count - 1))"
  fi
  if [[ -n "${DRY_RUN:-}" ]]; then
    echo "$*" "${command[*]}"
    continue
  fi
  "$@" "${command[@]}" > >(sed -u "s/^/[$index] /") 2> >(sed -u "s/^/[$index] /" >&2) &
  pids+=($!)
  [[ -n "$stopping" ]] && send TERM # the signal came while this process was starting
done
[[ -n "${DRY_RUN:-}" ]] && exit 0
((${#pids[@]})) || exit 75 # stopped before the first process

code=0 ended=""
while true; do
  wait -n -p ended "${pids[@]}" 2> /dev/null
  code=$?
  [[ -n "${ended:-}" ]] && break # else a signal came, and was forwarded
done
for index in "${!pids[@]}"; do
  [[ "${pids[$index]}" == "$ended" ]] && first="$index"
done
if [[ -n "$stopping" ]] && ((code == 128 + 15)); then
  code=75 # it was stopped before it had anything to save
elif ((code > 128)); then
  echo "error: process $first was ended by signal $((code - 128)): the others end too; the same command resumes from the last checkpoint" >&2
fi
# The others save what they can and end by themselves; after GRACE_S seconds the rest is killed.
for ((tenth = 0; tenth < 10 * ${GRACE_S:-60}; tenth++)); do
  running=0
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2> /dev/null && running=1
  done
  ((running)) || break
  sleep 0.1
done
exit "$code"
