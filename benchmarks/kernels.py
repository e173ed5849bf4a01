"""Each kernel beside its peers on one GPU: time, memory and correctness in one run.

    python benchmarks/kernels.py                          # everything, about 6 minutes on an H200
    python benchmarks/kernels.py --only linear_cross_entropy --out result.json
    python benchmarks/kernels.py --quick                  # small shapes, few repetitions: does it all work?
    python benchmarks/kernels.py --tokens                 # linear_cross_entropy over 256 ... 131072 tokens, 210 s
    python benchmarks/kernels.py --sweep                  # all but the linear loss over widths and tokens, 4 minutes
    python benchmarks/tune.py                             # the losses' launch shapes and chunks, with their memory

Times are medians between CUDA events, of forward without gradients and of forward + backward. Before each repetition
the L2 cache is flushed and the device sleeps while the host queues the work, so that Python's time does not count (an
operation that waits for the device pays for it, as it should). ``floor`` is the bytes or FLOP the operation must move
at the ceilings measured in the same run. ``error`` is the relative RMS error against float64 of the output and of the
worst gradient, on a smaller instance in the same dtype. ``extra`` is the peak of allocated bytes during forward +
backward beyond the inputs, ``beyond`` the same without the gradients that are returned.

Peers are optional: what cannot be imported is left out, what fails is reported. The cases of the other kernels come
from kernel_rows_elementwise.py (``cases(quick)`` returns a list of ``Case``).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
# The checkout's kernels/ and this very file would both answer to `import kernels`, which transformers tries (a peer may
# import it): ligermodels is loaded first, then neither folder stays on the path.
sys.path.insert(0, str(ROOT))
import ligermodels.kernels as ours  # noqa: E402

ce_module = sys.modules["ligermodels.kernels.cross_entropy"]
linear_module = sys.modules["ligermodels.kernels.linear_cross_entropy"]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() not in (ROOT, ROOT / "benchmarks")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16


@dataclasses.dataclass
class Case:
    """One operation at one shape.

    inputs(): the tensors at full size, made on DEVICE; those that require gradients are differentiated.
    small(): the same at a size where float64 is cheap, for the error.
    peers: name -> factory that imports and returns a function of the inputs (a tensor or a tuple of tensors); "ours…"
        are ours. ImportError in the factory leaves the peer out.
    reference: plain torch function that is right in float64.
    floor: (forward, forward + backward) in bytes, or in FLOP where ``flops`` is true.
    goal_ms: what ours must reach, forward + backward.
    """

    op: str
    shape: str
    inputs: Callable[[], list[torch.Tensor]]
    small: Callable[[], list[torch.Tensor]]
    peers: dict[str, Callable[[], Callable]]
    reference: Callable
    floor: tuple[float, float]
    flops: bool = False
    goal_ms: float | None = None


# --- Measuring --------------------------------------------------------------------------------------------------------

_flush: torch.Tensor | None = None


def sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_ms(run: Callable, quick: bool = False, repetitions: int | None = None) -> float:
    """Median device time of ``run()`` in ms, each from a cold L2; with ``repetitions`` given it is warm already."""
    global _flush
    if repetitions is None:
        run()
        sync()
        started = time.perf_counter()
        run()
        sync()
        guess = (time.perf_counter() - started) * 1e3
        repetitions = 3 if quick else max(5, min(40, int(200 / max(guess, 0.01))))
    if DEVICE != "cuda":
        times = []
        for _ in range(repetitions):
            started = time.perf_counter()
            run()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    if _flush is None:
        _flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=DEVICE)
    events = []
    for _ in range(repetitions):
        torch.cuda._sleep(4_000_000)  # about 2 ms: the host runs ahead, however slow (0.5 ms was not always enough)
        _flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    sync()
    return statistics.median(b.elapsed_time(e) for b, e in events)


def clear() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def ceilings(quick: bool) -> dict:
    """Copy bandwidth in bytes/s and bf16 product rate in FLOP/s of this device, now."""
    n = 2**20 if quick or DEVICE != "cuda" else 2**31
    source, target = (torch.empty(n, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    copy = 2 * n / median_ms(lambda: target.copy_(source), quick) * 1e3
    k = 256 if quick or DEVICE != "cuda" else 8192
    a, b = (torch.randn(k, k, device=DEVICE, dtype=BF16) for _ in range(2))
    return {"copy_bytes_per_s": copy, "matmul_flop_per_s": 2 * k**3 / median_ms(lambda: a @ b, quick) * 1e3}


def as_tuple(out) -> tuple[torch.Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def forward_backward(function: Callable, inputs: list[torch.Tensor], upstream: list[torch.Tensor]) -> Callable:
    def run():
        for tensor in inputs:
            tensor.grad = None
        out = as_tuple(function(*inputs))
        torch.autograd.backward(out, [g.to(o.dtype) for g, o in zip(upstream, out, strict=True)])
        return out

    return run


def upstream_of(function: Callable, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A loss is differentiated as in training, anything else by a random gradient."""
    with torch.no_grad():
        out = as_tuple(function(*inputs))
    torch.manual_seed(1)
    return [torch.ones_like(o) if o.dim() == 0 else torch.randn_like(o) for o in out]


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    return ((found.double() - true).norm() / true.norm().clamp(min=1e-300)).item()


def errors(case: Case, function: Callable) -> tuple[float, float]:
    """Relative RMS error of the outputs and of the worst gradient against float64."""
    torch.manual_seed(0)
    given = case.small()
    exact = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in given]
    upstream = upstream_of(case.reference, given)
    upstream = [g.to(given[0].dtype) if g.dim() else g for g in upstream]
    true = forward_backward(case.reference, exact, upstream)()
    # some peers write into their inputs
    mine = [t.detach().clone().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in given]
    found = forward_backward(function, mine, upstream)()
    output = max(relative_error(a, b.detach()) for a, b in zip(found, true, strict=True))
    pairs = [(a, b) for a, b in zip(mine, exact, strict=True) if b.grad is not None]
    grads = (math.inf if a.grad is None else relative_error(a.grad, b.grad) for a, b in pairs)
    return output, max(grads, default=0.0)


def peak_bytes(run: Callable, inputs: list[torch.Tensor]) -> tuple[int, int]:
    """(peak beyond the inputs, the same without the returned gradients) of one forward + backward."""
    for tensor in inputs:
        tensor.grad = None
    clear()
    if DEVICE != "cuda":
        run()
        return 0, 0
    sync()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    sync()
    extra = torch.cuda.max_memory_allocated() - before
    del out
    return extra, extra - sum(t.grad.nbytes for t in inputs if t.grad is not None)


def measure(case: Case, limits: dict, quick: bool) -> list[dict]:
    """One row for each peer that can be imported."""
    limit = limits["matmul_flop_per_s" if case.flops else "copy_bytes_per_s"]
    floor = [amount / limit * 1e3 for amount in case.floor]
    torch.manual_seed(0)
    inputs = case.inputs()
    rows = []
    for name, factory in case.peers.items():
        row = {"op": case.op, "shape": case.shape, "peer": name, "goal_ms": case.goal_ms}
        try:
            function = factory()
        except ImportError as missing:
            print(f"{case.op:22} {case.shape:22} {name:14} not installed: {missing}", flush=True)
            continue
        try:
            # the bare products compute no loss
            row["output_error"], row["gradient_error"] = (0.0, 0.0) if name == "products" else errors(case, function)
            # a peer that writes into its inputs gets its own
            own = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs] if name == "liger" else inputs
            with torch.no_grad():
                row["forward_ms"] = median_ms(lambda: function(*own), quick)  # noqa: B023
            run = forward_backward(function, own, upstream_of(function, own))
            row["total_ms"] = median_ms(run, quick)
            row["extra_bytes"], row["beyond_bytes"] = peak_bytes(run, own)
            row["forward_to_floor"] = row["forward_ms"] / floor[0]
            row["total_to_floor"] = row["total_ms"] / floor[1]
        except Exception as problem:  # a peer that fails is a result, not the end of the run
            row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
        own = run = None
        for tensor in inputs:
            tensor.grad = None
        clear()
        rows.append(row)
        print(line(row), flush=True)
    others = [r["total_ms"] for r in rows if "total_ms" in r and not r["peer"].startswith(("ours", "products"))]
    for row in rows:
        if "total_ms" in row:
            row["to_best_peer"] = row["total_ms"] / min(others) if others else None
    return rows


def line(row: dict) -> str:
    head = f"{row['op']:22} {row['shape']:22} {row['peer']:14}"
    if "failed" in row:
        return f"{head} FAILED {row['failed'][:120]}"
    return (
        f"{head} fwd {row['forward_ms']:8.3f} ms ({row['forward_to_floor']:5.2f}x floor)  fwd+bwd "
        f"{row['total_ms']:8.3f} ms ({row['total_to_floor']:5.2f}x)  extra {row['extra_bytes'] / 2**20:8.1f} MiB, "
        f"beyond {row['beyond_bytes'] / 2**20:8.1f}  error {row['output_error']:.1e} / {row['gradient_error']:.1e}"
    )


# --- Losses -----------------------------------------------------------------------------------------------------------


def leaf(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=BF16) * scale).requires_grad_()


def labels(n: int, classes: int) -> torch.Tensor:
    return torch.randint(0, classes, (n,), device=DEVICE)


def plain_cross_entropy(x, target):
    return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), target)


def plain_linear(x, head, target):
    return plain_cross_entropy(x @ head.t(), target)


def liger_cross_entropy():
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as op

    return lambda x, y: op.apply(x, y, None, -100, 0.0, 0.0, "mean", None, False)[0]


def liger_linear():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as op

    return lambda x, w, y: op.apply(x, w, y)[0]


def cce(implementation: str):
    def factory():
        from cut_cross_entropy import linear_cross_entropy

        return lambda x, w, y: linear_cross_entropy(x, w, y, impl=implementation)

    return factory


def torch_linear():
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError("torch < 2.13")
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda x, w, y: F.linear_cross_entropy(x, w, y, options=options)


def products():
    """The three matrix products alone, over the same chunks as ours: what the fastest exact loss cannot undercut."""

    def run(x, head, target):
        return _Products.apply(x, head) if torch.is_grad_enabled() else _logits_only(x, head)

    return run


def _chunks(x, head):
    step = linear_module._token_chunk(x.shape[0], x.shape[1], head.shape[0], x.dtype, x.device)
    buffer = linear_module._buffer(min(step, len(x)), head.shape[0], x.dtype, x.device)[:, : head.shape[0]]
    return buffer, [slice(i, min(i + step, len(x))) for i in range(0, len(x), step)]


def _logits_only(x, head):
    buffer, parts = _chunks(x, head)
    for part in parts:
        torch.mm(x[part], head.t(), out=buffer[: part.stop - part.start])
    return buffer.new_zeros(())


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head):
        buffer, parts = _chunks(x, head)
        dx, dw = torch.empty_like(x), torch.empty(head.shape, dtype=torch.float32, device=x.device)
        for part in parts:
            z = buffer[: part.stop - part.start]
            torch.mm(x[part], head.t(), out=z)
            torch.mm(z, head, out=dx[part])
            linear_module._product(z.t(), x[part], dw, add=part.start > 0)
        ctx.save_for_backward(dx, dw)
        return dw.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors


def linear_peers(memories: tuple[str, ...] = ("fast", "lean")) -> dict[str, Callable]:
    peers = {f"ours {m}": (lambda m=m: lambda x, w, y: ours.linear_cross_entropy(x, w, y, memory=m)) for m in memories}
    return peers | {
        "products": products,
        "eager": lambda: plain_linear,
        "compile": lambda: torch.compile(plain_linear),
        "torch chunked": torch_linear,
        "liger": liger_linear,
        "cce": cce("cce"),
        "cce exact": cce("cce_exact"),
    }


def loss_cases(quick: bool) -> list[Case]:
    found = []
    given = [(64, 1000, None)] if quick else [(8192, 128256, 1.65), (8192, 256000, 3.25), (8192, 50257, None)]
    for n, v, goal in given:
        found.append(
            Case(
                "cross_entropy",
                f"{n}x{v}",
                lambda n=n, v=v: [leaf(n, v), labels(n, v)],
                lambda v=v: [leaf(128, min(v, 8192), scale=3.0), labels(128, min(v, 8192))],
                {
                    "ours": lambda: ours.cross_entropy,
                    "eager": lambda: plain_cross_entropy,
                    "compile": lambda: torch.compile(plain_cross_entropy),
                    "liger": liger_cross_entropy,
                },
                plain_cross_entropy,
                (2.0 * n * v, 6.0 * n * v),
                goal_ms=goal,
            )
        )
    sizes = [(64, 32, 1000)] if quick else [(16384, 4096, 128256), (8192, 2304, 256000), (32768, 896, 151936)]
    return found + [linear_case(*size, linear_peers()) for size in sizes]


def linear_case(n: int, d: int, v: int, peers: dict[str, Callable]) -> Case:
    return Case(
        "linear_cross_entropy",
        f"{n}x{d}x{v}",
        lambda: [leaf(n, d), leaf(v, d, scale=d**-0.5), labels(n, v)],
        lambda: [leaf(256, min(d, 512)), leaf(4096, min(d, 512), scale=3 * min(d, 512) ** -0.5), labels(256, 4096)],
        peers,
        plain_linear,
        (2.0 * n * d * v, 6.0 * n * d * v),
        flops=True,
    )


HEADS = ((4096, 128256), (2304, 256000), (896, 151936))  # Llama-3-8B, Gemma-2-2B, Qwen2.5-0.5B


def tokens(quick: bool, save: Callable, seconds: float = 210.0) -> None:
    """Forward + backward time and memory of the linear loss over the number of tokens, for three heads.

    ``save(row)`` gets each row. Few repetitions, no error (the table of kernels has it). A peer whose next run would
    take over a second is left out from there on; so is what the head's share of ``seconds`` does not allow.
    """
    started = time.perf_counter()
    counts = (16, 64) if quick else tuple(2**k for k in (8, 10, 12, 13, 14, 15, 17))
    heads = ((32, 1000),) if quick else HEADS
    for index, (d, v) in enumerate(heads, 1):
        if hasattr(torch, "_dynamo"):
            torch._dynamo.reset()
        functions = {}
        for name, factory in linear_peers().items():
            try:
                if name not in ("eager", "cce exact"):
                    functions[name] = factory()
            except ImportError as missing:
                print(f"{name} not installed: {missing}", flush=True)
        torch.manual_seed(0)
        hidden, head, target = leaf(counts[-1], d), leaf(v, d, scale=d**-0.5), labels(counts[-1], v)
        last: dict[str, float] = {}
        for n in counts:
            x, y = hidden[:n].detach().requires_grad_(), target[:n]
            group = []
            for name, function in functions.items():
                if 2 * last.get(name, 0.0) > 1000 or time.perf_counter() - started > seconds * index / len(heads):
                    continue
                row = {"op": "linear_cross_entropy", "shape": f"{n}x{d}x{v}", "peer": name, "tokens": n}
                try:
                    one = [torch.ones((), device=DEVICE)]
                    run = forward_backward(function, [x, head, y], one)
                    run()
                    row["extra_bytes"], row["beyond_bytes"] = peak_bytes(run, [x, head, y])
                    row["total_ms"] = last[name] = median_ms(run, quick, repetitions=3 if n > 4096 else 10)
                except Exception as problem:
                    row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
                    last[name] = math.inf
                x.grad = head.grad = run = None
                group.append(row)
            clear()
            others = [
                r["total_ms"] for r in group if "total_ms" in r and not r["peer"].startswith(("ours", "products"))
            ]
            for row in group:
                if "total_ms" in row and others:
                    row["to_best_peer"] = row["total_ms"] / min(others)
                save(row)
                print(
                    f"{row['shape']:22} {row['peer']:14} "
                    + (row.get("failed") or f"{row['total_ms']:9.3f} ms, beyond {row['beyond_bytes'] / 2**20:9.1f} MiB")
                    + (
                        f", {row['to_best_peer']:.2f} of the best peer"
                        if row["peer"].startswith("ours") and others
                        else ""
                    ),
                    flush=True,
                )
        del hidden, head, target, x, y
        clear()


# --- Reporting --------------------------------------------------------------------------------------------------------


def environment() -> dict:
    commit = os.environ.get("GIT_COMMIT")
    if not commit:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or "unknown"
    versions = {}
    for name in ("torch", "triton", "liger-kernel", "cut-cross-entropy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU {platform.machine()}",
        **versions,
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def elementwise():
    """The module kernel_rows_elementwise.py."""
    path = ROOT / "benchmarks" / "kernel_rows_elementwise.py"
    spec = importlib.util.spec_from_file_location("kernel_rows_elementwise", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_bench"] = sys.modules[__name__]  # what the rows import Case from
    spec.loader.exec_module(module)
    return module


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument(
        "--only", action="append", help="an operation, such as rms_norm or linear_cross_entropy; repeatable"
    )
    cli.add_argument("--peers", help="only these, separated by commas")
    cli.add_argument("--quick", action="store_true", help="small shapes, few repetitions; also runs on CPU")
    cli.add_argument("--tokens", action="store_true", help="linear_cross_entropy over the number of tokens instead")
    cli.add_argument("--sweep", action="store_true", help="norm, rope, swiglu over widths and tokens: ratios only")
    cli.add_argument("--warm", help="I/N: only compile every N-th case of the sweep from I on, for N runs side by side")
    cli.add_argument("--out", type=Path, help="JSON file for the rows")
    args = cli.parse_args()
    if DEVICE != "cuda" and not args.quick:
        sys.exit("benchmarks/kernels.py: no CUDA device; --quick runs small shapes on the CPU")
    if args.warm:
        elementwise().warm(args.quick, *map(int, args.warm.split("/")))
        return
    limits = ceilings(args.quick)
    report = {"benchmark": "kernels", "environment": environment(), "ceilings": limits, "rows": []}
    print(f"{report['environment']['device']}: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, products "
          f"{limits['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip

    def save() -> None:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    if args.sweep:
        report["rows"] = elementwise().sweep(args.quick)
        save()
        return
    if args.tokens:
        tokens(args.quick, lambda row: (report["rows"].append(row), save()))
        return
    cases = elementwise().cases(args.quick) + loss_cases(args.quick)
    for case in cases:
        if args.only and case.op not in args.only:
            continue
        if args.peers:
            case.peers = {name: factory for name, factory in case.peers.items() if name in args.peers.split(",")}
        report["rows"] += measure(case, limits, args.quick)
        save()  # after each: what was measured is kept if the run is stopped
    print("\nours against the best peer, forward + backward (below 1 is faster)")
    for row in report["rows"]:
        if row["peer"].startswith("ours") and row.get("to_best_peer"):
            goal = f", goal {row['goal_ms']} ms" if row["goal_ms"] else ""
            print(f"{row['op']:22} {row['shape']:22} {row['peer']:10} {row['to_best_peer']:5.2f}  "
                  f"({row['total_ms']:.3f} ms{goal})")  # fmt: skip


if __name__ == "__main__":
    main()
