"""How long a sharded folder takes to load, out of the page cache: ours beside safetensors' load_file and transformers.

    python benchmarks/load.py --gib 4 --out benchmarks/results/load-cpu.json
    python benchmarks/load.py --gib 16 --device cuda --out benchmarks/results/load-h200.json

The folder is a bf16 Llama with random bits, in shards of 1 GB. Each peer runs in a process of its own, which loads it
``--repeat`` times; the figures are those of the quickest run, the one that others on the machine disturbed least. The
first run stands beside it: what a process pays once (lazy imports, pinned buffers), and most processes load once. To
the CPU a loader may map the files and return before a byte was read, so two times are taken: until it returns, and
until every byte of every weight was then read once (a sum); rates are of the second, the fair one. On CUDA "pinned
copy" is the rate at which pinned memory goes to the device, the most that any loader can reach. ``--threads`` and
``--chunk`` (MiB) try other settings of ours.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
CPU_PEERS, CUDA_PEERS = ("load_file", "ours", "transformers"), ("pinned copy", "load_file", "ours", "transformers")


def make_folder(folder: Path, gib: float) -> None:
    """A Llama of about ``gib`` GiB, unless it is there already."""
    import torch

    import ligermodels
    from ligermodels.checkpoints_convert.hf import save_streamed

    if (folder / "config.json").exists():
        return
    ends, layer = 2 * 2 * 32000 * 2048, 2 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 2048 * 8192)
    config = CONFIG | {"num_hidden_layers": max(1, round((gib * 2**30 - ends) / layer))}
    with torch.device("meta"):
        model = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf(config)).to(torch.bfloat16)
    tensors = dict(model.named_parameters())
    noise = torch.empty(max(t.numel() for t in tensors.values()), dtype=torch.bfloat16).normal_(std=0.02)
    save_streamed(
        folder, tensors, lambda name: noise[: tensors[name].numel()].view(tensors[name].shape), config,
        max_shard_size="1GB",
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------- in a child process


def peak_rss() -> int | None:
    try:
        return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    except (OSError, TypeError):
        return None


def read_all(tensors: Iterable) -> int:
    """Read every byte once."""
    import torch

    return sum(int(t.view(-1).view(torch.int64).sum()) for t in tensors)


def measure(peer: str, folder: Path, device: str, repeat: int, threads: int | None, chunk: int | None) -> dict:
    import torch

    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    for file in files:  # into the page cache
        with open(file, "rb", buffering=0) as f:
            while f.read(1 << 24):
                pass
    if peer == "load_file":
        from safetensors.torch import load_file

        def load() -> Iterable:
            return [t for file in files for t in load_file(file, device=device).values()]
    elif peer == "ours":
        import ligermodels
        from ligermodels.checkpoints_convert import reading

        reading.THREADS = threads or reading.THREADS
        reading.CHUNK = chunk << 20 if chunk else reading.CHUNK

        def load() -> Iterable:
            return list(ligermodels.from_pretrained(folder, device=device).parameters())
    elif peer == "transformers":
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()

        def load() -> Iterable:
            try:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device)
            except (ImportError, ValueError):  # without accelerate
                model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
            return list(model.parameters())
    else:
        part = 1 << 28
        host = torch.empty(part, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(part, dtype=torch.uint8, device=device)

        def load() -> Iterable:
            for _ in range(-(-size // part)):
                target.copy_(host, non_blocking=True)
            return []

        size = -(-size // part) * part
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    runs, first_peak = [], 0
    for _ in range(repeat):
        before = peak_rss()
        start = time.perf_counter()
        tensors = load()
        if device != "cpu":
            torch.cuda.synchronize()
        loaded = time.perf_counter() - start
        peak = peak_rss()
        if device == "cpu":
            read_all(t.detach() for t in tensors)
        used = time.perf_counter() - start
        runs.append((used, loaded))
        if len(runs) == 1:
            first_peak = (peak or 0) - (before or 0)
        del tensors
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
    what = 0 if device == "cpu" else 1
    all_seconds = [round(run[what], 4) for run in runs]
    used, loaded = min(runs, key=lambda run: run[what])
    return {
        "peer": peer,
        "bytes": size,
        "seconds_until_returned": round(loaded, 4),
        "seconds_until_read": round(used, 4) if device == "cpu" else None,
        "first_seconds": all_seconds[0],
        "all_seconds": all_seconds,
        "gb_per_s": round(size / (used if device == "cpu" else loaded) / 1e9, 2),
        "peak_host_over_size": round(first_peak / size, 2),
    }


# ---------------------------------------------------------------------------------------------------------- the parent


def environment(device: str) -> dict:
    import torch

    versions = {}
    for name in ("torch", "safetensors", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **versions,
        "python": platform.python_version(),
        "commit": os.environ.get("GIT_COMMIT") or git.stdout.strip() or "unknown",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", help="comma-separated; default: all that the device has")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, help="reading threads of ours")
    parser.add_argument("--chunk", type=int, help="MiB that one thread of ours reads at a time")
    parser.add_argument("--folder", type=Path, help="where the model is, or is made and left; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.folder, args.device, args.repeat, args.threads, args.chunk)))
        return

    peers = args.peers.split(",") if args.peers else CPU_PEERS if args.device == "cpu" else CUDA_PEERS
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "model"
        make_folder(folder, args.gib)
        for peer in peers:
            command = [sys.executable, __file__, "--child", peer, "--folder", str(folder), "--device", args.device]
            command += ["--repeat", str(args.repeat)]
            command += ["--threads", str(args.threads)] if args.threads else []
            command += ["--chunk", str(args.chunk)] if args.chunk else []
            child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if child.returncode:
                print(f"{peer:12} failed: {child.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                results.append({"peer": peer, "failed": child.stderr.strip()[-300:]})
                continue
            results.append(json.loads(child.stdout.splitlines()[-1]))
            r = results[-1]
            print(f"{peer:12} {r['gb_per_s']:8.2f} GB/s   returned after {r['seconds_until_returned']:.3f} s"
                  + (f", read after {r['seconds_until_read']:.3f} s" if r["seconds_until_read"] else "")
                  + f", the first time {r['first_seconds']:.3f} s"
                  + f"   host memory {r['peak_host_over_size']:.2f} × size")  # fmt: skip
    rates = {r["peer"]: r["gb_per_s"] for r in results if "gb_per_s" in r}
    reference = "load_file" if args.device == "cpu" else "pinned copy"
    if {"ours", reference} <= rates.keys():
        ratio = rates["ours"] / rates[reference]
        print(f"ours / {reference}: {ratio:.2f} (0.80 is wanted)")
    if args.out:
        settings = {"gib": args.gib, "device": args.device, "repeat": args.repeat, "threads": args.threads,
                    "chunk_mib": args.chunk}  # fmt: skip
        report = {
            "benchmark": "load",
            "settings": settings,
            "environment": environment(args.device),
            "results": results,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
