"""Rewrite the tables in README.md from benchmarks/results/*.json and from the code, so that none is typed by hand.

Results of step.py give the table of training steps, results of kernels.py (but not of its sweeps) that of the kernels.
ligermodels.MODELS and tests/published_configs.json give the table of families.

python benchmarks/readme_table.py            # rewrite
python benchmarks/readme_table.py --check    # only say (exit code 1) whether the README is out of date
"""

from __future__ import annotations

import json
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


def kernel_rows(report: dict) -> list[str]:
    """One line for each of our rows of one result file of kernels.py: forward + backward beside the fastest peer."""
    lines = []
    for row in report["rows"]:
        if not row["peer"].startswith("ours"):
            continue
        same = [r for r in report["rows"] if (r["op"], r["shape"]) == (row["op"], row["shape"]) and "total_ms" in r]
        others = [r for r in same if not r["peer"].startswith(("ours", "products"))]
        best = min(others, key=lambda r: r["total_ms"], default=None)
        cells = [f"{row['op']} {row['shape'].replace('x', ' × ')}", row["peer"]]
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


def loss_shares(reports: list[tuple[Path, dict]]) -> list[str]:
    """One line on how much of our step the loss head takes, where it was measured."""
    found = []
    for _, report in reports:
        ours = next((r for r in report["results"] if r["peer"] == "ours" and r.get("loss_share")), None)
        if ours:
            found.append(f"{report['settings']['model']} {ours['loss_share']:.1%}")
    return [f"The loss (head and cross entropy together) takes of our step: {', '.join(found)}.", ""] if found else []


def rows(report: dict) -> list[str]:
    """One line of the table for each peer of one result file of step.py."""
    settings, results = report["settings"], report["results"]
    others = [r for r in results if not r["peer"].startswith("ours") and "tokens_per_s" in r]
    best = max(others, key=lambda r: r["tokens_per_s"], default=None)
    title = f"{settings['model']}, {settings['batch']} × {settings['seq']}"
    title += f" × {settings['accumulation']} accumulated" * (settings["accumulation"] > 1)
    title += ", full checkpointing" * settings["checkpointing"]
    title += f", within {settings['cap_gib']:g} GiB" if settings["cap_gib"] else ""
    lines = []
    for r in results:
        cells = [title, report["environment"]["device"], r["peer"]]
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
    if not steps + kernels:
        return "No figures are committed yet."
    parts = []
    for found, head, lines_of in ((steps, HEAD, rows), (kernels, KERNELS_HEAD, kernel_rows)):
        if found:
            parts += [head, *(line for _, report in found for line in lines_of(report)), ""]
        if found is steps:
            parts += loss_shares(steps)
    sweeps = [(path, r) for path, r in reports if r.get("rows") and "best_peer" in r["rows"][0]]
    for _, report in sweeps:
        parts += [*sweep_lines(report), ""]
    for path, report in steps + kernels + sweeps:
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
