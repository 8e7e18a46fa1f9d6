#!/usr/bin/env bash
# Checks and measures the Triton kernels on the NVIDIA GPU of this machine, in under 4 minutes: builds kvtier, compares
# what the GPU writes with the CPU's kernels on fresh random pages, and times offload and onboard against a plain pinned
# copy of the same pages. Prints a table; further arguments go to tests/gpu/check.py (--json, --seed N).
#
#   tests/gpu/run.sh          needs a GPU, and a Python whose torch sees it ($PYTHON, python3)
#   tests/gpu/run.sh --dry    needs none: the same steps in Triton's interpreter on tiny pages, kernels compiled for
#                             sm_90 only, nothing timed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
say() { echo "tests/gpu/run.sh: $*" >&2; }

dry=0
for argument in "$@"; do if [ "$argument" = --dry ]; then dry=1; fi; done

"$python" -c 'import torch, triton' 2> /dev/null \
  || { say "$python has no torch and triton: pip install 'kvtier[triton]', or set PYTHON"; exit 1; }
if [ "$dry" = 0 ]; then
  "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
    || { say "the torch of $python sees no GPU; --dry checks what needs none"; exit 1; }
fi

# kvtier beside that Python's packages, so that nothing of them changes.
work=$(mktemp -d "${TMPDIR:-/tmp}/kvtier-gpu.XXXXXX")
trap 'rm -rf "$work"' EXIT
say "building kvtier"
"$python" -m venv --without-pip "$work/env"
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$site/below.pth"
"$python" -m pip --disable-pip-version-check install -q --no-deps --target "$site" . >&2

export TRITON_CACHE_DIR=$work/cache
if [ "$dry" = 1 ]; then
  say "compiling for sm_90"
  "$work/env/bin/python" tools/triton_resources.py --arch 90 --only "page nvfp4 bf16" >&2
  export TRITON_INTERPRET=1
fi
"$work/env/bin/python" tests/gpu/check.py "$@"
