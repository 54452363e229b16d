#!/usr/bin/env bash
# Usage: make_venv.sh DIR
# Makes the virtual environment DIR with torch in it.
#   PYTHON  the interpreter to use; default: one >= 3.10 that has torch, else the first >= 3.10
#   TORCH   what to give pip for torch; default: the interpreter's own torch where it has one,
#           else torch>=2.11 on a machine with an NVIDIA GPU, else torch==2.13.0
set -euo pipefail
venv=$1

is_supported='import sys, venv; sys.exit(sys.version_info < (3, 10))'
has_torch='
import sys
from importlib.metadata import version
sys.exit(tuple(int(n) for n in version("torch").split(".")[:2]) < (2, 11))'

python=
candidates=(python3 python python3.13 python3.12 python3.11 python3.10)
if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
for candidate in "${candidates[@]}"; do
  "$candidate" -c "$is_supported" >/dev/null 2>&1 || continue
  if "$candidate" -c "$has_torch" >/dev/null 2>&1; then
    python=$candidate
    break
  fi
  python=${python:-$candidate}
done
if [ -z "$python" ]; then
  echo "make_venv.sh: no Python >= 3.10 among: ${candidates[*]}; set PYTHON" >&2
  exit 1
fi

if [ -z "${TORCH:-}" ] && "$python" -c "$has_torch" >/dev/null 2>&1; then
  echo "$venv: $("$python" -V), with its own torch"
  "$python" -m venv --system-site-packages "$venv"
  # An interpreter that is itself a virtual environment passes on only its base's packages.
  if "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
    site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
      >"$site_packages/parent_environment.pth"
  fi
else
  if [ -z "${TORCH:-}" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then TORCH='torch>=2.11'; else TORCH='torch==2.13.0'; fi
  fi
  echo "$venv: $("$python" -V), $TORCH"
  "$python" -m venv "$venv"
  read -ra torch <<<"$TORCH"
  "$venv/bin/python" -m pip --disable-pip-version-check install -q "${torch[@]}"
fi
