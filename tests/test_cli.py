"""The command line: what it prints, its exit codes, and that errors are one line and no traceback."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family_checks import published
from safetensors.torch import load_file, save_file
from test_hub import TOKEN, hub  # noqa: F401 (a fixture)
from tiny import TINY
from tiny_chat import write_tiny_chat_model
from typer.testing import CliRunner

import ligermodels
from ligermodels.cli import app, main
from ligermodels.inspection import Summary, summarise, training_memory


def run(*arguments: object) -> tuple[int, str]:
    """As the console script: (exit code, output); errors of the project are caught where the script catches them."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


# ------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_a_folder(folder):
    code, text = run("inspect", folder, "--batch", 2, "--seq", 100)
    assert code == 0
    lines = dict(line.strip().split(maxsplit=1) for line in text.replace("to ", "to_").splitlines()[1:])
    model = ligermodels.from_pretrained(folder)
    count = sum(p.numel() for p in model.parameters())
    assert lines["family"] == "llama"
    assert lines["shape"] == "4 layers, hidden 64, 4 heads of 32 (2 for keys), vocabulary 97"
    assert lines["parameters"] == f"{count:,}" and lines["dtype"] == "float32"
    assert lines["files"] == f"1, {count * 4 / 2**20:.1f} MiB of tensors (39 × F32)"
    cache = model.make_cache(2, 100)
    room = sum(t.nbytes for t in (*cache.keys, *cache.values))
    assert f"{(count * 4 + room) / 2**20:.1f} MiB" in lines["to_generate"]


def test_a_tied_head_counts_once_and_other_families_are_told(folder):
    model = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf({**TINY, "tie_word_embeddings": True}))
    model.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    assert summarise(folder).parameters == parameters
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert summarise(folder).parameters == parameters
    (folder / "config.json").write_text('{"model_type": "gpt2", "torch_dtype": "float16"}')
    code, text = run("inspect", folder)
    assert code == 0 and "gpt2 (not in the zoo" in text and "to train" not in text


def test_inspect_says_what_is_quantised(folder):
    tensors = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}
    save_file(
        tensors | {"model.layers.0.mlp.up_proj.g_idx": torch.zeros(4, dtype=torch.int32)}, folder / "model.safetensors"
    )
    code, text = run("inspect", folder)
    assert code == 0 and "quantised    GPTQ" in text


@pytest.mark.parametrize("level, measured", [("block", 61.75), ("fast", 93.3)])
def test_the_memory_of_training_is_that_of_an_h200(level, measured):
    """GiB at 4 × 4096, measured at commit bd07ad7, and by a prototype without checkpointing."""
    entry = next(e for name, e in published("llama").items() if "Meta-Llama-3-8B" in name)
    config = ligermodels.LlamaConfig.from_hf(entry["config"])
    summary = Summary("", "llama", config, entry["parameters"], {}, {}, None, torch.bfloat16)
    assert training_memory(summary, 4, 4096, level) / 2**30 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("model_type", ligermodels.MODELS)
def test_every_family_has_an_estimate(model_type):
    entries = published(model_type)
    if not entries:
        pytest.skip(f"no published config of {model_type}")
    entry = next(iter(entries.values()))
    config = ligermodels.MODELS[model_type].config_class.from_hf(entry["config"])
    summary = Summary("", model_type, config, entry["parameters"], {}, {}, None, torch.bfloat16)
    fast, block = (training_memory(summary, 1, 4096, level) for level in ("fast", "block"))
    weights = summary.weights * (0.9 if model_type == "gemma3" else 1)  # of which the text model is trained
    assert 4 * weights < block <= 1.1 * fast  # where gradients outweigh activations both are alike


def test_inspect_a_repository_fetches_no_weights(hub, monkeypatch):  # noqa: F811
    hub.token = TOKEN
    hub.files["config.json"] = json.dumps(TINY).encode()
    code, text = run("inspect", "org/model", "--token", TOKEN)
    assert code == 0 and "parameters   64" in text and TOKEN not in text
    assert "files        2, 0.0 MiB of tensors (2 × F32)" in text
    shards = [name for name in hub.files if name.startswith("model-0")]
    assert len(shards) == 2 and all(hub.sent[name] <= 100_001 for name in shards)
    assert not hub.fetched() & {"pytorch_model.bin", "tokenizer.json"}


def test_inspect_a_repository_of_pickles_or_without_a_network(hub, monkeypatch):  # noqa: F811
    for name in [name for name in hub.files if "safetensors" in name]:
        del hub.files[name]
    with pytest.raises(ligermodels.HubError, match="org/model holds no weights"):
        run("inspect", "org/model")
    hub.refuse["/"] = (401, "GatedRepo", "")
    with pytest.raises(ligermodels.HubError, match="gated: accept its licence"):
        run("inspect", "org/model")
    hub.refuse["/"] = (503, "", "")
    with pytest.raises(ligermodels.HubError, match="the hub is having trouble, so org/model cannot be looked at"):
        run("inspect", "org/model")


def test_inspect_what_is_not_there(hub):  # noqa: F811
    for where, says in [("org/modle", "no repository org/modle"), ("./nowhere", "no folder"), ("a/b/c", "no folder")]:
        with pytest.raises(ligermodels.LigerError, match=says):
            run("inspect", where)


# -------------------------------------------------------------------------------------------------------------- verify


def test_verify_a_sound_folder(folder):
    code, text = run("verify", folder, "--values")
    assert code == 0 and "wrong" not in text and "note" not in text
    assert "ok     names and shapes: every tensor of LigerLlama, 197,312 parameters" in text
    assert "all 39 tensors are finite" in text


def test_verify_tells_faults_that_do_not_hide_each_other(folder):
    config = json.loads((folder / "config.json").read_text())
    config["hidden_act"] = "relu"
    (folder / "config.json").write_text(json.dumps(config))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    (folder / "generation_config.json").write_text("[]")
    code, text = run("verify", folder)
    assert code == 1
    assert [line.split(":")[0] for line in text.splitlines()] == [
        "wrong  config.json", "wrong  weights", "wrong  generation_config.json"
    ]  # fmt: skip


def test_verify_notes_what_loads_but_is_odd(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["lm_head.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    torch.save({}, folder / "pytorch_model.bin")
    code, text = run("verify", folder)
    assert code == 0
    assert "note   tensors have several dtypes" in text
    assert "note   weight files that nothing reads: pytorch_model.bin" in text
    code, text = run("verify", folder, "--values")
    assert code == 1 and "wrong  values: 1 tensors hold NaN or infinity: lm_head.weight" in text


# ------------------------------------------------------------------------------------------------------ the script


def test_errors_are_one_line_and_exit_code_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["ligermodels", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit) as exit:
        main()
    captured = capsys.readouterr()
    assert exit.value.code == 1 and captured.out == ""
    assert captured.err == f"error: {tmp_path} holds no config.json: it is not a model folder in Hugging Face layout\n"


def script(monkeypatch, *arguments: object) -> object:
    """The exit code of the console script."""
    monkeypatch.setattr(sys, "argv", ["ligermodels", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        main()
    return exit.value.code


def test_a_file_that_cannot_be_written_is_one_line_too(monkeypatch, capsys, tmp_path):
    folder, prompts = write_tiny_chat_model(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text('"hello"\n')
    arguments = ("generate", folder, "--prompts", prompts, "--out", tmp_path / "nowhere" / "out.jsonl")
    assert script(monkeypatch, *arguments) == 1
    text = capsys.readouterr().err
    assert text.startswith("error: ") and "nowhere" in text and text.count("\n") == 1


def test_warnings_are_one_line(monkeypatch, capsys, tmp_path):
    folder, prompts = write_tiny_chat_model(tmp_path / "model"), tmp_path / "prompts.jsonl"
    prompts.write_text('"hello"\n')
    given = ("--top-p", 0.5, "--temperature", 0, "--max-new-tokens", 2)
    assert script(monkeypatch, "generate", folder, "--prompts", prompts, "--out", tmp_path / "out", *given) == 0
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    assert "warning: temperature is 0, which is greedy: top_k, top_p and min_p have no effect" in lines


def test_the_version():
    assert run("--version") == (0, f"ligermodels {ligermodels.__version__}\n")


def test_python_m_ligermodels():
    result = subprocess.run([sys.executable, "-m", "ligermodels", "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    for command in ("inspect", "verify", "convert"):
        assert command in result.stdout


def test_convert_is_the_converters_own_command(tmp_path):
    code, _ = run("convert", tmp_path / "nothing.gguf", tmp_path / "out")
    assert code == 1 and not (tmp_path / "out").exists()
    assert "\\x1b[2Jcleared" in run("convert", tmp_path / "\x1b[2Jcleared", tmp_path / "out")[1]
