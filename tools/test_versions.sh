#!/usr/bin/env bash
# Usage: test_versions.sh TORCH...
# Builds agmm without CUDA and runs the tests with each torch (a requirement for pip, such as
# 'torch==2.11.*'; 'torch' is the newest), each in an environment of its own below build/versions.
# The first one, the oldest, also builds with the oldest CMake that CMakeLists.txt allows.
# Goes on after a failure; prints a line for each and ends with 1 where any failed.
#   MAKE         default: make
#   PYTEST_ARGS  for each run of the tests
set -uo pipefail
cd "$(dirname "$0")/.."
if [ $# -eq 0 ]; then
  echo "test_versions.sh: found no torch, wanted at least one, such as 'torch==2.11.*'" >&2
  exit 2
fi
oldest_cmake=$(sed -n 's/^cmake_minimum_required(VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
cmake="cmake==$oldest_cmake.*"
summary=()
failed=0
for torch in "$@"; do
  name=${torch//[^A-Za-z0-9.]/_}
  venv=build/versions/$name
  # What is there may be an older newest one, or half of one.
  rm -rf "$venv" "$venv.build"
  mkdir -p build/versions
  echo "== $torch${cmake:+, $cmake}: $venv, log in $venv.log"
  # A build tree and settings of its own: those of the ordinary build stay as they are.
  if "${MAKE:-make}" --no-print-directory test VENV="$venv" TORCH="$torch" AGMM_CUDA=OFF \
      CMAKE_REQUIREMENT="$cmake" BUILD_OPTIONS="-C build-dir=$venv.build" SETTINGS="$venv.settings" \
      PYTEST_ARGS="${PYTEST_ARGS:-}" </dev/null >"$venv.log" 2>&1; then
    result=passed
  else
    result=FAILED
    failed=1
  fi
  found=$("$venv/bin/python" -c 'import platform, torch; print("torch", torch.__version__ + ", Python", platform.python_version())' 2>/dev/null)
  found="${found:-no environment}, $("$venv/bin/cmake" --version 2>/dev/null | head -n 1)"
  summary+=("$result  $torch: $found; $(tail -n 1 "$venv.log")")
  cmake=
done
printf '%s\n' "${summary[@]}"
exit $failed
