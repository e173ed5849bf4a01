"""Decoding: tokens a second, prefill, and whether the tokens are right, beside transformers and the memory's limit.

    python benchmarks/generate.py --out benchmarks/results/generate-h200.json            # on a CUDA device, ~4 minutes
    python benchmarks/generate.py --peers ours,hf --cases 1b-1,prefill                   # a part of it
    python benchmarks/generate.py --cpu                                                  # SmolLM2-135M in fp32
    python benchmarks/generate.py --tune 1,16                                            # how to cut the products

Every peer runs in a process of its own and has the same weights, drawn per parameter from a seed made of its name, wide
enough that every layer matters. A call is a prompt of 128 tokens and 256 new ones, greedy, never stopped.
``tokens_per_s`` counts the new tokens of whole calls, prefill included. ``agree``: how many of the new tokens are the
likeliest in one forward of the same weights in fp32 over all tokens, and ``gap``: by how much the others miss it, in
standard deviations of the logits. ``bound``: weights and cache read once a step at the speed of a copy on this device.
Results are written after every case; with --out of an earlier run, they replace those of the same peer and case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from step import PUBLISHED, ROOT, environment

PEERS = {
    "ours": "ligermodels: fused step, captured as a graph",
    "ours-overlap": "the same with launches that overlap (programmatic dependent launch)",
    "ours-unfused": "ligermodels: the model's own forward, captured as a graph",
    "ours-plain": "ligermodels: the model's own forward, step by step",
    "hf": "transformers' generate",
    "hf-compile": "transformers' generate, static cache and torch.compile",
}
MODELS = {
    "1b": "meta-llama/Llama-3.2-1B",
    "8b": "meta-llama/Meta-Llama-3-8B",
    "135m": "HuggingFaceTB/SmolLM2-135M",
    "0.5b": "Qwen/Qwen2.5-0.5B",
    "gemma2": "google/gemma-2-2b",
    "tiny": None,
}
TINY = {"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
CASES = ("1b-1", "1b-16", "1b-64", "1b-prefill", "8b-1")  # model-rows, or model-prefill
SLOW = {"hf": ("1b-64", "8b-1"), "hf-compile": ("1b-16", "1b-64", "1b-prefill", "8b-1"),
        "ours-plain": ("1b-16", "1b-64", "1b-prefill", "8b-1"), "ours-overlap": ("1b-prefill",),
        "ours-unfused": ("1b-64", "1b-prefill")}  # left out unless asked for  # fmt: skip
GOALS = {"1b-1": 1000, "1b-16": 10_000}  # tokens a second on one H200


def config_of(model: str) -> dict:
    config = dict(PUBLISHED[MODELS[model]]["config"] if MODELS[model] else TINY)
    return {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}


def build(peer: str, model: str, dtype, device: str):
    """The peer's model with weights that are the same for all peers."""
    import torch

    config = config_of(model)
    kind = config.pop("model_type")
    if peer.startswith("ours"):
        import ligermodels

        cls = ligermodels.MODELS[kind]
        with torch.device(device):
            built = cls(cls.config_class.from_hf(dict(config, model_type=kind))).to(dtype)
    else:
        import transformers

        hf_config = transformers.AutoConfig.for_model(kind, **config)
        torch.set_default_dtype(dtype)
        with torch.device(device):
            built = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa", dtype=dtype)
        torch.set_default_dtype(torch.float32)
        built.generation_config.eos_token_id = None
        built.generation_config.pad_token_id = 0
    with torch.no_grad():
        for name, p in built.named_parameters():
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            if p.dim() == 1:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
            elif "embed_tokens" in name or "lm_head" in name:
                p.normal_(0.0, 0.02, generator=generator)
            else:  # what a layer adds is as large as what it is given; were it twice as large, bf16 itself (also
                # transformers') would miss half of the likeliest tokens, and with half of it all tokens are one
                p.normal_(0.0, p.shape[1] ** -0.5, generator=generator)
    return built.eval()


def caller(peer: str, model, vocab: int):
    """call(ids, new) → ids with ``new`` more, by this peer."""
    import torch

    if peer.startswith("ours"):
        from ligermodels import decode

        if peer == "ours-overlap":
            decode._OVERLAP = True
        if peer == "ours-unfused":
            decode.fusible = lambda *_: False
        if peer == "ours-plain":
            decode.capturable = lambda *_: False
        return lambda ids, new: model.generate(ids, max_new_tokens=new, eos_token_id=[])
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if peer == "hf-compile":
        options["cache_implementation"] = "static"  # transformers compiles the decoding step by itself then
    return lambda ids, new: model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options
    )


def copy_speed(device: str) -> float:
    """Bytes a second that a copy moves, read and written."""
    import torch

    n = 2**30 if device != "cpu" else 2**28
    source, target = torch.empty(n, dtype=torch.uint8, device=device), torch.empty(n, dtype=torch.uint8, device=device)
    source.zero_()
    best = min(timed(lambda: target.copy_(source), device) for _ in range(6))
    return 2 * n / best


def timed(call, device: str) -> float:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def step_bytes(model, rows: int, positions: float) -> int:
    """Bytes that one step must read: weights once (of an untied embedding only the rows), the cache of every row."""
    config = model.config
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    skipped = 0 if tied else model.model.embed_tokens.weight.nbytes
    weights = sum(p.nbytes for p in model.parameters()) - skipped
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.lm_head.weight.element_size()
    return weights + int(rows * positions * cached)


def judge(model, ids, prompt: int) -> dict:
    """How the new tokens of ids (1, S) fare in one forward of the same weights in fp32. Turns the model to fp32."""
    import torch

    model.float()
    with torch.no_grad():
        logits = model(ids).logits[0, prompt - 1 : -1].float()
    chosen = logits.gather(-1, ids[0, prompt:, None])[:, 0]
    gap = (logits.amax(-1) - chosen) / logits.std(-1)
    return {"agree": round(float((gap == 0).float().mean()), 4), "gap": round(float(gap.max()), 5),
            "different_tokens": int(ids[0, prompt:].unique().numel())}  # fmt: skip


def run_case(
    kind: str, args: argparse.Namespace, model, call, vocab: int, device: str, speed: float
) -> tuple[dict, object]:
    """The figures of one case, and the ids of its first row (None for prefill alone)."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if kind == "prefill":
        ids = torch.randint(3, vocab, (1, args.prefill), generator=generator).to(device)
        seconds = [timed(lambda: call(ids, 1), device) for _ in range(5)]
        best = statistics.median(seconds[2:])
        return dict(prefill_ms=round(1e3 * best, 2), tokens_per_s=round(args.prefill / best, 1)), None
    rows, ours = int(kind), args.worker.startswith("ours")
    ids = torch.randint(3, vocab, (rows, args.prompt), generator=generator).to(device)
    warm = timed(lambda: call(ids, 12 if args.worker == "hf" else args.new), device)
    alone = 0.0
    if args.worker != "hf-compile":  # another length would be compiled anew
        alone = statistics.median([timed(lambda: call(ids, 1), device) for _ in range(3)])
    outputs = []
    repeats = args.repeats if ours or args.cpu else max(1, args.repeats // 3)
    seconds = [timed(lambda: outputs.append(call(ids, args.new)), device) for _ in range(repeats)]
    if args.profile:
        profile(call, ids, 20)
    middle = statistics.median(seconds)
    floor = step_bytes(model, rows, args.prompt + args.new / 2) / speed
    row = dict(tokens_per_s=round(rows * args.new / middle, 1), of_bound=round(args.new / middle * floor, 3),
               bound=round(rows / floor, 1), seconds=round(middle, 4), prefill_ms=round(1e3 * alone, 2),
               step_ms=round(1e3 * (middle - alone) / (args.new - 1), 4), all_seconds=[round(s, 4) for s in seconds],
               first_call_s=round(warm, 2))  # fmt: skip
    return row, outputs[-1][:1]


def work(args: argparse.Namespace) -> None:
    """All cases of one peer, a line of JSON each; models are built once, and judged after their last case."""
    import torch

    device, dtype = ("cpu", torch.float32) if args.cpu else ("cuda", torch.bfloat16)
    speed = copy_speed(device)
    by_model: dict[str, list[str]] = {}
    for case in args.cases:
        by_model.setdefault(case.rsplit("-", 1)[0], []).append(case.rsplit("-", 1)[1])
    with open(args.answer, "a") as answer:

        def say(**row):
            print(json.dumps(row), file=answer, flush=True)

        say(device=torch.cuda.get_device_name(0) if device == "cuda" else "CPU", copy_tb_per_s=round(speed / 1e12, 3))
        for name, kinds in by_model.items():
            model = build(args.worker, name, dtype, device)
            vocab = config_of(name)["vocab_size"]
            call = caller(args.worker, model, vocab)
            judged = None
            for kind in kinds:
                try:
                    row, ids = run_case(kind, args, model, call, vocab, device, speed)
                    say(case=f"{name}-{kind}", **row)
                    judged = judged or (ids is not None and (kind, ids))
                except Exception as error:  # a failure of one case is a result
                    say(case=f"{name}-{kind}", error=f"{type(error).__name__}: {str(error)[:400]}")
            if judged and not args.no_judge:
                try:
                    say(case=f"{name}-{judged[0]}", **judge(model, judged[1], args.prompt))
                except Exception as error:
                    say(case=f"{name}-{judged[0]}", judge_error=str(error)[:300])
            del model, call, judged
            if device == "cuda":
                torch.cuda.empty_cache()


def profile(call, ids, new: int) -> None:
    """Print the kernels of a call by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as found:
        call(ids, new)
    print(found.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=70))


# ------------------------------------------------------------------------------------------------- tuning the products
def products(model: str) -> dict[str, dict]:
    """The five products of a layer and the head: sizes and what goes with them."""
    c = config_of(model)
    H, inner, D = (
        c["hidden_size"],
        c["intermediate_size"],
        c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
    )
    A, K = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    return {
        "qkv": dict(n=[A, K, K], k=H, norm=True),
        "o": dict(n=[H], k=A, residual=True),
        "gate_up": dict(n=[inner, inner], k=H, norm=True, gate="silu"),
        "down": dict(n=[H], k=inner, residual=True),
        "head": dict(n=[c["vocab_size"]], k=H, norm=True),
    }


def candidates(product: dict, rows: int) -> list[tuple]:
    """(method, shape) to try; shape None is the default."""
    if rows == 1:
        found = [("row", None)]
        for n in (1, 2, 4, 8):
            for k in (512, 1024, 2048, 4096):
                for warps in (2, 4, 8):
                    elements = n * k * (2 if product.get("gate") else 1) // (32 * warps)
                    if 16 <= elements <= 128 and product["k"] % k == 0:
                        found.append(("row", (n, k, warps)))
    else:
        found = [("tile", None), ("torch", None)]
        splittable = len(product["n"]) == 1 and not product.get("norm")
        for n, k in ((16, 128), (16, 256), (16, 512), (32, 128), (32, 256), (64, 64), (64, 128), (128, 64), (128, 128)):
            for splits in (1, 2, 4, 8) if splittable else (1,):
                if -(-sum(product["n"]) // n) * splits < 100 or product["k"] // (k * splits) < 2:
                    continue
                stages = 5 if n * k <= 8192 else 4 if n * k <= 16384 and rows <= 32 else 3
                found.append(("tile", (n, k, splits, 4, stages)))
                if n >= 64:
                    found.append(("tile", (n, k, splits, 8, stages)))
    return found


def run_candidate(product: dict, rows: int, method: str, shape, copies: list, x, norm, residual, counters):
    from ligermodels.kernels.gemv import few_rows_linear

    options = dict(method=method, shape=shape, counters=counters, gate=product.get("gate"))
    options |= dict(
        norm_weight=norm if product.get("norm") else None, residual=residual if product.get("residual") else None
    )
    for weights in copies:
        out = few_rows_linear(x, weights, **options)
    return out


def tune(args: argparse.Namespace) -> None:
    """Time every candidate in a CUDA graph over weights that are out of the L2; print the best of each product."""
    import torch

    speed = copy_speed("cuda")
    print(f"copy {speed / 1e12:.2f} TB/s")
    found = []
    for model in args.tune_models.split(","):
        for rows in map(int, args.tune.split(",")):
            for name, product in products(model).items():
                size = sum(product["n"]) * product["k"] * 2
                copies = []
                for _ in range(1 if args.compile_share else max(2, -(-300 * 2**20 // size))):
                    copies.append([torch.randn(n, product["k"], device="cuda").bfloat16().div_(product["k"] ** 0.5)
                                   for n in product["n"]])  # fmt: skip
                x = torch.randn(rows, product["k"], device="cuda").bfloat16()
                norm = torch.ones(product["k"], device="cuda").bfloat16()
                residual = torch.randn(rows, product["n"][0], device="cuda").bfloat16()
                counters = torch.zeros(4096, dtype=torch.int32, device="cuda")
                want, timings = None, []
                for number, (method, shape) in enumerate(candidates(product, rows)):
                    if args.compile_share and number % args.compile_share[1] != args.compile_share[0]:
                        continue
                    inputs = (product, rows, method, shape, copies, x, norm, residual, counters)
                    try:
                        out = run_candidate(*inputs).float()
                        want = out if want is None else want
                        error = float((out - want).norm() / want.norm())
                        if args.compile_share:
                            continue
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            run_candidate(*inputs)
                        graph.replay()
                        seconds = min(timed(graph.replay, "cuda") for _ in range(6)) / len(copies)
                        timings.append((seconds, method, shape, error))
                    except Exception as failure:
                        timings.append((float("inf"), method, shape, str(failure).splitlines()[0][:80]))
                if args.compile_share:
                    continue
                timings.sort(key=lambda row: row[0])
                default = next((t for t in timings if t[2] is None and t[1] != "torch"), None)
                for seconds, method, shape, error in timings[:4] + ([default] if default not in timings[:4] else []):
                    share = size / speed / seconds
                    print(f"{model} {rows:3d} {name:8s} {1e6 * seconds:8.2f} us {share:5.0%}  {method} {shape} {error}")
                    found.append(dict(model=model, rows=rows, product=name, us=round(1e6 * seconds, 2), method=method,
                                      share=round(share, 3), shape=shape, error=error))  # fmt: skip
                torch_row = next((t for t in timings if t[1] == "torch"), None)
                if torch_row:
                    print(f"{model} {rows:3d} {name:8s} {1e6 * torch_row[0]:8.2f} us         torch")
                failed = [t for t in timings if t[0] == float("inf")]
                if failed:
                    print(f"   {len(failed)} failed, such as {failed[0][1:]}")
                if args.out:
                    args.out.write_text(json.dumps(dict(benchmark="generate-tune", rows=found), indent=1) + "\n")
                del copies


# ------------------------------------------------------------------------------------------------------- all the peers
def run_peer(peer: str, args: argparse.Namespace, given: list[str], report: dict) -> None:
    """Run one peer in a fresh process and put its results into the report as they come."""
    asked = args.cases if args.explicit else [c for c in args.cases if c not in SLOW.get(peer, ())]
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
    # transformers takes the checkout's kernels/ for Hugging Face's package of that name: only ours sees the root
    paths = ([str(ROOT)] if peer.startswith("ours") else []) + paths
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as answer:
        command = [
            sys.executable,
            __file__,
            *given,
            "--worker",
            peer,
            "--answer",
            answer.name,
            "--cases",
            ",".join(asked),
        ]
        started, problem = time.time(), None
        try:
            done = subprocess.run(command, env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
                                  timeout=args.timeout, stderr=subprocess.PIPE, text=True)  # fmt: skip
            log = done.stderr
            if done.returncode:
                problem = f"exit {done.returncode}: " + " | ".join(log.strip().splitlines()[-3:])[-600:]
        except subprocess.TimeoutExpired as late:
            log = (late.stderr or b"").decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
            problem = f"still running after {args.timeout} s"
        sys.stderr.write(log[-4000:])
        for line in answer.read().splitlines():
            row = json.loads(line)
            if "case" not in row:
                report["environment"] |= row
                continue
            old = next((r for r in report["results"] if (r["peer"], r["case"]) == (peer, row["case"])), None)
            judged = old is not None and "tokens_per_s" not in row and "error" not in row
            if not judged:
                report["results"] = [r for r in report["results"] if r is not old]
            report["results"].append((old if judged else {"peer": peer}) | row)
            if judged:
                report["results"].remove(old)
    print(f"{peer}: {time.time() - started:.0f} s" + (f", {problem}" if problem else ""), flush=True)
    if problem:
        report.setdefault("problems", []).append(f"{peer}: {problem}")


def table(report: dict) -> str:
    columns = [("tokens_per_s", 12), ("of_bound", 9), ("step_ms", 9), ("prefill_ms", 11), ("agree", 7), ("gap", 9)]
    lines = [f"{'case':12} {'peer':14}" + "".join(f"{name:>{width}}" for name, width in columns)]
    for row in sorted(report["results"], key=lambda r: (r["case"], list(PEERS).index(r["peer"]))):
        figures = "".join(f"{row.get(name, ''):>{width}}" for name, width in columns)
        lines.append(
            f"{row['case']:12} {row['peer']:14}" + (f" FAILED {row['error'][:90]}" if "error" in row else figures)
        )
    for case, goal in GOALS.items():
        ours = next((r for r in report["results"] if (r["peer"], r["case"]) == ("ours", case)), {})
        if "tokens_per_s" in ours:
            reached = "reached" if ours["tokens_per_s"] >= goal else "NOT reached"
            lines.append(f"{case}: {ours['tokens_per_s']:,.0f} of the wanted {goal:,} tokens/s: {reached}")
    return "\n".join(lines)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--peers", help="of " + ", ".join(PEERS))
    cli.add_argument(
        "--cases", help=f"model-rows or model-prefill, by default {','.join(CASES)}; all peers then run all"
    )
    cli.add_argument("--prompt", type=int, default=128)
    cli.add_argument("--new", type=int, default=256)
    cli.add_argument("--prefill", type=int, default=8192)
    cli.add_argument("--repeats", type=int, default=5)
    cli.add_argument("--timeout", type=int, default=150, help="seconds a peer may take")
    cli.add_argument("--cpu", action="store_true", help="SmolLM2-135M, fp32, 32 + 64 tokens")
    cli.add_argument("--profile", action="store_true", help="print the kernels of 20 tokens")
    cli.add_argument("--no-judge", action="store_true", help="skip the comparison of the tokens with fp32")
    cli.add_argument("--tune", metavar="ROWS", help="time ways to cut the products for these numbers of rows: 1,16")
    cli.add_argument("--tune-models", default="1b")
    cli.add_argument("--compile-share", help="only compile, the i-th of n shares: 0/8; for --tune, in processes beside")
    cli.add_argument("--commit", help="of the measured code, where there is no .git (or GIT_COMMIT)")
    cli.add_argument("--out", type=Path, help="JSON file to write")
    cli.add_argument("--worker", help=argparse.SUPPRESS)
    cli.add_argument("--answer", help=argparse.SUPPRESS)
    args = cli.parse_args()
    args.compile_share = [int(i) for i in args.compile_share.split("/")] if args.compile_share else None
    if args.tune:
        tune(args)
        return
    args.explicit = args.cases is not None
    if args.cpu:
        args.prompt, args.new = min(args.prompt, 32), min(args.new, 64)
    args.cases = (args.cases or ("135m-1" if args.cpu else ",".join(CASES))).split(",")
    if args.worker:
        work(args)
        return
    peers = (args.peers or ("ours,hf" if args.cpu else "ours,ours-overlap,ours-unfused,hf,hf-compile")).split(",")
    if unknown := [peer for peer in peers if peer not in PEERS]:
        cli.error(f"unknown peer {', '.join(unknown)}: choose from {', '.join(PEERS)}")
    report = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {"results": []}
    settings = dict(prompt=args.prompt, new=args.new, prefill=args.prefill, dtype="float32" if args.cpu else "bfloat16")
    report = dict(benchmark="generate", settings=settings, environment=environment(args), results=report["results"])
    for peer in peers:
        run_peer(peer, args, sys.argv[1:], report)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
