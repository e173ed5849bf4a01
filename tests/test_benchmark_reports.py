"""What is made of the results of benchmarks/kernels.py: the README's table of kernels, and the plots."""

from __future__ import annotations

import json
import sys

import pytest
from scripts import load

ENVIRONMENT = {
    "device": "GPU",
    "date": "2026-12-01T00:00:00Z",
    "commit": "0123456789abcdef",
    "torch": "2.11",
    "triton": None,
}


def row(peer: str, ms: float | None, mib: float = 0.0, shape: str = "8x4x100", **more) -> dict:
    found = {"op": "linear_cross_entropy", "shape": shape, "peer": peer, **more}
    return found | ({"failed": "why"} if ms is None else {"total_ms": ms, "beyond_bytes": mib * 2**20})


def kernels_report() -> dict:
    peers = [row("ours fast", 2.0, 1500), row("ours lean", 3.0, 9), row("products", 1.8, 7), row("compile", 2.5, 4000)]
    peers += [row("cce", None), row("liger", 4.0, -8), row("ours fast", 1.0, shape="9x4x100")]
    return {"benchmark": "kernels", "environment": ENVIRONMENT, "rows": [r | {"goal_ms": None} for r in peers]}


def tokens_report() -> dict:
    rows = [
        row(peer, 1.0 + n / 100, 5, f"{n}x4x100", tokens=n)
        for n in (256, 512)
        for peer in ("ours fast", "products", "liger")
    ]
    return {"benchmark": "kernels", "environment": ENVIRONMENT, "rows": rows}


def test_each_kernel_stands_beside_its_fastest_peer():
    fast, lean, alone = load("benchmarks/readme_table.py").kernel_rows(kernels_report())
    assert fast == "| linear_cross_entropy 8 × 4 × 100 | ours fast | 2 | compile | 2.5 | 0.80 | 1,500 | 4,000 |"
    assert lean == "| linear_cross_entropy 8 × 4 × 100 | ours lean | 3 | compile | 2.5 | 1.20 | 9 | 4,000 |"
    assert alone.endswith("| ours fast | 1 | – | – | – | 0 | – |")


def test_sweeps_stay_out_of_the_table(tmp_path):
    table = load("benchmarks/readme_table.py")
    (tmp_path / "tokens.json").write_text(json.dumps(tokens_report()))
    assert table.block(tmp_path) == "No figures are committed yet."
    (tmp_path / "kernels.json").write_text(json.dumps(kernels_report()))
    text = table.block(tmp_path)
    assert text.count("| linear_cross_entropy") == 3
    assert text.endswith("`benchmarks/results/kernels.json`: GPU, 2026-12-01, commit 0123456789; torch 2.11")


def test_plots(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    for name, report in (("kernels", kernels_report()), ("tokens", tokens_report())):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, sorted(tmp_path.glob("*.json")))])
    load("benchmarks/plot.py").main()
    bars, lines = ((tmp_path / f"{name}.svg").read_text() for name in ("kernels", "tokens"))
    assert "<!-- compile -->" in bars and "<!-- ours = 1" not in bars
    assert "<!-- liger -->" in lines and "tokens" in lines


def test_a_training_step_says_what_each_run_did_its_own_way():
    results = [{"peer": peer, "tokens_per_s": 100.0, "peak_gib": 2.0} for peer in ("ours", "ours", "liger")]
    settings = {"model": "m", "batch": 4, "seq": 8, "accumulation": 1, "checkpointing": False, "cap_gib": 80}
    settings["options"] = [["ours", "--fit 80"], ["ours", "--host-gib 40 --cuda-graph"], ["liger", "--accumulation 4"]]
    lines = load("benchmarks/readme_table.py").rows(
        {"settings": settings, "environment": ENVIRONMENT, "results": results}
    )
    peers = [line.split(" | ")[2] for line in lines]
    assert peers == ["ours", "ours, 40 GiB of host memory, captured", "liger, 4 micro-batches"]
