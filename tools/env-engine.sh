#!/usr/bin/env bash
# Makes the environment in which the tests of an engine run: the real engine on a CPU, and this checkout of kvtier,
# editable. Prints the environment's directory as its last line.
#
#   tools/env-engine.sh sglang|lmcache|vllm|compare [DIRECTORY]
#
# Two layers, as in tools/venv.sh. The engine and everything it needs lie in DIRECTORY, by default
# ${KVTIER_CACHE:-~/.cache/kvtier}/ENGINE-<hash of the pins>, shared by all clones: 3 minutes and 3 GB (SGLang), 2 GB
# (LMCache; compare, which is LMCache, kvpress and torchao), or 10 minutes and 3 GB (vLLM with LMCache), once. kvtier
# lies in build/env/ENGINE of this clone, on top of them, and is installed again when its native code or packaging
# changed.
#
# From the environment: PYTHON (python3, 3.11 or newer), KVTIER_CACHE, and TORCH_INDEX: torch is pinned without a local
# version, so where PyPI would bring the CUDA build (Linux on x86-64 or arm64) name torch's CPU index,
# https://download.pytorch.org/whl/cpu
set -euo pipefail

engine=${1:?usage: tools/env-engine.sh sglang|lmcache|vllm|compare [DIRECTORY]}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
say() { echo "tools/env-engine.sh: $*" >&2; }
digest() { sha256sum | cut -c1-16; }
lock() { exec 9> "$1.lock"; if command -v flock > /dev/null; then flock 9; fi; }

command -v "$python" > /dev/null || { say "no '$python'; set PYTHON to a Python of at least 3.11"; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { say "$python is $("$python" --version), the pins need at least 3.11; set PYTHON"; exit 1; }

# The first layer: the engine. `stand_ins.py`, where there is one, replaces what cannot be installed without a GPU.
pins=$root/tools/$engine/requirements.txt
stand_ins=$root/tools/$engine/stand_ins.py
[ -e "$pins" ] || { say "unknown engine '$engine': there are sglang, lmcache, vllm and compare"; exit 2; }
version=$("$python" -c 'import sys, sysconfig; print(sys.version, sysconfig.get_platform(), sys.base_prefix)')
hash=$({ cat "$pins"; if [ -e "$stand_ins" ]; then cat "$stand_ins"; fi; echo "$version ${TORCH_INDEX:-}"; } | digest)
deps=${2:-${KVTIER_CACHE:-$HOME/.cache/kvtier}/$engine-$hash}
mkdir -p "$(dirname "$deps")"
lock "$deps"
if [ "$(cat "$deps/complete" 2> /dev/null)" != "$hash" ]; then
  say "making $deps: $engine and the rest, some minutes the first time"
  rm -rf "$deps"
  "$python" -m venv "$deps"
  "$deps/bin/python" -m pip --disable-pip-version-check install -qq --no-deps \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement "$pins" >&2
  if [ -e "$stand_ins" ]; then "$deps/bin/python" "$stand_ins"; fi
  echo "$hash" > "$deps/complete"
fi

# The second layer: kvtier.
cd "$root"
env=$root/build/env/$engine
mkdir -p "$root/build/env"
lock "$env"
state=$({ echo "$root $deps"; find pyproject.toml CMakeLists.txt kernels/csrc tools/editable -type f -print0 | sort -z | xargs -0 sha256sum; } | digest)
if [ "$(cat "$env/complete" 2> /dev/null)" != "$state" ]; then
  say "installing kvtier into $env"
  rm -rf "$env"
  "$deps/bin/python" -m venv --without-pip "$env"
  site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  below=$("$deps/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$below')" > "$site/kvtier-dependencies.pth"
  "$deps/bin/python" -m pip --disable-pip-version-check --python "$env/bin/python" install -qq --no-deps \
    --config-settings build-dir="$env/native" --editable . >&2
  echo "$state" > "$env/complete"
fi
# The Redis tier's own dependency, which SGLang does not bring. Tests that need it say so where it is not.
if ! "$env/bin/python" -c 'import redis' 2> /dev/null; then
  "$deps/bin/python" -m pip --disable-pip-version-check --python "$env/bin/python" install -qq --no-deps \
    --constraint tools/constraints.txt redis >&2 || say "redis could not be installed into $env"
fi

echo "$env"
