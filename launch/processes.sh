#!/usr/bin/env bash
# Trains with several processes on the CPU of this machine, as several hosts would; each has DEVICES (1) devices of its own.
#   launch/processes.sh 2 --config=configs/quickstart.py --workdir=runs/two --config.mesh.rollout_slices=2
# Process 0 talks to the terminal, the others write to process-I.log in the current directory. When one fails, all are ended; its exit code is this script's.
# PYTHON=/path/to/python3 chooses the Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: launch/processes.sh N [arguments of tlt_jax.train]" >&2
  exit 2
fi
count=$1
shift
prepare_environment
address=localhost:$("$VENV_PYTHON" -c 'import socket; free = socket.socket(); free.bind(("localhost", 0)); print(free.getsockname()[1])')
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=${DEVICES:-1}"

processes=()
trap 'kill -TERM "${processes[@]}" 2>/dev/null || true' TERM INT
for ((number = count - 1; number >= 0; number--)); do
  output=/dev/stdout
  if ((number > 0)); then
    output=process-$number.log
  fi
  "$VENV_PYTHON" -m tlt_jax.train "$@" --coordinator_address="$address" --num_processes="$count" --process_id="$number" >"$output" 2>&1 &
  processes+=($!)
done
code=0
for _ in "${processes[@]}"; do
  wait -n "${processes[@]}" || code=$?
  if ((code != 0)); then
    break
  fi
done
wait || true
exit "$code"
