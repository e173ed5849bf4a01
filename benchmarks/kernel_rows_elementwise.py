"""The norm, rotation and activation rows of benchmarks/kernels.py.

Interface: ``cases(quick)`` returns a list of ``Case`` (see its docstring in kernels.py, which makes itself importable
as ``kernel_bench``). Run them by ``python benchmarks/kernels.py --only rms_norm``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_bench import DEVICE, Case, leaf, ours


def plain_rms_norm(x, weight):
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_add_rms_norm(x, residual, weight):
    total = x + residual
    return plain_rms_norm(total, weight), total


def plain_swiglu(gate, up):
    return F.silu(gate) * up


def plain_rope(q, k, cos, sin):
    cos, sin = (torch.cat((t, t), -1)[:, :, None].to(q.dtype) for t in (cos, sin))

    def turned(x):
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def liger_rms_norm():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as op

    return lambda x, weight: op.apply(x, weight, 1e-6, 0.0, "llama", True)


def liger_swiglu():
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as op

    return op.apply


def liger_rope():
    from liger_kernel.ops.rope import LigerRopeFunction as op

    def run(q, k, cos, sin):
        cos, sin = (torch.cat((t, t), -1).to(q.dtype) for t in (cos, sin))
        q, k = op.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    return run


def tables(s: int, d: int) -> list[torch.Tensor]:
    angle = torch.outer(torch.arange(s).float(), 500000.0 ** -(torch.arange(0, d, 2) / d))[None].to(DEVICE)
    return [angle.cos(), angle.sin()]


def cases(quick: bool) -> list[Case]:
    found = []
    norms = [(64, 256, None)] if quick else [(16384, 4096, 0.20), (16384, 2048, 0.11), (65536, 896, 0.19)]
    for n, d, goal in norms:
        found.append(
            Case(
                "rms_norm",
                f"{n}x{d}",
                lambda n=n, d=d: [leaf(n, d), leaf(d)],
                lambda d=d: [leaf(512, d), leaf(d)],
                {
                    "ours": lambda: ours.rms_norm,
                    "eager": lambda: plain_rms_norm,
                    "compile": lambda: torch.compile(plain_rms_norm),
                    "F.rms_norm": lambda: lambda x, w: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
                    "liger": liger_rms_norm,
                },
                plain_rms_norm,
                (4.0 * n * d, 10.0 * n * d),
                goal_ms=goal,
            )
        )
        found.append(
            Case(
                "add_rms_norm",
                f"{n}x{d}",
                lambda n=n, d=d: [leaf(n, d), leaf(n, d), leaf(d)],
                lambda d=d: [leaf(512, d), leaf(512, d), leaf(d)],
                {
                    "ours": lambda: ours.add_rms_norm,
                    "eager": lambda: plain_add_rms_norm,
                    "compile": lambda: torch.compile(plain_add_rms_norm),
                },
                plain_add_rms_norm,
                (8.0 * n * d, 16.0 * n * d),
            )
        )
    for b, s, hq, hk, d in [(1, 16, 4, 2, 64)] if quick else [(4, 4096, 32, 8, 128)]:
        moved = 2.0 * b * s * (hq + hk) * d
        found.append(
            Case(
                "rope",
                f"{b}x{s}x({hq}+{hk})x{d}",
                lambda b=b, s=s, hq=hq, hk=hk, d=d: [leaf(b, s, hq, d), leaf(b, s, hk, d), *tables(s, d)],
                lambda hq=hq, hk=hk, d=d: [leaf(1, 128, hq, d), leaf(1, 128, hk, d), *tables(128, d)],
                {
                    "ours": lambda: ours.rope,
                    "eager": lambda: plain_rope,
                    "compile": lambda: torch.compile(plain_rope),
                    "liger": liger_rope,
                },
                plain_rope,
                (2 * moved, 4 * moved),
                goal_ms=None if quick else 0.20,
            )
        )
    for n, i, goal in [(64, 512, None)] if quick else [(16384, 14336, 0.90), (16384, 8192, None)]:
        found.append(
            Case(
                "swiglu",
                f"{n}x{i}",
                lambda n=n, i=i: [leaf(n, i), leaf(n, i)],
                lambda i=i: [leaf(128, i), leaf(128, i)],
                {
                    "ours": lambda: ours.swiglu,
                    "eager": lambda: plain_swiglu,
                    "compile": lambda: torch.compile(plain_swiglu),
                    "liger": liger_swiglu,
                },
                plain_swiglu,
                (6.0 * n * i, 16.0 * n * i),
                goal_ms=goal,
            )
        )
    return found
