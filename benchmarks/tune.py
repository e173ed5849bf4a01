"""What the constants of the two loss files are chosen by: launch shapes and chunks, with their memory.

    python benchmarks/tune.py --out tune.json      # about 100 s on an H200
    python benchmarks/tune.py --quick              # small shapes; also runs on the CPU

Times as in kernels.py. A change is tried by putting another function in place of the module's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

SPEC = importlib.util.spec_from_file_location("kernel_bench", Path(__file__).with_name("kernels.py"))
bench = importlib.util.module_from_spec(SPEC)
sys.modules["kernel_bench"] = bench
SPEC.loader.exec_module(bench)
from kernel_bench import BF16, DEVICE, ce_module, clear, labels, leaf, linear_module, median_ms, ours, peak_bytes  # noqa: E402


def tune_rows(note: Callable, n: int, v: int) -> None:
    """Launch shapes of the row step of "fast"."""
    logits, target = torch.randn(n, v, device=DEVICE, dtype=BF16), labels(n, v)
    one, loss = torch.ones((), device=DEVICE), torch.ones(n, device=DEVICE)
    scales, terms = ce_module.Scales(one, one, one), ce_module.Terms(-100, 0.0, 0.0, 0.0, v)
    chosen, processors = ce_module.fused_launch, ce_module.multiprocessors(logits.device)

    def fused():
        ce_module.row_fused(logits, target, None, scales, terms, loss)

    note(f"rows {n}x{v}: as chosen", 4.0 * n * v, "bytes_per_s", fused)
    for each, warps, block in ((1, 32, 16384), (1, 32, 8192), (1, 16, 16384), (2, 16, 8192), (4, 8, 4096)):
        launch = min(n, processors * each), {"BLOCK": block, "num_warps": warps}
        ce_module.fused_launch = lambda *_, launch=launch: launch
        what = f"rows {n}x{v}: {each} programs a multiprocessor, {warps} warps, block {block}"
        note(what, 4.0 * n * v, "bytes_per_s", fused)
    ce_module.fused_launch = chosen


def tune_slices(note: Callable, n: int, v: int) -> None:
    """Launch shapes of the two row steps of "lean", whose rows are short."""
    logits, target = torch.randn(n, v, device=DEVICE, dtype=BF16), labels(n, 2 * v)
    one, loss, state = (torch.ones(shape, device=DEVICE) for shape in ((), (n,), (4, n)))
    scales, terms = ce_module.Scales(one, one, one), ce_module.Terms(-100, 0.0, 0.0, 0.0, 2 * v)
    chosen = ce_module._launch

    def forward():
        ce_module.row_forward(logits, target, None, scales, terms, state, loss, first=v, carry=True)

    def backward():
        ce_module.row_backward(logits, logits, target, None, scales, terms, state, one.expand(n), first=v)

    for warps, block in ((2, 1024), (4, 2048), (4, 4096), (8, 4096), (8, 8192)):
        ce_module._launch = lambda *_, warps=warps, block=block: {"BLOCK": block, "num_warps": warps}
        note(f"slice {n}x{v} forward: {warps} warps, block {block}", 2.0 * n * v, "bytes_per_s", forward)
        note(f"slice {n}x{v} backward: {warps} warps, block {block}", 4.0 * n * v, "bytes_per_s", backward)
    ce_module._launch = chosen


def tune_heads(note: Callable, n: int, d: int, v: int, chunks, slices) -> None:
    """Chunks of "fast", slices and parts of tokens of "lean": time and memory.

    Correctness: dX of each must be as near to the one of the current choice as two bf16 roundings allow.
    """
    x, head, target = leaf(n, d), leaf(v, d, scale=d**-0.5), labels(n, v)
    chosen = linear_module._token_chunk, linear_module._lean_shape
    true = None

    def check(what: str, memory: str) -> None:
        nonlocal true

        def run():
            x.grad = head.grad = None
            ours.linear_cross_entropy(x, head, target, memory=memory).backward()

        run()
        found = [t.grad[:2048].float() for t in (x, head)]
        true = found if true is None else true
        for a, b in zip(found, true, strict=True):
            assert (a - b).norm() <= 6e-3 * b.norm(), f"{what}: gradients differ"
        beyond = peak_bytes(run, [x, head, target])[1]
        note(f"{what}, beyond {beyond / 2**20:5.0f} MiB", 6.0 * n * d * v, "flop_per_s", run)

    name = f"{n}x{d}x{v}"
    for chunk in chunks:
        if chunk:
            linear_module._token_chunk = lambda *_, chunk=chunk: chunk
        check(f"fast {name}: chunk {chunk or 'as chosen'}", "fast")
        linear_module._token_chunk = chosen[0]
    for step, tokens in slices:
        if step:
            linear_module._lean_shape = lambda *_, s=step, t=tokens: (min(s, v), min(t or n, n))
        check(f"lean {name}: " + (f"slices of {step} classes x {tokens or n} tokens" if step else "as chosen"), "lean")
        linear_module._lean_shape = chosen[1]
    linear_module._token_chunk, linear_module._lean_shape = chosen


def tune(quick: bool) -> list[dict]:
    """Everything; a part that fails is reported, and the rest is measured."""
    found = []

    def note(what: str, amount: float, unit: str, run: Callable) -> None:
        ms = median_ms(run, quick)
        found.append({"peer": "ours", "what": what, "ms": ms, unit: amount / ms * 1e3})
        name = "TB/s" if unit == "bytes_per_s" else "TFLOP/s"
        print(f"{what:88} {ms:8.3f} ms  {amount / ms / 1e9:9.3f} {name}", flush=True)

    def attempt(function: Callable, *args) -> None:
        try:
            function(note, *args)
        except Exception as problem:  # the rest is still worth knowing
            print(f"FAILED {function.__name__}{args}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
            found.append({"peer": "ours", "what": f"{function.__name__}{args}", "failed": str(problem)[:300]})
        clear()

    for n, v in [] if quick else [(4096, 128256), (2816, 256000), (4608, 151936)]:
        attempt(tune_rows, n, v)
    for n, v in [(64, 1000)] if quick else [(32768, 4096), (16384, 4096)]:
        attempt(tune_slices, n, v)
    heads = [
        (16384, 4096, 128256, (0, 4096, 5504, 8192), ((0, 0), (4096, 0), (8192, 0), (8192, 8192), (8192, 4096))),
        (8192, 2304, 256000, (0, 2048, 4096, 5504), ((0, 0), (8192, 0), (16384, 0), (8192, 4096), (4096, 4096))),
        (
            *(32768, 896, 151936, (0, 3456, 4736, 5504)),
            ((0, 0), (8192, 16384), (15232, 8192), (14464, 9216), (18688, 7168), (20096, 6656), (8192, 8192)),
        ),
    ]
    for head in [(64, 32, 1000, (0, 32), ((0, 0), (300, 32)))] if quick else heads:
        attempt(tune_heads, *head)
    return found


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--quick", action="store_true", help="small shapes, few repetitions; also runs on CPU")
    cli.add_argument("--out", type=Path, help="JSON file for the rows")
    args = cli.parse_args()
    if DEVICE != "cuda" and not args.quick:
        sys.exit("benchmarks/tune.py: no CUDA device; --quick runs small shapes on the CPU")
    report = {"benchmark": "kernels tune", "environment": bench.environment(), "rows": tune(args.quick)}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
