#!/usr/bin/env bash
# Prints how many compilers may run at once: one per core, and one per 8 GiB of free memory
# (a translation unit of kernels takes up to 7.5 GB).
set -eu
cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
free_kib=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo 2>/dev/null || true)
jobs=$cores
if [ -n "$free_kib" ]; then
  by_memory=$((free_kib / (8 * 1024 * 1024)))
  if [ "$by_memory" -lt "$jobs" ]; then jobs=$by_memory; fi
fi
if [ "$jobs" -lt 1 ]; then jobs=1; fi
echo "$jobs"
