"""examples/finetune_llava.py and the step benchmark on a tiny random LLaVA, as from the command line."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import load
from tiny_llava import IMAGE, write_tiny_llava

import ligermodels
from ligermodels import Tokenizer
from ligermodels.image_processor import ImageProcessor

Image = pytest.importorskip("PIL.Image")
SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "finetune_llava.py"


@pytest.fixture
def folder(tmp_path):
    """A tiny random LLaVA with its tokenizer and image processor, and two questions about two images."""
    torch.manual_seed(0)
    folder = write_tiny_llava(tmp_path / "model")
    records = []
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (40, 30), color).save(tmp_path / f"{name}.png")
        records.append({"image": f"{name}.png", "question": "Colour?", "answer": name})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return folder


def run(monkeypatch, folder, *arguments):
    given = ["--model", folder, "--data", folder.parent / "data.jsonl", "--out", folder.parent / "out", *arguments]
    given += ["--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["finetune_llava.py", *map(str, given)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return ligermodels.from_pretrained(folder.parent / "out")


@pytest.mark.parametrize(
    ("what", "moves"),
    [
        ("projector", ("multi_modal_projector",)),
        ("lora", ("language_model", "multi_modal_projector")),
        ("text", ("language_model", "multi_modal_projector")),
        ("all", ("language_model", "multi_modal_projector", "vision_tower")),
    ],
)
def test_only_what_is_asked_for_moves_and_the_result_loads(what, moves, folder, monkeypatch):
    before = dict(ligermodels.from_pretrained(folder).named_parameters())
    after = dict(run(monkeypatch, folder, "--train", what, "--lr", 1e-2).named_parameters())
    assert before.keys() == after.keys()
    assert {n.split(".")[0] for n, p in after.items() if not torch.equal(p, before[n])} == set(moves)


def test_colours_are_learnt_from_images_alone(folder, monkeypatch):
    """The questions are the same, so only the image tells the answers apart."""
    run(monkeypatch, folder, "--train", "all", "--lr", 1e-2, "--epochs", 60)
    out = folder.parent / "out"
    model, tokenizer = ligermodels.from_pretrained(out), Tokenizer.from_pretrained(out)
    processor = ImageProcessor.from_pretrained(out)
    for answer in ("red", "blue"):
        inputs = processor(folder.parent / f"{answer}.png")
        ids = tokenizer.encode(processor.expand("USER: <image>\nColour? ASSISTANT: ", inputs))
        found = model.generate(torch.tensor([ids]), **inputs.arguments, max_new_tokens=8)
        assert tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True) == answer


def test_a_wrong_image_is_one_clear_line(folder, monkeypatch, capsys):
    (folder.parent / "red.png").write_text("no image")
    with pytest.raises(SystemExit):
        run(monkeypatch, folder)
    assert "red.png cannot be read as an image" in capsys.readouterr().err.splitlines()[-1]
    assert not (folder.parent / "out").exists()


def test_the_example_stays_short_and_supervises_answers_alone(folder):
    assert len(SCRIPT.read_text().splitlines()) <= 100
    example = load("examples/finetune_llava.py")
    tokenizer, processor = Tokenizer.from_pretrained(folder), ImageProcessor.from_pretrained(folder)
    records = [json.loads(line) for line in (folder.parent / "data.jsonl").read_text().splitlines()]
    batch = example.encode(records, tokenizer, processor, "{image}{question}", folder.parent)
    for row, answer in zip(batch["labels"], ("red", "blue"), strict=True):
        assert tokenizer.decode(row[row != -100]) == answer + "<|im_end|>"
    assert (batch["input_ids"] == IMAGE).sum(1).tolist() == [4, 4]


def test_the_step_benchmark_gives_both_peers_the_same_model_and_images(tmp_path):
    step = SCRIPT.parent.parent / "benchmarks" / "step.py"
    command = [sys.executable, step, "--model", "tiny-llava", "--device", "cpu", "--batch", "2", "--seq", "24"]
    command += ["--peers", "ours,hf", "--steps", "1", "--warmup", "1", "--commit", "x", "--out", tmp_path / "out.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ours, hf = json.loads((tmp_path / "out.json").read_text())["results"]
    assert ours["parameters"] == hf["parameters"]
    assert ours["first_loss"] == pytest.approx(hf["first_loss"], abs=2e-3)  # bf16 models, random weights
