"""Puts stand-ins for two compiled packages into this interpreter's site-packages, so that SGLang starts without a GPU.

``sgl_kernel`` (CUDA only on PyPI): the two operators that a CPU engine calls, in plain torch; every other name fails
when it is called, not when it is imported. ``torchvision`` (its wheel on PyPI wants the CUDA build of torch): the
operator schemas that its import expects are declared beforehand, without an implementation.

Run with the environment's own python. Only for tests; running it twice changes nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

SGL_KERNEL = '''\
"""Stand-in for sgl-kernel on a CPU without AMX, for tests only."""

import torch

_ops = torch.library.Library("sgl_kernel", "DEF")
_ops.define("initialize(int size, int rank) -> ()")
_ops.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")
_ops.define("init_cpu_threads_env(str cpu_ids) -> str")
_ops.impl("init_cpu_threads_env", lambda cpu_ids: "not bound", "CompositeExplicitAutograd")


def assign_req_to_token_pool_cpu(rows, req_to_token, starts, ends, slots, *_):
    """Scatter the flat `slots` into ``req_to_token[rows[i], starts[i]:ends[i]]``, request by request."""
    counts = (ends - starts).tolist()
    for row, start, part in zip(rows.tolist(), starts.tolist(), slots.split(counts)):
        req_to_token[row, start : start + len(part)] = part.to(req_to_token.dtype)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: not part of the CPU stand-in")

    return absent
'''

MARK = "# kvtier: operator schemas for a torch without torchvision's compiled half"
TORCHVISION = f"""\
{MARK}
import torch as _torch

_kvtier_ops = _torch.library.Library("torchvision", "DEF")
for _op in ("nms", "qnms"):
    _kvtier_ops.define(_op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""


def main() -> None:
    site = Path(sysconfig.get_path("purelib"))
    kernel = site / "sgl_kernel" / "__init__.py"
    kernel.parent.mkdir(exist_ok=True)
    kernel.write_text(SGL_KERNEL)
    vision = site / "torchvision" / "__init__.py"
    text = vision.read_text()
    if MARK not in text:
        vision.write_text(TORCHVISION + text)


if __name__ == "__main__":
    main()
