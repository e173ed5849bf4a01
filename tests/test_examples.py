"""The examples and the step benchmark do what they say, and the files that people read stay short."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import shutil
import subprocess
import sys

import pytest
import torch
from scripts import ROOT, load
from tiny_chat import write_tiny_chat_model

from ligermodels import LigerLlama, LlamaConfig, Tokenizer
from ligermodels.training import __main__ as finetune
from ligermodels.training.loop import dtype_of
from ligermodels.training.lora import load_adapter, merge_lora

STORY = ROOT / "examples" / "data" / "lamp_at_corrin.txt"


@pytest.fixture(scope="module")
def example():
    """examples/train.py as a module."""
    return load("examples/train.py")


def script(monkeypatch, name, *arguments):
    """A script of examples/ as from the command line."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def run(monkeypatch, *arguments):
    script(monkeypatch, "train.py", "--text", STORY, *arguments)


def hf_logits(folder, ids):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits


def test_training_lowers_the_loss(example):
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig(**example.TINY)).train()
    losses = example.train(model, torch.tensor(list(STORY.read_bytes())), steps=30, batch=4, seq=32, lr=1e-2)
    assert len(losses) == 30
    assert losses[0] == pytest.approx(5.545, abs=0.2)  # ln 256: nothing is known yet
    assert sum(losses[-5:]) / 5 < losses[0] - 2


def test_how_a_batch_is_cut_does_not_change_the_gradients(example):
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig(**example.TINY))
    ids = torch.randint(0, 256, (4, 20))
    model(ids, labels=ids).loss.backward()
    whole = [p.grad.clone() for p in model.parameters()]
    for cut in ([4], [1, 1, 1, 1], [3, 1]):
        model.zero_grad()
        loss = example.backward(model, ids.split(cut))
        torch.testing.assert_close(loss, model(ids, labels=ids).loss.detach(), rtol=1e-6, atol=1e-6)
        for p, expected in zip(model.parameters(), whole, strict=True):
            torch.testing.assert_close(p.grad, expected, rtol=1e-5, atol=1e-7)


def test_pieces_of_unequal_length_count_by_their_tokens(example):
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig(**example.TINY))
    short, long = torch.randint(0, 256, (1, 5)), torch.randint(0, 256, (1, 41))  # 4 and 40 labels after the shift
    with torch.no_grad():
        means = [model(ids, labels=ids).loss for ids in (short, long)]
    loss = example.backward(model, [short, long])
    torch.testing.assert_close(loss, (4 * means[0] + 40 * means[1]) / 44, rtol=1e-6, atol=1e-6)


def test_learning_rate_warms_up_and_falls_to_a_tenth(example):
    shares = [example.schedule(step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(0.1) and max(shares) == 1.0 and shares.index(1.0) in (9, 10)
    assert all(a >= b for a, b in itertools.pairwise(shares[10:]))
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)
    assert example.schedule(0, 1) == 1.0  # a single step is not warmup


def test_tiny_from_the_command_line_saves_what_both_libraries_load(tmp_path, monkeypatch):
    run(monkeypatch, "--tiny", "--steps", 2, "--seq", 16, "--accumulation", 2, "--device", "cpu", "--out", tmp_path)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours = LigerLlama.from_pretrained(tmp_path)(ids).logits
        torch.testing.assert_close(ours, hf_logits(tmp_path, ids), rtol=0, atol=1e-5)


def test_fine_tuning_a_folder_keeps_its_tokenizer_and_changes_its_weights(tmp_path, monkeypatch):
    source, out = write_tiny_chat_model(tmp_path / "source"), tmp_path / "out"
    before = (source / "model.safetensors").read_bytes()
    run(monkeypatch, "--model", source, "--steps", 1, "--seq", 16, "--device", "cpu", "--out", out)
    text = "Ninety-one steps."
    assert Tokenizer.from_pretrained(out).encode(text) == Tokenizer.from_pretrained(source).encode(text)
    trained = LigerLlama.from_pretrained(out)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(trained.parameters(), LigerLlama.from_pretrained(source).parameters(), strict=True)
    )
    assert (source / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--text", "{tmp}/short.txt"),
            "short.txt has 53 tokens, fewer than --seq 128: give a longer text or a smaller",
        ),
        (("--text", "{tmp}/absent.txt"), "absent.txt"),
        (("--text", "{tmp}/latin.txt"), "latin.txt: not UTF-8"),
        (("--model", "{tmp}/absent"), "absent"),
        (("--dtype", "float7"), "invalid choice: 'float7'"),
    ],
)
def test_a_wrong_argument_is_one_clear_line_and_leaves_nothing_behind(
    arguments, message, tmp_path, monkeypatch, capsys
):
    (tmp_path / "short.txt").write_text("x" * 53)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 200)
    model, out = write_tiny_chat_model(tmp_path / "model"), tmp_path / "out"
    arguments = [a.format(tmp=tmp_path) for a in arguments]
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "--model", model, "--device", "cpu", "--out", out, *arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not out.exists()


# ------------------------------------------------------------------------------------------- finetune.py, pretrain.py

RUN = ("--device", "cpu", "--dtype", "float32", "--batch", 2, "--lr", 3e-3, "--log-every", 2, "--save-every", 2)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = []
    for name in ("Ann", "Bo", "Cy", "Di", "Ed"):
        messages = [{"role": "user", "content": f"Who is {name}?"}, {"role": "assistant", "content": f"{name} it is."}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join([*lines, "{broken"]), "utf-8")
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.manual_seed(0)
    return write_tiny_chat_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.filterwarnings("ignore:left out")
def test_the_dtype_is_one_that_the_device_is_fast_with(tiny, chats, tmp_path, monkeypatch):
    """bf16 took 17 times as long as fp32 on a CPU without it, so that the README's command seemed to hang."""
    for number, (given, expected) in enumerate([((), torch.float32), (("--dtype", "bfloat16"), torch.bfloat16)]):
        script(monkeypatch, "finetune.py", "--model", tiny, "--data", chats, "--out", tmp_path / str(number),
               "--device", "cpu", "--steps", 1, "--seq", 32, *given)  # fmt: skip
        assert LigerLlama.from_pretrained(tmp_path / str(number) / "final").dtype == expected
    chosen = {device: dtype_of(argparse.Namespace(device=device, dtype=None)) for device in ("cpu", "cuda", "cuda:1")}
    assert chosen == {"cpu": "float32", "cuda": "bfloat16", "cuda:1": "bfloat16"}


@pytest.mark.filterwarnings("ignore:left out")
def test_finetune_learns_chats_and_resumes_where_it_was(tiny, chats, tmp_path, monkeypatch, capsys):
    from ligermodels.training.log import read_log

    def trained(out, *more):
        script(monkeypatch, "finetune.py", "--model", tiny, "--data", chats, "--eval-data", chats, "--out", out,
               "--seq", 96, "--steps", 6, "--seed", 3, *RUN, *more)  # fmt: skip
        return read_log(out / "log.csv")

    rows = trained(tmp_path / "a")
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3 and rows[-1]["eval_loss"] > 0
    assert "broken records were left out" in capsys.readouterr().out
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "checkpoint-00000002").rename(tmp_path / "b" / "checkpoint-00000002")
    (tmp_path / "b" / "log.csv").write_bytes((tmp_path / "a" / "log.csv").read_bytes())
    again = trained(tmp_path / "b", "--resume")
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    for suffix in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (tmp_path / "a" / "final" / suffix).read_bytes() == (tmp_path / "b" / "final" / suffix).read_bytes()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours = LigerLlama.from_pretrained(tmp_path / "a" / "final")(ids).logits
        torch.testing.assert_close(ours, hf_logits(tmp_path / "a" / "final", ids), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:left out")
def test_finetune_with_lora_writes_an_adapter_and_the_merged_model(tiny, chats, tmp_path, monkeypatch):
    script(monkeypatch, "finetune.py", "--model", tiny, "--data", chats, "--out", tmp_path, "--lora", 4, "--merge",
           "--lora-targets", "q_proj", "lm_head", "--epochs", 2, "--seq", 96, "--fit-gib", 4, *RUN)  # fmt: skip
    model = LigerLlama.from_pretrained(tiny)
    names = load_adapter(model, tmp_path / "final")
    assert len(names) == 3 and "lm_head" in names
    ids = torch.arange(40)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        assert not torch.allclose(adapted, LigerLlama.from_pretrained(tiny)(ids).logits, atol=1e-4)
        torch.testing.assert_close(hf_logits(tmp_path / "merged", ids), adapted, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:left out")
def test_a_run_that_was_killed_before_it_was_merged_is_merged_when_resumed(tiny, chats, tmp_path, monkeypatch):
    given = ["--model", tiny, "--data", chats, "--out", tmp_path, "--lora", 4, "--merge", "--steps", 2, "--seq", 96]

    def run(*more):
        finetune.main([str(x) for x in [*given, *RUN, *more]])

    def killed(self, folder, **options):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LigerLlama, "save_pretrained", killed)
        run()
    assert (tmp_path / "final").exists() and not (tmp_path / "merged").exists()
    run("--resume")
    model = LigerLlama.from_pretrained(tiny)
    load_adapter(model, tmp_path / "final")
    merge_lora(model)
    found = LigerLlama.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in model.state_dict().items())
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    with pytest.raises(SystemExit, match="holds a finished run"):
        run("--resume")


@pytest.mark.filterwarnings("ignore:left out")
def test_resuming_with_another_rank_or_without_lora_names_the_option(tiny, chats, tmp_path, monkeypatch):
    def run(*more):
        finetune.main([str(x) for x in ["--model", tiny, "--data", chats, "--out", tmp_path, "--seq", 96, "--steps", 3,
                                        *RUN, *more]])  # fmt: skip

    run("--lora", 4)
    with pytest.raises(SystemExit, match=r"made otherwise: lora was 4 and is 2$"):
        run("--lora", 2, "--resume")
    with pytest.raises(SystemExit, match=r"made otherwise: lora was 4 and is None, frozen weights was"):
        run("--resume")


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (5, 2), (2.5, 1)])
def test_epochs_of_little_data_are_passes_over_it(epochs, steps, tiny, tmp_path, monkeypatch):
    from ligermodels.training.log import read_log

    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n{"text": "d"}\n{\n')
    script(monkeypatch, "finetune.py", "--model", tiny, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "out",
           "--epochs", epochs, "--seq", 16, *RUN)  # fmt: skip
    rows = read_log(tmp_path / "out" / "log.csv")
    assert len(rows) == steps


def test_epochs_must_be_above_0(tiny, chats, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="error: epochs must be above 0, found -1"):
        script(monkeypatch, "finetune.py", "--model", tiny, "--data", chats, "--out", tmp_path, "--epochs", -1, *RUN)


def test_the_command_line_trains_as_the_example_does(tiny, chats, tmp_path):
    from typer.testing import CliRunner

    from ligermodels.cli import app

    command = ["train", "--model", tiny, "--data", chats, "--out", tmp_path, "--seq", 96, "--steps", 2, *RUN]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    assert f"warning: left out: {chats}, line 6: not valid JSON" in done.output and "UserWarning" not in done.output
    assert (tmp_path / "final" / "model.safetensors").is_file()
    done = CliRunner().invoke(app, ["train", "--help"])
    assert "usage: ligermodels train" in done.output and "--lora RANK" in done.output


def test_pretrain_makes_a_tokenizer_and_a_model_that_learns(tmp_path, monkeypatch):
    from ligermodels.training.log import read_log

    script(monkeypatch, "pretrain.py", "--data", STORY.parent, "--eval-data", STORY, "--eval-batches", 2,
           "--out", tmp_path, "--vocab", 300, "--seq", 32, "--steps", 8, "--schedule", "wsd", *RUN)  # fmt: skip
    rows = read_log(tmp_path / "log.csv")
    assert rows[0]["loss"] == pytest.approx(5.70, abs=0.25) and rows[-1]["loss"] < rows[0]["loss"] - 0.3  # ln 300
    tokenizer = Tokenizer.from_pretrained(tmp_path / "final")
    assert tokenizer.vocab_size == 300 and tokenizer.decode(tokenizer.encode("été 北京")) == "été 北京"
    ids = torch.tensor([tokenizer.encode("The lamp asks for very little.")])
    with torch.no_grad():
        ours = LigerLlama.from_pretrained(tmp_path / "final")(ids).logits
        torch.testing.assert_close(ours, hf_logits(tmp_path / "final", ids), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:left out")
def test_pretrain_leaves_broken_lines_out_and_resumes_with_the_tokenizer_it_began_with(tmp_path, monkeypatch, capsys):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    text = json.dumps({"text": "one lamp, two lamps, many lamps. " * 20})
    given = ("--data", data, "--vocab", 280, "--seq", 32, "--steps", 4, *RUN)
    data.write_text(json.dumps({"text": "quite another text " * 40}))
    with pytest.raises(SystemExit, match="decay"):
        script(monkeypatch, "pretrain.py", *given, "--out", out, "--schedule", "wsd", "--decay", 2000)
    data.write_text(f"{text}\n{{broken\n")  # what failed before it began leaves no tokenizer behind
    script(monkeypatch, "pretrain.py", *given, "--out", out)
    assert "1 broken records were left out" in capsys.readouterr().out
    tokens = Tokenizer.from_pretrained(out / "final").encode("many lamps")
    assert len(tokens) < 10
    shutil.rmtree(out / "final")
    data.write_text(json.dumps({"text": "quite another text " * 40}))
    with pytest.raises(SystemExit, match="the data is not what it was: file 1"):
        script(monkeypatch, "pretrain.py", *given, "--out", out, "--resume")
    script(monkeypatch, "pretrain.py", *given, "--out", out, "--resume", "--other-data")
    assert Tokenizer.from_pretrained(out / "final").encode("many lamps") == tokens


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("finetune.py", ("--data", "{tmp}/absent.jsonl"), "absent.jsonl: cannot be read"),
        ("finetune.py", ("--data", "{tmp}/bad.jsonl", "--strict"), "bad.jsonl, line 1: not valid JSON"),
        ("finetune.py", ("--data", "{tmp}/good.jsonl", "--lora", 4, "--lora-targets", "qproj"), "qproj is no Linear"),
        ("finetune.py", ("--data", "{tmp}/good.jsonl", "--steps", 0), "steps must be at least 1"),
        ("finetune.py", ("--data", "{tmp}/good.jsonl", "--merge"), "--merge is for adapters"),
        (
            "finetune.py",
            ("--data", "{tmp}/good.jsonl", "--lora", 0),
            "rank must be a whole number of at least 1, found 0",
        ),
        ("pretrain.py", ("--data", "{tmp}/good.jsonl", "--config", "{tmp}/bad.jsonl"), "bad.jsonl"),
        ("pretrain.py", ("--data", "{tmp}/good.jsonl", "--vocab", 256), "--vocab must be at least 257"),
        ("pretrain.py", ("--data", "{tmp}/good.jsonl", "--vocab", 300, "--schedule", "wsd", "--decay", 2000), "decay"),
    ],
)
def test_what_is_wrong_is_one_line(name, arguments, message, tiny, tmp_path, monkeypatch):
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "good.jsonl").write_text('{"text": "a good text"}\n')
    model = ("--model", tiny) if name == "finetune.py" else ()
    arguments = [str(a).format(tmp=tmp_path) for a in arguments]
    with pytest.raises(SystemExit) as stopped:
        script(monkeypatch, name, *model, "--out", tmp_path / "out", "--device", "cpu", *arguments)
    text = str(stopped.value.code)
    assert text.startswith("error: ") and message in text and "\n" not in text
    assert not (tmp_path / "out" / "final").exists()


# ---------------------------------------------------------------------------------------------------- demo.py, step.py


def test_the_demo_fails_if_the_answer_lacks_paris(tmp_path, monkeypatch, capsys):
    write_tiny_chat_model(tmp_path / "smollm2")  # random weights in the place of the real ones
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match="Paris"):
        runpy.run_path(str(ROOT / "examples" / "demo.py"), run_name="__main__")
    assert "What is the capital of France?" in capsys.readouterr().out


def test_the_demo_evaluates_every_token_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    model = LigerLlama.from_pretrained(write_tiny_chat_model(tmp_path))
    tokens = torch.arange(1, 100)
    with torch.no_grad():
        whole = model(tokens[None], labels=tokens[None]).loss.item()
        parts = [model(t[None], labels=t[None]).loss.item() for t in (tokens[:60], tokens[60:])]
    assert demo["evaluate"](model, tokens, seq=256) == pytest.approx(whole, rel=1e-6)
    assert demo["evaluate"](model, tokens, seq=60) == pytest.approx((59 * parts[0] + 38 * parts[1]) / 97, rel=1e-6)


def test_the_step_benchmark_gives_both_peers_the_same_weights_and_tokens(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "step.py", "--model", "tiny", "--device", "cpu", "--batch", "1"]
    command += ["--seq", "16", "--peers", "ours,hf", "--steps", "1", "--warmup", "1", "--commit", "abc", "--out", out]
    one_thread = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    ours, hf = report["results"]
    assert ours["parameters"] == hf["parameters"]
    assert ours["first_loss"] == pytest.approx(hf["first_loss"], abs=2e-3)  # bf16 models, random weights
    assert ours["first_loss"] == pytest.approx(6.238, abs=0.1)  # ln 512
    assert report["environment"]["commit"] == "abc" and "ratios: to hf" in done.stdout


def test_the_convergence_benchmark_trains_both_sides_alike_and_draws_it(tiny, tmp_path, monkeypatch):
    convergence = load("benchmarks/convergence.py")
    out = tmp_path / "result.json"
    options = ["--device", "cpu", "--dtype", "float32", "--steps", 3, "--batch", 1, "--seq", 24, "--lr", 1e-2]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(map(str, ["convergence.py", "--model", tiny, *options, "--out", out])))
    with pytest.raises(SystemExit) as ended:
        convergence.main()
    report = json.loads(out.read_text())
    assert ended.value.code == 0 and report["max_difference"] <= 1e-5
    ours, hf = report["ours"]["losses"], report["hf"]["losses"]
    assert len(ours) == len(hf) == 3 and ours[2] < ours[0]
    assert convergence.docstrings(5000) == convergence.docstrings(5000)
    monkeypatch.setattr(sys, "argv", ["convergence.py", "--plot", str(out)])
    convergence.main()
    assert "<svg" in out.with_suffix(".svg").read_text()


def test_a_peer_that_crashes_or_runs_out_of_memory_is_a_line_of_the_table():
    step = load("benchmarks/step.py")
    good = dict(tokens_per_s=100.0, tflops=1.0, first_loss=12.0, last_loss=11.0)
    results = [dict(peer="ours", **good), dict(peer="hf", out_of_memory=True), dict(peer="liger", error="exit 1: no")]
    assert "out of memory" in step.table(results) and "FAILED: exit 1: no" in step.table(results)


def test_what_people_read_stays_short():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("*/*.py")}
    assert lines[ROOT / "examples" / "train.py"] <= 100
    assert max(lines[ROOT / "examples" / name] for name in ("finetune.py", "pretrain.py")) <= 120
    package = ROOT / "ligermodels"
    families = [path for path in package.glob("*.py") if "class Liger" in path.read_text(encoding="utf-8")]
    families = [path for path in families if path.name != "errors.py"]
    assert package / "llama.py" in families
    assert {path.name: lines[path] for path in families if lines[path] > 220} == {}
