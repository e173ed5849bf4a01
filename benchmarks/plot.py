"""Draw the committed results of kernels.py with matplotlib (extra ``dev``).

    python benchmarks/plot.py                       # every benchmarks/results/*.json of kernels.py, to .svg beside it
    python benchmarks/plot.py a.json --out folder

A file of --tokens gives time and memory over the number of tokens, one column a head; any other gives bars of each
operation's forward + backward time against ours. Colours are Okabe and Ito's, told apart by the colour-blind too; each
peer also has its own marker or place.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
STYLES = {  # peer: colour, marker
    "ours": ("#0072B2", "o"),
    "ours fast": ("#0072B2", "o"),
    "ours lean": ("#56B4E9", "v"),
    "products": ("#000000", ""),
    "eager": ("#999999", "x"),
    "compile": ("#E69F00", "s"),
    "torch chunked": ("#F0E442", "P"),
    "F.rms_norm": ("#F0E442", "P"),
    "liger": ("#D55E00", "^"),
    "cce": ("#CC79A7", "D"),
}


def measured(report: dict) -> list[dict]:
    return [row for row in report["rows"] if "total_ms" in row and row["peer"] in STYLES]


def over_tokens(report: dict, path: Path) -> None:
    """Two rows of axes: milliseconds a thousand tokens, and MiB beyond inputs and returned gradients."""
    import matplotlib.pyplot as plt

    rows = [row for row in measured(report) if "tokens" in row]
    heads = list(dict.fromkeys(row["shape"].split("x", 1)[1] for row in rows))
    figure, axes = plt.subplots(2, len(heads), figsize=(4.2 * len(heads), 7), sharex=True, squeeze=False)
    for column, head in enumerate(heads):
        for peer, (colour, marker) in STYLES.items():
            of = [row for row in rows if row["peer"] == peer and row["shape"].endswith(f"x{head}")]
            if not of:
                continue
            style = {
                "color": colour,
                "marker": marker,
                "markersize": 5,
                "label": peer,
                "linestyle": "-" if marker else ":",
            }
            n = [row["tokens"] for row in of]
            axes[0][column].plot(n, [1000 * row["total_ms"] / row["tokens"] for row in of], **style)
            if peer != "products":
                axes[1][column].plot(n, [max(row["beyond_bytes"] / 2**20, 1) for row in of], **style)
        axes[0][column].set_title("D × V = " + head.replace("x", " × "))
        axes[1][column].set_xlabel("tokens")
    axes[0][0].set_ylabel("ms per 1000 tokens, forward + backward")
    axes[1][0].set_ylabel("MiB beyond inputs and gradients")
    for axis in axes.flat:
        axis.set(xscale="log", yscale="log")
        axis.set_xscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}" if axis in axes[0] else "")
        axis.tick_params(axis="y", which="both", labelsize=7)
        axis.grid(True, which="both", alpha=0.3)
    axes[0][-1].legend(fontsize=8)
    finish(figure, report, path)


def bars(report: dict, path: Path) -> None:
    """Forward + backward time of each peer divided by ours (by our fast mode): above 1 is slower than ours."""
    import matplotlib.pyplot as plt

    rows = measured(report)
    cases = list(dict.fromkeys((row["op"], row["shape"]) for row in rows))
    figure, axis = plt.subplots(figsize=(8, 0.75 * len(cases) + 1.5))
    labelled = set()
    for y, case in enumerate(cases):
        of = {row["peer"]: row["total_ms"] for row in rows if (row["op"], row["shape"]) == case}
        base = of.get("ours", of.get("ours fast"))
        if base is None:
            continue
        for place, (peer, ms) in enumerate(of.items()):
            name = "ours" if peer == "ours fast" else peer
            label = None if name in labelled else name
            labelled.add(name)
            at, height = y + (place + 0.5) / len(of) * 0.84 - 0.42, 0.8 / len(of)
            axis.barh(at, min(ms / base, 4), height, color=STYLES[peer][0], label=label)
            if ms / base > 4:
                axis.text(4.03, at, f"{ms / base:.1f}", va="center", fontsize=7)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set(xlim=(0, 4.4), xlabel="time of forward + backward, ours = 1")
    axis.set_yticks(range(len(cases)), [f"{op}\n{shape}" for op, shape in cases], fontsize=8)
    axis.set_ylim(len(cases) - 0.4, -0.6)
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False)
    finish(figure, report, path)


def finish(figure, report: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    e = report["environment"]
    names = ("torch", "triton", "liger-kernel", "cut-cross-entropy")
    versions = ", ".join(f"{name} {e[name]}" for name in names if e.get(name))
    figure.text(0.01, 0.005, f"{e['device']}, {e['date'][:10]}; {versions}", fontsize=7)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)  # the same bytes each time
    plt.close(figure)
    print(path)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("files", nargs="*", type=Path, help="JSON files of kernels.py (default: all committed ones)")
    cli.add_argument("--out", type=Path, help="folder (default: beside each file)")
    args = cli.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ligermodels"
    for file in args.files or sorted(RESULTS.glob("*.json")):
        report = json.loads(file.read_text())
        if not isinstance(report, dict) or report.get("benchmark") != "kernels" or not measured(report):
            continue
        path = (args.out or file.parent) / f"{file.stem}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        (over_tokens if any("tokens" in row for row in report["rows"]) else bars)(report, path)


if __name__ == "__main__":
    main()
