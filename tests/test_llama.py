"""LigerLlama against transformers: the same folder, the same numbers."""

from __future__ import annotations

import copy
import json
import shutil
from itertools import pairwise

import pytest
import torch
from family_checks import (
    check_bf16,
    check_logits_loss_gradients,
    check_parameter_count,
    make_pair,
    published,
    relative,
)
from tiny import TINY

from ligermodels import ConfigError, LigerError, LigerLlama, LlamaConfig, from_pretrained
from ligermodels.config import Config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [1.5 + i / 4 for i in range(16)]}
VARIANTS = {
    "llama2": {"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64},
    "llama3": {"rope_theta": 500000.0},
    "llama3.1, old spelling": {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama3.1": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3.2": {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 32.0}, "tie_word_embeddings": True},
    "llama3.2, v5 spelling": {
        "rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    },
    "codellama": {"rope_theta": 1e6, "vocab_size": 101},
    "tinyllama": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8},
    "smollm2": {"num_attention_heads": 6, "head_dim": 16, "tie_word_embeddings": True, "hidden_size": 96},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "padding row": {"pad_token_id": 5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "yarn, every option": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 16.0,
            "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False,
        }
    },
    "yarn, attention_factor": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}},
    "longrope": {
        "rope_scaling": {"rope_type": "longrope", **LONGROPE, "factor": 2.0, "original_max_position_embeddings": 16}
    },
    "longrope, short": {"rope_scaling": {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 256}},
}  # fmt: skip


@pytest.fixture(params=VARIANTS, ids=str)
def pair(request, tmp_path):
    """(transformers' model, ours), from one folder that transformers wrote and whose config.json is as published."""
    config = {**TINY, **VARIANTS[request.param]}
    config = {k: v for k, v in config.items() if v is not None or k == "pad_token_id"}
    return make_pair(config, tmp_path)


class OtherConfig(Config):
    model_type = "other"
    architecture = "OtherForCausalLM"


def test_logits_loss_and_all_gradients_equal_transformers(pair, ids):
    check_logits_loss_gradients(*pair, ids)


def test_greedy_generation_with_cache_equals_transformers(pair, ids):
    hf, ours = pair
    # Where LongRoPE's frequencies change, transformers fills the cache anew for Phi-3 and forgets to for Llama.
    cached = ours.config.rope["rope_type"] != "longrope"
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": cached}
    expected = hf.generate(ids[:, :12], max_new_tokens=24, **options)
    assert ours.generate(ids[:, :12], max_new_tokens=24, eos_token_id=[]).tolist() == expected.tolist()


def test_save_then_transformers_loads_equal_logits_and_bits(pair, ids, tmp_path):
    from transformers import AutoModelForCausalLM

    hf, ours = pair
    ours.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    assert (tmp_path / "saved/model.safetensors.index.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, hf(ids).logits)
    reloaded = LigerLlama.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), ours.parameters(), strict=True))
    assert reloaded.config.rope == ours.config.rope


@pytest.fixture
def tiny(tiny_folder):
    return LigerLlama.from_pretrained(tiny_folder)


@pytest.mark.parametrize("kind", [torch.bool, torch.long, torch.float32])
def test_left_padding_leaves_the_real_positions_alone(tiny, ids, kind):
    mask = torch.ones(2, 40, dtype=kind)
    mask[0, :6] = 0
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    padded = tiny(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.isfinite(padded).all()
    assert (padded[0, 6:] - tiny(ids[:1, 6:]).logits[0]).abs().max() <= 1e-4
    assert (padded[1] - tiny(ids[1:]).logits[0]).abs().max() <= 1e-4


def test_a_row_of_padding_is_finite_and_gets_no_gradient(tiny, ids):
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0] = 0
    labels = ids.masked_fill(mask == 0, -100)
    tiny(ids, attention_mask=mask, labels=labels).loss.backward()
    padded = {n: p.grad.clone() for n, p in tiny.named_parameters()}
    tiny.zero_grad()
    tiny(ids[1:], labels=ids[1:]).loss.backward()
    for name, p in tiny.named_parameters():
        assert torch.isfinite(padded[name]).all()
        assert relative(padded[name], p.grad) <= 1e-5


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_documents_equal_separate_runs(tiny, ids, rows):
    """Rows of 40 hold documents of 5, 1, 34 and of 17, 23 tokens."""
    bounds = [[0, 5, 6, 40], [0, 17, 40]][:rows]
    cu_seqlens = torch.tensor(sorted({40 * row + b for row, bs in enumerate(bounds) for b in bs}), dtype=torch.int32)
    batch = ids[:rows]
    logits = tiny(batch, cu_seqlens=cu_seqlens).logits
    empty = torch.cat((cu_seqlens[:1], cu_seqlens[:2], cu_seqlens[1:]))  # documents of length 0, one of them the first
    assert tiny(batch, labels=batch, cu_seqlens=empty).loss == tiny(batch, labels=batch, cu_seqlens=cu_seqlens).loss
    total, count = 0.0, 0
    for row, bs in enumerate(bounds):
        for start, end in pairwise(bs):
            document = batch[row : row + 1, start:end]
            assert (logits[row, start:end] - tiny(document).logits[0]).abs().max() <= 1e-4
            total = total + tiny(document, labels=document).loss * (end - start - 1)
            count += end - start - 1
    loss = tiny(batch, labels=batch, cu_seqlens=cu_seqlens).loss
    assert abs(loss * count - total) <= 1e-3
    parameters = list(tiny.parameters())
    expected = torch.autograd.grad(total / count, parameters)
    for a, b in zip(torch.autograd.grad(loss, parameters), expected, strict=True):
        assert relative(a, b) <= 1e-5


def test_cached_chunks_equal_one_pass(tiny, ids):
    with torch.no_grad():
        whole = tiny(ids).logits
        cache = tiny.make_cache(2, 40)
        parts = [tiny(ids[:, a:b], cache=cache).logits for a, b in [(0, 7), (7, 8), (8, 31), (31, 40)]]
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-4
    with pytest.raises(LigerError, match="holds 40 positions"):
        tiny(ids[:, :1], cache=cache)


def test_a_cache_in_training_keeps_what_backward_needs(tiny, ids):
    """Also where the keys need no gradient and the queries do: the second forward must not overwrite the first's."""
    tiny.requires_grad_(False)
    weight = tiny.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    past = tiny.make_cache(2, 40)
    tiny(ids[:, :20], cache=past)
    cache = copy.deepcopy(past)
    first = tiny(ids[:, 20:30], cache=cache, labels=ids[:, 20:30]).loss
    second = tiny(ids[:, 30:], cache=cache, labels=ids[:, 30:]).loss
    found = torch.autograd.grad(first + second, weight)[0]
    expected = torch.autograd.grad(tiny(ids[:, 20:30], cache=past, labels=ids[:, 20:30]).loss, weight)[0]
    expected += torch.autograd.grad(tiny(ids[:, 30:], cache=past, labels=ids[:, 30:]).loss, weight)[0]
    assert relative(found, expected) <= 1e-6


def test_a_cache_of_another_dtype_serves(tiny, ids):
    with torch.no_grad():
        cache = tiny.to(torch.bfloat16).make_cache(2, 40)
        assert tiny.float()(ids, cache=cache).logits.dtype == torch.float32


@pytest.mark.parametrize("level", ["none", "fast", "block"])
def test_activation_memory_levels_give_the_same_gradients(tiny, ids, level):
    expected = torch.autograd.grad(tiny(ids, labels=ids).loss, list(tiny.parameters()))
    tiny.set_activation_memory(level)
    found = torch.autograd.grad(tiny(ids, labels=ids).loss, list(tiny.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_fast_level_keeps_less_for_backward(tiny, ids):
    def kept(level):
        tiny.set_activation_memory(level)
        sizes = {}
        loss = tiny(ids, labels=ids).loss
        stack, seen = [loss.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for name in dir(node):
                if name.startswith("_raw_saved_") and not isinstance(getattr(node, name), tuple):
                    try:
                        saved = getattr(node, name).data
                    except RuntimeError:  # replaced by a recipe
                        continue
                    if isinstance(saved, torch.Tensor):
                        sizes[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
            stack += [f for f, _ in node.next_functions]
        return sum(sizes.values())

    assert kept("fast") < kept("none")


def test_micro_batches_with_num_items_equal_the_whole_batch(tiny, ids):
    labels = torch.cat((ids, ids.flip(1)))
    for row, keep in enumerate((3, 9, 20, 39)):
        labels[row, keep:] = -100
    batch = torch.cat((ids, ids.flip(1)))
    count = int((labels[:, 1:] != -100).sum())
    parameters = list(tiny.parameters())
    expected = torch.autograd.grad(tiny(batch, labels=labels).loss, parameters)
    for rows in (batch.split(1), batch.split(3)):
        start, found = 0, [torch.zeros_like(p) for p in parameters]
        for part in rows:
            out = tiny(part, labels=labels[start : start + len(part)], num_items_in_batch=torch.tensor(count))
            for total, g in zip(found, torch.autograd.grad(out.loss, parameters), strict=True):
                total += g
            start += len(part)
        assert max(relative(a, b) for a, b in zip(found, expected, strict=True)) <= 1e-5


@pytest.mark.parametrize("count", [7, 7.0, 0.5, torch.tensor(7), torch.tensor([7]), torch.tensor(7.0)], ids=str)
def test_num_items_may_be_any_number(tiny, ids, count):
    total = tiny(ids, labels=ids).loss * 78
    loss = tiny(ids, labels=ids, num_items_in_batch=count).loss
    assert loss.shape == () and relative(loss, total / float(count)) <= 1e-6


def test_nothing_to_learn_from_is_a_zero_loss_with_zero_gradients(tiny, ids):
    for batch, labels in [(ids, torch.full_like(ids, -100)), (ids[:, :1], ids[:, :1])]:
        tiny.zero_grad()
        loss = tiny(batch, labels=labels).loss
        loss.backward()
        assert loss.item() == 0.0
        assert all(p.grad is not None and not p.grad.any() for p in tiny.parameters())


def test_logits_are_left_out_while_training(tiny, ids):
    assert tiny(ids, labels=ids).logits is None
    assert tiny(ids, labels=ids, logits_to_keep=3).logits.shape == (2, 3, 97)
    assert tiny(ids, logits_to_keep=1).logits.shape == (2, 1, 97)
    with torch.no_grad():
        assert tiny(ids, labels=ids).logits.shape == (2, 40, 97)


def test_the_tie_survives_casts_and_copies():
    model = LigerLlama(LlamaConfig.from_hf({**TINY, "tie_word_embeddings": True}))
    for m in (model, copy.deepcopy(model), copy.deepcopy(model).to(torch.bfloat16)):
        assert m.lm_head.weight is m.model.embed_tokens.weight
        assert "lm_head.weight" not in dict(m.named_parameters())


def test_the_tie_survives_loading_and_new_memory(tmp_path):
    config = LlamaConfig.from_hf({**TINY, "tie_word_embeddings": True})
    source = LigerLlama(config)
    with torch.device("meta"):
        model = LigerLlama(config)
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    headless = {k: v for k, v in source.state_dict().items() if k != "lm_head.weight"}  # as a safetensors file has it
    for assign in (False, True):
        model.load_state_dict(headless, assign=assign)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, source.lm_head.weight)


def test_what_could_not_be_loaded_is_not_saved(tiny, tmp_path):
    untied = copy.deepcopy(tiny)
    untied.config.tie_word_embeddings = True
    shorter = copy.deepcopy(tiny)
    del shorter.model.layers[-1]
    wrapped = copy.deepcopy(tiny)
    torch.nn.utils.parametrizations.weight_norm(wrapped.lm_head)
    for model, name in [(untied, "lm_head"), (shorter, "layers.3"), (wrapped, "lm_head")]:
        with pytest.raises(LigerError, match=name):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_model_of_compiled_layers_saves_plain_names(tiny, ids, tmp_path):
    expected = tiny(ids).logits
    for i, layer in enumerate(tiny.model.layers):
        tiny.model.layers[i] = torch.compile(layer)
    tiny.save_pretrained(tmp_path)
    assert torch.equal(LigerLlama.from_pretrained(tmp_path)(ids).logits, expected)


def test_packed_documents_and_far_positions_under_compile(tiny, ids):
    compiled = torch.compile(tiny, backend="eager", fullgraph=True)
    bounds = torch.tensor([0, 5, 80], dtype=torch.int32)
    assert torch.equal(compiled(ids, cu_seqlens=bounds).logits, tiny(ids, cu_seqlens=bounds).logits)
    model = LigerLlama(LlamaConfig.from_hf({**TINY, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    far = torch.arange(60, 100)[None]
    expected = model(ids, position_ids=far).logits
    assert torch.equal(torch.compile(model, backend="eager")(ids, position_ids=far).logits, expected)


def test_casting_the_model_leaves_rope_in_fp32(tiny):
    exact = tiny.model.rotary_emb.inv_freq.clone()
    tiny.to(torch.bfloat16)
    assert torch.equal(tiny.model.rotary_emb.inv_freq, exact)


def test_bf16_is_as_close_to_the_truth_as_transformers_bf16(tiny_folder, ids):
    check_bf16(tiny_folder, ids)


PUBLISHED = published("llama")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_their_parameter_count(name):
    check_parameter_count(LigerLlama, PUBLISHED[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "bogus", "factor": 2.0}}, "bogus"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, "factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": None, "hidden_size": 66}, "num_attention_heads"),
        ({"hidden_act": "relu"}, "relu"),
        ({"torch_dtype": "float7"}, "float7"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings"),
        ({"pad_token_id": 97}, "pad_token_id"),
        ({"eos_token_id": ["2"]}, "eos_token_id"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"initializer_range": -0.02}, "initializer_range"),
        ({"attention_dropout": 2}, "attention_dropout"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "long_factor": ["1"] * 16}}, "long_factor"),
        ({"rope_scaling": {"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 1}}, "above 1"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_hf({**TINY, **change})


def test_the_rope_dict_beats_the_top_level_and_theta_survives_saving():
    config = LlamaConfig.from_hf(
        {**TINY, "rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}
    )
    assert config.rope["rope_theta"] == 7e4
    assert LlamaConfig.from_hf(config.to_hf()).rope == config.rope


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "longrope", **LONGROPE, "long_factor": [2.0] * 15}},
        {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"head_dim": 15},
    ],
)
def test_rope_settings_that_do_not_fit_the_heads_are_refused_when_the_model_is_built(change):
    with pytest.raises(ConfigError, match=r"factor|dimension"):
        LigerLlama(LlamaConfig.from_hf({**TINY, **change}))


def test_every_rope_setting_survives_saving():
    """partial_rotary_factor is no business of Llama's, but of the families that share Config."""
    for given in ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "llama3", **LLAMA3}, {"rope_type": "default"}):
        config = OtherConfig.from_hf({"rope_parameters": {**given, "rope_theta": 5e5, "partial_rotary_factor": 0.5}})
        assert OtherConfig.from_hf(config.to_hf()).rope == config.rope


def test_unknown_keys_of_a_config_are_written_back():
    config = LlamaConfig.from_hf({**TINY, "pretraining_tp": 1, "my_note": {"a": [1]}})
    assert config.to_hf()["my_note"] == {"a": [1]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, ids: m(ids.masked_fill(ids == ids[0, 0], 97)), "token id 97"),
        (lambda m, ids: m(ids.float()), "int64"),
        (lambda m, ids: m(ids[0]), "batch, length"),
        (lambda m, ids: m(ids[:, :0]), "non-empty"),
        (lambda m, ids: m(ids, labels=ids[:, :-1]), "labels"),
        (lambda m, ids: m(ids, attention_mask=torch.ones(2, 39)), "attention_mask"),
        (lambda m, ids: m(ids, position_ids=torch.arange(40)[None] % 20), "cu_seqlens"),
        (lambda m, ids: m(ids, position_ids=torch.arange(39)[None]), "position_ids"),
        (lambda m, ids: m(ids, cu_seqlens=torch.tensor([0, 40])), "80"),
        (lambda m, ids: m(ids, cu_seqlens=torch.tensor([0, 80]), attention_mask=torch.ones(2, 40)), "cu_seqlens"),
        (lambda m, ids: m(ids, cache=m.make_cache(3, 40)), "3 rows"),
        (lambda m, ids: m.set_activation_memory("tiny"), "tiny"),
        (lambda m, ids: m(ids.tolist()), "input_ids must be a tensor"),
        (lambda m, ids: m(ids, labels=ids.tolist()), "labels must be a tensor"),
        (lambda m, ids: m(ids, cu_seqlens=[0, 80]), "cu_seqlens must be a tensor"),
        (lambda m, ids: m(ids, attention_mask=ids.tolist()), "attention_mask must be a tensor"),
        (lambda m, ids: m(ids, attention_mask=torch.zeros(2, 40) - 1e9), "added to the scores"),
        (lambda m, ids: m(ids, position_ids=torch.arange(40.0)[None]), "position_ids must be int64"),
        (lambda m, ids: m(ids, logits_to_keep=-1), "logits_to_keep"),
        (lambda m, ids: m(ids, logits_to_keep=2.0), "logits_to_keep"),
        (lambda m, ids: m(ids, labels=ids, num_items_in_batch=-1), "num_items_in_batch"),
        (lambda m, ids: m(ids, labels=ids, num_items_in_batch=torch.tensor([1, 2])), "num_items_in_batch"),
        (lambda m, ids: m(ids, labels=ids, num_items_in_batch=float("nan")), "num_items_in_batch"),
        (lambda m, ids: m(ids, labels=ids, num_items_in_batch=float("inf")), "num_items_in_batch"),
        (lambda m, ids: m(ids, labels=ids, num_items_in_batch=torch.tensor(True)), "num_items_in_batch"),
        (lambda m, ids: m(ids, labels=ids.to(torch.uint8)), "labels must be int64 or int32"),
        (lambda m, ids: m(ids, cache="cache"), "make_cache"),
        (lambda m, ids: m(ids, cache=LigerLlama(LlamaConfig(97, 8, 8, 2, 2)).make_cache(2, 40)), "another model"),
        (lambda m, ids: m.make_cache(0, 40), "batch_size"),
        (lambda m, ids: m.make_cache(2, 10**12), "max_length"),
        (lambda m, ids: LigerLlama(TINY), "LlamaConfig"),
        (lambda m, ids: from_pretrained(None), "None"),
    ],
)
def test_inputs_that_do_not_fit_are_named(tiny, ids, call, message):
    with pytest.raises(LigerError, match=message):
        call(tiny, ids)


@pytest.mark.parametrize("label", [97, -1])
def test_a_label_out_of_range_is_named(tiny, ids, label):
    with pytest.raises(ValueError, match=str(label)):
        tiny(ids, labels=ids.masked_fill(ids == ids[0, 5], label))


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_broken_generation_config_is_named(tiny_folder, tmp_path, content):
    shutil.copytree(tiny_folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(content)
    with pytest.raises(LigerError, match=r"generation_config\.json"):
        LigerLlama.from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("device", ["banana", "cuda:4000", 4000])
def test_a_device_that_is_not_there_is_named(tiny_folder, device):
    with pytest.raises(LigerError, match=str(device)):
        LigerLlama.from_pretrained(tiny_folder, device=device)


def test_a_folder_of_another_family_is_refused(tiny_folder, tmp_path):
    config = json.loads((tiny_folder / "config.json").read_text()) | {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="mamba"):
        LigerLlama.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="mamba"):
        from_pretrained(tmp_path)


def test_what_will_disappoint_is_warned_of(tiny, ids):
    with pytest.warns(UserWarning, match="max_position_embeddings is 32"):
        tiny(ids)
    with pytest.warns(UserWarning, match="no label is supervised"):
        tiny(ids[:, :8], labels=torch.full_like(ids[:, :8], -100))
    with pytest.warns(UserWarning, match="greedy"):
        tiny.generate(ids[:, :8], max_new_tokens=1, top_p=0.9)
