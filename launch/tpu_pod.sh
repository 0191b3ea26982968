#!/usr/bin/env bash
# Runs a training on every host of a Cloud TPU slice: launch/tpu_pod.sh NAME ZONE ARGS...; DRY_RUN=1 prints the command.
# FOLDER (~/tlt_jax) on each host holds this repository, installed with launch/install.sh tpu; run folder, data and models are on a
# file system that all hosts mount. When a host is preempted, the others end; the same command resumes from the last checkpoint.
set -euo pipefail
if [[ $# -lt 3 ]]; then
  echo "error: write launch/tpu_pod.sh NAME ZONE ARGS..., of python -m tlt_jax.train ARGS..." >&2
  exit 2
fi
name="$1" zone="$2"
shift 2
remote="cd ${FOLDER:-~/tlt_jax} && exec .venv/bin/python -u -m tlt_jax.train$(printf ' %q' "$@")"
command=(gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all --command "$remote")
if [[ -n "${DRY_RUN:-}" ]]; then
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
