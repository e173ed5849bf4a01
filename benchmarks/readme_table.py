"""Rewrite the tables in README.md from benchmarks/results/*.json and from the code, so that none is typed by hand.

Results of step.py give the table of training steps, results of kernels.py (but not of its sweeps) that of the kernels.
ligermodels.MODELS and tests/published_configs.json give the table of families.

python benchmarks/readme_table.py            # rewrite
python benchmarks/readme_table.py --check    # only say (exit code 1) whether the README is out of date
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- figures: begin (benchmarks/readme_table.py writes this) -->", "<!-- figures: end -->"
FAMILIES_BEGIN = BEGIN.replace("figures", "families")
FAMILIES_END = END.replace("figures", "families")
FAMILIES_HEAD = """\
| class | `model_type` | published checkpoints |
|---|---|---|"""
HEAD = """\
| model, batch × length | device | | tokens/s | against the fastest peer | peak GiB | against the same peer |
|---|---|---|---|---|---|---|"""


KERNELS_HEAD = """\
| kernel, shape | | ms | fastest peer | ms | ours / peer | MiB beyond the gradients | peer's |
|---|---|---|---|---|---|---|---|"""


DECODE_HEAD = """\
| decoding: model, prompts at once | | tokens/s | of the memory's limit | ms a step |
|---|---|---|---|---|"""
EXPERTS_HEAD = """\
| mixture of experts: layer, tokens | | ms forward | + backward | of the products' ceiling | MiB beyond the gradients |
|---|---|---|---|---|---|"""

LOAD_HEAD = """\
| loading 4 GiB from the page cache | | GB/s | the first load, s |
|---|---|---|---|"""


def load_rows(report: dict) -> list[str]:
    """One line for each peer of a result file of load.py."""
    to = "the GPU" if report["settings"]["device"] == "cuda" else "the CPU, every byte read once"
    return [f"| to {to} | {r['peer']} | {r['gb_per_s']:.1f} | {r['first_seconds']:.2f} |" for r in report["results"]]


def decode_rows(report: dict) -> list[str]:
    """One line for each peer and case of a result file of generate.py; reading a long prompt is one of the cases."""
    lines = []
    for r in sorted(report["results"], key=lambda r: r["case"]):
        model, rows = r["case"].rsplit("-", 1)
        name = f"Llama {model.upper()}, " + (
            f"reading {report['settings']['prefill']:,}" if rows == "prefill" else rows
        )
        bound, step = (f"{r[k]:{f}}" if k in r else "–" for k, f in (("of_bound", ".0%"), ("step_ms", ".2f")))
        lines.append(f"| {name} | {r['peer']} | {r['tokens_per_s']:,.0f} | {bound} | {step} |")
    return lines


def expert_rows(report: dict) -> list[str]:
    """One line for each peer and layer of a result file of moe.py, then its training steps."""
    lines = []
    for r in (r for r in report["rows"] if r["op"] == "moe layer"):
        cells = [f"{r['shape']}, 16,384", r["peer"]]
        if "failed" in r:
            cells += ["not measured", *["–"] * 3]
        else:
            ceiling = f"{1 / r['forward_to_floor']:.0%}, {1 / r['total_to_floor']:.0%}"
            cells += [f"{r['forward_ms']:.3g}", f"{r['total_ms']:.3g}", ceiling, mebibytes(r)]
        lines.append("| " + " | ".join(cells) + " |")
    steps = "; ".join(
        f"{r['peer']} {r['tokens_per_s']:,.0f} tokens/s, {r['peak_gib']:.1f} GiB"
        for r in report.get("step", {}).get("results", ())
        if "tokens_per_s" in r
    )
    return lines + (["", f"A training step of four layers of Mixtral-8x7B, 2 × 4096: {steps}."] if steps else [])


def newest(reports: list[tuple[Path, dict]]) -> list[tuple[Path, dict]]:
    """The reports without the rows that a later run measured again."""
    latest: dict[tuple, str] = {}
    for _, report in reports:
        for r in report["rows"]:
            key = r["op"], r["shape"]
            latest[key] = max(latest.get(key, ""), report["environment"]["date"])
    found = []
    for path, report in reports:
        rows = [r for r in report["rows"] if latest[r["op"], r["shape"]] == report["environment"]["date"]]
        found += [(path, report | {"rows": rows})] if rows else []
    return found


def kernel_rows(report: dict) -> list[str]:
    """One line for each of our rows of one result file of kernels.py: forward + backward beside the fastest peer."""
    lines = []
    for row in report["rows"]:
        if not row["peer"].startswith("ours"):
            continue
        same = [r for r in report["rows"] if (r["op"], r["shape"]) == (row["op"], row["shape"]) and "total_ms" in r]
        others = [r for r in same if not r["peer"].startswith(("ours", "products"))]
        best = min(others, key=lambda r: r["total_ms"], default=None)
        cells = [f"{row['op']} " + re.sub(r"(?<=[\d)])x(?=[\d(])", " × ", row["shape"]), row["peer"]]
        if "total_ms" not in row:
            cells += ["failed", *["–"] * 5]
        elif best is None:
            cells += [f"{row['total_ms']:.3g}", *["–"] * 3, mebibytes(row), "–"]
        else:
            cells += [f"{row['total_ms']:.3g}", best["peer"], f"{best['total_ms']:.3g}"]
            cells += [f"{row['total_ms'] / best['total_ms']:.2f}", mebibytes(row), mebibytes(best)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def mebibytes(row: dict) -> str:
    """Below 0: the peer writes its gradients into its inputs, which are then lost."""
    return f"{row['beyond_bytes'] / 2**20:,.0f}"


def sweep_lines(report: dict) -> list[str]:
    """What a sweep of kernels.py found, and each shape at which ours is more than 3 % slower than the fastest peer."""
    found = report["rows"]
    slower = [r for r in found if r["ratio"] > 1.03]
    median = statistics.median(r["ratio"] for r in found)
    operations = ", ".join(dict.fromkeys(r["op"] for r in found))
    lines = [
        f"Over {len(found)} shapes of {operations} (widths and vocabularies of real models, 256 to 131,072 tokens) "
        f"forward + backward takes {median:.2f} of the fastest peer's time in the median. More than 3 % slower are "
        f"{len(slower)}, all so small that fixed costs decide:"
    ]
    for r in slower:
        lines.append(
            f"- {r['op']} {r['shape']}, {r['tokens']:,} tokens: {1e3 * r['ms']['ours']:.1f} µs, {r['best_peer']} "
            f"{1e3 * r['ms'][r['best_peer']]:.1f} µs"
        )
    return lines


def loss_paths(report: dict) -> list[str]:
    """The linear loss with and without its pass over the logits, beside its three products alone."""
    heads = "; ".join(
        f"{h['tokens']} × {h['hidden_size']} × {h['vocab_size']}: {h['ours_ms']:.1f} ms ({h['row_pass_ms']:.1f}), "
        f"{h['ours_ms'] / h['products_ms']:.2f} ({h['row_pass_ms'] / h['products_ms']:.2f}) of the three products, "
        f"{h['gib_beyond_gradients']:.2f} GiB beyond the gradients"
        for h in report["heads"]
    )
    return [f"The fast linear loss on Hopper, in brackets without exponentials in its first product: {heads}."]


def title(settings: dict) -> str:
    """What a result file of step.py measured."""
    words = f"{settings['model']}, {settings['batch']} × {settings['seq']}"
    words += f" × {settings['accumulation']} accumulated" * (settings["accumulation"] > 1)
    words += ", full checkpointing" * settings["checkpointing"]
    return words + (f", within {settings['cap_gib']:g} GiB" if settings["cap_gib"] else "")


def loss_shares(reports: list[tuple[Path, dict]]) -> list[str]:
    """One line on how much of our step the loss head takes, where it was measured."""
    found = []
    for _, report in reports:
        ours = next((r for r in report["results"] if r["peer"] == "ours" and r.get("loss_share")), None)
        if ours:
            found.append(f"{title(report['settings'])} {ours['loss_share']:.1%}")
    return [f"The loss (head and cross entropy together) takes of our step: {'; '.join(found)}.", ""] if found else []


HOW = {
    "--checkpointing": "checkpointing",
    "--accumulation": "micro-batches",
    "--host-gib": "GiB of host memory",
    "--optimizer-in-backward": "optimizer in backward",
    "--cuda-graph": "captured",
}


def how(settings: dict, number: int) -> str:
    """What one run of a row of step.py's table did its own way: ", captured"."""
    words = settings["options"][number][1].split() if "options" in settings else []
    said = []
    for option, name in HOW.items():
        if option in words:
            value = words[words.index(option) + 1 :][:1]
            said.append(f"{value[0]} {name}" if value and not value[0].startswith("--") else name)
    return "".join(f", {text}" for text in said)


def rows(report: dict) -> list[str]:
    """One line of the table for each peer of one result file of step.py."""
    settings, results = report["settings"], report["results"]
    others = [r for r in results if not r["peer"].startswith("ours") and "tokens_per_s" in r]
    best = max(others, key=lambda r: r["tokens_per_s"], default=None)
    lines = []
    for number, r in enumerate(results):
        cells = [title(settings), report["environment"]["device"], r["peer"] + how(settings, number)]
        if "tokens_per_s" in r:
            cells.append(f"{r['tokens_per_s']:,.0f}")
            cells.append(f"{r['tokens_per_s'] / best['tokens_per_s']:.2f}" if best else "–")
            cells.append(f"{r['peak_gib']:.1f}" if "peak_gib" in r else "–")
            cells.append(f"{r['peak_gib'] / best['peak_gib']:.2f}" if best and "peak_gib" in r else "–")
        else:
            cells += ["out of memory" if r.get("out_of_memory") else "failed", "–", "–", "–"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def block(folder: Path) -> str:
    """The text between the two marks."""
    reports = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    reports = [(path, report) for path, report in reports if isinstance(report, dict)]
    steps = [(path, report) for path, report in reports if report.get("benchmark") == "step"]
    kernels = [
        (path, report)
        for path, report in reports
        if report.get("benchmark") == "kernels" and any("goal_ms" in row for row in report["rows"])
    ]
    kernels = newest(kernels)
    decoding, experts, loading = (
        [(p, r) for p, r in reports if r.get("benchmark") == name] for name in ("generate", "moe", "load")
    )
    if not steps + kernels:
        return "No figures are committed yet."
    parts = []
    tables = (
        (steps, HEAD, rows),
        (decoding, DECODE_HEAD, decode_rows),
        (experts, EXPERTS_HEAD, expert_rows),
        (loading, LOAD_HEAD, load_rows),
        (kernels, KERNELS_HEAD, kernel_rows),
    )
    for found, head, lines_of in tables:
        if found:
            parts += [head, *(line for _, report in found for line in lines_of(report)), ""]
        if found is steps:
            parts += loss_shares(steps)
    paths = [(path, r) for path, r in reports if r.get("benchmark") == "loss paths"]
    for _, report in paths:
        parts += [*loss_paths(report), ""]
    sweeps = [(path, r) for path, r in reports if r.get("rows") and "best_peer" in r["rows"][0]]
    for _, report in sweeps:
        parts += [*sweep_lines(report), ""]
    for path, report in steps + decoding + experts + loading + kernels + paths + sweeps:
        e = report["environment"]
        versions = ", ".join(
            f"{name} {e[name]}"
            for name in ("torch", "triton", "transformers", "liger-kernel", "cut-cross-entropy")
            if e.get(name)
        )
        place = f"`benchmarks/results/{path.name}`"
        note = f". {report['note']}" if report.get("note") else ""
        parts.append(f"- {place}: {e['device']}, {e['date'][:10]}, commit {e['commit'][:10]}; {versions}{note}")
    return "\n".join(parts)


def families(models: dict[str, type], published: dict) -> str:
    """One line for each class: the model types it loads and the published checkpoints of those types."""
    lines = [FAMILIES_HEAD]
    for cls in dict.fromkeys(models.values()):
        types = [name for name, other in models.items() if other is cls]
        names = [repo.split("/")[1] for repo, entry in published.items() if entry["config"]["model_type"] in types]
        lines.append(f"| {cls.__name__} | {', '.join(f'`{t}`' for t in types)} | {', '.join(names) or '–'} |")
    return "\n".join(lines)


def current_families() -> str:
    """The table of this checkout."""
    sys.path.insert(0, str(ROOT))  # run as a script, only benchmarks/ is on the path
    try:
        from ligermodels import MODELS
    finally:
        sys.path.remove(str(ROOT))
    return families(MODELS, json.loads((ROOT / "tests" / "published_configs.json").read_text(encoding="utf-8")))


def replace(text: str, begin: str, end: str, new: str) -> str:
    """``text`` with what stands between two marks replaced."""
    before, rest = text.split(begin)
    return f"{before}{begin}\n{new}\n{end}{rest.split(end)[1]}"


def main() -> None:
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = replace(old, BEGIN, END, block(ROOT / "benchmarks" / "results"))
    new = replace(new, FAMILIES_BEGIN, FAMILIES_END, current_families())
    if "--check" in sys.argv:
        sys.exit("README.md: a table is out of date, run benchmarks/readme_table.py" if new != old else 0)
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
