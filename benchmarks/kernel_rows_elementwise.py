"""The norm, rotation and activation rows of benchmarks/kernels.py.

Interface: ``cases(quick)`` returns a list of ``Case`` (see its docstring in kernels.py, which makes itself importable
as ``kernel_bench``). Run them by ``python benchmarks/kernels.py --only rms_norm``.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from kernel_bench import (
    DEVICE,
    Case,
    clear,
    forward_backward,
    labels,
    leaf,
    liger_cross_entropy,
    median_ms,
    ours,
    plain_cross_entropy,
    upstream_of,
)


def plain_rms_norm(x, weight):
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_add_rms_norm(x, residual, weight):
    total = x + residual
    return plain_rms_norm(total, weight), total


def torch_rms_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def plain_swiglu(gate, up):
    return F.silu(gate) * up


def plain_swiglu_packed(gate_up):
    return plain_swiglu(*gate_up.chunk(2, -1))


def plain_geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def plain_qk_norm_rope(q, k, q_weight, k_weight, cos, sin):
    return plain_rope(plain_rms_norm(q, q_weight), plain_rms_norm(k, k_weight), cos, sin)


def plain_embedding(weight, ids):
    return F.embedding(ids, weight)


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


def liger_geglu():
    from liger_kernel.ops.geglu import LigerGELUMulFunction as op

    return op.apply


def liger_embedding():
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction as op

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
    norms += [] if quick else [(4096, 16384, None), (2048, 32768, None)]
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
                    "F.rms_norm": lambda: torch_rms_norm,
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
    return found + other_cases(quick)


def other_cases(quick: bool) -> list[Case]:
    found = []
    for b, s, hq, hk, d in [(1, 16, 4, 2, 64)] if quick else [(4, 4096, 32, 8, 128), (4, 4096, 4, 1, 256)]:
        moved = 2.0 * b * s * (hq + hk) * d
        found.append(
            Case(
                "qk_norm_rope",
                f"{b}x{s}x({hq}+{hk})x{d}",
                lambda b=b, s=s, hq=hq, hk=hk, d=d: [
                    leaf(b, s, hq, d), leaf(b, s, hk, d), leaf(d), leaf(d), *tables(s, d),
                ],
                lambda hq=hq, hk=hk, d=d: [
                    leaf(1, 128, hq, d), leaf(1, 128, hk, d), leaf(d), leaf(d), *tables(128, d),
                ],
                {
                    "ours": lambda: ours.qk_norm_rope,
                    "eager": lambda: plain_qk_norm_rope,
                    "compile": lambda: torch.compile(plain_qk_norm_rope),
                },
                plain_qk_norm_rope,
                (2 * moved, 5 * moved),
            )
        )  # fmt: skip
    n, i = (64, 512) if quick else (16384, 14336)
    glus = {
        "geglu": (ours.geglu, plain_geglu, {"liger": liger_geglu}, lambda n: [leaf(n, i), leaf(n, i)]),
        "swiglu_packed": (ours.swiglu_packed, plain_swiglu_packed, {}, lambda n: [leaf(n, 2 * i)]),
    }
    for name, (fused, plain, more, inputs) in glus.items():
        peers = {"ours": lambda f=fused: f, "eager": lambda p=plain: p, "compile": lambda p=plain: torch.compile(p)}
        floor = (6.0 * n * i, 16.0 * n * i)
        found.append(Case(name, f"{n}x{i}", lambda f=inputs: f(n), lambda f=inputs: f(128), peers | more, plain, floor))
    v, d, n = (100, 64, 64) if quick else (128256, 4096, 16384)
    spreads = {  # few ids are frequent, as in text; or one id is every token
        "text": lambda n, v: (torch.rand(n, device=DEVICE).pow(6) * v).long(),
        "one id": lambda n, v: torch.full((n,), v // 2, device=DEVICE),
    }
    for name, ids in spreads.items():
        found.append(
            Case(
                "embedding",
                f"{n}x{d} of {v} {name}",
                lambda ids=ids: [leaf(v, d), ids(n, v)],
                lambda ids=ids: [leaf(1000, 64), ids(4096, 1000)],
                {
                    "ours": lambda: lambda weight, given: ours.embedding(given, weight),
                    "eager": lambda: plain_embedding,
                    "compile": lambda: torch.compile(plain_embedding),
                    "liger": liger_embedding,
                },
                plain_embedding,
                (4.0 * n * d, 6.0 * n * d + 2.0 * v * d),
            )
        )
    return found


# --- Every width and number of tokens: where are we slower than the best peer? ----------------------------------------

SWEEP_S = 240.0  # then the rest is left out, and said so


def sweep_cases(quick: bool) -> list[tuple]:
    """(operation, shape, elements a token, ours, peers, inputs of n tokens), widths and vocabularies of real models."""
    widths = [256] if quick else [576, 896, 1152, 1536, 2048, 2304, 3584, 4096, 5120, 8192, 16384]
    inner = [512] if quick else [1536, 4864, 8192, 14336, 18944, 28672, 53248]
    heads = [(4, 2, 64)] if quick else [(9, 3, 64), (14, 2, 64), (32, 8, 128), (8, 1, 256)]
    vocabularies = [1000] if quick else [32000, 50257, 128256, 151936, 256000, 262208]
    cases = []
    for d in widths:
        peers = {
            "F.rms_norm": lambda: torch_rms_norm,
            "compile": lambda: _compiled(plain_rms_norm),
            "liger": liger_rms_norm,
        }
        cases.append(("rms_norm", f"{d}", d, ours.rms_norm, peers, lambda n, d=d: [leaf(n, d), leaf(d)]))
    for i in inner:
        peers = {"compile": lambda: _compiled(plain_swiglu), "liger": liger_swiglu}
        cases.append(("swiglu", f"{i}", 3 * i, ours.swiglu, peers, lambda n, i=i: [leaf(n, i), leaf(n, i)]))
    for hq, hk, d in heads:
        peers = {"compile": lambda: _compiled(plain_rope), "liger": liger_rope}
        make = lambda n, hq=hq, hk=hk, d=d: [leaf(1, n, hq, d), leaf(1, n, hk, d), *tables(n, d)]  # noqa: E731
        cases.append(("rope", f"({hq}+{hk})x{d}", (hq + hk) * d, ours.rope, peers, make))
    for v in vocabularies:
        peers = {"compile": lambda: _compiled(plain_cross_entropy), "liger": liger_cross_entropy}
        make = lambda n, v=v: [leaf(n, v), labels(n, v)]  # noqa: E731
        cases.append(("cross_entropy", f"{v}", v, ours.cross_entropy, peers, make))
    return cases


def _functions(fused, peers) -> dict:
    torch._dynamo.reset()
    functions = {"ours": fused}
    for name, factory in peers.items():
        try:
            functions[name] = factory()
        except ImportError:
            continue
    return functions


def warm(quick: bool, part: int, parts: int) -> None:
    """Compile what every ``parts``-th case of the sweep needs into the disk caches of Triton and torch.compile."""
    for _, _, _, fused, peers, make in sweep_cases(quick)[part::parts]:
        for function in _functions(fused, peers).values():
            for n in (64, 80):
                inputs = make(n)
                forward_backward(function, inputs, upstream_of(fused, inputs))()


def sweep(quick: bool) -> list[dict]:
    """Forward + backward against the best peer, widths times tokens. Prints the ratio only, then what is above 1.03."""
    started, found, left_out = time.monotonic(), [], 0
    cases = sweep_cases(quick)
    # the ends and the middle of the widths first, so that what the clock leaves out is in between
    for op, shape, width, fused, peers, make in cases[::2] + cases[1::2]:
        functions = _functions(fused, peers)
        for n in (64,) if quick else (256, 4096, 16384, 131072):
            if n * width > 2**32:
                continue
            if time.monotonic() - started > SWEEP_S:
                left_out += 1
                continue
            inputs = make(n)
            upstream, times = upstream_of(fused, inputs), {}
            for name, function in functions.items():
                try:
                    times[name] = median_ms(forward_backward(function, inputs, upstream), quick)
                except Exception as problem:
                    print(
                        f"{op} {shape} {n} tokens: {name} FAILED {type(problem).__name__}: {problem}"[:200], flush=True
                    )
            best = min((t, p) for p, t in times.items() if p != "ours")
            ratio = times["ours"] / best[0]
            found.append({"op": op, "shape": shape, "tokens": n, "ratio": ratio, "best_peer": best[1], "ms": times})
            print(f"{op:13} {shape:12} {n:7} tokens  {ratio:5.2f} of {best[1]}  ({times['ours']:.4f} ms)", flush=True)
            inputs = upstream = None
            clear()
    slower = [r for r in found if r["ratio"] > 1.03]
    middle = statistics.median(r["ratio"] for r in found)
    print(
        f"\n{len(found)} shapes, median ratio {middle:.2f}, slower than the best peer by more than 3 %: {len(slower)}"
    )
    for r in slower:
        print(f"  {r['op']} {r['shape']}, {r['tokens']} tokens: {r['ratio']:.2f} of {r['best_peer']}  {r['ms']}")
    if left_out:
        print(f"  {left_out} shapes not measured: {SWEEP_S:.0f} s were over")
    return found


def _compiled(plain):
    """torch.compile once for each width: the number of tokens is marked as dynamic."""
    compiled = torch.compile(plain)

    def run(*inputs):
        for tensor in inputs:
            if tensor.dim() > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0 if tensor.dim() == 2 else 1)
        return compiled(*inputs)

    return run
