#!/usr/bin/env bash
# A Slurm job of one process per node, which uses all GPUs of the node: sbatch --nodes=N --gpus-per-node=G launch/slurm.sh ARGS...
# All nodes need this folder, the run folder, data and models under the same paths. DRY_RUN=1 launch/slurm.sh ARGS... prints the step.
# Before the time limit and at preemption the run saves, exits with 75, and the job is requeued; also when a node is lost.
#SBATCH --job-name=tlt_jax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
command=(srun --kill-on-bad-exit=0 --label "${PYTHON:-.venv/bin/python}" -u -m tlt_jax.train "$@")
if [[ -n "${DRY_RUN:-}" ]]; then
  echo "${command[*]}"
  exit 0
fi
trap : TERM # the processes handle the signal; this script waits for them
"${command[@]}" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do # a signal ended the wait, not the step
  wait "$step"
  code=$?
done
if ((code == 75)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
