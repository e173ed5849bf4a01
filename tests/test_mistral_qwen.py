"""LigerMistral, LigerQwen2 and LigerQwen3 against transformers: the same folder, the same numbers."""

from __future__ import annotations

import family_checks as check
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TINY
from torch.multiprocessing.reductions import StorageWeakRef

from ligermodels import ConfigError, LigerLlama, LigerMistral, LigerQwen2, LigerQwen3, from_pretrained, qwen3

ABSENT = object()  # the file does not have the key
NO_KEYS_OF_THESE = {"attention_bias": ABSENT, "mlp_bias": ABSENT}
MISTRAL = TINY | NO_KEYS_OF_THESE | {"model_type": "mistral"}
QWEN2 = TINY | NO_KEYS_OF_THESE | {
    "model_type": "qwen2", "head_dim": ABSENT, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 4
}  # fmt: skip
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 32, "attention_bias": False}
ALTERNATING = ["full_attention", "sliding_attention"] * 2
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}

VARIANTS = {
    "mistral v0.1, a window": MISTRAL | {"sliding_window": 8},
    "mistral v0.2, no window": MISTRAL | {"sliding_window": None, "rope_theta": 1e6, "tie_word_embeddings": True},
    "mistral v0.3, defaults": MISTRAL | {"num_attention_heads": 16, "num_key_value_heads": ABSENT, "head_dim": 8},
    "mistral nemo, v5 spelling": MISTRAL | {
        "sliding_window": 8, "rope_theta": ABSENT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
    },
    "mistral large, head_dim null": MISTRAL | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": None},
    "mistral, a window of two": MISTRAL | {"sliding_window": 2},
    "mistral, biases not heard": MISTRAL | {"attention_bias": True, "mlp_bias": True, "sliding_window": 8},
    "qwen2": QWEN2,
    "qwen2, tied": QWEN2 | {"tie_word_embeddings": True, "rope_theta": 1e6, "attention_bias": False},
    "qwen2, window": QWEN2 | {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2, window null": QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
    "qwen2, layer_types": QWEN2 | {"use_sliding_window": True, "layer_types": ALTERNATING},
    "qwen2, heads absent": QWEN2 | {"num_attention_heads": 32, "head_dim": 4, "num_key_value_heads": ABSENT},
    "qwen2, heads null": QWEN2 | {"num_key_value_heads": None},
    "qwen2.5, yarn": QWEN2 | {"rope_scaling": {"type": "yarn", **YARN}, "num_key_value_heads": 1},
    "qwen3, tied": QWEN3 | {"tie_word_embeddings": True, "rope_theta": 5e6},
    "qwen3, head_dim absent": QWEN3 | {"head_dim": ABSENT, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3, biases": QWEN3 | {"attention_bias": True, "sliding_window": None},
    "qwen3, window": QWEN3 | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3, v5 spelling": QWEN3 | {
        "use_sliding_window": True, "layer_types": ALTERNATING,
        "rope_theta": ABSENT, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN},
    },
}  # fmt: skip
VARIANTS = {name: {k: v for k, v in c.items() if v is not ABSENT} for name, c in VARIANTS.items()}
MISTRAL, QWEN2, QWEN3 = ({k: v for k, v in c.items() if v is not ABSENT} for c in (MISTRAL, QWEN2, QWEN3))
ONE_OF_EACH = ["mistral v0.1, a window", "qwen2, window", "qwen3, v5 spelling"]
CLASSES = {"mistral": LigerMistral, "qwen2": LigerQwen2, "qwen3": LigerQwen3}


@pytest.fixture(params=VARIANTS, ids=str)
def pair(request, tmp_path):
    return check.make_pair(VARIANTS[request.param], tmp_path)


@pytest.fixture(params=ONE_OF_EACH, ids=str)
def ours(request, tmp_path):
    return check.make_pair(VARIANTS[request.param], tmp_path)[1]


def test_logits_loss_and_all_gradients_equal_transformers(pair, ids):
    check.check_logits_loss_gradients(*pair, ids)


def test_generation_with_cache_and_padding_equals_transformers(pair, ids):
    check.check_generation(*pair, ids)


def test_what_we_save_transformers_loads(pair, ids, tmp_path):
    check.check_round_trip(*pair, ids, tmp_path / "saved")


def test_left_padding_leaves_the_real_positions_alone(ours, ids):
    check.check_left_padding(ours, ids)


def test_cached_chunks_equal_one_pass(ours, ids):
    check.check_cached_chunks(ours, ids)


def test_packed_documents_equal_separate_runs(ours, ids):
    check.check_packing(ours, ids)


def test_a_compiled_step_is_one_graph(ids):
    """One full and one sliding layer, with normed heads: what the three families add to Llama.

    All lengths exceed the window: shorter rows, from which it hides nothing, are a graph of their own.
    """
    config = VARIANTS["qwen3, window"] | {"num_hidden_layers": 2, "sliding_window": 4}
    check.check_compiles(LigerQwen3(LigerQwen3.config_class.from_hf(config)), ids)


def test_bf16_is_as_close_to_the_truth_as_transformers_bf16(ours, ids, tmp_path):
    check.check_bf16(tmp_path, ids)


@pytest.mark.parametrize("name", check.published(*CLASSES))
def test_published_checkpoints_have_their_parameter_count(name):
    entry = check.published(*CLASSES)[name]
    check.check_parameter_count(CLASSES[entry["config"]["model_type"]], entry)


@pytest.mark.parametrize("given", [{}, {"sliding_window": 8}])
def test_mistral_slides_by_layer_where_the_file_says_so_as_transformers_loader_does(given, ids, tmp_path):
    """A file with layer_types is read as a Ministral there: the same tensors, windows by layer."""
    from transformers import AutoModelForCausalLM

    config = MISTRAL | given | {"layer_types": ALTERNATING}
    check.make_pair(config, tmp_path)
    ours, theirs = from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() <= 2e-4
    assert [layer.self_attn.window for layer in ours.model.layers] == [None, given.get("sliding_window", 4096)] * 2


def test_a_window_absent_is_4096_and_null_is_none():
    assert LigerMistral.config_class.from_hf(MISTRAL).window(0) == 4096
    assert LigerMistral.config_class.from_hf(MISTRAL | {"sliding_window": None}).window(0) is None


@pytest.mark.parametrize("base", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, [None] * 4),
        ({"max_window_layers": 0}, [None] * 4),
        ({"use_sliding_window": True}, [None] * 4),
        ({"use_sliding_window": True, "max_window_layers": 3}, [None] * 3 + [8]),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, [None] * 4),
        ({"use_sliding_window": True, "max_window_layers": 0, "layer_types": ALTERNATING}, [None, 8, None, 8]),
        ({"layer_types": ["full_attention"] * 4}, [None] * 4),
    ],
)
def test_which_layers_of_a_qwen_slide(base, given, windows):
    config = CLASSES[base["model_type"]].config_class.from_hf(base | given)
    assert [config.window(layer) for layer in range(4)] == windows


@pytest.mark.parametrize("kind", CLASSES)
def test_keys_that_a_file_lacks_have_transformers_defaults(kind):
    from transformers import AutoConfig

    expected = AutoConfig.for_model(kind).to_dict()
    ours = CLASSES[kind].config_class.from_hf({"model_type": kind}).to_hf()
    derived = {"architectures", "head_dim", "layer_types", "sliding_window", "rope_scaling", "torch_dtype"}
    shared = (ours.keys() & expected.keys()) - derived
    assert len(shared) >= 15
    assert {k: ours[k] for k in shared} == {k: expected[k] for k in shared}


def test_biases_are_where_the_family_has_them_whatever_the_file_says():
    for config, on_qkv, on_o in [
        (MISTRAL, False, False), (MISTRAL | {"attention_bias": True}, False, False),
        (QWEN2, True, False), (QWEN2 | {"attention_bias": False}, True, False),
        (QWEN2 | {"attention_bias": True, "mlp_bias": True}, True, False),
        (QWEN3, False, False), (QWEN3 | {"attention_bias": True}, True, True),
    ]:  # fmt: skip
        with torch.device("meta"):
            model = CLASSES[config["model_type"]](CLASSES[config["model_type"]].config_class.from_hf(config))
        attention = model.model.layers[0].self_attn
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert all((p.bias is not None) == on_qkv for p in qkv)
        assert (attention.o_proj.bias is not None) == on_o
        assert all(p.bias is None for p in model.model.layers[0].mlp.children())


def test_a_stored_copy_of_the_tied_head_is_tied_and_another_head_is_kept(ids, tmp_path):
    """Qwen3 up to 4B stores the head twice."""
    hf, _ = check.make_pair(VARIANTS["qwen3, tied"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    copy = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": copy}, tmp_path / "model.safetensors")
    ours = from_pretrained(tmp_path)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    with torch.no_grad():
        assert (ours(ids).logits - hf(ids).logits).abs().max() <= 2e-4
    save_file(tensors | {"lm_head.weight": copy * 2}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="lm_head"):
        ours = from_pretrained(tmp_path)
    with torch.no_grad():
        assert (ours(ids).logits - 2 * hf(ids).logits).abs().max() <= 4e-4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MISTRAL | {"sliding_window": 0}, "sliding_window.*0"),
        (MISTRAL | {"sliding_window": "8"}, "sliding_window.*'8'"),
        (MISTRAL | {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        (MISTRAL | {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "chunked_attention"),
        (MISTRAL | {"layer_types": ALTERNATING, "sliding_window": None}, "layer_types.*sliding_window"),
        (MISTRAL | {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (MISTRAL | {"hidden_act": "gelu"}, "hidden_act 'gelu'.*mistral"),
        (QWEN2 | {"layer_types": ALTERNATING}, "layer_types.*sliding_window"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window.*0"),
        (QWEN2 | {"use_sliding_window": 1}, "use_sliding_window must be bool, found 1"),
        ({k: v for k, v in QWEN2.items() if k != "num_key_value_heads"}, "num_key_value_heads 32"),
        (QWEN2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: qwen2"),
        (QWEN3 | {"head_dim": None}, "head_dim"),
        (QWEN3 | {"max_window_layers": None}, "max_window_layers"),
        (QWEN3 | {"hidden_act": "relu"}, "hidden_act 'relu'.*qwen3"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        CLASSES[config["model_type"]].config_class.from_hf(config)


def test_a_folder_of_another_family_is_refused(tmp_path):
    check.make_pair(VARIANTS["qwen2, tied"], tmp_path)
    for wrong in (LigerLlama, LigerMistral, LigerQwen3):
        with pytest.raises(ConfigError, match="qwen2"):
            wrong.from_pretrained(tmp_path)


@pytest.mark.parametrize("level", ["none", "fast", "block"])
def test_activation_memory_levels_give_the_same_gradients(ours, ids, level):
    expected = torch.autograd.grad(ours(ids, labels=ids).loss, list(ours.parameters()))
    ours.set_activation_memory(level)
    found = torch.autograd.grad(ours(ids, labels=ids).loss, list(ours.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("level", "kept"), [("none", True), ("fast", False)])
def test_qwen3_does_not_keep_rotated_heads_for_backward(level, kept, ids, monkeypatch):
    storages, plain = [], qwen3.attention

    def attention(q, k, *rest, **options):
        storages.extend(StorageWeakRef(x.untyped_storage()) for x in (q, k))
        return plain(q, k, *rest, **options)

    monkeypatch.setattr(qwen3, "attention", attention)
    model = LigerQwen3(LigerQwen3.config_class.from_hf(QWEN3))
    model.set_activation_memory(level)
    loss = model(ids, labels=ids).loss
    assert loss.requires_grad and len(storages) == 8
    assert all(s.expired() != kept for s in storages)
