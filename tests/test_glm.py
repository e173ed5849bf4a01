"""LigerGlm and LigerGlm4 against transformers, and ChatGLM's own layout against the same GLM."""

from __future__ import annotations

import json

import family_checks as check
import pytest
import torch
from tiny import TINY

import ligermodels
from ligermodels import CheckpointError, ConfigError, Glm4Config, GlmConfig, LigerGlm, LigerGlm4
from ligermodels.checkpoints_convert.hf import open_checkpoint, save_checkpoint
from ligermodels.checkpoints_convert.rewrites import to_chatglm_names, to_model_names

ABSENT = object()  # the file does not have the key
GLM = TINY | {
    "model_type": "glm", "mlp_bias": ABSENT, "attention_bias": True, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7, "pad_token_id": 0,
}  # fmt: skip
GLM4 = GLM | {"model_type": "glm4", "rms_norm_eps": 1e-5}

VARIANTS = {
    "glm-4-9b-hf": GLM,
    "defaults": GLM | {"partial_rotary_factor": ABSENT, "attention_bias": ABSENT, "num_key_value_heads": ABSENT},
    "head_dim and eps absent": GLM | {"head_dim": ABSENT, "rms_norm_eps": ABSENT, "num_attention_heads": 2},
    "one key head, no bias": GLM | {"num_key_value_heads": 1, "attention_bias": False, "rope_theta": 5e6},
    "as many key heads, tied": GLM | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "a quarter turns": GLM | {"partial_rotary_factor": 0.25},
    "whole heads turn": GLM | {"partial_rotary_factor": 1.0},
    "v5 spelling": GLM | {
        "rope_theta": ABSENT, "partial_rotary_factor": ABSENT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.75},
    },
    "linear": GLM | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": GLM | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "glm4 9B": GLM4,
    "glm4 32B, no bias": GLM4 | {"attention_bias": False, "num_attention_heads": 6},
    "glm4 defaults": GLM4 | {"partial_rotary_factor": ABSENT, "attention_bias": ABSENT, "num_key_value_heads": ABSENT},
    "glm4 v5 spelling, tied": GLM4 | {
        "rope_theta": ABSENT, "partial_rotary_factor": ABSENT, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip


def without_absent(config):
    return {k: v for k, v in config.items() if v is not ABSENT}


VARIANTS = {name: without_absent(config) for name, config in VARIANTS.items()}
GLM, GLM4 = without_absent(GLM), without_absent(GLM4)
BOTH = ["glm-4-9b-hf", "glm4 9B"]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_gradients_equal_transformers(name, tmp_path, ids):
    check.check_logits_loss_gradients(*check.make_pair(VARIANTS[name], tmp_path), ids)


@pytest.mark.parametrize("name", [*BOTH, "one key head, no bias", "v5 spelling"])
def test_generation_equals_transformers(name, tmp_path, ids):
    check.check_generation(*check.make_pair(VARIANTS[name], tmp_path), ids)


@pytest.mark.parametrize("name", [*BOTH, "glm4 32B, no bias", "as many key heads, tied", "v5 spelling", "linear"])
def test_what_we_save_transformers_loads(name, tmp_path, ids):
    hf, ours = check.make_pair(VARIANTS[name], tmp_path / "a")
    check.check_round_trip(hf, ours, ids, tmp_path / "b")


@pytest.mark.parametrize("name", BOTH)
def test_padding_chunks_and_packing(name, tmp_path, ids):
    _, ours = check.make_pair(VARIANTS[name], tmp_path)
    check.check_left_padding(ours, ids)
    check.check_cached_chunks(ours, ids)
    check.check_packing(ours, ids)


@pytest.mark.parametrize("name", BOTH)
def test_bf16(name, tmp_path):
    """Over 640 tokens: of 80, one that falls on the other side of a rounding can be half of the error."""
    check.make_pair(VARIANTS[name], tmp_path)
    check.check_bf16(tmp_path, torch.randint(3, 97, (16, 40), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("level", ["none", "block"])
def test_activation_memory_changes_no_gradient_of_the_four_norms(level, tmp_path, ids):
    _, ours = check.make_pair(GLM4, tmp_path)
    parameters = list(ours.parameters())
    expected = torch.autograd.grad(ours(ids, labels=ids).loss, parameters)
    ours.set_activation_memory(level)
    found = torch.autograd.grad(ours(ids, labels=ids).loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_compiles(tmp_path, ids):
    check.check_compiles(check.make_pair(GLM4, tmp_path)[1], ids)


@pytest.mark.parametrize(
    ("model", "name"),
    [(m, n) for m, t in ((LigerGlm, ("glm", "chatglm")), (LigerGlm4, ("glm4",))) for n in check.published(*t)],
)
def test_published_checkpoints_have_their_parameter_count(model, name):
    check.check_parameter_count(model, check.published("glm", "glm4", "chatglm")[name])


@pytest.mark.parametrize("config_class", [GlmConfig, Glm4Config])
def test_missing_keys_take_the_defaults_of_the_class_in_transformers(config_class):
    import transformers

    ours, theirs = config_class.from_hf({}), getattr(transformers, config_class.__name__)()
    names = set(theirs.to_dict()) & set(vars(ours)) - {"rope_parameters", "dtype"}
    assert {"head_dim", "pad_token_id", "eos_token_id", "rms_norm_eps", "attention_bias"} < names
    assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
    assert ours.rope == theirs.rope_parameters


# ----------------------------------------------------------------------------------------------------------- ChatGLM

# As in the published files of glm-4-9b, without what the remote code alone reads.
CHATGLM = {
    "_name_or_path": "THUDM/glm-4-9b", "model_type": "chatglm", "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "padded_vocab_size": 97, "vocab_size": 97, "hidden_size": 64, "ffn_hidden_size": 112, "num_layers": 4,
    "num_attention_heads": 4, "kv_channels": 32, "multi_query_attention": True, "multi_query_group_num": 2,
    "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True, "fp32_residual_connection": False, "hidden_dropout": 0.0, "layernorm_epsilon": 1e-5,
    "rmsnorm": True, "post_layer_norm": True, "original_rope": True, "seq_length": 32, "rope_ratio": 500,
    "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
RATIO_500 = {"rope_theta": 5e6, "rms_norm_eps": 1e-5}
CHATGLM_VARIANTS = {  # (the remote config, the same in GLM's words)
    "glm-4-9b": ({}, RATIO_500),
    "chatglm2-6b": ({"_name_or_path": "THUDM/chatglm2-6b", "rope_ratio": ABSENT}, RATIO_500 | {"rope_theta": 1e4}),
    "chatglm2-6b-32k": ({"_name_or_path": "THUDM/chatglm2-6b-32k", "rope_ratio": 16},
                        RATIO_500 | {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 16}}),
    "chatglm3-6b-32k": ({"_name_or_path": "THUDM/chatglm3-6b-32k", "rope_ratio": 50}, RATIO_500 | {"rope_theta": 5e5}),
    "no bias, one group": ({"add_qkv_bias": ABSENT, "multi_query_group_num": ABSENT, "layernorm_epsilon": ABSENT},
                           RATIO_500 | {"attention_bias": False, "num_key_value_heads": 1}),
}  # fmt: skip


def remote_tensors(glm):
    """transformers' GLM in ChatGLM's layout: rows of query_key_value are [q | k | v]; all other tensors are renamed."""
    out = {"transformer.rotary_pos_emb.inv_freq": torch.ones(8)}
    given = {name: p.detach() for name, p in glm.named_parameters()}
    out["transformer.embedding.word_embeddings.weight"] = given["model.embed_tokens.weight"]
    out["transformer.encoder.final_layernorm.weight"] = given["model.norm.weight"]
    out["transformer.output_layer.weight"] = given["lm_head.weight"]
    for i in range(4):
        ours, theirs = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
        for kind in ("weight", "bias"):
            if f"{ours}self_attn.q_proj.{kind}" in given:
                parts = [given[f"{ours}self_attn.{x}_proj.{kind}"] for x in "qkv"]
                out[f"{theirs}self_attention.query_key_value.{kind}"] = torch.cat(parts)
        out[theirs + "self_attention.dense.weight"] = given[ours + "self_attn.o_proj.weight"]
        out[theirs + "mlp.dense_h_to_4h.weight"] = given[ours + "mlp.gate_up_proj.weight"]
        out[theirs + "mlp.dense_4h_to_h.weight"] = given[ours + "mlp.down_proj.weight"]
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[theirs + norm] = given[ours + norm]
    return out


def chatglm(folder, change=None, same=RATIO_500, **save):
    """transformers' GLM, whose weights are in ``folder`` in ChatGLM's layout."""
    hf = check.scaled_hf(GLM | same)
    save_checkpoint(folder, remote_tensors(hf), without_absent(CHATGLM | (change or {})), **save)
    return hf


@pytest.mark.parametrize("name", CHATGLM_VARIANTS)
def test_chatglm_computes_what_the_same_glm_computes(name, tmp_path, ids):
    hf = chatglm(tmp_path, *CHATGLM_VARIANTS[name])
    check.check_logits_loss_gradients(hf, ligermodels.from_pretrained(tmp_path), ids)


def test_a_model_from_chatglm_is_saved_as_a_glm_that_transformers_loads(tmp_path, ids):
    hf = chatglm(tmp_path / "a", max_shard_size="50KB")
    ours = LigerGlm.from_pretrained(tmp_path / "a")
    check.check_round_trip(hf, ours, ids, tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert saved["model_type"] == "glm"
    assert saved.keys() & CHATGLM.keys() <= {"architectures", "model_type", "torch_dtype", *vars(ours.config)}


def test_chatglm_tensors_survive_the_way_there_and_back_bit_for_bit(tmp_path):
    hf = chatglm(tmp_path, max_shard_size="50KB")
    there = to_model_names(open_checkpoint(tmp_path))
    tensors = dict(there.stream())
    given = dict(hf.named_parameters())
    assert tensors.keys() == given.keys()
    assert all(torch.equal(tensors[name], given[name]) for name in given)
    back, expected = to_chatglm_names(tensors), remote_tensors(hf)
    del expected["transformer.rotary_pos_emb.inv_freq"]
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) for name in expected)


def test_half_of_a_split_tensor_is_read_into_another_dtype(tmp_path):
    hf = chatglm(tmp_path)
    ours = ligermodels.from_pretrained(tmp_path, dtype=torch.float16)
    theirs = dict(hf.half().named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in ours.named_parameters())


def test_rope_scaling_in_a_chatglm_file_is_taken_as_it_stands():
    """The way out for a copy of chatglm2-6b-32k that lost its name."""
    scaling = {"rope_scaling": {"type": "linear", "factor": 16}, "rope_ratio": 16}
    rope = GlmConfig.from_hf(CHATGLM | scaling).rope
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 16, 1e4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("post_layer_norm", False),
        ("rmsnorm", False),
        ("add_bias_linear", True),
        ("apply_residual_connection_post_layernorm", True),
        ("multi_query_attention", False),
        ("fp32_residual_connection", True),
        ("original_rope", False),
        ("hidden_dropout", 0.1),
        ("quantization_bit", 4),
        ("pre_seq_len", 128),
        ("vision_config", {"hidden_size": 1792}),
        ("position_encoding_2d", True),
        ("rope_ratio", "500"),
        ("rope_ratio", 0),
        ("kv_channels", None),
    ],
)
def test_what_only_the_remote_code_can_do_is_refused(key, value):
    found = "null" if value is None else str(value).split(":")[0].strip("{'")
    with pytest.raises(ConfigError, match=f"{key}.*{found}"):
        GlmConfig.from_hf(CHATGLM | {key: value})


def test_the_default_of_the_remote_code_is_one_key_head_per_query_head_which_is_refused():
    with pytest.raises(ConfigError, match="multi_query_attention False"):
        GlmConfig.from_hf({k: v for k, v in CHATGLM.items() if k != "multi_query_attention"})


def test_a_tensor_that_cannot_be_split_is_named(tmp_path):
    tensors = remote_tensors(check.scaled_hf(GLM | RATIO_500))
    name = "transformer.encoder.layers.2.self_attention.query_key_value.weight"
    save_checkpoint(tmp_path / "a", tensors | {name: tensors[name][:-1]}, CHATGLM)
    with pytest.raises(CheckpointError, match=rf"{name} has 255 rows"):
        LigerGlm.from_pretrained(tmp_path / "a")
    tensors.pop("transformer.encoder.layers.2.self_attention.dense.weight")
    save_checkpoint(tmp_path / "b", tensors, CHATGLM)
    with pytest.raises(CheckpointError, match=r"layers.2\..*query_key_value\.\w+ has no 'dense.weight'"):
        LigerGlm.from_pretrained(tmp_path / "b")


@pytest.mark.parametrize(
    ("config_class", "config", "message"),
    [
        (GlmConfig, GLM | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (Glm4Config, GLM4 | {"hidden_act": "relu"}, "hidden_act 'relu'"),
        (GlmConfig, GLM | {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (GlmConfig, GLM4, "glm4"),
        (Glm4Config, GLM, "glm"),
        (Glm4Config, CHATGLM, "chatglm"),
        (GlmConfig, {k: v for k, v in GLM.items() if k != "pad_token_id"}, "pad_token_id 151329"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(config_class, config, message):
    with pytest.raises(ConfigError, match=message):
        config_class.from_hf(config)
