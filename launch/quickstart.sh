#!/usr/bin/env bash
# Makes .venv, installs requirements.txt and runs the quick-start job on this machine; no download but the packages.
#   launch/quickstart.sh                      a second call (or --resume) continues, or says that it is done
#   launch/quickstart.sh --config.seed=1      arguments go to tlt_jax.train
# PYTHON=/path/to/python3 chooses the Python; WORKDIR=DIR (runs/quickstart) is where the run goes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

arguments=()
trains=true
for argument in "$@"; do
  # Continuing is what a second call does anyway (checkpoint.resume=auto).
  if [[ "$argument" != --resume ]]; then
    arguments+=("$argument")
  fi
  if [[ "$argument" == --help || "$argument" == -h || "$argument" == --dry[_-]run ]]; then
    trains=false
  fi
done

workdir=${WORKDIR:-runs/quickstart}
prepare_environment
started=$SECONDS
echo "training with configs/quickstart.py in $workdir"
"$VENV_PYTHON" -m tlt_jax.train --config=configs/quickstart.py --workdir="$workdir" ${arguments[@]+"${arguments[@]}"}
if [[ "$trains" == false ]]; then
  exit 0
fi
cat <<END
done in $((SECONDS - started)) s; the files are in $(cd "$workdir" 2>/dev/null && pwd || echo "$workdir")
  curves.png, metrics.jsonl, samples.jsonl: how the run went and what the model wrote
what to type next:
  launch/quickstart.sh --config.stages.rl.steps=200      train on
  .venv/bin/python -m tlt_jax.export --workdir=$workdir --output=$workdir/model
  .venv/bin/python -m tlt_jax.train --help               every setting
END
