#!/usr/bin/env bash
# Builds the environment in which the SGLang tests run: the real SGLang on a CPU, in a virtual environment of its own,
# with this checkout of kvtier installed editable. Prints the environment's directory as its last line.
#
#   tools/env-sglang.sh [DIRECTORY]
#
# DIRECTORY defaults to ${KVTIER_CACHE:-~/.cache/kvtier}/sglang-<hash of the pins>. A second run is fast: packages are
# installed once per set of pins, kvtier again only when its native code or packaging changed.
# PYTHON names the interpreter (3.11 or newer, default python3).
#
# torch is pinned without a local version: where PyPI would bring the CUDA build (Linux x86-64 and arm64), point pip at
# torch's CPU index first, for example with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pins=$root/tools/sglang/requirements.txt
stand_ins=$root/tools/sglang/stand_ins.py
python=${PYTHON:-python3}

"$python" - <<'PY' || { echo "env-sglang: $python is too old, the pins need Python 3.11 or newer: set PYTHON" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

hash=$(cat "$pins" "$stand_ins" | sha256sum | cut -c1-12)
env=${1:-${KVTIER_CACHE:-$HOME/.cache/kvtier}/sglang-$hash}
mkdir -p "$(dirname "$env")"

exec 9>"$env.lock"
flock 9

if [ "$(cat "$env/.kvtier-pins" 2>/dev/null)" != "$hash" ]; then
  echo "env-sglang: installing SGLang into $env (a few minutes, about 3 GB)" >&2
  rm -rf "$env"
  "$python" -m venv "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$pins" >&2
  "$env/bin/python" "$stand_ins"
  echo "$hash" >"$env/.kvtier-pins"
fi

# What an editable install depends on; Python files are read from the checkout itself.
build=$(cd "$root" && { echo "$root"; cat pyproject.toml CMakeLists.txt kernels/csrc/*; find tools/editable; } | sha256sum | cut -c1-12)
if [ "$(cat "$env/.kvtier-build" 2>/dev/null)" != "$build" ]; then
  echo "env-sglang: building kvtier from $root" >&2
  "$env/bin/pip" install --quiet --disable-pip-version-check --no-deps --config-settings "build-dir=$env/kvtier-build" --editable "$root" >&2
  echo "$build" >"$env/.kvtier-build"
fi

echo "$env"
