"""One whole training step (forward, backward, fused AdamW; random weights, bf16): tokens/s and peak GiB beside peers.

    python benchmarks/step.py --model llama3-8b --batch 4 --seq 4096 --checkpointing --peers ours,hf,liger --out x.json
    python benchmarks/step.py --table                  # every row of the table of training steps, one JSON file a row
    python benchmarks/step.py --table --rows 8b,80gib  # some of them

Every peer runs in its own process of the same call: same machine, same optimiser, same token counts, same allocator.
All peers get the *same* weights (drawn per parameter from a seed made of its name) and the same tokens, so the losses
of the first step must agree to bf16's rounding. Out of memory is a result, not a crash.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
import zlib
from pathlib import Path

PEERS = {
    "ours": "ligermodels",
    "ours-compile": "ligermodels + torch.compile of each block",
    "hf": "transformers, sdpa attention (eager for gemma2)",
    "hf-compile": "transformers + torch.compile",
    "liger": "transformers + Liger-Kernel",
}
GIB = 2**30
ROOT = Path(__file__).resolve().parent.parent

# The published config.json files themselves; add a model by its name there.
PUBLISHED = json.loads((ROOT / "tests" / "published_configs.json").read_text())
MODELS = {
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "gemma2-2b": "google/gemma-2-2b",
    "phi3.5-mini": "microsoft/Phi-3.5-mini-instruct",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "llava-1.5-7b": "llava-hf/llava-1.5-7b-hf",
    "tiny": None,  # for trying this script without a GPU: --model tiny --device cpu
    "tiny-llava": None,
}
TINY = dict(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
TINY_VISION = dict(model_type="clip_vision_model", hidden_size=32, intermediate_size=64, num_hidden_layers=2)
TINY_VISION |= dict(num_attention_heads=2, image_size=28, patch_size=14)
TINY_LLAVA = dict(model_type="llava", image_token_index=511, text_config=TINY, vision_config=TINY_VISION)
# What the sparse text_config of the published LLaVA leaves to LlamaConfig's defaults.
LLAMA_7B = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)

# The table of training steps: (options of all runs, [(peer, its own options)], what ours must reach against Liger).
# Budgets are what the goals leave of Liger's peak: 61.3, 0.82 · 114.7, 0.80 · 26.3, 0.75 · 33.1, 0.75 · 16.5 GiB.
_8B, _EXACT = "--model llama3-8b --batch 4 --seq 4096", "--reserve 0"
_OURS = ("--host-gib 8", "--host-gib 8 --optimizer-in-backward")
_SMALL = [("hf", ""), ("hf-compile", ""), ("liger", "")]
_SETTINGS = [f"--batch {b} --accumulation {4 // b}{c}" for b in (1, 2, 4) for c in ("", " --checkpointing")]
ROWS = {
    "8b-ckpt": (
        _8B,
        [("ours", f"--fit 61.3 {_EXACT}"), *((p, "--checkpointing") for p in ("hf", "hf-compile", "liger"))],
        dict(speed=1.04, memory=1.0),
    ),
    "8b": (
        _8B,
        [*(("ours", f"--fit 94.05 {_EXACT} {own}") for own in _OURS), ("liger", "")],
        dict(speed=1.03, memory=0.82),
    ),
    "80gib": (
        f"{_8B} --cap-gib 80",
        [
            ("ours", "--fit 80"),
            ("ours", "--fit 80 --host-gib 40"),
            ("hf", "--checkpointing"),
            ("hf-compile", "--checkpointing"),
            ("liger", "--batch 1 --accumulation 4"),
        ],
        dict(speed=1.05, speed_hf=1.40),
    ),
    # Each peer in each setting, to find its best: those above are what was found on an H200.
    "80gib-search": (f"{_8B} --cap-gib 80", [(p, s) for p in ("hf", "liger") for s in _SETTINGS], {}),
    "1b": (
        "--model llama3.2-1b --batch 4 --seq 4096",
        [
            *(("ours", f"--fit 21.0 {_EXACT} {own}") for own in _OURS),
            ("ours-compile", ""),
            *_SMALL,
        ],
        dict(speed=1.05, memory=0.80),
    ),
    "0.5b": (
        "--model qwen2.5-0.5b --batch 8 --seq 4096",
        [("ours", f"--fit 24.8 {_EXACT}"), ("ours-compile", ""), *_SMALL],
        dict(speed=1.10, memory=0.75),
    ),
    "135m": (
        "--model smollm2-135m --batch 16 --seq 2048",
        [
            ("ours", f"--fit 12.35 {_EXACT} --cuda-graph"),
            ("ours", f"--fit 12.35 {_EXACT}"),
            ("ours-compile", ""),
            *_SMALL,
        ],
        dict(speed=1.35, memory=0.75),
    ),
}
# Long contexts take a minute and more for each run: one step to warm up on a short row, one or two measured.
_LONG = "--model llama3-8b --batch 1 --short-warmup --timeout 400"
LONG_ROWS = {
    "64k": (
        f"{_LONG} --seq 65536 --steps 1",
        [("ours", "--fit 132"), ("hf", "--checkpointing"), ("liger", "--checkpointing")],
        {},
    ),
    "96k": (
        f"{_LONG} --seq 98304 --steps 1",
        [("ours", "--fit 132"), ("liger", "--checkpointing")],
        dict(speed=1.10),
    ),
    "256k": (f"{_LONG} --seq 262144 --steps 1", [("ours", "--fit 135 --host-gib 40 --optimizer-in-backward")], {}),
}
ATTENTION = {"gemma2": "eager"}  # transformers' sdpa cannot cap scores, so its own default for this family is eager


def config_of(model: str) -> dict:
    """config.json of a benchmarked model, in bf16 and without the keys that do not matter here."""
    tiny = {"tiny": TINY, "tiny-llava": TINY_LLAVA}
    config = dict(PUBLISHED[MODELS[model]]["config"] if MODELS[model] else tiny[model])
    return {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}


def text_of(config: dict) -> dict:
    """Of a model that reads images the config of its text model, else the config itself."""
    return LLAMA_7B | config["text_config"] if "text_config" in config else config


# ---------------------------------------------------------------------------------------------- one peer, one process
def build(args: argparse.Namespace):
    """The peer's model in bf16 on the device, ready to train, and the callable whose result has a ``loss``."""
    import torch

    config = config_of(args.model)
    kind = config.pop("model_type")
    torch.set_default_dtype(torch.bfloat16)
    if args.worker.startswith("ours"):
        import ligermodels

        cls = ligermodels.MODELS[kind]
        with torch.device(args.device):
            model = cls(cls.config_class.from_hf(dict(config, model_type=kind)))
        if level := args.activation_memory or ("block" if args.checkpointing else None):
            model.set_activation_memory(level)
        if args.worker == "ours-compile":
            for layer in model.model.layers:
                layer.compile(fullgraph=True)
    else:
        import transformers

        if args.worker == "liger":
            import liger_kernel.transformers as liger

            getattr(liger, f"apply_liger_kernel_to_{kind}")()
            if kind == "llava":  # patches the loss only; the text model is patched as a Llama
                liger.apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
                # 0.8.5 fills an output class as transformers had it before 5.24; only the loss is read here
                module = sys.modules["liger_kernel.transformers.model.llava"]
                module.LigerLlavaCausalLMOutputWithPast = lambda **fields: types.SimpleNamespace(**fields)
        hf_config = transformers.AutoConfig.for_model(kind, **config)
        hf_config.get_text_config().use_cache = False
        images = "vision_config" in config
        auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
        with torch.device(args.device):
            model = auto.from_config(hf_config, attn_implementation=ATTENTION.get(kind, "sdpa"), dtype=torch.bfloat16)
        if args.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.set_default_dtype(torch.float32)
    model.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # parameters only: tables of rope must stay in fp32
            parameter.data = parameter.data.to(torch.bfloat16)
            if "vision_config" in config:  # the peers agree on the names of its parts, not on how these are nested
                name = ".".join(p for p in name.split(".") if p not in ("model", "language_model", "vision_model"))
            generator = torch.Generator(args.device).manual_seed(zlib.crc32(name.encode()))
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    forward = torch.compile(model) if args.worker == "hf-compile" else model
    return model, forward


def make_batch(args: argparse.Namespace, seq: int, generator) -> dict:
    """Random ids (batch, seq) as labels too; of a model that reads images one image a row, whose tokens come second."""
    import torch

    config = config_of(args.model)
    options = dict(device=args.device, generator=generator)
    if "vision_config" not in config:
        ids = torch.randint(0, config["vocab_size"], (args.batch, seq), **options)
        return dict(input_ids=ids, labels=ids)
    vision, image = config["vision_config"], config["image_token_index"]
    ids = torch.randint(0, image, (args.batch, seq), **options)
    ids[:, 1 : 1 + (vision["image_size"] // vision["patch_size"]) ** 2] = image
    shape = (args.batch, 3, vision["image_size"], vision["image_size"])
    pixel_values = torch.randn(shape, **options).to(torch.bfloat16)
    return dict(input_ids=ids, labels=ids.masked_fill(ids == image, -100), pixel_values=pixel_values)


def measure(args: argparse.Namespace) -> dict:
    """Warm up, time each step, and describe the result; CUDA out of memory is described too."""
    import torch

    cuda = args.device.startswith("cuda")
    if cuda and args.cap_gib:
        torch.cuda.set_per_process_memory_fraction(
            args.cap_gib * GIB / torch.cuda.get_device_properties(0).total_memory
        )
    result = dict(peer=args.worker, device=torch.cuda.get_device_name(0) if cuda else "CPU")
    try:
        model, forward = build(args)
        result["parameters"] = sum(p.numel() for p in model.parameters())
        result["weights_gib"] = round(sum(p.numel() * p.element_size() for p in model.parameters()) / GIB, 2)
        if args.worker.startswith("ours"):
            plan = fit(model, args)
            result["activation_memory"] = model.activation_memory
            result |= dict(plan=str(plan).splitlines(), predicted_gib=round(plan.peak / GIB, 2)) if plan else {}
        optimizer = make_optimizer(model, args)
        tokens = torch.Generator(args.device).manual_seed(0)

        graphed = None
        if args.cuda_graph:
            from ligermodels.training.graph import GraphedStep

            graphed = GraphedStep(model, optimizer, warmup=max(args.warmup - 1, 1))

        def step(seq: int = args.seq) -> torch.Tensor:
            total = 0.0
            for _ in range(args.accumulation):
                inputs = make_batch(args, seq, tokens)
                if graphed is not None:
                    return graphed(**inputs)
                with optimizer.ahead() if args.optimizer_in_backward else contextlib.nullcontext():
                    loss = forward(**inputs).loss / args.accumulation
                    loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        def wait() -> float:
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

        if args.short_warmup:
            step(min(args.seq, 4096))
        else:
            result["first_loss"] = round(step().item(), 5)
        for number in range(1, 1 if args.short_warmup else args.warmup):
            if cuda and number == args.warmup - 1:  # a graph takes its memory when it is captured, in the last of these
                torch.cuda.reset_peak_memory_stats()
            step()
        wait()
        if cuda and not args.cuda_graph:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(args.steps):
            start = wait()
            loss = step()
            seconds.append(wait() - start)
        median = statistics.median(seconds)
        count = args.batch * args.seq * args.accumulation
        result |= dict(
            tokens_per_s=round(count / median, 1),
            step_ms=round(median * 1e3, 2),
            step_ms_all=[round(s * 1e3, 2) for s in seconds],
            tflops=round(count * flops_per_token(args, result["parameters"]) / median / 1e12, 1),
            last_loss=round(loss.item(), 5),
        )
        if cuda:
            result["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
            result["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 2)
        if args.profile:
            result["kernels"] = profile(step, cuda)
        if args.worker == "ours" and cuda and not args.short_warmup and "vision_config" not in config_of(args.model):
            if args.optimizer_in_backward:
                optimizer.remove()  # or the loss alone would be taken for a second backward of the last step
            del optimizer, graphed, loss
            result["loss_ms"] = loss_time(model, args)
            result["loss_share"] = round(result["loss_ms"] * args.accumulation / result["step_ms"], 4)
    except torch.OutOfMemoryError as error:
        if "step_ms" not in result:
            result |= dict(out_of_memory=True, error=str(error).splitlines()[0][:300])
    return result


def fit(model, args: argparse.Namespace):
    """Plan the activations for the budget that was asked for, if one was; pins the host memory that the plan needs."""
    if not args.fit:
        return None
    options = dict(accumulation=args.accumulation, optimizer_in_backward=args.optimizer_in_backward)
    options |= dict(host_gib=args.host_gib) | (dict(reserve=args.reserve) if args.reserve is not None else {})
    plan = model.fit_memory(args.fit, args.batch, args.seq, **options)
    if plan.host and args.device.startswith("cuda"):
        model._offload.pool.reserve(plan.host)
    return plan


def make_optimizer(model, args: argparse.Namespace):
    """AdamW, fused: the same for all peers, but for where it runs."""
    import torch

    if args.optimizer_in_backward:
        from ligermodels.training.in_backward import AdamWInBackward

        return AdamWInBackward(model.parameters(), lr=1e-5)
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=args.cuda_graph)


def loss_time(model, args: argparse.Namespace, repeats: int = 4) -> float:
    """Milliseconds of the loss alone, forward and backward of the head with its gradients, for one micro-batch."""
    import torch

    hidden = torch.randn(args.batch, args.seq, model.config.hidden_size, device=args.device, dtype=model.dtype)
    labels = torch.randint(0, model.config.vocab_size, (args.batch, args.seq), device=args.device)
    times = []
    for _ in range(repeats):
        hidden.requires_grad_().grad = model.lm_head.weight.grad = None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        model.loss(hidden, labels).backward()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times[1:]), 3)


def flops_per_token(args: argparse.Namespace, parameters: int) -> float:
    """Model FLOPs of forward and backward: 6 a matmul weight, and causal attention (half of the full square).

    A vision tower's weights count for the patches of its one image a row, spread over the row's tokens.
    """
    config = config_of(args.model)
    c, tower = text_of(config), 0.0
    if vision := config.get("vision_config"):
        H, layers = vision["hidden_size"], vision["num_hidden_layers"]
        weights = layers * (4 * H * H + 2 * H * vision["intermediate_size"])
        tower = 6 * weights * ((vision["image_size"] // vision["patch_size"]) ** 2 + 1) / args.seq
        parameters -= weights
    width = c["num_attention_heads"] * (c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])
    matmul = parameters - (0 if c.get("tie_word_embeddings") else c["vocab_size"] * c["hidden_size"])
    return 6 * matmul + 6 * c["num_hidden_layers"] * args.seq * width + tower


def profile(step, cuda: bool, top: int = 40) -> list[dict]:
    """The kernels of one step that take the most time; also printed as a table on stderr."""
    from torch.profiler import DeviceType, ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as trace:
        step()
    rows = []
    for event in trace.key_averages():
        if (event.device_type == DeviceType.CUDA) == cuda:
            rows.append((event.self_device_time_total if cuda else event.self_cpu_time_total, event.count, event.key))
    rows.sort(reverse=True)
    total = sum(row[0] for row in rows) or 1.0
    print(f"{'ms':>9} {'share':>6} {'calls':>6}  kernel   (sum {total / 1e3:.1f} ms)", file=sys.stderr)
    for microseconds, calls, key in rows[:top]:
        print(f"{microseconds / 1e3:9.2f} {microseconds / total:6.1%} {calls:6d}  {key[:110]}", file=sys.stderr)
    return [dict(ms=round(us / 1e3, 3), calls=calls, kernel=key[:200]) for us, calls, key in rows[:top]]


def versions() -> dict:
    """Versions of what decides speed; a package that is not installed is left out."""
    found = {}
    for name in ("torch", "triton", "transformers", "liger-kernel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ------------------------------------------------------------------------------------------------------- all the peers
def run_peer(peer: str, argv: list[str], timeout: int) -> dict:
    """Run one peer in a fresh process and return its result; a failure is a result with an ``error``."""
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    # transformers takes the checkout's kernels/ for Hugging Face's package of that name: only ours sees the root
    paths = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != ROOT]
    environment["PYTHONPATH"] = os.pathsep.join(([str(ROOT)] if peer.startswith("ours") else []) + paths)
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, *argv, "--worker", peer, "--answer", answer.name]
        started = time.time()
        try:
            done = subprocess.run(command, env=environment, timeout=timeout, stderr=subprocess.PIPE, text=True)
            code, log = done.returncode, done.stderr
        except subprocess.TimeoutExpired as late:
            code, log = f"still running after {timeout} s", late.stderr or b""
            log = log.decode(errors="replace") if isinstance(log, bytes) else log
        text = answer.read()
    sys.stderr.write(log[-6000:])
    if text:
        result = json.loads(text)
    else:
        result = dict(peer=peer, error=f"exit {code}: " + " | ".join(log.strip().splitlines()[-3:])[-600:])
    return result | dict(wall_s=round(time.time() - started, 1))


def table(results: list[dict]) -> str:
    """The results as text; ratios are to the best peer that is not ours."""
    others = [r for r in results if not r["peer"].startswith("ours") and "tokens_per_s" in r]
    best = max(others, key=lambda r: r["tokens_per_s"], default=None)
    lines = [
        f"{'peer':12} {'tokens/s':>10} {'ratio':>7} {'peak GiB':>9} {'ratio':>7} {'TFLOP/s':>8} {'first loss':>11}"
    ]
    for r in results:
        if "tokens_per_s" not in r:
            why = "out of memory" if r.get("out_of_memory") else "FAILED: " + r["error"].splitlines()[0][:90]
            lines.append(f"{r['peer']:12} {why}")
            continue
        speed = f"{r['tokens_per_s'] / best['tokens_per_s']:.3f}" if best else "-"
        memory = f"{r['peak_gib'] / best['peak_gib']:.3f}" if best and "peak_gib" in r else "-"
        lines.append(
            f"{r['peer']:12} {r['tokens_per_s']:10,.0f} {speed:>7} {r.get('peak_gib', '-'):>9} {memory:>7} "
            f"{r['tflops']:8.1f} {r.get('first_loss', r['last_loss']):11.5f}"
        )
    return "\n".join(lines + ([f"ratios: to {best['peer']}, the fastest of the others"] if best else []))


def environment(args: argparse.Namespace) -> dict:
    """What a reader needs to judge the figures. The device's name comes from the workers: no CUDA context here."""
    commit = args.commit or os.environ.get("GIT_COMMIT")
    if not commit:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or "unknown"
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return dict(device="unknown", **versions(), python=sys.version.split()[0], commit=commit, date=now)


def run_row(
    runs: list[tuple[str, list[str]]], args: argparse.Namespace, settings: dict, out: Path | None
) -> list[dict]:
    """The runs of one table row, each peer with its own options; the file is written after each."""
    report = dict(benchmark="step", settings=settings, environment=environment(args), results=[])
    for peer, argv in runs:
        result = run_peer(peer, argv, args.timeout)
        report["environment"]["device"] = result.pop("device", report["environment"]["device"])
        report["results"].append(result)
        print(json.dumps({k: v for k, v in result.items() if k != "kernels"}), flush=True)
        if out:  # after each peer: what was measured is kept if a later one is stopped
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{settings['model']}, {settings['batch']} x {settings['seq']}, on {report['environment']['device']}")
    print(table(report["results"]), flush=True)
    return report["results"]


def judge(goals: dict, results: list[dict]) -> str:
    """The best of ours that stays within the goal's memory, beside what it must reach."""
    speed = {r["peer"]: r["tokens_per_s"] for r in results if "tokens_per_s" in r}
    memory = {r["peer"]: r["peak_gib"] for r in results if "peak_gib" in r}
    ours = [r for r in results if r["peer"].startswith("ours") and "tokens_per_s" in r]
    fits = [
        r for r in ours if "memory" not in goals or r.get("peak_gib", 0) <= goals["memory"] * memory.get("liger", 0)
    ]
    best = max(fits or ours, key=lambda r: r["tokens_per_s"], default=None)
    if best is None or "liger" not in speed:
        return "no judgement: ours or liger did not run"
    said = []
    for name, peer in (("speed", "liger"), ("speed_hf", "hf")):
        if name in goals and peer in speed:
            ratio = best["tokens_per_s"] / speed[peer]
            said.append(f"{ratio:.3f} x {peer} (goal {goals[name]}: {'reached' if ratio >= goals[name] else 'MISSED'})")
    if "memory" in goals and "peak_gib" in best:
        ratio = best["peak_gib"] / memory["liger"]
        said.append(f"memory {ratio:.3f} (goal {goals['memory']}: {'reached' if fits else 'MISSED'})")
    return ", ".join(said)


def run_table(args: argparse.Namespace, cli: argparse.ArgumentParser, given: list[str]) -> bool:
    """All rows, or those asked for; True if every run gave a result."""
    every = ROWS | LONG_ROWS
    names = (
        args.rows.split(",") if args.rows else list(LONG_ROWS if args.long else (r for r in ROWS if "search" not in r))
    )
    if unknown := [name for name in names if name not in every]:
        cli.error(f"unknown row {', '.join(unknown)}: choose from {', '.join(every)}")
    wanted, good, verdicts = args.peers.split(",") if args.peers else None, True, []
    for name in names:
        shared, runs, goals = every[name]
        runs = [(peer, [*shared.split(), *own.split(), *given]) for peer, own in runs if not wanted or peer in wanted]
        own = cli.parse_args([*shared.split(), *given])
        settings = dict(row=name, model=own.model, batch=own.batch, seq=own.seq, accumulation=1, dtype="bfloat16")
        settings |= dict(cap_gib=own.cap_gib, optimizer="AdamW fused", steps=own.steps, warmup=own.warmup, goals=goals)
        settings |= dict(checkpointing=name == "8b-ckpt", options=[[peer, " ".join(argv)] for peer, argv in runs])
        results = run_row(runs, own, settings, args.out_dir / f"step-{name}.json" if args.out_dir else None)
        verdicts.append(f"{name}: {judge(goals, results)}")
        print(verdicts[-1], flush=True)
        good = good and all("tokens_per_s" in r or r.get("out_of_memory") for r in results)
    print("\n" + "\n".join(verdicts))
    return good


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--model", choices=MODELS, default="llama3-8b")
    cli.add_argument("--batch", type=int, default=4, help="rows a micro-batch")
    cli.add_argument("--seq", type=int, default=4096, help="tokens a row")
    cli.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    cli.add_argument("--checkpointing", action="store_true", help="recompute whole blocks in backward, for every peer")
    cli.add_argument("--activation-memory", help="ours only, a level of set_activation_memory: overrules the above")
    cli.add_argument("--fit", type=float, help="ours only: let model.fit_memory plan for so many GiB")
    cli.add_argument("--host-gib", type=float, default=0.0, help="with --fit: pinned host memory it may use")
    cli.add_argument("--reserve", type=float, help="with --fit: share of the budget to leave free")
    cli.add_argument("--optimizer-in-backward", action="store_true", help="ours only: keep no gradients")
    cli.add_argument("--cuda-graph", action="store_true", help="ours only: capture the step")
    cli.add_argument("--cap-gib", type=float, help="let the allocator have no more than this")
    cli.add_argument("--peers", help="of " + ", ".join(PEERS) + "; by default ours,hf,liger, with --table all of a row")
    cli.add_argument("--steps", type=int, default=5)
    cli.add_argument("--warmup", type=int, default=3)
    cli.add_argument("--short-warmup", action="store_true", help="instead: one step of at most 4,096 tokens a row")
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--timeout", type=int, default=200, help="seconds a peer may take")
    cli.add_argument("--profile", action="store_true", help="also list the kernels that take the most time")
    cli.add_argument("--commit", help="of the measured code, where there is no .git (or GIT_COMMIT)")
    cli.add_argument("--out", type=Path, help="JSON file to write")
    cli.add_argument("--table", action="store_true", help="the rows of the table of training steps")
    cli.add_argument("--long", action="store_true", help="with --table: the long contexts instead")
    cli.add_argument("--rows", help="with --table: of " + ", ".join(ROWS | LONG_ROWS))
    cli.add_argument("--out-dir", type=Path, help="with --table: folder for step-ROW.json")
    cli.add_argument("--worker", help=argparse.SUPPRESS)
    cli.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.warmup < 1 or args.steps < 1:
        cli.error("--warmup and --steps must be at least 1")
    if args.cuda_graph and (args.warmup < 2 or args.accumulation > 1):
        cli.error("--cuda-graph needs --warmup 2 or more (the last one captures) and no accumulation")
    if args.worker:
        args.answer.write_text(json.dumps(measure(args)))
        return
    if args.table:
        # what was typed overrules the rows' options; only options that concern a run are passed on
        own = ("--rows", "--out-dir", "--peers")
        given = [
            w for w in sys.argv[1:] if w not in ("--table", "--long") and not w.startswith(tuple(f"{o}=" for o in own))
        ]
        for name in own:
            while name in given:
                del given[given.index(name) : given.index(name) + 2]
        sys.exit(not run_table(args, cli, given))
    peers = (args.peers or "ours,hf,liger").split(",")
    if unknown := [peer for peer in peers if peer not in PEERS]:
        cli.error(f"unknown peer {', '.join(unknown)}: choose from {', '.join(PEERS)}")
    settings = dict(model=args.model, batch=args.batch, seq=args.seq, accumulation=args.accumulation, dtype="bfloat16")
    settings |= dict(checkpointing=args.checkpointing, activation_memory=args.activation_memory, cap_gib=args.cap_gib)
    settings |= dict(optimizer="AdamW fused", steps=args.steps, warmup=args.warmup)
    results = run_row([(peer, sys.argv[1:]) for peer in peers], args, settings, args.out)
    sys.exit(any("tokens_per_s" not in r and not r.get("out_of_memory") for r in results))


if __name__ == "__main__":
    main()
