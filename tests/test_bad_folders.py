"""Each folder in bad_folders.py gets the stated result: of ``from_pretrained``, and of ``ligermodels verify``."""

import hashlib
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from bad_folders import CASES, FP8, MARKER, TINY, bins, config, make, put, quantised, sound_folder, tensors_of, weights
from family_checks import scaled_hf
from test_cli import run

import ligermodels
from ligermodels import LigerError, from_pretrained
from ligermodels.checkpoints_convert.hf import Checkpoint

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return sound_folder(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture(scope="module")
def logits(sound) -> torch.Tensor:
    return logits_of(from_pretrained(sound))


def logits_of(model) -> torch.Tensor:
    ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
    with torch.no_grad():
        out = model(ids)
    return out.logits


def hf_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits_of(AutoModelForCausalLM.from_pretrained(folder))


def fingerprint(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir() if f.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of(name, sound, logits, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    folder = make(name, sound, tmp_path / "model")
    before = fingerprint(folder)
    code, text = run("verify", folder)
    if case.says is None:
        assert code == 0, text
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert torch.equal(logits_of(from_pretrained(folder)), logits)
        said = [str(w.message) for w in caught if "max_position" not in str(w.message)]
        if case.warns is None:
            assert not said
        else:
            assert any(re.search(case.warns, text) for text in said)
    else:

        def read(*_, **__):
            raise AssertionError("a weight was read, or its memory taken, before the fault was found")

        monkeypatch.setattr(Checkpoint, "stream", read)
        with pytest.raises(LigerError, match=case.says):
            from_pretrained(folder)
        assert code == 1
    assert fingerprint(folder) == before and not MARKER.exists()


# --------------------------------------------------------------------------------------------------------------- C05


@pytest.mark.parametrize("model_type", ["llama", "gemma"])
@pytest.mark.parametrize("stored", ["no_head", "equal", "equal_bf16", "differs"])
def test_tied_heads(model_type, stored, tmp_path):
    settings = {**TINY, "model_type": model_type, "tie_word_embeddings": True, "hidden_act": "silu"}
    if model_type == "gemma":
        settings["hidden_act"] = "gelu_pytorch_tanh"
    folder = tmp_path / "model"
    scaled_hf(settings).save_pretrained(folder)
    tensors = tensors_of(folder)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    if stored == "equal_bf16":
        head = tensors["model.embed_tokens.weight"] = head.bfloat16().float()
        put(folder, tensors | {"lm_head.weight": head.bfloat16()})
    elif stored == "equal":
        put(folder, tensors | {"lm_head.weight": head})
    elif stored == "differs":
        head[3, 4] += 1
        put(folder, tensors | {"lm_head.weight": head})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = from_pretrained(folder)
    tied = stored != "differs"
    assert any("lm_head.weight differs" in str(w.message) for w in caught) == (not tied)
    assert (logits_of(model) - hf_logits(folder)).abs().max() < 2e-4
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path / "again")
    assert ("lm_head.weight" in tensors_of(tmp_path / "again")) == (not tied)
    assert torch.equal(logits_of(from_pretrained(tmp_path / "again")), logits_of(model))
    assert (hf_logits(tmp_path / "again") - logits_of(model)).abs().max() < 2e-4


# --------------------------------------------------------------------------------------------------------------- C09

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "stored, keys, argument, expected",
    [
        (FP32, {"torch_dtype": "bfloat16"}, "auto", BF16),
        (FP32, {"torch_dtype": ..., "dtype": "float16"}, "auto", FP16),
        (FP32, {"torch_dtype": "float32", "dtype": "bfloat16"}, "auto", BF16),
        (FP32, {"torch_dtype": "float16", "dtype": None}, "auto", FP16),
        (BF16, {"torch_dtype": ...}, "auto", BF16),
        (BF16, {"torch_dtype": None}, "auto", BF16),
        (BF16, {"torch_dtype": "torch.float16"}, "auto", FP16),
        (BF16, {"torch_dtype": "float16"}, "float32", FP32),
        (FP16, {"torch_dtype": "float16"}, torch.bfloat16, BF16),
    ],
)
def test_which_dtype(stored, keys, argument, expected, sound, tmp_path):
    folder = make("sound", sound, tmp_path / "model")
    weights(lambda tensors: {name: t.to(stored) for name, t in tensors.items()})(folder)
    config(**keys)(folder)
    tensors = tensors_of(folder)
    model = from_pretrained(folder, dtype=argument)
    assert all(torch.equal(p, tensors[name].to(expected)) for name, p in model.named_parameters())
    held = model.config.to_hf()
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["torch_dtype"] == saved["dtype"] == str(expected).removeprefix("torch.")
    assert model.config.to_hf() == held  # saving does not change the config in memory
    assert {t.dtype for t in tensors_of(tmp_path / "again").values()} == {expected}
    again = from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_several_dtypes_in_one_file_are_read_as_transformers_reads_them(sound, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make("sound", sound, tmp_path / "model")
    weights(lambda tensors: {n: t if "norm" in n else t.bfloat16() for n, t in tensors.items()})(folder)
    for keys in ({"torch_dtype": ...}, {"torch_dtype": "bfloat16"}):
        config(**keys)(folder)
        ours, theirs = from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        assert {n: p.dtype for n, p in ours.named_parameters()} == {n: p.dtype for n, p in theirs.named_parameters()}


def test_save_after_a_cast_and_after_training_writes_what_is_there(sound, tmp_path):
    model = from_pretrained(sound).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "cast")
    assert from_pretrained(tmp_path / "cast").dtype == torch.bfloat16
    trained = from_pretrained(tmp_path / "cast", dtype="float32").train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    ids = torch.tensor([[3, 14, 15, 92, 65, 35]])
    with torch.autocast("cpu", torch.bfloat16):
        trained(ids, labels=ids).loss.backward()
    optimizer.step()  # in place, in memory that is mapped from the file
    trained.save_pretrained(tmp_path / "trained")
    reloaded = from_pretrained(tmp_path / "trained")
    assert reloaded.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), trained.parameters(), strict=True))
    assert from_pretrained(tmp_path / "cast").dtype == torch.bfloat16


def test_training_and_saving_in_place_never_change_the_file_that_was_loaded(sound, tmp_path):
    folder = make("sound", sound, tmp_path / "model")
    before = fingerprint(folder)
    model = from_pretrained(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    assert fingerprint(folder) == before
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.save_pretrained(folder)  # over the very files that the weights are mapped from
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in from_pretrained(folder).named_parameters())


# --------------------------------------------------------------------------------------------------------------- C10


def test_padded_but_consistent_vocabularies_load(sound, tmp_path):
    folder = make("sound", sound, tmp_path / "model")
    pad = torch.zeros(31, 64)
    rows = ("model.embed_tokens.weight", "lm_head.weight")
    weights(lambda t: t | {name: torch.cat([t[name], pad]) for name in rows}, vocab_size=128)(folder)
    assert (logits_of(from_pretrained(folder)) - hf_logits(folder)).abs().max() < 2e-4


# --------------------------------------------------------------------------------------------------------------- C12


def test_one_memory_under_two_names_of_a_pickle_becomes_two_parameters(sound, tmp_path):
    """As a tied model was pickled once, but under a config that does not tie: training one must not train the other."""
    folder = make("sound", sound, tmp_path / "model")
    tensors = tensors_of(folder)
    bins(change=lambda _: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})(folder)
    model = from_pretrained(folder)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    assert torch.equal(embedding, head)
    with torch.no_grad():
        head.add_(1)
    assert torch.equal(embedding + 1, head) and torch.equal(embedding, tensors["model.embed_tokens.weight"])


def test_chatglm_pickles_are_cut_like_its_safetensors(tmp_path):
    from ligermodels.checkpoints_convert.rewrites import to_chatglm_names

    keys = {"num_hidden_layers": 2, "head_dim": 16, "model_type": "glm"}
    config = {**{k: v for k, v in TINY.items() if k not in ("attention_bias", "mlp_bias")}, **keys}
    model = ligermodels.LigerGlm(ligermodels.GlmConfig.from_hf(config)).eval()
    model.save_pretrained(tmp_path)
    torch.save(to_chatglm_names({n: p.detach() for n, p in model.named_parameters()}), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(logits_of(from_pretrained(tmp_path)), logits_of(model))


# --------------------------------------------------------------------------------------------------------------- C15

LINEAR, LLAMA3 = {"factor": 2.0}, {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16
}  # fmt: skip
SPELLINGS = {
    "theta": [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
    "linear": [
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", **LINEAR}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", **LINEAR}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "type": "linear", **LINEAR}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, **LINEAR}},
    ],
    "llama3": [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
}


@pytest.mark.parametrize("group", SPELLINGS)
def test_spellings_of_rope_that_mean_the_same(group, sound, logits, tmp_path):
    found = []
    for number, keys in enumerate(SPELLINGS[group]):
        folder = make("sound", sound, tmp_path / str(number))
        config(**keys)(folder)
        found.append(logits_of(from_pretrained(folder)))
    assert all(torch.equal(other, found[0]) for other in found)
    assert (found[0] - hf_logits(tmp_path / "0")).abs().max() < 2e-4 < (found[0] - logits).abs().max()
    from_pretrained(tmp_path / "0").save_pretrained(tmp_path / "again")
    assert (hf_logits(tmp_path / "again") - found[0]).abs().max() < 2e-4


# ---------------------------------------------------------------------------------------------------------------- fp8


def fp8(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "name, scales, keys, block",
    [
        ("weight_scale_inv", (4, 3), {"weight_block_size": [32, 24]}, (32, 24)),  # 112 = 3·32 + 16, 64 = 2·24 + 16
        ("weight_scale_inv", (1, 1), {"weight_block_size": [128, 128]}, (112, 64)),
        ("weight_scale", (), {}, (112, 64)),
        ("weight_scale", (1,), {}, (112, 64)),
        ("weight_scale", (112, 1), {}, (1, 64)),
        ("weight_scale", (112,), {}, (1, 64)),
        ("weight_scale", (7, 2), {"config_groups": {"g": {"weights": {"block_structure": [16, 32]}}}}, (16, 32)),
    ],
)
@pytest.mark.parametrize("scale_dtype", [FP32, BF16])
@pytest.mark.parametrize("chunk", [4 << 20, 1024])
def test_fp8_is_read_as_numbers(name, scales, keys, block, scale_dtype, chunk, sound, tmp_path, monkeypatch):
    from ligermodels.checkpoints_convert import reading

    monkeypatch.setattr(reading, "CHUNK", chunk)  # 1024: four rows at a time
    scale = (torch.rand(scales, generator=torch.Generator().manual_seed(1)) + 0.5).to(scale_dtype)
    stored = {"weight": fp8((112, 64)), name: scale, "input_scale": torch.ones(1)}
    method = "compressed-tensors" if "config_groups" in keys else "fp8"
    folder = make("sound", sound, tmp_path / "model")
    quantised(stored, method, **keys)(folder)
    matrix = scale.double().reshape(-1, scales[1] if len(scales) == 2 else 1)
    wide = matrix.repeat_interleave(block[0], 0)[:112].repeat_interleave(block[1], 1)[:, :64]
    expected = stored["weight"].double() * wide
    with pytest.warns(UserWarning, match=r"1 tensors are fp8 and are read as numbers.*1 scales of activations"):
        model = from_pretrained(folder, dtype="float32")
    assert torch.allclose(model.get_parameter(UP).double(), expected, rtol=1e-7, atol=0)
    with pytest.warns(UserWarning, match="fp8"):
        half = from_pretrained(folder, dtype="bfloat16")
    assert torch.equal(half.get_parameter(UP), model.get_parameter(UP).bfloat16())
    half.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert torch.isfinite(hf_logits(tmp_path / "again")).all()


def test_fp8_of_two_shapes_has_no_dtype_of_its_own(sound, tmp_path):
    """Without a dtype in config.json the model is bf16, not fp8."""
    folder = make("sound", sound, tmp_path / "model")
    quantised({"weight": FP8, "weight_scale": torch.ones(1)}, "fp8")(folder)
    tensors = {n: t if t.dtype == torch.float8_e4m3fn else t.bfloat16() for n, t in tensors_of(folder).items()}
    put(folder, tensors)
    config(torch_dtype=..., quantization_config={"quant_method": "fp8"})(folder)
    with pytest.warns(UserWarning, match="fp8"):
        assert from_pretrained(folder).dtype == torch.bfloat16


def test_rows_of_fp8_keep_their_scales(sound, tmp_path):
    from ligermodels.checkpoints_convert.hf import open_checkpoint

    folder = make("sound", sound, tmp_path / "model")
    stored = {"weight": fp8((112, 64)), "weight_scale_inv": torch.rand(4, 3) + 0.5}
    quantised(stored, "fp8", weight_block_size=[32, 24])(folder)
    with pytest.warns(UserWarning, match="fp8"):
        checkpoint = open_checkpoint(folder)
    whole = checkpoint.read(UP, dtype=FP32)
    info = checkpoint.tensors[UP]
    part = Checkpoint(folder, {"part": info.rows(20, 112).rows(15, 77), "joined": type(info).joined(
        [info.rows(60, 112), info.rows(0, 60)], (112, 64)
    )})  # fmt: skip
    assert torch.equal(part.read("part", dtype=FP32), whole[35:97])
    assert torch.equal(part.read("joined", dtype=FP32), torch.cat([whole[60:], whole[:60]]))


# -------------------------------------------------------------------------------------------------------------- on CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["sound", "C12/bin_sharded", "quantised/fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [4 << 20, 1024])
def test_cuda_gets_the_same_bits(case, dtype, chunk, sound, tmp_path, monkeypatch):
    from ligermodels.checkpoints_convert import reading

    monkeypatch.setattr(reading, "CHUNK", chunk)
    if case == "quantised/fp8":
        folder = make("sound", sound, tmp_path / "model")
        scales = {"weight": fp8((112, 64)), "weight_scale_inv": torch.rand(4, 3) + 0.5}
        quantised(scales, "fp8", weight_block_size=[32, 24])(folder)
    else:
        folder = make(case, sound, tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, cuda = from_pretrained(folder, dtype=dtype), from_pretrained(folder, dtype=dtype, device="cuda")
    assert all(p.is_cuda for p in cuda.parameters())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(ours.parameters(), cuda.parameters(), strict=True))


@pytest.mark.gpu
def test_cuda_after_an_error_in_the_middle(sound, tmp_path):
    from ligermodels.checkpoints_convert.hf import open_checkpoint

    folder = make("sound", sound, tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    file = next(iter(checkpoint.tensors.values())).file
    file.write_bytes(file.read_bytes()[:-50_000])
    with pytest.raises(LigerError, match="ended while tensor"):
        dict(checkpoint.stream(device="cuda", ahead=1 << 20))
    torch.cuda.synchronize()
