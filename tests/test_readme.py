"""The README keeps its word: its snippets run, what it links to exists, its figures are those of committed results."""

from __future__ import annotations

import re

import pytest
from scripts import ROOT, load
from tiny_chat import write_tiny_chat_model
from tiny_llava import write_tiny_llava

import ligermodels
from ligermodels.image_processor import ImageProcessor

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_python_snippet_runs(tmp_path, monkeypatch):
    chat, llava = "HuggingFaceTB/SmolLM2-135M-Instruct", "llava-hf/llava-1.5-7b-hf"
    folders = {chat: write_tiny_chat_model(tmp_path / "chat"), llava: write_tiny_llava(tmp_path / "llava")}
    pytest.importorskip("PIL.Image").new("RGB", (40, 30)).save(tmp_path / "photo.jpg")
    asked = []

    def from_hub(cls, repo, **options):  # no internet in tests: a tiny folder stands for the repository
        asked.append(repo)
        return cls.from_pretrained(folders[repo], **options)

    for cls in (ligermodels.LigerLlama, ligermodels.LigerLlava, ligermodels.Tokenizer, ImageProcessor):
        monkeypatch.setattr(cls, "from_hub", classmethod(from_hub))
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(snippets) >= 5
    names: dict = {}
    for number, snippet in enumerate(snippets, 1):  # in the order of the page: later ones use names of earlier ones
        exec(compile(snippet, f"<README snippet {number}>", "exec"), names)
    assert asked == [chat] * 2 + [llava] * 3
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert names["loss"].isfinite()


def test_commands_and_links_lead_somewhere():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\S+)", README, re.MULTILINE)
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README) + re.findall(r"^\S*python (\S+\.py)", README, re.MULTILINE)
    assert targets and links
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_figures_are_those_of_the_committed_results():
    table = load("benchmarks/readme_table.py")
    written = README.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert written == table.block(ROOT / "benchmarks" / "results").strip(), "run benchmarks/readme_table.py"


def test_families_are_those_of_the_code():
    table = load("benchmarks/readme_table.py")
    written = README.split(table.FAMILIES_BEGIN)[1].split(table.FAMILIES_END)[0].strip()
    assert written == table.current_families(), "run benchmarks/readme_table.py"


def test_a_family_lists_its_types_and_their_checkpoints():
    class LigerA: ...

    class LigerB: ...

    published = {"x/One": {"config": {"model_type": "a"}}, "x/Two": {"config": {"model_type": "other"}}}
    rows = load("benchmarks/readme_table.py").families({"a": LigerA, "b": LigerB, "a2": LigerA}, published)
    assert rows.splitlines()[2:] == ["| LigerA | `a`, `a2` | One |", "| LigerB | `b` | – |"]


def test_the_table_gives_ratios_to_the_fastest_peer_and_says_out_of_memory():
    report = {
        "settings": dict(model="m", batch=4, seq=4096, accumulation=1, checkpointing=False, cap_gib=None),
        "environment": {"device": "GPU"},
        "results": [
            dict(peer="ours", tokens_per_s=1200.0, peak_gib=40.0),
            dict(peer="hf", out_of_memory=True),
            dict(peer="hf-compile", tokens_per_s=800.0, peak_gib=60.0),
            dict(peer="liger", tokens_per_s=1000.0, peak_gib=50.0),
        ],
    }
    ours, hf, compiled, liger = load("benchmarks/readme_table.py").rows(report)
    assert ours == "| m, 4 × 4096 | GPU | ours | 1,200 | 1.20 | 40.0 | 0.80 |"
    assert hf == "| m, 4 × 4096 | GPU | hf | out of memory | – | – | – |"
    assert compiled.endswith("| 800 | 0.80 | 60.0 | 1.20 |") and liger.endswith("| 1,000 | 1.00 | 50.0 | 1.00 |")
