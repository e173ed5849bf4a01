"""Mixtures of experts on one GPU: the layer and a whole training step beside transformers and Liger-Kernel.

    GIT_COMMIT=... python benchmarks/moe.py --out benchmarks/results/moe-h200.json     # about 180 s on an H200
    python benchmarks/moe.py --tune --out tune.json       # torch's grouped product against Triton's in several shapes
    python benchmarks/moe.py --quick                      # small sizes, runs on the CPU too: does it all work?

Layers: router and experts of Mixtral-8x7B and Qwen3-30B-A3B on 16,384 tokens, bf16; forward without gradients, then
forward + backward, timed, checked against float64 and weighed as in kernels.py. ``share`` is the products' FLOP
(6·M·D·I forward, 18·M·D·I in all, M = tokens times experts a token) over the time, as a part of what an 8192³ product
reaches in the same run. Decoding: the same layers on a few tokens, against the bytes of the busy experts' weights.

Step: forward, backward, fused AdamW of a Mixtral-8x7B of four layers, random weights, the same for all peers, each in
a process of its own. Liger-Kernel's experts tune themselves over 32 launch shapes a kernel, which takes minutes:
``--liger-shapes`` says how many of them it may try (0 for all).
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("kernel_bench", ROOT / "benchmarks" / "kernels.py")
bench = importlib.util.module_from_spec(SPEC)
sys.modules["kernel_bench"] = bench
SPEC.loader.exec_module(bench)  # it also loads ligermodels without leaving the checkout's root on the path
from ligermodels.kernels import grouped_mm as products  # noqa: E402
from ligermodels.kernels import moe_mlp, moe_route  # noqa: E402
from ligermodels.kernels.moe import sort_by_expert  # noqa: E402

BF16, DEVICE, GIB = torch.bfloat16, bench.DEVICE, 2**30
#          name               E   k    D      I
LAYERS = {"mixtral-8x7b": (8, 2, 4096, 14336), "qwen3-30b-a3b": (128, 8, 2048, 768)}
GOALS = {"mixtral-8x7b": (0.70, 0.65)}
MIXTRAL = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=32768,
    rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None, tie_word_embeddings=False, router_aux_loss_coef=0.02,
)  # fmt: skip
TINY = MIXTRAL | dict(
    vocab_size=512, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
)


# --- The layer ----------------------------------------------------------------------------------------------------


def layer_inputs(tokens: int, size: tuple[int, ...]) -> list[torch.Tensor]:
    """x (N, D), router (E, D), gate_up (E, 2I, D), down (E, D, I), all with a gradient."""
    e, _, d, i = size
    shapes = ((tokens, d), (e, d), (e, 2 * i, d), (e, d, i))
    scales = (1.0, d**-0.5, d**-0.5, i**-0.5)
    return [bench.leaf(*shape, scale=scale) for shape, scale in zip(shapes, scales, strict=True)]


def clear_choices(k: int, inputs: list[torch.Tensor], keep: int) -> list[torch.Tensor]:
    """The tokens whose choice is clear: else rounding, and not the experts' arithmetic, would be judged."""
    x, router = inputs[:2]
    top = (x.double() @ router.double().t()).topk(min(k + 1, len(router)), -1).values
    clear = (top[:, k - 1] - top[:, k] > 0.05).nonzero()[:keep, 0] if top.shape[1] > k else slice(keep)
    return [x.detach()[clear].clone().requires_grad_(), *inputs[1:]]


def plain_layer(x, router, gate_up, down, *, k):
    """The formula, for float64."""
    weights, experts = torch.topk(torch.softmax(x @ router.t(), -1), k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(len(router)):
        token, slot = torch.where(experts == e)
        gate, up = (x[token] @ gate_up[e].t()).chunk(2, -1)
        out = out.index_add(0, token, (F.silu(gate) * up) @ down[e].t() * weights[token, slot, None])
    return out


def our_layer(k: int) -> Callable:
    def factory():
        def run(x, router, gate_up, down):
            weights, experts = moe_route(x @ router.t(), k, normalise=True)
            return moe_mlp(x, gate_up, down, weights, experts)

        return run

    return factory


def transformers_layer(size: tuple[int, ...], experts: str) -> Callable:
    """transformers' block with an implementation of the experts by name, or "liger"."""

    def factory():
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        experts_class = liger_experts() if experts == "liger" else None

        @functools.cache
        def block(e: int, d: int, i: int):  # errors are judged at a smaller size than times
            config = MixtralConfig(hidden_size=d, intermediate_size=i, num_local_experts=e, num_experts_per_tok=size[1])
            config._experts_implementation = experts
            with torch.device("meta"):
                found = MixtralSparseMoeBlock(config)
                if experts_class is not None:
                    found.experts = experts_class(config)
            return found

        def run(x, router, gate_up, down):
            names = {"gate.weight": router, "experts.gate_up_proj": gate_up, "experts.down_proj": down}
            e, d, i = down.shape
            return torch.func.functional_call(block(e, d, i), names, (x[None],))[0]

        return run

    return factory


def liger_experts() -> type:
    """Liger-Kernel's experts, to try no more launch shapes than was asked for."""
    from liger_kernel.ops import fused_moe_kernels as kernels
    from liger_kernel.transformers.swiglu import LigerExperts

    most = int(os.environ.get("LIGER_SHAPES", "0"))
    for kernel in vars(kernels).values():
        if most and len(getattr(kernel, "configs", ())) > most:
            # the last ones there are the largest tiles, which large products want; of the longer lists every second
            # one, so that both numbers of warps are among them
            every = 2 if len(kernel.configs) >= 32 else 1
            kernel.configs = kernel.configs[-most * every :: every]
    return LigerExperts


def layer_case(name: str, tokens: int, size: tuple[int, ...], quick: bool) -> bench.Case:
    e, k, d, i = size
    flop = 6.0 * tokens * k * d * i
    small = (e, k, min(d, 256), min(i, 256))
    return bench.Case(
        "moe layer",
        name,
        lambda: layer_inputs(tokens, size),
        lambda: clear_choices(k, layer_inputs(1024, small), 64 if quick else 512),
        {
            "ours": our_layer(k),
            "hf grouped_mm": transformers_layer(size, "grouped_mm"),
            "hf eager": transformers_layer(size, "eager"),
            "liger": transformers_layer(size, "liger"),
        },
        functools.partial(plain_layer, k=k),
        (flop, 3 * flop),
        flops=True,
    )


def layers(report: dict, save: Callable, quick: bool, peers: list[str]) -> None:
    limits = report["ceilings"]
    for name, size in LAYERS.items():
        size = (size[0] // 4 or 2, 2, 64, 32) if quick else size
        case = layer_case(name, 64 if quick else 16384, size, quick)
        case.peers = {peer: make for peer, make in case.peers.items() if peer.split()[0] in peers}
        for row in bench.measure(case, limits, quick):
            if "total_ms" in row:
                row["share"] = [1 / row["forward_to_floor"], 1 / row["total_to_floor"]]
                row["goal_share"] = GOALS.get(name)
                print(f"{name:16} {row['peer']:14} reaches {row['share'][0]:.1%} of the ceiling forward, "
                      f"{row['share'][1]:.1%} in all", flush=True)  # fmt: skip
            report["rows"].append(row)
        save()


def decoding(report: dict, save: Callable, quick: bool, peers: list[str]) -> None:
    """A few tokens without gradients; the floor is the weights of the experts that they chose."""
    limit = report["ceilings"]["copy_bytes_per_s"]
    for name, size in LAYERS.items():
        _, k, d, i = size = (size[0] // 4 or 2, 2, 64, 32) if quick else size
        _, router, gate_up, down = (t.detach() for t in layer_inputs(1, size))
        for tokens in (1, 8, 64):
            x = bench.leaf(tokens, d).detach()
            busy = len((x @ router.t()).topk(k, -1).indices.unique())
            floor = 3 * busy * d * i * 2 / limit * 1e3
            found = {}
            factories = {"ours": our_layer(k)}
            for experts in ("grouped_mm", *(["batched_mm"] if tokens == 1 else [])):
                factories[f"hf {experts}"] = transformers_layer(size, experts)
            for peer, factory in factories.items():
                if peer.split()[0] not in peers:
                    continue
                row = {"op": "moe decode", "shape": f"{name} x {tokens}", "peer": peer}
                try:
                    run = factory()
                    with torch.no_grad():
                        found[peer] = run(x, router, gate_up, down)
                        row["ms"] = bench.median_ms(lambda: run(x, router, gate_up, down), quick)  # noqa: B023
                    row["to_floor"] = row["ms"] / floor
                    if "ours" in found:
                        row["difference_to_ours"] = bench.relative_error(found[peer], found["ours"].double())
                    print(f"{row['op']:12} {row['shape']:20} {peer:14} {row['ms']:7.4f} ms ({row['to_floor']:.2f}x "
                          f"the bytes of {busy} experts)  differs by {row.get('difference_to_ours', 0):.1e}",
                          flush=True)  # fmt: skip
                except Exception as problem:
                    row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
                    print(f"{row['op']:12} {row['shape']:20} {peer:14} FAILED {row['failed'][:120]}", flush=True)
                report["rows"].append(row)
        save()


# --- Launch shapes ------------------------------------------------------------------------------------------------

ROWS = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "num_warps", "num_stages")
GRADS = ("BLOCK_N", "BLOCK_K", "BLOCK_R", "GROUP", "num_warps", "num_stages")
# fmt: off
ROWS_SHAPES = [(128, 256, 64, 8, 8, 3), (128, 256, 64, 16, 8, 3), (128, 128, 64, 8, 4, 3), (128, 128, 64, 8, 8, 4),
               (128, 128, 64, 8, 4, 4), (64, 256, 64, 8, 4, 3)]
GLU_SHAPES = [(128, 128, 64, 8, 8, 3), (128, 128, 64, 8, 8, 2), (64, 128, 64, 8, 4, 3)]
GRAD_SHAPES = [(128, 256, 64, 8, 8, 3), (128, 128, 64, 8, 4, 3), (128, 128, 64, 8, 8, 4), (256, 128, 64, 8, 8, 3)]
FEW_SHAPES = [(16, 32, 128, 1, 4, 4), (16, 64, 128, 1, 4, 4), (16, 64, 128, 1, 4, 3), (16, 32, 256, 1, 4, 3),
              (16, 16, 256, 1, 2, 4), (16, 128, 64, 1, 4, 4), (16, 32, 64, 1, 2, 6)]
TMA = (*ROWS[:5], "PERSIST", "num_stages")
TMA_SHAPES = [(128, 256, 64, 8, 8, True, 3), (128, 256, 64, 8, 8, False, 3), (128, 256, 64, 8, 8, False, 4)]
TMA_GLU_SHAPES = [(m, n // 2, *rest) for m, n, *rest in TMA_SHAPES]
# fmt: on


class Notes:
    """Times one product after the other and keeps the rows; what fails is noted too."""

    def __init__(self, report: dict, save: Callable, quick: bool):
        self.report, self.save, self.quick = report, save, quick

    def __call__(self, what: str, shape: object, amount: float, unit: str, run: Callable, true=None) -> None:
        row = {"what": what, "shape": str(shape)}
        try:
            out = run()
            if true is not None:
                row["difference"] = bench.relative_error(out, true.double())
            del out
            row["ms"] = bench.median_ms(run, repetitions=3 if self.quick else 12)
            row["per_s"] = amount / row["ms"] * 1e3
            print(f"{what:46} {row['shape']:28} {row['ms']:8.3f} ms {row['per_s'] / 1e12:8.2f} T{unit}/s  "
                  f"differs by {row.get('difference', 0):.1e}", flush=True)  # fmt: skip
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {problem}"[:300]
            print(f"{what:46} {row['shape']:28} FAILED {row['failed'][:160]}", flush=True)
        self.report["rows"].append(row)

    def all(self, what: str, names: tuple[str, ...], shapes: list, amount: float, unit: str, run, true=None) -> None:
        """``run(config)`` for each launch shape."""
        for shape in shapes[:1] if self.quick else shapes:
            config = dict(zip(names, shape, strict=True))
            self(what, shape, amount, unit, lambda c=config: run(c), true)


def tune_rows(note: Notes, what: str, a: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> None:
    flop = 2.0 * a.numel() * weight.shape[1]
    what = f"{what} {len(a)}x{a.shape[1]}x{weight.shape[1]}"
    true = F.grouped_mm(a, weight.transpose(1, 2), offs=ends) if products.use_torch(len(a), weight) else None
    note(what, "as chosen", flop, "FLOP", lambda: products.rows_by_group(a, weight, ends), true)
    if true is not None:
        note(what, "torch", flop, "FLOP", lambda: F.grouped_mm(a, weight.transpose(1, 2), offs=ends), true)
    if products.use_tma(len(a), weight):
        by_tma = functools.partial(products.tma_rows, a, weight, ends)
        note.all(f"{what}, TMA", TMA, TMA_SHAPES, flop, "FLOP", lambda config: by_tma(config=config)[0], true)
    run = functools.partial(products.rows_by_group, a, weight, ends)
    note.all(what, ROWS, ROWS_SHAPES, flop, "FLOP", lambda config: run(config=config), true)


def tune_grads(note: Notes, what: str, g: torch.Tensor, a: torch.Tensor, ends: torch.Tensor) -> None:
    flop = 2.0 * g.numel() * a.shape[1]
    what = f"{what} {g.shape[1]}x{len(g)}x{a.shape[1]}"
    true = products.weight_grad(g, a, ends)
    note(what, "as chosen", flop, "FLOP", lambda: products.weight_grad(g, a, ends), true)
    note.all(what, GRADS, GRAD_SHAPES, flop, "FLOP", lambda config: products.weight_grad(g, a, ends, config), true)


def tune_glu(note: Notes, what: str, x, gate_up, experts, shapes: list, amount: float, unit: str) -> None:
    """Gather, gate and up, swiglu in one kernel."""
    e, k = len(gate_up), experts.shape[1]
    order, _, ends = sort_by_expert(experts, e)
    run = functools.partial(products.rows_by_group, x, gate_up, ends, order=order, times=k, glu=True)
    note.all(what, ROWS, shapes, amount, unit, lambda config: run(config=config))
    if products.use_tma(len(order), gate_up, glu=True):
        run = functools.partial(products.tma_rows, x, gate_up, ends, order=order, times=k, glu=True)
        note.all(f"{what}, TMA", TMA, TMA_GLU_SHAPES, amount, unit, lambda config: run(config=config)[0])


def tune(note: Notes) -> None:
    """Every product of the layer by torch and by Triton in several launch shapes; then those for few tokens."""
    for name, size in LAYERS.items():
        e, k, d, i = (size[0] // 4 or 2, 2, 64, 32) if note.quick else size
        tokens = 64 if note.quick else 16384
        _, router, gate_up, down = (t.detach() for t in layer_inputs(1, (e, k, d, i)))
        x = bench.leaf(tokens, d).detach()
        _, experts = moe_route(x @ router.t(), k, normalise=True)
        _, _, ends = sort_by_expert(experts, e)
        m = tokens * k
        tune_rows(note, f"{name} up", bench.leaf(m, d).detach(), gate_up, ends)
        tune_glu(note, f"{name} gather, up, glu", x, gate_up, experts, GLU_SHAPES, 4.0 * m * d * i, "FLOP")
        tune_rows(note, f"{name} down", bench.leaf(m, i).detach(), down, ends)
        tune_rows(note, f"{name} down dX", bench.leaf(m, d).detach(), down.transpose(1, 2), ends)
        tune_rows(note, f"{name} up dX", bench.leaf(m, 2 * i).detach(), gate_up.transpose(1, 2), ends)
        bench.clear()
        tune_grads(note, f"{name} up dW", bench.leaf(m, 2 * i).detach(), bench.leaf(m, d).detach(), ends)
        tune_grads(note, f"{name} down dW", bench.leaf(m, d).detach(), bench.leaf(m, i).detach(), ends)
        bench.clear()
        note.save()
        for few in (1, 16):
            _, experts = moe_route(x[:few] @ router.t(), k, normalise=True)
            _, _, ends = sort_by_expert(experts, e)
            weights = 2.0 * len(experts.unique()) * d * i  # bytes of one matrix of the busy experts
            a = bench.leaf(few * k, i).detach()
            tune_glu(note, f"{name} {few} tokens, up, glu", x[:few], gate_up, experts, FEW_SHAPES, 2 * weights, "B")
            run = functools.partial(products.rows_by_group, a, down, ends)
            note.all(f"{name} {few} tokens, down", ROWS, FEW_SHAPES, weights, "B", lambda c, run=run: run(config=c))
        note.save()


# --- A training step ----------------------------------------------------------------------------------------------


def worker(args: argparse.Namespace) -> dict:
    """One peer's step in this process."""
    config = dict(TINY if args.quick else MIXTRAL)
    torch.set_default_dtype(BF16)
    if args.worker == "ours":
        from ligermodels import LigerMixtral

        with torch.device(DEVICE):
            model = LigerMixtral(LigerMixtral.config_class.from_hf({"model_type": "mixtral", **config}))
    else:
        import transformers

        if args.worker == "liger":
            import liger_kernel.transformers as liger

            liger_experts()
            liger.apply_liger_kernel_to_mixtral()
        theirs = transformers.AutoConfig.for_model("mixtral", **config)
        theirs.use_cache = False
        theirs._experts_implementation = "grouped_mm"
        with torch.device(DEVICE):
            model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="sdpa", dtype=BF16)
    torch.set_default_dtype(torch.float32)
    model.train()
    with torch.no_grad():  # the same weights for all: names are the same
        for name, parameter in model.named_parameters():
            generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    batch, seq = (1, 32) if args.quick else (args.batch, args.seq)
    tokens = torch.Generator(DEVICE).manual_seed(0)

    def step() -> torch.Tensor:
        ids = torch.randint(0, config["vocab_size"], (batch, seq), device=DEVICE, generator=tokens)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    result = {"peer": args.worker, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        result["first_loss"] = round(step().item(), 5)
        step()
        bench.sync()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(args.steps):
            started = time.perf_counter()
            loss = step()
            bench.sync()
            seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds)
        result |= dict(tokens_per_s=round(batch * seq / median, 1), step_ms=round(median * 1e3, 2))
        result |= dict(step_ms_all=[round(s * 1e3, 2) for s in seconds], last_loss=round(loss.item(), 5))
        if DEVICE == "cuda":
            result["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    except torch.OutOfMemoryError as error:
        result |= dict(out_of_memory=True, error=str(error).splitlines()[0][:300])
    return result


def steps(report: dict, save: Callable, args: argparse.Namespace, peers: list[str]) -> None:
    settings = dict(model="mixtral-8x7b, 4 layers", batch=args.batch, seq=args.seq, dtype="bfloat16")
    settings |= dict(optimizer="AdamW fused", steps=args.steps)
    report.setdefault("step", {"settings": settings, "results": []})
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    for peer in peers:
        with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", peer, "--answer", answer.name]
            try:
                done = subprocess.run(command, env=environment, timeout=args.timeout, stderr=subprocess.PIPE, text=True)
                log = done.stderr
            except subprocess.TimeoutExpired:
                log = f"still running after {args.timeout} s"
            text = answer.read()
        result = json.loads(text) if text else dict(peer=peer, error=log[-600:])
        print("step", json.dumps(result), flush=True)
        report["step"]["results"].append(result)
        save()


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", help="of layers, decoding, step; separated by commas")
    cli.add_argument("--peers", default="ours,hf,liger", help="of ours, hf, liger")
    cli.add_argument("--tune", action="store_true", help="the products' launch shapes instead")
    cli.add_argument("--quick", action="store_true", help="small sizes, few repetitions; also runs on CPU")
    cli.add_argument("--batch", type=int, default=2)
    cli.add_argument("--seq", type=int, default=4096)
    cli.add_argument("--steps", type=int, default=5)
    cli.add_argument("--timeout", type=int, default=90, help="seconds for one peer's step")
    cli.add_argument("--liger-shapes", type=int, default=4, help="launch shapes that Liger's kernels try; 0 for all")
    cli.add_argument("--out", type=Path, help="JSON file, written after every part")
    cli.add_argument("--worker", help=argparse.SUPPRESS)
    cli.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = cli.parse_args()
    os.environ["LIGER_SHAPES"] = str(args.liger_shapes)
    if args.worker:
        args.answer.write_text(json.dumps(worker(args)))
        return
    if DEVICE != "cuda" and not args.quick:
        sys.exit("benchmarks/moe.py: no CUDA device; --quick runs small sizes on the CPU")
    parts = (args.only or "layers,decoding,step").split(",")
    peers = args.peers.split(",")
    limits = bench.ceilings(args.quick)
    report = {"benchmark": "moe tune" if args.tune else "moe", "environment": bench.environment()}
    report["environment"]["transformers"] = version("transformers")
    report |= {"liger_shapes": args.liger_shapes, "ceilings": limits, "rows": []}
    print(f"{report['environment']['device']}: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, products "
          f"{limits['matmul_flop_per_s'] / 1e12:.0f} TFLOP/s", flush=True)  # fmt: skip

    def save() -> None:
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    if args.tune:
        tune(Notes(report, save, args.quick))
        return
    # Liger-Kernel last: tuning its kernels takes longest, and what was measured before is kept if time runs out.
    for some in ([peer for peer in peers if peer != "liger"], [peer for peer in peers if peer == "liger"]):
        if some and "layers" in parts:
            layers(report, save, args.quick, some)
        if some != ["liger"] and "decoding" in parts:
            decoding(report, save, args.quick, some)
        bench._flush = None
        bench.clear()
        if some and "step" in parts:
            steps(report, save, args, some)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
