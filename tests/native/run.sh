#!/usr/bin/env bash
# Builds the C++ checks of the page kernels, with address and undefined-behaviour sanitizers, and runs them; then for
# aarch64, where a cross compiler and qemu-user are installed, and compares digests. Takes a folder to build in.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
sources=$here/../../kernels/csrc
build=${1:?usage: run.sh FOLDER [native|aarch64|all]}
which=${2:-all}
kernels=(box_fit coverage dispatch forms forms_avx2 forms_avx512 forms_scalar pages rows_avx2 rows_scalar tables xxh3)
flags=(-std=c++17 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi)

# compile COMPILER NAME FLAGS...
compile() {
  local compiler=$1 name=$2 unit
  shift 2
  mkdir -p "$build/$name"
  printf '%s\n' "$here/kernels_check.cpp" "${kernels[@]/#/$sources/}" | sed 's/\.cpp$//' |
    xargs -P "${JOBS:-2}" -I UNIT sh -c '"$0" "$@" -c UNIT.cpp -o "'"$build/$name"'/$(basename UNIT).o"' \
      "$compiler" "${flags[@]}" "$@"
  "$compiler" "${flags[@]}" "$@" "$build/$name"/*.o -o "$build/$name/check"
}

if [ "$which" != aarch64 ]; then
  compile "${CXX:-g++}" native -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
  "$build/native/check" | tee "$build/native/said"
fi
if [ "$which" != native ]; then
  if ! command -v aarch64-linux-gnu-g++ > /dev/null || ! command -v qemu-aarch64 > /dev/null; then
    echo "aarch64: not checked, g++-aarch64-linux-gnu and qemu-user are not installed"
    exit 0
  fi
  compile aarch64-linux-gnu-g++ aarch64 -O2 -static -Werror
  qemu-aarch64 "$build/aarch64/check" | tee "$build/aarch64/said"
  [ "$which" = aarch64 ] || cmp <(sed 's/.*digest//' "$build/native/said") <(sed 's/.*digest//' "$build/aarch64/said")
fi
