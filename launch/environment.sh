# shellcheck shell=bash
# Sourced by the other scripts from the root of the repository: prepare_environment makes .venv ready and sets VENV_PYTHON.

# Prints version and installation of a Python that runs, is 3.11 to 3.13 and can make a venv; fails otherwise.
# Running it is the only proof: a version shim is on the PATH and ends with an error.
python_identity() {
  "$1" -c '
import sys
import ensurepip, venv
if not (3, 11) <= sys.version_info < (3, 14):
    sys.exit(1)
print(".".join(map(str, sys.version_info[:3])), sys.base_prefix)' 2>/dev/null
}

choose_python() {
  local candidate
  if [[ -n "${PYTHON:-}" ]]; then
    if ! python_identity "$PYTHON" >/dev/null; then
      echo "PYTHON=$PYTHON does not run, is not Python 3.11 to 3.13, or cannot make a venv (Debian: apt install python3-venv)" >&2
      return 1
    fi
    echo "$PYTHON"
    return
  fi
  for candidate in python3.13 python3.12 python3.11 python3; do
    if python_identity "$candidate" >/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.11 to 3.13 that can make a venv was found; install one or set PYTHON=/path/to/python3" >&2
  return 1
}

prepare_environment() {
  local python wanted digest started=$SECONDS
  python=$(choose_python)
  wanted=$(python_identity "$python")
  VENV_PYTHON=$PWD/.venv/bin/python
  if [[ "$(python_identity "$VENV_PYTHON" || true)" != "$wanted" ]] || ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
    echo "making .venv with $python (Python ${wanted%% *})"
    rm -rf .venv
    "$python" -m venv .venv
  fi
  digest=$("$VENV_PYTHON" -c 'import hashlib; print(hashlib.sha256(open("requirements.txt", "rb").read()).hexdigest())')
  if [[ "$(cat .venv/requirements.sha256 2>/dev/null || true)" != "$digest" ]]; then
    echo "installing requirements.txt into .venv (minutes the first time)"
    "$VENV_PYTHON" -m pip install --quiet --disable-pip-version-check -r requirements.txt
    echo "$digest" >.venv/requirements.sha256
    echo "installed in $((SECONDS - started)) s"
  fi
}
