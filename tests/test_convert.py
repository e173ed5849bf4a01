"""Conversions between layouts: bit-equal round trips, transformers and gguf as judges, hostile and interrupted runs."""

import contextlib
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import bad_folders
import pytest
import torch
import yaml
from convert_cases import (
    GLM,
    LLAMA,
    LLAMA_32,
    MISTRAL,
    MIXTRAL,
    SHARED,
    check_same_model,
    folder_of,
    same,
    tensors_of,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import TINY
from tiny_llava import write_tiny_llava

import ligermodels
from ligermodels.checkpoints_convert import hf as hf_folders
from ligermodels.checkpoints_convert import meta, streamed
from ligermodels.checkpoints_convert.__main__ import main
from ligermodels.checkpoints_convert.adapters import merged, read_adapter, save_adapter
from ligermodels.checkpoints_convert.convert import convert, recognise
from ligermodels.checkpoints_convert.hf import read_config, save_checkpoint
from ligermodels.checkpoints_convert.pickle_file import load_pickle
from ligermodels.checkpoints_convert.pth import open_pth
from ligermodels.errors import CheckpointError, ConfigError, LigerError

ROOT = Path(__file__).parents[1]
# ---------------------------------------------------------------------------------------------------------------- Meta


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [LLAMA, LLAMA_32], ids=["llama", "llama3.2"])
def test_meta_and_back(tmp_path, config, dtype):
    """Ours loads and saves what transformers wrote; then to Meta's layout and back."""
    source = folder_of(config, tmp_path / "hf", dtype)
    ligermodels.from_pretrained(source).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "meta", to="meta")
    assert recognise(tmp_path / "meta") == "meta"
    check_same_model(tmp_path / "ours", convert(tmp_path / "meta", tmp_path / "back", to="hf"))
    assert same(tensors_of(source), tensors_of(tmp_path / "back"))


def test_meta_rotates_neighbours_where_we_rotate_halves(tmp_path):
    """Scores of q and k from Meta's weights, rotated as complex numbers, are those of ours, rotated in halves."""
    convert(folder_of(LLAMA, tmp_path / "hf", torch.float32), tmp_path / "meta", to="meta")
    theirs = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    ours = tensors_of(tmp_path / "hf")
    x = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    position = torch.arange(5, dtype=torch.float64)[:, None, None]
    angle = position / 10_000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)  # (5, 1, D/2)

    def neighbours(weight):
        heads = torch.view_as_complex((x @ weight.double().T).view(5, -1, 4, 2))
        return torch.view_as_real(heads * torch.polar(torch.ones_like(angle), angle)).flatten(-2)

    def halves(weight):
        a, b = (x @ weight.double().T).view(5, -1, 2, 4).unbind(2)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    q, k = neighbours(theirs["layers.1.attention.wq.weight"]), neighbours(theirs["layers.1.attention.wk.weight"])
    q2 = halves(ours["model.layers.1.self_attn.q_proj.weight"])
    k2 = halves(ours["model.layers.1.self_attn.k_proj.weight"])
    scores = torch.einsum("sad,tad->ast", q, k.repeat_interleave(4, dim=1))
    assert (scores - torch.einsum("sad,tad->ast", q2, k2.repeat_interleave(4, dim=1))).abs().max() < 1e-10
    for name in ("wv", "wo"):
        assert torch.equal(
            theirs[f"layers.0.attention.{name}.weight"], ours[f"model.layers.0.self_attn.{name[1]}_proj.weight"]
        )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [96, 100_002])
def test_meta_files_of_tensor_parallelism(tmp_path, vocab, tied):
    """Two files: rows of one kind, columns of the other; the embedding by columns, in Llama 3 by rows."""
    source = folder_of(LLAMA | {"vocab_size": vocab, "tie_word_embeddings": tied}, tmp_path / "hf")
    size = sum(t.nbytes for t in tensors_of(source).values())
    convert(source, tmp_path / "meta", to="meta", max_shard_size=int(size * 0.6))
    parts = [torch.load(tmp_path / "meta" / f"consolidated.0{i}.pth", weights_only=True) for i in (0, 1)]
    assert [p["layers.0.attention.wk.weight"].shape for p in parts] == [(8, 64)] * 2
    assert [p["layers.0.feed_forward.w2.weight"].shape for p in parts] == [(64, 56)] * 2
    assert parts[0]["tok_embeddings.weight"].shape == ((96, 32) if vocab == 96 else (50_001, 64))
    check_same_model(source, convert(tmp_path / "meta", tmp_path / "back", to="hf"))
    (tmp_path / "meta" / "consolidated.00.pth").unlink()
    with pytest.raises(CheckpointError, match=r"lacks consolidated\.00\.pth"):
        convert(tmp_path / "meta", tmp_path / "again", to="hf")
    with pytest.raises(ConfigError, match="tensor parallelism over 4"):
        convert(source, tmp_path / "four", to="meta", max_shard_size=int(size * 0.3))


def test_meta_files_may_be_more_than_heads_of_k_and_v(tmp_path):
    """Four files and two heads: neighbours have the same one, and must agree on it."""
    source = folder_of(LLAMA | {"vocab_size": 96}, tmp_path / "hf")
    folder = convert(source, tmp_path / "meta", to="meta")
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)

    def cut(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if tensor.dim() == 1:
            return tensor
        if ".wk." in name or ".wv." in name:
            return tensor.chunk(2)[rank // 2].clone()
        by_columns = any(part in name for part in (".wo.", ".w2.", "tok_embeddings"))
        return tensor.chunk(4, dim=int(by_columns))[rank].clone()

    for rank in range(4):
        torch.save({n: cut(n, t, rank) for n, t in state.items()}, folder / f"consolidated.0{rank}.pth")
    check_same_model(source, convert(folder, tmp_path / "back", to="hf"))

    third, name = folder / "consolidated.03.pth", "layers.1.attention.wv.weight"
    good = torch.load(third, weights_only=True)
    torch.save(good | {name: good[name] + 1}, third)
    with pytest.raises(CheckpointError, match=r"03\.pth: .*wv\.weight differs from that in consolidated\.02\.pth"):
        convert(folder, tmp_path / "out", to="hf")
    torch.save(good | {name: state[name]}, third)
    with pytest.raises(CheckpointError, match=r"03\.pth: tensor .*wv\.weight is \[16, 64\], expected \[8, 64\]"):
        convert(folder, tmp_path / "out", to="hf")
    third.unlink()
    with pytest.raises(CheckpointError, match=r"meta lacks consolidated\.03\.pth: it holds 3 of 4 parts"):
        convert(folder, tmp_path / "out", to="hf")
    third.with_name("consolidated.02.pth").unlink()
    for extra in range(2, 7):
        torch.save(state, folder / f"consolidated.0{extra}.pth")
    torch.save(state, folder / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match="holds 7 files, but 1 hold the whole model"):
        convert(folder, tmp_path / "out", to="hf")


def test_meta_files_among_which_heads_cannot_be_divided(tmp_path):
    config = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
    folder = convert(folder_of(config, tmp_path / "hf"), tmp_path / "meta", to="meta")
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    state |= {"layers.0.attention.wq.weight": torch.ones(16, 48), "tok_embeddings.weight": torch.ones(97, 16)}
    for rank in range(3):
        torch.save(state, folder / f"consolidated.0{rank}.pth")
    (folder / "hf_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"3 files, among which 2 heads of wk and wv \(n_kv_heads of params"):
        convert(folder, tmp_path / "out", to="hf")


def test_a_folder_that_meta_published(tmp_path):
    """No hf_config.json, a copy of the head, rope.freqs: what is known of Llama 3.2 fills in the rest."""
    source = folder_of(LLAMA_32, tmp_path / "hf", torch.bfloat16)
    folder = convert(source, tmp_path / "meta", to="meta")
    (folder / "hf_config.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"as it is")
    state = torch.load(folder / "consolidated.00.pth", weights_only=True)
    assert torch.equal(state["output.weight"], state["tok_embeddings.weight"])
    torch.save(OrderedDict(state) | {"rope.freqs": torch.ones(4)}, folder / "consolidated.00.pth")
    back = convert(folder, tmp_path / "back", to="hf")
    assert same(tensors_of(source), tensors_of(back))
    expected = LLAMA_32 | {"torch_dtype": "bfloat16"}
    assert {key: read_config(back)[key] for key in expected} == expected
    assert (back / "tokenizer.model").read_bytes() == b"as it is"


PUBLISHED_PARAMS = {
    "meta-llama/Llama-2-7b-hf": {"multiple_of": 256, "norm_eps": 1e-05, "vocab_size": -1},
    "meta-llama/Llama-2-70b-hf": {"multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_kv_heads": 8, "vocab_size": -1},
    "codellama/CodeLlama-7b-hf": {"multiple_of": 256, "rope_theta": 1000000, "vocab_size": -1},
    "meta-llama/Meta-Llama-3-8B": {"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "n_kv_heads": 8},
    "meta-llama/Meta-Llama-3-70B": {"multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_kv_heads": 8},
    "meta-llama/Llama-3.1-405B": {
        "multiple_of": 4096, "ffn_dim_multiplier": 1.2, "n_kv_heads": 8, "use_scaled_rope": True
    },
    "meta-llama/Llama-3.2-1B": {
        "multiple_of": 256, "ffn_dim_multiplier": 1.5, "n_kv_heads": 8, "use_scaled_rope": True
    },
    "meta-llama/Llama-3.2-3B": {
        "multiple_of": 256, "ffn_dim_multiplier": 1.0, "n_kv_heads": 8, "use_scaled_rope": True
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_width_of_the_mlp_both_ways(name):
    published = json.loads((ROOT / "tests" / "published_configs.json").read_text())[name]["config"]
    params = PUBLISHED_PARAMS[name]
    hidden, width = published["hidden_size"], published["intermediate_size"]
    assert meta.ffn_width(hidden, params["multiple_of"], params.get("ffn_dim_multiplier")) == width
    found = meta.ffn_params(hidden, width)
    assert meta.ffn_width(hidden, found["multiple_of"], found.get("ffn_dim_multiplier")) == width


def test_any_width_of_the_mlp_can_be_said():
    for hidden in (64, 100, 576, 4096):
        for width in [*range(1, 300), 1536, 14335, 14336, 28673]:
            found = meta.ffn_params(hidden, width)
            assert meta.ffn_width(hidden, found["multiple_of"], found.get("ffn_dim_multiplier")) == width


@pytest.mark.parametrize(
    "change, says",
    [
        ({"head_dim": 16}, "head_dim"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters"),
    ],
)
def test_what_meta_has_no_form_for_is_refused(tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        convert(folder_of(LLAMA | change, tmp_path / "hf"), tmp_path / "meta", to="meta")


@pytest.mark.parametrize("to", ["meta", "mistral", "gguf", "chatglm"])
def test_a_vision_language_model_is_refused_by_its_type(tmp_path, to):
    with pytest.raises(ConfigError, match="model_type 'llava'"):
        convert(write_tiny_llava(tmp_path / "hf"), tmp_path / "out", to=to)


# ------------------------------------------------------------------------------------------------------------- pickles


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Bomb:
    def __reduce__(self):
        return bytearray, (1 << 40,)


def repack(path: Path, change) -> None:
    """The same archive with another data.pkl."""
    with zipfile.ZipFile(path) as old:
        contents = {member.filename: old.read(member) for member in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in contents.items():
            new.writestr(name, change(content) if name.endswith("data.pkl") else content)


@pytest.mark.parametrize("evil", [Touch, Bomb])
def test_pickles_are_read_as_text_first(tmp_path, evil):
    marker = tmp_path / "MARKER"
    content = {"a": evil(marker)} if evil is Touch else {"a": evil()}
    torch.save({"a": torch.ones(2)}, tmp_path / "evil.pth")
    repack(tmp_path / "evil.pth", lambda _: pickle.dumps(content, protocol=2))
    with pytest.raises(CheckpointError, match=r"evil\.pth holds more than tensors"):
        open_pth(tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match=r"evil\.pth holds more than tensors"):
        load_pickle(tmp_path / "evil.pth")
    assert not marker.exists()


def test_pth_files_are_checked_against_their_size(tmp_path):
    path = tmp_path / "a.pth"
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.arange(12.0)[2:8].view(2, 3)}
    torch.save({"model": tensors}, path)
    found = open_pth(path)
    assert all(torch.equal(found.read(name), tensor) for name, tensor in tensors.items())
    huge = b"J\xff\xff\xff\x7f"  # 2^31 - 1 instead of 2 rows; then of a storage that claims to hold them
    for old, new in ((b"K\x02K\x03\x86", huge + b"K\x03\x86"), (b"K\x0ct", b"\x8a\x05\xff\xff\xff\xff\x7ft")):
        repack(path, lambda raw, old=old, new=new: raw.replace(old, new, 1))
        assert new in path.read_bytes()
        with pytest.raises(CheckpointError, match=r"a\.pth"):
            open_pth(path)
    for name, value, says in [
        ("ints", {"a": torch.arange(3)}, "int64"),
        ("columns", {"a": torch.ones(3, 4).T}, "row by row"),
        ("step", {"a": torch.ones(2), "step": 3}, "step"),
        ("list", [torch.ones(2)], "state dict"),
    ]:
        torch.save(value, tmp_path / f"{name}.pth")
        with pytest.raises(CheckpointError, match=rf"{name}\.pth.*{says}"):
            open_pth(tmp_path / f"{name}.pth")
    torch.save(tensors, path)
    whole = path.read_bytes()
    for end in (0, 3, 100, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"a\.pth"):
            open_pth(path)
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="zip archive"):
        open_pth(path)


def test_damaged_pickles_end_in_the_projects_error(tmp_path):
    """Bytes of data.pkl overwritten at random: read, or refused by name."""
    import random

    path, draw = tmp_path / "a.pth", random.Random(0)
    torch.save({"a": torch.ones(4), "b": torch.ones(2, 2)}, path)
    good, refused = path.read_bytes(), 0
    for _ in range(80):

        def damage(raw):
            raw = bytearray(raw)
            for _ in range(draw.randint(1, 3)):
                raw[draw.randrange(len(raw))] = draw.randrange(256)
            return bytes(raw)

        path.write_bytes(good)
        repack(path, damage)
        try:
            open_pth(path)
        except CheckpointError as error:
            refused += 1
            assert "a.pth" in str(error)
    assert refused > 40


# ------------------------------------------------------------------------------------------------ Mistral and ChatGLM


@pytest.mark.parametrize("config", [MISTRAL, MIXTRAL], ids=["mistral", "mixtral"])
@pytest.mark.parametrize("size", [None, "30KB"])
def test_mistral_and_back(tmp_path, config, size):
    source = folder_of(config, tmp_path / "hf", torch.bfloat16)
    folder = convert(source, tmp_path / "mistral", to="mistral", max_shard_size=size)
    assert recognise(folder) == "mistral"
    assert (folder / "consolidated.safetensors").exists() is (size is None)
    check_same_model(source, convert(folder, tmp_path / "back", to="hf", max_shard_size=size or "5GB"))


def test_a_folder_that_mistral_published(tmp_path):
    source = folder_of(MISTRAL, tmp_path / "hf", torch.bfloat16)
    folder = convert(source, tmp_path / "mistral", to="mistral")
    (folder / "hf_config.json").unlink()
    params = json.loads((folder / "params.json").read_text())
    params.pop("rope_theta")
    (folder / "params.json").write_text(json.dumps(params))
    back = convert(folder, tmp_path / "back", to="hf")
    assert same(tensors_of(source), tensors_of(back))
    config = read_config(back)
    assert (config["rope_theta"], config["sliding_window"], config["head_dim"]) == (1e4, 8, 32)
    stored = load_file(folder / "consolidated.safetensors")["layers.0.attention.wk.weight"]  # (2 heads of 32, 64)
    ours = tensors_of(source)["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(stored[32 + 1], ours[32 + 16]) and torch.equal(stored[32 + 2], ours[32 + 1])
    (folder / "params.json").write_text(json.dumps(params | {"quantization": {"qformat_weight": "fp8_e4m3"}}))
    with pytest.raises(CheckpointError, match=r"params\.json: quantization"):
        convert(folder, tmp_path / "quantised", to="hf")


def test_chatglm_and_back(tmp_path):
    source = folder_of(GLM | {"rope_theta": 500000.0}, tmp_path / "hf")
    ligermodels.from_pretrained(source).save_pretrained(tmp_path / "ours")
    folder = convert(tmp_path / "ours", tmp_path / "chatglm", to="chatglm", max_shard_size="40KB")
    assert recognise(folder) == "chatglm"
    assert read_config(folder)["rope_ratio"] == 50
    packed = tensors_of(folder)["transformer.encoder.layers.1.self_attention.query_key_value.bias"]
    ours = tensors_of(source)
    assert torch.equal(packed, torch.cat([ours[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv"]))
    check_same_model(tmp_path / "ours", convert(folder, tmp_path / "back", to="hf"))
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        convert(folder_of(GLM | {"partial_rotary_factor": 1.0}, tmp_path / "a"), tmp_path / "b", to="chatglm")


# -------------------------------------------------------------------------------------------------------------- LitGPT

LITGPT = {
    "name": "tiny", "block_size": 32, "padded_vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 64,
    "n_query_groups": 2, "head_size": 32, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "norm_eps": 1e-05, "mlp_class_name": "LLaMAMLP", "intermediate_size": 112,
    "rope_base": 10000,
}  # fmt: skip
LIT_FAMILIES = {
    "llama": (TINY | {"num_hidden_layers": 2}, {}),
    "qwen2": (SHARED | {"model_type": "qwen2"}, {"attn_bias": True}),
    "qwen3": (SHARED | {"model_type": "qwen3"}, {"norm_qk": True}),
    "gemma2": (
        SHARED
        | {
            "model_type": "gemma2",
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
        },
        {
            "mlp_class_name": "GemmaMLP",
            "sliding_window_size": 8,
            "attention_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "attention_scores_scalar": 32,
            "sliding_window_indices": [1, 0],
        },
    ),
}


def lit_state(tensors: dict[str, torch.Tensor], gemma: bool, grouped: bool) -> dict[str, torch.Tensor]:
    """What LitGPT stores, row by row: q heads 4 of 32, k and v 2 of 32."""
    names = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "lm_head": "lm_head"}
    parts = {"input_layernorm": "norm_1", "self_attn.o_proj": "attn.proj", "mlp.gate_proj": "mlp.fc_1"}
    parts |= {"mlp.up_proj": "mlp.fc_2", "mlp.down_proj": "mlp.proj"}
    parts |= {"self_attn.q_norm": "attn.norm_q", "self_attn.k_norm": "attn.norm_k"}
    parts |= {"post_attention_layernorm": "post_attention_norm" if gemma else "norm_2"}
    parts |= {"pre_feedforward_layernorm": "norm_2", "post_feedforward_layernorm": "post_mlp_norm"}
    out = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in names:
            out[f"{names[module]}.{kind}"] = tensor
            continue
        _, _, layer, part = module.split(".", 3)
        if part in parts:
            out[f"transformer.h.{layer}.{parts[part]}.{kind}"] = tensor
        elif part == "self_attn.q_proj":
            q, k, v = (tensors[name.replace("q_proj", f"{x}_proj")] for x in "qkv")
            if grouped:
                rows = [q[:64], k[:32], v[:32], q[64:], k[32:], v[32:]]
                out[f"transformer.h.{layer}.attn.attn.{kind}"] = torch.cat(rows)
            else:
                out[f"transformer.h.{layer}.attn.qkv.{kind}"] = torch.cat([q, k, v])
    return out


@pytest.mark.parametrize("grouped", [True, False], ids=["attn.attn", "attn.qkv"])
@pytest.mark.parametrize("family", LIT_FAMILIES)
def test_litgpt(tmp_path, family, grouped):
    config, said = LIT_FAMILIES[family]
    source = folder_of(config, tmp_path / "hf")
    folder = tmp_path / "lit"
    folder.mkdir()
    state = lit_state(tensors_of(source), family == "gemma2", grouped)
    if family == "gemma2":
        state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(state, folder / "lit_model.pth")
    if grouped:
        (folder / "lit_config.json").write_text(json.dumps(LITGPT | said))
    else:
        (folder / "model_config.yaml").write_text(yaml.safe_dump(LITGPT | said))
    back = convert(folder, tmp_path / "back", to="hf")
    assert same(tensors_of(source), tensors_of(back))
    ids = torch.arange(12)[None]
    ours, theirs = ligermodels.from_pretrained(source), ligermodels.from_pretrained(back)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"parallel_residual": True}, "parallel_residual"),
        ({"norm_class_name": "LayerNorm"}, "norm_class_name"),
        ({"mlp_class_name": "GptNeoxMLP"}, "GptNeoxMLP"),
        ({"n_head": "four"}, "n_head"),
        ({"intermediate_size": 111}, r"fc_1\.weight is \[112, 64\]"),
        ({"scale_embeddings": True}, "scale_embeddings True: of a llama only False"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_scores_scalar": 256}, "attention_scores_scalar"),
        ({"post_mlp_norm": True}, "post_mlp_norm"),
        ({"rope_interleave": True}, "rope_interleave"),
    ],
)
def test_litgpt_of_other_networks_is_refused(tmp_path, change, says):
    state = lit_state(tensors_of(folder_of(TINY | {"num_hidden_layers": 2}, tmp_path / "hf")), False, False)
    torch.save(state, tmp_path / "lit_model.pth")
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(LITGPT | change))
    with pytest.raises(CheckpointError, match=says):
        convert(tmp_path, tmp_path.with_name("out"), to="hf", from_="litgpt")


def test_a_window_in_litgpt_makes_a_mistral(tmp_path):
    state = lit_state(tensors_of(folder_of(TINY | {"num_hidden_layers": 2}, tmp_path / "hf")), False, False)
    (tmp_path / "lit").mkdir()
    torch.save(state, tmp_path / "lit" / "lit_model.pth")
    said = LITGPT | {"sliding_window_size": 8, "sliding_window_indices": [1, 0]}
    (tmp_path / "lit" / "model_config.yaml").write_text(yaml.safe_dump(said))
    config = read_config(convert(tmp_path / "lit", tmp_path / "out", to="hf"))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 8)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]


def test_the_head_of_litgpt_is_kept_where_it_differs(tmp_path):
    """LitGPT ties nothing: training there parts a Gemma's head from its embedding. A file without one is cut short."""
    config, said = LIT_FAMILIES["gemma2"]
    tensors = tensors_of(folder_of(config, tmp_path / "hf"))
    state = lit_state(tensors, True, False)
    (tmp_path / "lit").mkdir()
    (tmp_path / "lit" / "model_config.yaml").write_text(yaml.safe_dump(LITGPT | said))
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    torch.save(state | head, tmp_path / "lit" / "lit_model.pth")
    back = convert(tmp_path / "lit", tmp_path / "back", to="hf")
    assert same(tensors_of(back), tensors | head) and read_config(back)["tie_word_embeddings"] is False
    torch.save(state, tmp_path / "lit" / "lit_model.pth")
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        convert(tmp_path / "lit", tmp_path / "out", to="hf")


# ------------------------------------------------------------------------------------------------------------ adapters


def pair(rows: int, columns: int, rank: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_merged_into_its_base(tmp_path, rslora):
    base = folder_of(LLAMA, tmp_path / "base", torch.float32)
    down, q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
    pairs = {down: pair(64, 112), q: pair(64, 64, rank=2, seed=1)}
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["down_proj", "q_proj"], "use_rslora": rslora,
              "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 10},
              "base_model_name_or_path": str(base)}  # fmt: skip
    norm = torch.full((64,), 0.5)
    save_adapter(tmp_path / "adapter", pairs, config, saved={"model.norm.weight": norm})
    assert recognise(tmp_path / "adapter") == "adapter"
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight" in stored

    before, after = tensors_of(base), tensors_of(convert(tmp_path / "adapter", tmp_path / "merged", to="hf"))
    root = math.sqrt if rslora else float
    for module, scale in ((down, 6 / root(4)), (q, 10 / root(2))):
        a, b = pairs[module]
        expected = before[f"{module}.weight"].double() + scale * b.double() @ a.double()
        assert (after[f"{module}.weight"].double() - expected).abs().max() < 1e-5
    assert torch.equal(after["model.norm.weight"], norm)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{down}.weight", f"{q}.weight", "model.norm.weight"}


def test_an_adapter_of_a_tied_embedding_unties_the_head(tmp_path):
    base = folder_of(LLAMA_32, tmp_path / "base", torch.float32)
    a, b = pair(64, 97)  # (r, V), (H, r)
    config = {"r": 4, "lora_alpha": 4, "target_modules": ["embed_tokens"], "base_model_name_or_path": None}
    save_adapter(tmp_path / "adapter", {"model.embed_tokens": (a, b)}, config, embeddings={"model.embed_tokens"})
    with pytest.raises(CheckpointError, match="--base"):
        convert(tmp_path / "adapter", tmp_path / "merged", to="hf")
    merged_folder = convert(tmp_path / "adapter", tmp_path / "merged", to="hf", base=base)
    before, after = tensors_of(base)["model.embed_tokens.weight"], tensors_of(merged_folder)
    assert torch.equal(after["lm_head.weight"], before)
    assert (after["model.embed_tokens.weight"] - (before + (b @ a).T)).abs().max() < 1e-5
    assert read_config(merged_folder)["tie_word_embeddings"] is False
    ligermodels.from_pretrained(merged_folder)

    whole = {"model.embed_tokens.weight": before + 1}  # PEFT may keep the base beside its pair: that counts, then
    save_adapter(
        tmp_path / "whole", {"model.embed_tokens": (a, b)}, config, saved=whole, embeddings={"model.embed_tokens"}
    )
    after = tensors_of(convert(tmp_path / "whole", tmp_path / "merged2", to="hf", base=base))
    assert (after["model.embed_tokens.weight"] - (before + 1 + (b @ a).T)).abs().max() < 1e-5


def test_merging_rounds_once_and_knows_transposed_weights():
    a, b = pair(6, 5)
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = weight.double() + 0.5 * b.double() @ a.double()
    assert torch.equal(merged(weight, a, b, 0.5), expected.bfloat16())
    assert torch.equal(merged(weight.T.contiguous(), a, b, 0.5, fan_in_fan_out=True), expected.bfloat16().T)
    with pytest.raises(CheckpointError, match=r"\[6, 5\], but the weight is \[5, 6\]"):
        merged(weight.T, a, b, 0.5)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"r": 0}, "r must be"),
        ({"r": 5}, "rank 5"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern"),
    ],
)
def test_adapters_that_compute_something_else_are_refused(tmp_path, change, says):
    save_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": pair(112, 64)}, {"r": 4, "lora_alpha": 8})
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=says):
        read_adapter(tmp_path / "a")


def test_an_adapter_brings_the_tokenizer_that_it_was_trained_with(tmp_path):
    base = folder_of(LLAMA, tmp_path / "base")
    put(base, "tokenizer.json", "chat_template.jinja", "tokenizer.model", "generation_config.json")
    save_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": pair(112, 64)}, {"r": 4, "lora_alpha": 8})
    both = all_files(convert(tmp_path / "adapter", tmp_path / "base's", to="hf", base=base))
    assert {"tokenizer.json", "chat_template.jinja", "tokenizer.model", "generation_config.json"} <= both.keys()
    (tmp_path / "adapter" / "tokenizer.json").write_text('{"of": "the adapter"}')
    own = all_files(convert(tmp_path / "adapter", tmp_path / "own", to="hf", base=base))
    assert own["tokenizer.json"] == b'{"of": "the adapter"}'
    assert both.keys() - own.keys() == {"chat_template.jinja", "tokenizer.model"}


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    base = folder_of(LLAMA, tmp_path / "base")
    for name, module, shape, says in [
        ("unknown", "model.layers.7.mlp.up_proj", (112, 64), r"layers\.7\.mlp\.up_proj"),
        ("shape", "model.layers.0.mlp.up_proj", (112, 60), r"\[112, 60\]"),
    ]:
        save_adapter(tmp_path / name, {module: pair(*shape)}, {"r": 4, "lora_alpha": 8})
        with pytest.raises(CheckpointError, match=says):
            convert(tmp_path / name, tmp_path / "out", to="hf", base=base)
    half = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}
    save_file(half, tmp_path / "shape" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="only half of its pair"):
        read_adapter(tmp_path / "shape")
    assert not (tmp_path / "out").exists()


def test_an_adapter_saved_beside_a_model_leaves_it_alone(tmp_path):
    folder = folder_of(LLAMA, tmp_path / "model")
    before = tensors_of(folder)
    save_adapter(folder, {"model.layers.0.mlp.up_proj": pair(112, 64)}, {"r": 4, "lora_alpha": 8})
    assert same(tensors_of(folder), before) and read_config(folder)["hidden_size"] == 64


# ------------------------------------------------------------------------------------- interrupted, taken, recognised


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def interrupt(monkeypatch, after: int) -> list[str]:
    """Reading ends with the ``after``-th tensor; returns the list of all that were read."""
    read, original = [], hf_folders.Checkpoint.read

    def failing(self, name, **options):
        if len(read) == after:
            raise KeyboardInterrupt
        read.append(name)
        return original(self, name, **options)

    monkeypatch.setattr(hf_folders.Checkpoint, "read", failing)
    return read


def test_an_interrupted_conversion_continues(tmp_path, monkeypatch):
    source, target = folder_of(LLAMA, tmp_path / "hf"), tmp_path / "out"
    options = {"to": "hf", "dtype": "float32", "max_shard_size": "40KB"}
    with monkeypatch.context() as patch:
        interrupt(patch, 12)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, **options)
    assert not target.exists()
    work = tmp_path / "out.partial"
    finished = sizes(work)
    assert len(finished) >= 2
    broken = sorted(finished)[0]
    (work / broken).write_bytes((work / broken).read_bytes()[:-1])  # as after a crash
    with monkeypatch.context() as patch:
        read = interrupt(patch, -1)
        convert(source, target, **options)
    kept = {name: time for name, time in sizes(target).items() if finished.get(name) == time}
    assert kept.keys() == finished.keys() - {broken}
    assert 0 < len(read) < len(tensors_of(source))
    assert not work.exists()
    expected = {name: tensor.float() for name, tensor in tensors_of(source).items()}
    assert same(tensors_of(target), expected)


def test_an_interrupted_conversion_to_meta_continues(tmp_path, monkeypatch):
    source, target = folder_of(LLAMA | {"vocab_size": 96}, tmp_path / "hf"), tmp_path / "out"
    size = sum(t.nbytes for t in tensors_of(source).values())
    options = {"to": "meta", "max_shard_size": int(size * 0.6)}
    whole = len(tensors_of(source))
    with monkeypatch.context() as patch:
        interrupt(patch, whole + 3)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, **options)
    with monkeypatch.context() as patch:
        read = interrupt(patch, -1)
        convert(source, target, **options)
    assert len(read) == whole  # for the second file alone
    check_same_model(source, convert(target, tmp_path / "back", to="hf"))


def test_leftovers_of_another_source_are_not_used(tmp_path, monkeypatch):
    target, options = tmp_path / "out", {"to": "hf", "max_shard_size": "40KB"}
    with monkeypatch.context() as patch:
        interrupt(patch, 12)
        with pytest.raises(KeyboardInterrupt):
            convert(folder_of(LLAMA, tmp_path / "a"), target, **options)
    other = folder_of(LLAMA, tmp_path / "b")
    first = tensors_of(other)
    save_checkpoint(other, {name: tensor + 1 for name, tensor in first.items()}, read_config(other))
    convert(other, target, **options)
    assert same(tensors_of(target), tensors_of(other))


def test_nothing_is_overwritten_unasked(tmp_path):
    source, target = folder_of(LLAMA, tmp_path / "hf"), tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    convert(source, target, to="hf", max_shard_size="40KB")
    shards = sizes(target)
    with pytest.raises(CheckpointError, match="--force"):
        convert(source, target, to="hf")
    assert sizes(target) == shards
    convert(source, target, to="hf", force=True)
    assert sizes(target).keys() == {"model.safetensors"} and (target / "notes.txt").read_text() == "mine"
    assert not (target / "model.safetensors.index.json").exists()
    check_same_model(source, target)
    (tmp_path / "file.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="--force"):
        convert(source, tmp_path / "file.gguf", to="gguf")
    with pytest.raises(CheckpointError, match="not a GGUF"):  # a model is replaced, not just any file
        convert(source, tmp_path / "file.gguf", to="gguf", force=True)
    assert (tmp_path / "file.gguf").read_text() == "mine"
    for bad in (source, source / "inside"):
        with pytest.raises(CheckpointError, match="source"):
            convert(source, bad, to="hf", force=True)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "x").write_text("mine")
    with pytest.raises(CheckpointError, match="not ours"):
        convert(source, tmp_path / "new", to="hf")


def test_a_source_is_recognised_by_what_it_holds(tmp_path):
    for files, says in [
        ([], "It holds nothing"),
        (["readme.md", "weights.h5"], r"readme\.md, weights\.h5"),
        (["config.json", "model.safetensors", "lit_model.pth"], "hf or litgpt: say which"),
        (["a.gguf", "b.gguf"], r"a\.gguf, b\.gguf"),
    ]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for file in files:
            (folder / file).write_text("{}")
        with pytest.raises(CheckpointError, match=says):
            recognise(folder)
    (tmp_path / "file").write_text("x")
    for text, says in [("x", "give the folder"), ("", "it is empty"), ("<!DOCTYPE html>", "it is a web page")]:
        (tmp_path / "file").write_text(text)
        with pytest.raises(CheckpointError, match=f"not a GGUF: {says}"):
            recognise(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"there is no .*nowhere$"):
        recognise(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="hf download meta-llama/Llama-3-8B"):
        recognise(Path("meta-llama/Llama-3-8B"))


def test_the_command(tmp_path, capsys):
    source = folder_of(LLAMA, tmp_path / "hf")
    arguments = [str(source), str(tmp_path / "meta"), "--to", "meta", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    assert main(arguments) == 1
    assert "error:" in capsys.readouterr().err
    assert main([str(source), ""]) == 1 and "empty text" in capsys.readouterr().err
    assert main([str(tmp_path / "meta"), str(tmp_path / "back")]) == 0
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors_of(tmp_path / "back").values())
    with pytest.raises(LigerError, match="dtype"):
        convert(source, tmp_path / "x", to="hf", dtype="q8_0")
    large = {name: tensor.float() * 1e6 for name, tensor in tensors_of(source).items()}
    save_checkpoint(tmp_path / "large", large, read_config(source))
    with pytest.raises(CheckpointError, match=r"tensor .*weight .*too large for torch\.float16"):
        convert(tmp_path / "large", tmp_path / "y", to="hf", dtype="float16")


def test_an_interrupted_command_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    source = folder_of(LLAMA, tmp_path / "hf")
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        assert main([str(source), str(tmp_path / "out")]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert main([str(source), str(tmp_path / "out")]) == 0


def test_a_model_type_that_is_no_name_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
    with pytest.raises(ConfigError, match="not in the zoo"):
        ligermodels.from_pretrained(tmp_path)


def json_values():
    plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """(folder, the file that describes it) of four layouts."""
    root = tmp_path_factory.mktemp("layouts")
    llama, mixtral = folder_of(LLAMA, root / "llama"), folder_of(MIXTRAL, root / "mixtral")
    convert(llama, root / "meta", to="meta")
    convert(mixtral, root / "mistral", to="mistral")
    for name in ("meta", "mistral"):
        (root / name / "hf_config.json").unlink()
    save_adapter(root / "adapter", {"model.layers.0.mlp.up_proj": pair(112, 64)}, {"r": 4, "lora_alpha": 8})
    (root / "lit").mkdir()
    torch.save(lit_state(tensors_of(folder_of(LLAMA, root / "b")), False, False), root / "lit" / "lit_model.pth")
    (root / "lit" / "lit_config.json").write_text(json.dumps(LITGPT | {"n_head": 8, "head_size": 8}))
    files = {
        "meta": "params.json",
        "mistral": "params.json",
        "adapter": "adapter_config.json",
        "lit": "lit_config.json",
    }
    for name in files:
        convert(root / name, root / "good", to="hf", base=llama, force=True)
    return [root / name / file for name, file in files.items()] + [llama / "config.json"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_in_a_config_is_taken_or_refused_by_name(layouts, data):
    """One value of params.json, adapter_config.json, lit_config.json or config.json replaced by any JSON value."""
    path = data.draw(st.sampled_from(layouts))
    good = path.read_text()
    content = json.loads(good)
    key = data.draw(st.sampled_from(sorted(content)))
    content[key] = data.draw(json_values())
    try:
        path.write_text(json.dumps(content))
        target = path.parent.with_name("target")
        options = {"to": "hf", "force": True, "base": path.parent.with_name("llama")}
        if path.name == "config.json":
            options["to"] = data.draw(st.sampled_from(["meta", "gguf", "hf"]))
        with contextlib.suppress(LigerError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert(path.parent, target / "x.gguf" if options["to"] == "gguf" else target, **options)
    finally:
        path.write_text(good)


MEMORY = """
import re, sys, torch
from pathlib import Path
from ligermodels.checkpoints_convert.convert import convert

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

torch.set_num_threads(1)
root, before = sys.argv[1], 0
for name in ("warm", "large"):
    for to, size in [("hf", "20MB"), ("gguf", None), ("meta", "20MB"), ("meta-hf", "20MB")]:
        source = f"{root}/{name}-meta" if to == "meta-hf" else f"{root}/{name}"
        convert(source, f"{root}/{name}-{to}", to=to.split("-")[-1], dtype="float16", max_shard_size=size)
    if name == "warm":
        before = peak()
print((peak() - before) / 20e6)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to tell the peak")
def test_two_shards_of_memory_suffice(tmp_path):
    """100 MB in shards of 20 MB, there and back."""
    for name, layers, hidden in (("warm", 1, 64), ("large", 3, 1024)):
        config = LLAMA | {"vocab_size": 96, "num_key_value_heads": 8, "num_hidden_layers": layers}
        config |= {"hidden_size": hidden, "intermediate_size": 4 * hidden, "head_dim": hidden // 8}
        model = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf(config))
        model.half().save_pretrained(tmp_path / name)
    assert (tmp_path / "large" / "model.safetensors").stat().st_size > 80e6
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    # What is freed is given back at once, so that the peak is that of live tensors.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536"}
    ratio = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env).stdout
    assert 0.5 < float(ratio) < 2


def test_work_folder_of_a_failed_write_says_where(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streamed, "write_safetensors", full)
    with pytest.raises(CheckpointError, match=r"out\.partial.*No space left"):
        convert(folder_of(LLAMA, tmp_path / "hf"), tmp_path / "out", to="hf")


# --------------------------------------------------------------------------------- what must not become other weights


def changed_pth(path: Path, **tensors) -> None:
    """The same file with tensors replaced or added (dots as double underscores)."""
    state = torch.load(path, weights_only=True)
    torch.save(state | {name.replace("__", "."): t for name, t in tensors.items()}, path)


def test_files_of_tensor_parallelism_must_be_of_one_model(tmp_path):
    source = folder_of(LLAMA | {"vocab_size": 96}, tmp_path / "hf")
    folder = convert(source, tmp_path / "meta", to="meta", max_shard_size="150KB")
    second = folder / "consolidated.01.pth"
    good = second.read_bytes()
    changed_pth(second, norm__weight=torch.zeros(64).half())
    with pytest.raises(CheckpointError, match=r"01\.pth: norm\.weight differs from that in consolidated\.00\.pth"):
        convert(folder, tmp_path / "out", to="hf")
    second.write_bytes(good)
    changed_pth(second, output__weight=torch.zeros(48, 64))
    with pytest.raises(CheckpointError, match=r"01\.pth: output\.weight is torch\.float32, in consolidated\.00\.pth"):
        convert(folder, tmp_path / "out", to="hf")


def test_what_is_beside_the_weights_must_not_contradict_them(tmp_path):
    folder = convert(folder_of(LLAMA_32, tmp_path / "hf"), tmp_path / "meta", to="meta")
    head = torch.load(folder / "consolidated.00.pth", weights_only=True)["output.weight"]
    changed_pth(folder / "consolidated.00.pth", output__weight=head + 1)
    with pytest.raises(CheckpointError, match=r"output\.weight differs .* tie_word_embeddings true"):
        convert(folder, tmp_path / "out", to="hf")
    changed_pth(folder / "consolidated.00.pth", output__weight=head, rope__freqs=torch.ones(8))
    with pytest.raises(CheckpointError, match=r"rope\.freqs is \[8\], but params\.json gives heads of 8"):
        convert(folder, tmp_path / "out", to="hf")

    changed_pth(folder / "consolidated.00.pth", rope__freqs=torch.ones(4))

    mixtral = convert(folder_of(MIXTRAL, tmp_path / "mixtral"), tmp_path / "mistral", to="mistral")
    for place, file, change, says in [
        (folder, "params.json", {"use_scaled_rope": False}, "use_scaled_rope False"),
        (folder, "hf_config.json", {"attention_bias": True}, "attention_bias is True"),
        (folder, "hf_config.json", {"rope_parameters": {"rope_theta": 7.0}}, "rope_parameters is {'rope_theta': 7.0}"),
        (folder, "hf_config.json", {"eos_token_id": "x"}, "meta: eos_token_id must be int"),
        (folder, "hf_config.json", {"hidden_act": "relu"}, "meta: hidden_act 'relu'"),
        (mixtral, "hf_config.json", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_"),
        (mixtral, "hf_config.json", {"layer_types": ["sliding_attention"] * 2}, "layer_types is .*params.json says"),
        (mixtral, "params.json", {"moe": {"num_experts": 3, "num_experts_per_tok": 1}}, "num_experts_per_tok is 2"),
        (mixtral, "params.json", {"moe": {"num_experts": 3, "num_experts_per_tok": 4}}, "is 4, of 3 experts"),
        (mixtral, "params.json", {"sliding_window": 5}, "sliding_window is None"),
    ]:
        good = (place / file).read_text()
        (place / file).write_text(json.dumps(json.loads(good) | change))
        with pytest.raises((CheckpointError, ConfigError), match=says):
            convert(place, tmp_path / "out", to="hf")
        (place / file).write_text(good)


@pytest.mark.parametrize("copy", [False, True], ids=["no head", "copy of the head"])
def test_an_adapter_of_an_embedding_unties_also_by_default_and_beside_a_copy(tmp_path, copy):
    """A Gemma is tied where its config says nothing; a copy of the head does not change that."""
    config = {key: value for key, value in SHARED.items() if key != "tie_word_embeddings"}
    config |= {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
    base = folder_of(config, tmp_path / "base", torch.float32)
    before = tensors_of(base)
    if copy:
        head = {"lm_head.weight": before["model.embed_tokens.weight"].clone()}
        save_checkpoint(base, before | head, read_config(base))
    a, b = pair(64, 97)
    for name, more in (("plain", {}), ("tied", {"ensure_weight_tying": True})):
        settings = {"r": 4, "lora_alpha": 4} | more
        embedding = {"model.embed_tokens"}
        save_adapter(tmp_path / name, {"model.embed_tokens": (a, b)}, settings, embeddings=embedding)
    folder = convert(tmp_path / "plain", tmp_path / "merged", to="hf", base=base)
    assert torch.equal(tensors_of(folder)["lm_head.weight"], before["model.embed_tokens.weight"])
    assert read_config(folder)["tie_word_embeddings"] is False
    with pytest.raises(CheckpointError, match="ensure_weight_tying"):
        convert(tmp_path / "tied", tmp_path / "out", to="hf", base=base)


def test_adapters_that_overflow_or_say_a_thing_twice_are_refused(tmp_path):
    base = folder_of(LLAMA, tmp_path / "base")
    a, b = pair(112, 64)
    save_adapter(tmp_path / "pair", {"model.layers.0.mlp.up_proj": (a * 1e3, b * 1e3)}, {"r": 4, "lora_alpha": 8})
    save_adapter(tmp_path / "saved", {}, {"r": 4}, saved={"model.norm.weight": torch.full((64,), 1e6)})
    for name, tensor in (("pair", r"up_proj\.weight"), ("saved", r"norm\.weight")):
        with pytest.raises(CheckpointError, match=rf"{tensor} holds numbers up to .*too large for torch\.float16"):
            convert(tmp_path / name, tmp_path / "out", to="hf", base=base)
    for name, again, says in (("pair", ".default.weight", "two pairs"), ("saved", ".x", "twice")):
        path = tmp_path / name / "adapter_model.safetensors"
        state = load_file(path)
        for key, tensor in list(state.items()):
            key = key.replace("norm.weight", "norm.modules_to_save.default.weight")
            state[key.replace(".weight", again) if name == "pair" else key] = tensor
        save_file({key: tensor.clone() for key, tensor in state.items()}, path)
        with pytest.raises(CheckpointError, match=says):
            read_adapter(tmp_path / name)


def test_the_source_is_never_written_to(tmp_path):
    source = folder_of(LLAMA, tmp_path / "x.partial")
    (source / "plan.json").write_text("mine")
    before = tensors_of(source)
    (tmp_path / "links").mkdir()
    for file in source.iterdir():
        (tmp_path / "links" / file.name).symlink_to(file)
    for folder, target, to in [
        (source, tmp_path / "x", "hf"),
        (source, source / "model.safetensors", "gguf"),
        (tmp_path / "links", source, "hf"),
    ]:
        with pytest.raises(CheckpointError, match="source"):
            convert(folder, target, to=to, dtype="float32", force=True)
        assert same(tensors_of(source), before)


def test_targets_that_are_no_plain_name(tmp_path, monkeypatch):
    source = folder_of(LLAMA, tmp_path / "hf")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(source, tmp_path / "link", to="hf")
    check_same_model(source, tmp_path / "real")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    check_same_model(source, convert(source, ".", to="hf"))
    (tmp_path / "nothing").symlink_to(tmp_path / "nowhere")
    for target in ("x" * 300, "x" * 250, "a\0b", "/", tmp_path / "nothing"):
        with pytest.raises(CheckpointError):
            convert(source, target, to="hf")


KILLED = """
import os, shutil, signal, sys
from ligermodels.checkpoints_convert.convert import convert
from ligermodels.errors import CheckpointError
root, options = sys.argv[1], eval(sys.argv[2])

def hook(event, arguments):
    global left
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.copyfile", "shutil.rmtree") or (
        event == "open" and ".partial" in str(arguments[0]) and arguments[1] not in ("r", "rb", None)
    ):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

for n in range(1, 80):
    target = f"{root}/{n}/model"
    os.makedirs(f"{root}/{n}")
    if os.path.exists(f"{root}/old"):
        shutil.copytree(f"{root}/old", target)
    pid = os.fork()
    if not pid:
        left = n
        sys.addaudithook(hook)
        convert(f"{root}/hf", target, **options)
        os._exit(0)
    killed = os.waitpid(pid, 0)[1]
    if not killed:
        break
    try:
        convert(f"{root}/hf", target, **options)
    except CheckpointError:  # all was done, but for the folder, which is empty by now
        assert not os.listdir(f"{target}.partial")
print(n)
"""


@pytest.mark.parametrize("to, old", [("hf", False), ("hf", True), ("gguf", False)])
def test_killed_wherever_it_writes_renames_or_deletes_a_conversion_continues(tmp_path, to, old):
    """A second run brings the whole and nothing else, into a new target or in the place of an old model."""
    source = folder_of(LLAMA, tmp_path / "hf")
    options = {"to": to} | ({"max_shard_size": "80KB"} if to == "hf" else {}) | ({"force": True} if old else {})
    if old:
        put(tmp_path / "old", "config.json", "model.safetensors", *BESIDE, "notes.txt")
    else:
        put(source, "tokenizer.model", "additional_chat_templates/rag.jinja")
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path), repr(options)]
    count = int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
    assert count > 8
    whole = all_files(tmp_path / str(count))
    assert ("model/notes.txt" in whole) is old and "model/plan.json" not in whole
    for n in range(1, count):
        assert all_files(tmp_path / str(n)) == whole, n


def test_only_a_folder_that_a_run_left_is_cleared(tmp_path):
    source = folder_of(LLAMA, tmp_path / "hf")
    put(tmp_path / "out.partial", "plan.json", "thesis.txt")
    with pytest.raises(CheckpointError, match="not ours"):
        convert(source, tmp_path / "out", to="hf")
    assert len(all_files(tmp_path / "out.partial")) == 2
    put(tmp_path / "there", "plan.json")
    assert all_files(convert(source, tmp_path / "there", to="hf"))["plan.json"] == b"{}"


def test_a_full_disk_is_told_for_pickles_too(tmp_path):
    import resource
    import signal

    source, old = folder_of(LLAMA, tmp_path / "hf"), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not write .*consolidated\.00\.pth\.tmp"):
            convert(source, tmp_path / "meta", to="meta")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)


def test_every_part_of_a_source_tells_it_from_another(tmp_path):
    for i in (1, 2):
        (tmp_path / f"a-0000{i}-of-00002.gguf").write_text("x")
    (tmp_path / "within").mkdir()
    (tmp_path / "within" / "model-00001-of-00001.safetensors").write_text("x")
    assert len(streamed.fingerprint(tmp_path / "a-00001-of-00002.gguf")) == 2
    assert len(streamed.fingerprint(tmp_path)) == 3


def test_two_runs_at_once_do_not_mix(tmp_path):
    with streamed.WorkFolder(tmp_path / "out", ["a"], 1, marker="a") as first:
        (first.path / "a").write_text("x")
        for plan in (1, 2):
            with (
                pytest.raises(CheckpointError, match=r"another run is writing to .*out\.partial"),
                streamed.WorkFolder(tmp_path / "out", ["a"], plan, marker="a"),
            ):
                pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


# ---------------------------------------------------------------------------- what goes beside the weights, and is left

BESIDE = ("tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja", "merges.txt",
          "preprocessor_config.json", "additional_chat_templates/rag.jinja")  # fmt: skip


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", ["hf", "meta"])
def test_what_is_beside_the_weights_goes_along(tmp_path, to):
    source = folder_of(LLAMA, tmp_path / "hf")
    put(source, *BESIDE, "notes.txt")
    assert set(BESIDE) <= all_files(convert(source, tmp_path / "new", to=to)).keys()
    put(tmp_path / "there", "mine.txt")
    assert set(BESIDE) <= all_files(convert(source, tmp_path / "there", to=to)).keys() - {"notes.txt"}


@pytest.mark.parametrize("to, marker", [("hf", "config.json"), ("meta", "params.json")])
def test_a_replaced_model_leaves_nothing_and_foreign_files_stay(tmp_path, to, marker):
    """Also where the new source has no tokenizer: the old one would be taken for its own."""
    source, target = folder_of(LLAMA, tmp_path / "hf"), tmp_path / "out"
    (source / "generation_config.json").unlink()
    whole = all_files(convert(source, tmp_path / "alone", to=to))
    put(target, marker, *BESIDE, "notes.txt", "additional_chat_templates/mine.txt")
    convert(source, target, to=to, force=True)
    assert all_files(target) == whole | {"notes.txt": b"{}", "additional_chat_templates/mine.txt": b"{}"}
    put(tmp_path / "no model", "tokenizer.json")  # put there by hand, for the weights to come
    assert all_files(convert(source, tmp_path / "no model", to=to)) == whole | {"tokenizer.json": b"{}"}


def test_templates_of_another_folder_are_not_removed_through_a_link(tmp_path):
    source, target = folder_of(LLAMA, tmp_path / "hf"), tmp_path / "out"
    put(tmp_path / "other", "additional_chat_templates/rag.jinja")
    convert(source, target, to="hf")
    (target / "additional_chat_templates").symlink_to(tmp_path / "other" / "additional_chat_templates")
    with pytest.raises(CheckpointError, match="additional_chat_templates is a link"):
        convert(source, target, to="hf", force=True)
    assert all_files(tmp_path / "other") and (target / "config.json").exists()


def test_a_folder_that_does_not_load_is_not_copied(tmp_path, monkeypatch):
    """Every broken folder of the list is refused as from_pretrained refuses it, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    sound = bad_folders.sound_folder(tmp_path / "0")
    for number, (name, case) in enumerate(bad_folders.CASES.items(), 1):
        if case.says is not None and name not in ("C07/unknown_family", "C07/no_family", "C09/unknown"):
            folder = bad_folders.make(name, sound, tmp_path / str(number))
            with pytest.raises(LigerError, match=case.says):
                convert(folder, tmp_path / "out", to="hf", from_="hf")
    assert not list(tmp_path.glob("out*"))
    family = bad_folders.make("C07/unknown_family", sound, tmp_path / "other")
    with pytest.warns(UserWarning, match="model_type 'gpt2' is not in the zoo: its names and shapes are not checked"):
        convert(family, tmp_path / "out", to="hf")
