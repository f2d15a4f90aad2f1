#!/usr/bin/env bash
# A search on a Slurm allocation: a Ray node on each of its nodes, the driver on the first.
#
#   sbatch scripts/cluster/slurm.sh --data /shared/data --study /shared/runs/mine --space methods \
#       --trials 60 --steps 5000 --gpus-per-trial 0.25
#
# Arguments are those of `dgsearch search`. Near the time limit Slurm sends USR1: the driver ends its session cleanly,
# the job is put back in the queue, and the same command goes on. Change: the #SBATCH lines (nodes, CPUs, GPUs, time,
# partition and account), DGSEARCH_ENV if the environment is not .venv here, and DGSEARCH_CACHE, a folder on each
# node's own disk. Data, study and environment must lie on storage that every node sees.
#SBATCH --job-name=dgsearch
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=dgsearch-%j.log
set -euo pipefail

export PATH="${DGSEARCH_ENV:-$PWD/.venv}/bin:$PATH"
export DGSEARCH_CACHE="${DGSEARCH_CACHE:-${TMPDIR:-/tmp}/dgsearch-$USER}"
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1

# Only who holds this job's token can use its Ray cluster. srun hands the environment to every node.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

# This script runs on the first node. The port follows the job, so that two jobs may share a node.
export HEAD_IP="${HEAD_IP:-$(hostname -I | awk '{print $1}')}"
export HEAD_PORT=$((20000 + SLURM_JOB_ID % 10000))
export RAY_FOLDER="/tmp/ray-$SLURM_JOB_ID" # short: sockets lie in it

answers() { # until the head's port is open, for five minutes
  for _ in $(seq 300); do
    if (exec 3<>"/dev/tcp/$HEAD_IP/$HEAD_PORT") 2>/dev/null; then return; fi
    sleep 1
  done
  echo "error: no Ray head at $HEAD_IP:$HEAD_PORT" >&2
  return 1
}
export -f answers

ray_node() { # on each node of the allocation
  local options=(--num-cpus="${SLURM_CPUS_PER_TASK:-1}" --disable-usage-stats --block)
  if [ "$SLURM_NODEID" = 0 ]; then
    exec ray start --head --node-ip-address="$HEAD_IP" --port="$HEAD_PORT" --temp-dir="$RAY_FOLDER" \
      --ray-client-server-port=$((HEAD_PORT + 10000)) --include-dashboard=false "${options[@]}"
  fi
  answers && exec ray start --address="$HEAD_IP:$HEAD_PORT" "${options[@]}"
}
export -f ray_node

driver='' told=''
on_signal() {
  told=$1
  if [ -n "$driver" ]; then kill -"$1" "$driver" 2>/dev/null || true; fi
}
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM

# A node that fails ends neither the step nor the job: its trials go on elsewhere from their checkpoints.
srun --overlap --no-kill --kill-on-bad-exit=0 --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  bash -c ray_node &
nodes=$!

code=130
if answers && [ -z "$told" ]; then
  dgsearch search --address "$HEAD_IP:$HEAD_PORT" "$@" &
  driver=$!
  while kill -0 "$driver" 2>/dev/null; do wait "$driver" || true; done # a signal ends a wait early
  code=0
  wait "$driver" || code=$?
fi

kill "$nodes" 2>/dev/null || true
wait "$nodes" || true
if [ "$told" = USR1 ] && [ "$code" = 130 ]; then
  echo "out of time: job $SLURM_JOB_ID goes back into the queue, and goes on from here"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
