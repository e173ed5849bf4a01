"""LigerPhi3 against transformers: the same folder, the same numbers."""

from __future__ import annotations

import copy

import family_checks as check
import pytest
import torch
from tiny import TINY

from ligermodels import ConfigError, LigerError, LigerPhi3, Phi3Config

PHI3 = {k: v for k, v in TINY.items() if k not in ("mlp_bias", "head_dim")} | {
    "model_type": "phi3",
    "original_max_position_embeddings": 32,
    "sliding_window": None,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "pad_token_id": 0,
}


def long(kind="type", name="longrope", pairs=8, **more):
    """LongRoPE settings for heads of 2 · pairs rotated dimensions."""
    short, far = [1.0 + 0.02 * i for i in range(pairs)], [1.5 + 3.0 * i for i in range(pairs)]
    return {kind: name, "short_factor": short, "long_factor": far, **more}


BEYOND = {"max_position_embeddings": 128, "original_max_position_embeddings": 24}  # ids have 40 positions

VARIANTS = {
    "mini 4k, a window": PHI3 | {"sliding_window": 8, "num_key_value_heads": 4},
    "medium, grouped": PHI3 | {"sliding_window": 7, "num_attention_heads": 8, "num_key_value_heads": 2},
    "phi-4, window null": PHI3 | {"rope_theta": 250000, "pad_token_id": 96},
    "heads wider than H / A": PHI3 | {"head_dim": 32},
    "mini 128k": PHI3 | BEYOND | {"rope_scaling": long()},
    "yarn means longrope": PHI3 | BEYOND | {"rope_scaling": long(name="yarn"), "sliding_window": 8},
    "3.5, wide window": PHI3 | BEYOND | {"rope_scaling": long(), "sliding_window": 262144, "num_key_value_heads": 1},
    "below the border": PHI3 | {"rope_scaling": long(), "max_position_embeddings": 128,
                                "original_max_position_embeddings": 40},
    "v5 spelling": PHI3 | BEYOND | {"rope_theta": None, "rope_parameters": {
        **long("rope_type"), "rope_theta": 5e3, "original_max_position_embeddings": 9, "partial_rotary_factor": 1.0}},
    "4-mini, partial, tied": PHI3 | BEYOND | {"rope_scaling": long(pairs=6), "partial_rotary_factor": 0.75,
                                              "tie_word_embeddings": True},
    "partial, default rope": PHI3 | {"partial_rotary_factor": 0.5, "sliding_window": 8},
    "attention_factor": PHI3 | BEYOND | {"rope_scaling": long(attention_factor=1.3)},
}  # fmt: skip
VARIANTS = {name: {k: v for k, v in c.items() if v is not None or k != "rope_theta"} for name, c in VARIANTS.items()}
ONE = VARIANTS["mini 4k, a window"]


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_gradients_equal_transformers(name, tmp_path, ids):
    check.check_logits_loss_gradients(*check.make_pair(VARIANTS[name], tmp_path), ids)


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_equals_transformers_beyond_the_window_and_across_the_longrope_border(name, tmp_path, ids):
    """Prompts of 12 and 24 new tokens: the border at 24 is crossed, and where it is at 40 it is not."""
    check.check_generation(*check.make_pair(VARIANTS[name], tmp_path), ids)


@pytest.mark.parametrize("name", ["mini 4k, a window", "yarn means longrope", "4-mini, partial, tied", "v5 spelling"])
def test_what_we_save_transformers_loads(name, tmp_path, ids):
    hf, ours = check.make_pair(VARIANTS[name], tmp_path / "a")
    check.check_round_trip(hf, ours, ids, tmp_path / "b")


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_has_three_names(name, key, kind):
    """transformers 5.24 fails on "su"; as "longrope" the same numbers are compared above."""
    expected = Phi3Config.from_hf(VARIANTS["mini 128k"]).rope
    assert expected["rope_type"] == "longrope"
    assert Phi3Config.from_hf(PHI3 | BEYOND | {key: long(kind, name)}).rope == expected


def test_padding_chunks_and_packing(tmp_path, ids):
    _, ours = check.make_pair(ONE, tmp_path)
    check.check_left_padding(ours, ids)
    check.check_cached_chunks(ours, ids)
    check.check_packing(ours, ids)


def test_compiles(tmp_path, ids):
    """Without a window: one of 8 keys is one case more, for rows that are shorter than that."""
    check.check_compiles(check.make_pair(VARIANTS["phi-4, window null"], tmp_path)[1], ids)


def test_bf16(tmp_path):
    """Over 640 tokens: of 80, one that falls on the other side of a rounding can be half of the error."""
    check.make_pair(ONE, tmp_path)
    check.check_bf16(tmp_path, torch.randint(3, 97, (16, 40), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("prompt", [1, 8, 9, 10, 11])
def test_each_token_is_the_likeliest_after_all_before_it_at_any_distance_from_the_border(prompt, tmp_path, ids):
    """Of the defining recurrence, without any cache. The border is 9: prompts end below, on and beyond it."""
    config = VARIANTS["3.5, wide window"] | {"original_max_position_embeddings": 9}
    _, ours = check.make_pair(config, tmp_path)
    out = ours.generate(ids[:, :prompt], max_new_tokens=6, eos_token_id=[])
    for end in range(prompt, prompt + 6):
        with torch.no_grad():
            assert torch.equal(ours(out[:, :end]).logits[:, -1].argmax(-1), out[:, end])


def test_padding_in_all_rows_does_not_move_the_longrope_border(tmp_path, ids):
    """Rows of 12 of which the longest holds 8: the border at 9 is crossed by its tenth token, not by the row's."""
    config = VARIANTS["3.5, wide window"] | {"original_max_position_embeddings": 9}
    _, ours = check.make_pair(config, tmp_path)
    prompt, mask = ids[:1, :12], torch.ones(1, 12, dtype=torch.long)
    mask[0, :4] = 0
    padded = ours.generate(prompt, attention_mask=mask, max_new_tokens=6, eos_token_id=[])
    assert torch.equal(padded[:, 4:], ours.generate(prompt[:, 4:], max_new_tokens=6, eos_token_id=[]))


@pytest.mark.parametrize("level", ["none", "fast", "block"])
def test_resid_pdrop_drops_in_training_what_transformers_drops(level, tmp_path, ids):
    config = ONE | {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
    hf, ours = check.make_pair(config, tmp_path)
    ours.set_activation_memory(level)
    with torch.no_grad():
        assert (ours(ids).logits - hf(ids).logits).abs().max() <= 2e-4
    torch.manual_seed(5)
    expected = hf.train()(input_ids=ids, labels=ids).loss
    expected.backward()
    torch.manual_seed(5)
    loss = ours.train()(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - expected) <= 1e-5
    gradients = dict(hf.named_parameters())
    assert all(check.relative(p.grad, gradients[name].grad) <= 2e-5 for name, p in ours.named_parameters())


@pytest.mark.parametrize("name", check.published("phi3"))
def test_published_checkpoints_have_their_parameter_count(name):
    check.check_parameter_count(LigerPhi3, check.published("phi3")[name])


def test_missing_keys_take_the_defaults_of_the_class_in_transformers():
    from transformers import Phi3Config as HFConfig

    ours, theirs = Phi3Config.from_hf({"model_type": "phi3"}), HFConfig()
    names = set(theirs.to_dict()) & set(vars(ours)) - {"rope_parameters", "dtype"}
    assert {"sliding_window", "pad_token_id", "original_max_position_embeddings"} < names
    assert {n: getattr(ours, n) for n in names} == {n: getattr(theirs, n) for n in names}
    assert Phi3Config.from_hf({"rope_scaling": long(pairs=48)}).rope["original_max_position_embeddings"] == 4096


def test_the_embedding_row_of_padding_gets_no_gradient(tmp_path, ids):
    _, ours = check.make_pair(PHI3 | {"pad_token_id": 5}, tmp_path)
    ours(ids.masked_fill(ids == ids[0, 3], 5), labels=ids).loss.backward()
    assert not ours.model.embed_tokens.weight.grad[5].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 0}, "sliding_window .* 0"),
        ({"resid_pdrop": 1.5}, "resid_pdrop .* 1.5"),
        ({"embd_pdrop": -1.0}, "embd_pdrop"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"pad_token_id": 32000}, "pad_token_id 32000"),
        ({"partial_rotary_factor": -0.5}, "partial_rotary_factor"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        Phi3Config.from_hf(PHI3 | change)


def test_factors_that_do_not_fit_the_heads_are_refused():
    config = Phi3Config.from_hf(copy.deepcopy(PHI3) | {"rope_scaling": long(pairs=7)})
    with pytest.raises(LigerError, match=r"short_factor .* 8 numbers, found 7"):
        LigerPhi3(config)
