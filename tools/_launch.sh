# dist_*.sh and slurm_*.sh source this file: it finds Python and the GPUs, and starts the command.
# DRY_RUN=1 prints the command instead of running it; PYTHON is the path of the interpreter.

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

# The command that an interrupted run prints, to be resumed with.
BEIT_MM_COMMAND=
for name in NNODES NODE_RANK MASTER_ADDR PORT MAX_RESTARTS OVERSUBSCRIBE GPUS GPUS_PER_NODE CPUS_PER_TASK SRUN_ARGS; do
  [[ -z ${!name:-} ]] || BEIT_MM_COMMAND+=$(printf '%s=%q ' "$name" "${!name}")
done
BEIT_MM_COMMAND+=$(printf '%q ' "$0" "$@")
export BEIT_MM_COMMAND=${BEIT_MM_COMMAND% }

usage() { echo "Usage: $0 $*" >&2; exit 2; }

run() {
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "$@"
    echo
  else
    exec "$@"
  fi
}

# Sets PYTHON to the interpreter of the active environment, or of .venv, which run_demo.sh and run_tests.sh make. Sets
# devices to the number of GPUs that torch sees and the number of cores that this process may use. It imports yapf,
# because the first import on a machine writes a file, and processes that do this together read it half written.
find_devices() {
  local candidates=(python "$root/.venv/bin/python")
  [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
  for PYTHON in "${candidates[@]}"; do
    devices=$("$PYTHON" -c 'import sys; sys.path[:] = filter(None, sys.path)  # not from the current folder
import os, torch, yapf.yapflib.yapf_api
cores = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)
print(torch.cuda.device_count(), len(cores))' 2>/dev/null) && return
  done
  echo "$0: $PYTHON cannot import torch or yapf: see tools/doctor.py." >&2
  exit 1
}

# too_many LIMIT FOUND [HOW]: stops, and prints the command for LIMIT GPUs; the calling script sets gpus, config and
# extra.
too_many() {
  echo "$0: $gpus GPUs asked for on this node, found $2. GPUS counts the GPUs of one node; for several nodes see" \
    "the head of dist_train.sh." >&2
  echo "This node has room for $1${3:-}: $(printf '%q ' "$0" "${config[@]}" "$1" "${extra[@]}")" >&2
  exit 1
}

# launch SCRIPT: runs SCRIPT of this folder, with the arguments config and extra, in gpus processes on this node.
launch() {
  local devices visible cores
  [[ $gpus =~ ^[1-9][0-9]*$ ]] || { echo "$0: GPUS is '$gpus'; expected a number from 1." >&2; exit 2; }
  find_devices
  read -r visible cores <<<"$devices"

  if ((visible == 0 && (gpus <= cores || ${OVERSUBSCRIBE:-0}))); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((gpus < cores ? cores / gpus : 1))}
    echo "No GPU is visible: $gpus process(es) on the CPU with gloo, threads of each: $OMP_NUM_THREADS." >&2
  elif ((visible == 0)); then
    local batch=${1%.py}_dataloader.batch_size how=
    if [[ " ${extra[*]}" != *" $batch="* ]]; then
      extra+=(--cfg-options "$batch=2")
      how=" with two images each, because the batch of a GPU may need too much memory here"
    fi
    too_many "$cores" "none, and only $cores cores for processes on the CPU (OVERSUBSCRIBE=1 starts more)" "$how"
  elif ((gpus > visible)); then
    too_many "$visible" "$visible"
  fi
  [[ ${NODE_RANK:-0} == 0 || -n ${NNODES:-} ]] ||
    echo "warning: NODE_RANK=$NODE_RANK has no effect without NNODES, the number of nodes; this one trains alone." >&2
  local nodes=${NNODES:-1} address=${MASTER_ADDR:-127.0.0.1}
  if [[ $nodes != 1 && ${NODE_RANK:-0} != 0 && -z ${MASTER_ADDR:-} ]]; then
    echo "$0: NODE_RANK=$NODE_RANK needs MASTER_ADDR, the address of node 0; this node would wait for itself." >&2
    exit 2
  fi
  local meeting=(--standalone --local-addr=127.0.0.1)  # on a port that torchrun chooses
  if [[ -n ${PORT:-} || $nodes != 1 ]]; then
    export PORT=${PORT:-29500}  # _torchrun.py checks that it is free
    meeting=(--nnodes="$nodes" --node_rank="${NODE_RANK:-0}" --master_addr="$address" --master_port="$PORT")
    [[ -z ${MAX_RESTARTS:-} ]] ||
      meeting=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-id=beit_mm --rdzv-endpoint="$address:$PORT")
  fi
  if [[ -n ${MAX_RESTARTS:-} ]]; then
    # The store outlives the processes, and restarted processes would find the addresses of the dead ones in it. So each
    # round gets its own store, which only c10d's rendezvous can do.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    meeting+=(--max-restarts="$MAX_RESTARTS")
  fi
  run "$PYTHON" "$root/tools/_torchrun.py" "${meeting[@]}" --nproc_per_node="$gpus" \
    "$root/tools/$1" "${config[@]}" "${extra[@]}" --launcher pytorch
}

# slurm SCRIPT PARTITION JOB ARGUMENTS...: runs SCRIPT under srun in GPUS tasks, one GPU each. A training gets a signal
# two minutes before its time is over (in an sbatch job from sbatch's own --signal); it saves and requeues its job.
slurm() {
  local script=$1 partition=$2 job=$3 gpus=${GPUS:-8} per_node devices code=0
  shift 3
  [[ -n ${DRY_RUN:-} ]] || command -v srun >/dev/null || { echo "$0: no srun here; without Slurm use dist_*.sh." >&2; exit 1; }
  find_devices
  export MASTER_PORT=${PORT:-29500}
  per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
  # SRUN_ARGS must be split into words.
  # shellcheck disable=SC2086
  set -- srun --partition="$partition" --job-name="$job" --ntasks="$gpus" --ntasks-per-node="$per_node" \
    --gres="gpu:$per_node" --cpus-per-task="${CPUS_PER_TASK:-8}" --kill-on-bad-exit=1 --signal=USR1@120 \
    ${SRUN_ARGS:-} "$PYTHON" -u "$root/tools/$script" "$@" --launcher slurm
  if [[ $script != train.py || -n ${DRY_RUN:-} ]]; then
    run "$@"
    return
  fi
  trap : TERM USR1 INT  # the tasks get these signals too, save, and exit with 75, or 130
  "$@" || code=$?
  if ((code == 75)) && [[ -n ${SLURM_JOB_ID:-} ]]; then
    # A cancelled job is no longer running, and must not be started again.
    if [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]] && scontrol requeue "$SLURM_JOB_ID"; then
      echo "$0: job $SLURM_JOB_ID is requeued and will resume." >&2
    else
      echo "$0: job $SLURM_JOB_ID is not requeued." >&2
    fi
  fi
  exit "$code"
}
