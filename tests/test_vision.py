"""LigerLlava, LigerLlavaNext and Gemma 3 with images against transformers: the same folder, the same numbers."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import family_checks as check
import pytest
import torch
from tiny import TINY

import ligermodels
from ligermodels import (
    CheckpointError,
    ConfigError,
    LigerError,
    LigerGemma3,
    LigerGemma3Multimodal,
    LigerLlama,
    LigerLlava,
    LigerLlavaNext,
)

IMAGE = 96  # the image token
CLIP = {"model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": 28, "patch_size": 7, "projection_dim": 16}  # fmt: skip
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False, "hidden_act": "gelu_pytorch_tanh",
                 "layer_norm_eps": 1e-6}  # fmt: skip
TEXT = {k: v for k, v in TINY.items() if k != "torch_dtype"} | {"max_position_embeddings": 256}
LLAVA = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": IMAGE,
         "pad_token_id": 0, "ignore_index": -100, "projector_hidden_act": "gelu", "torch_dtype": "float32",
         "vision_feature_select_strategy": "default", "vision_feature_layer": -2, "tie_word_embeddings": False,
         "text_config": TEXT, "vision_config": CLIP}  # fmt: skip
QWEN2 = TEXT | {"model_type": "qwen2", "head_dim": 16}
MISTRAL = TEXT | {"model_type": "mistral", "sliding_window": 24}
NEXT = LLAVA | {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"],
                "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]}  # fmt: skip
GEMMA3 = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 6],
          "mm_tokens_per_image": 4, "image_token_index": IMAGE, "boi_token_index": 94, "eoi_token_index": 95,
          "torch_dtype": "float32", "vision_config": SIGLIP, "text_config": {
              "model_type": "gemma3_text", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112,
              "head_dim": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2,
              "sliding_window": 8, "query_pre_attn_scalar": 24,
              "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}  # fmt: skip

VARIANTS = {
    "llava": LLAVA,
    "llava, several layers, class token kept": LLAVA
    | {"vision_feature_layer": [-2, 0, 3], "vision_feature_select_strategy": "full"},
    "llava, siglip and qwen2": LLAVA
    | {"vision_config": SIGLIP, "text_config": QWEN2, "vision_feature_layer": -1,
       "vision_feature_select_strategy": "full"},
    "llava, mistral, tied, no projector bias": LLAVA
    | {"text_config": MISTRAL | {"tie_word_embeddings": True}, "multimodal_projector_bias": False},
    "llava next": NEXT,
    "llava next, mistral, siglip": NEXT
    | {"text_config": MISTRAL, "vision_config": SIGLIP, "vision_feature_select_strategy": "full",
       "vision_feature_layer": [-1, 1]},
    "gemma 3": GEMMA3,
    "gemma 3, more tokens": GEMMA3 | {"mm_tokens_per_image": 16},
}  # fmt: skip
ONE_OF_EACH = ["llava", "llava next", "gemma 3"]
one_of_each = pytest.mark.parametrize("pair", ONE_OF_EACH, indirect=True, ids=str)


@pytest.fixture(params=VARIANTS, ids=str)
def pair(request, tmp_path):
    return check.make_pair(VARIANTS[request.param], tmp_path)


SIZES = [(30, 60), (61, 29), (56, 57), (20, 90), (97, 31)]  # (height, width): five aspect ratios


def images(config: Any, count: int, sizes: list[tuple[int, int]] | None = None) -> dict[str, torch.Tensor]:
    """pixel_values of random images and, for LLaVA-NeXT, their sizes."""
    generator = torch.Generator().manual_seed(7)
    if config.model_type != "llava_next":
        return {"pixel_values": torch.randn(count, 3, 28, 28, generator=generator)}
    sizes = (sizes or SIZES)[:count]
    return {"pixel_values": torch.randn(count, 5, 3, 28, 28, generator=generator), "image_sizes": torch.tensor(sizes)}


def tokens_of(config: Any, image: int, sizes: list[tuple[int, int]] | None = None) -> int:
    if config.model_type == "llava_next":
        return config.image_tokens(*(sizes or SIZES)[image])
    return config.mm_tokens_per_image if config.model_type == "gemma3" else config.features_per_image


def prompt(config: Any, rows: list[list[int]], length: int, sizes: list[tuple[int, int]] | None = None) -> torch.Tensor:
    """(rows, length) ids in which each row's images (by number) stand among text, the last 9 ids always text."""
    generator = torch.Generator().manual_seed(1)
    out = torch.randint(3, 90, (len(rows), length), generator=generator)
    for row, numbers in enumerate(rows):
        position = 3 + row
        for image in numbers:
            count = tokens_of(config, image, sizes)
            out[row, position : position + count] = IMAGE
            position += count + 2
        assert position <= length - 9
    return out


@pytest.fixture
def batch(pair):
    """Two images in the first row, one in the second: ids, images, and the token types that a processor gives."""
    config = pair[1].config
    ids = prompt(config, [[0, 1], [2]], 130 if config.model_type == "llava_next" else 60)
    given = images(config, 3)
    hf_given = dict(given)
    if config.model_type == "gemma3":
        hf_given["token_type_ids"] = (ids == IMAGE).long()
    return ids, given, hf_given


def masked(ids: torch.Tensor) -> torch.Tensor:
    return ids.masked_fill(ids == IMAGE, -100)


def own_name(theirs: str) -> str:
    """transformers' name in memory as ours, which is the published one."""
    for old, new in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")):
        if theirs.startswith(old):
            return new + theirs.removeprefix(old)
    return theirs.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")


def check_parity(hf: Any, ours: Any, ids: torch.Tensor, given: dict, hf_given: dict) -> None:
    expected = hf(input_ids=ids, labels=masked(ids), **hf_given)
    expected.loss.backward()
    with torch.no_grad():
        error = (ours(ids, **given).logits - expected.logits).abs().max()
    assert error <= 2e-4, error
    loss = ours(ids, labels=masked(ids), **given).loss
    loss.backward()
    assert abs(loss - expected.loss) <= 1e-5
    gradients = {own_name(name): p.grad for name, p in hf.named_parameters()}
    own = {name: p.grad for name, p in ours.named_parameters()}
    assert own.keys() == gradients.keys()
    unused = {name for name, g in gradients.items() if g is None}
    assert unused == {name for name, g in own.items() if g is None}
    assert all(name.startswith("vision_tower.") for name in unused)  # layers above the one that is looked at
    # A constant added to all keys changes no softmax: the gradient of the tower's key biases is 0, but for rounding.
    zero = {name for name in own if name.startswith("vision_tower.") and name.endswith("k_proj.bias")}
    errors = {name: check.relative(own[name], g) for name, g in gradients.items() if name not in zero | unused}
    # Rounding of two models in a row: at these weights either library is up to 5e-5 from the same model in float64.
    assert max(errors.values()) <= 1e-4, max(errors.items(), key=lambda item: item[1])
    for name in zero - unused:
        assert own[name].norm() <= 1e-5 * own[name.replace("k_proj", "q_proj")].norm()


def test_logits_loss_and_all_gradients_equal_transformers(pair, batch):
    check_parity(*pair, *batch)


def test_images_of_five_aspect_ratios_equal_transformers(tmp_path):
    """LLaVA-NeXT, each size alone and all in one padded batch; features are cut and counted as transformers' are."""
    hf, ours = check.make_pair(NEXT, tmp_path)
    grids = {ours.config.grid(*size) for size in SIZES}
    assert len(grids) >= 3 and len({ours.config.image_tokens(*size) for size in SIZES}) == 5
    for size in SIZES:
        ids = prompt(ours.config, [[0]], 110, [size])
        given = images(ours.config, 1, [size])
        with torch.no_grad():
            assert (ours(ids, **given).logits - hf(input_ids=ids, **given).logits).abs().max() <= 2e-4, size
    ids, given = prompt(ours.config, [[0], [1], [2], [3], [4]], 110), images(ours.config, 5)
    check_parity(hf, ours, ids, given, given)


def test_all_sizes_have_the_tokens_and_features_of_transformers():
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches, unpad_image

    config = LigerLlavaNext.config_class.from_hf(
        check.published("llava_next")["llava-hf/llava-v1.6-mistral-7b-hf"]["config"]
    )
    for height, width in [(h, w) for h in (1, 13, 335, 337, 672, 1003, 4000) for w in (1, 17, 336, 500, 673, 1500)]:
        rows, columns = config.grid(height, width)
        assert image_size_to_num_patches([height, width], config.image_grid_pinpoints, 336) == 1 + rows * columns
        left = unpad_image(torch.empty(1, 24 * rows, 24 * columns), (height, width))
        assert config.image_tokens(height, width) == 576 + left.numel() + left.shape[1]


# ------------------------------------------------------------------------------------------ Gemma 3's two directions


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return check.make_pair(GEMMA3 | {"mm_tokens_per_image": 16}, tmp_path_factory.mktemp("gemma"))


def test_tokens_of_one_image_see_each_other_only_with_token_types(gemma):
    """Two images; 16 tokens an image and a window of 8, so that the window cuts the image in layers that have one."""
    hf, ours = gemma
    ids, given = prompt(ours.config, [[0, 1]], 60), images(ours.config, 2)
    types = (ids == IMAGE).long()
    with torch.no_grad():
        seeing, causal = hf(input_ids=ids, token_type_ids=types, **given).logits, hf(input_ids=ids, **given).logits
        assert (seeing - causal).abs().max() > 0.1
        for found, expected in (
            (ours(ids, **given), seeing),
            (ours(ids, token_type_ids=types, **given), seeing),
            (ours(ids, token_type_ids=types * 0, **given), causal),
        ):
            assert (found.logits - expected).abs().max() <= 2e-4


def test_neighbouring_images_and_padding_are_masked_as_in_transformers(gemma):
    """Images without text between are one block; the padding of a row stays out of sight."""
    hf, ours = gemma
    ids, given = prompt(ours.config, [[0, 1], [2]], 60), images(ours.config, 3)
    first = int((ids[0] == IMAGE).nonzero()[0])
    ids[0, first : first + 34] = torch.cat((torch.full((32,), IMAGE), torch.tensor([5, 6])))
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, -5:] = 0, 0
    with torch.no_grad():
        expected = hf(input_ids=ids, attention_mask=mask, token_type_ids=(ids == IMAGE).long(), **given).logits
        found = ours(ids, attention_mask=mask, **given).logits
    assert (found - expected)[mask.bool()].abs().max() <= 2e-4


def test_an_image_after_cached_text_sees_both_ways(gemma):
    """A second turn: the cache holds positions already, and the sliding layers see no more than their window of it."""
    _, ours = gemma
    ids, given = prompt(ours.config, [[0]], 60), images(ours.config, 1)
    start = int((ids[0] == IMAGE).nonzero()[0]) - 2
    cache = ours.make_cache(1, 60)
    with torch.no_grad():
        ours(ids[:, :start], cache=cache)
        parts = [ours(ids[:, start:30], cache=cache, **given).logits, ours(ids[:, 30:], cache=cache).logits]
        whole = ours(ids, **given).logits
    assert (torch.cat(parts, 1) - whole[:, start:]).abs().max() <= 2e-4


# -------------------------------------------------------------------------------------------------------- any family


@one_of_each
def test_generation_with_images_equals_transformers(pair, batch):
    """Greedy with a cache, a row of two images and a left-padded one of one image."""
    hf, ours = pair
    ids, given, hf_given = batch
    ids = ids.clone()
    ids[1] = ids[1].roll(4)
    hf_given = hf_given | ({"token_type_ids": (ids == IMAGE).long()} if "token_type_ids" in hf_given else {})
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = hf.generate(input_ids=ids, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=None,
                           pad_token_id=0, **hf_given)  # fmt: skip
    found = ours.generate(ids, attention_mask=mask, max_new_tokens=16, eos_token_id=[], **given)
    assert found.tolist() == expected.tolist()
    streamed = list(ours.stream(ids, attention_mask=mask, max_new_tokens=4, eos_token_id=[], **given))
    assert torch.equal(torch.stack(streamed, 1), found[:, ids.shape[1] : ids.shape[1] + 4])


@one_of_each
def test_a_row_equals_itself_alone(pair, batch):
    _, ours = pair
    ids, given, _ = batch
    with torch.no_grad():
        together = ours(ids, **given).logits
        for row, chosen in enumerate((slice(0, 2), slice(2, 3))):
            alone = ours(ids[row : row + 1], **{name: x[chosen] for name, x in given.items()}).logits
            assert (together[row] - alone[0]).abs().max() <= 2e-4


def test_save_then_transformers_loads_equal_logits_and_bits(pair, batch, tmp_path):
    from transformers import AutoModelForImageTextToText

    hf, ours = pair
    ids, _, hf_given = batch
    ours.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    assert type(again) is type(hf) and again.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids, **hf_given).logits, hf(input_ids=ids, **hf_given).logits)
    reloaded = ligermodels.from_pretrained(tmp_path / "saved")
    assert type(reloaded) is type(ours)
    assert all(torch.equal(a, b) for a, b in zip(reloaded.parameters(), ours.parameters(), strict=True))
    assert reloaded.config.to_hf() == ours.config.to_hf()


@one_of_each
def test_the_three_published_spellings_of_names_load_the_same(pair, tmp_path):
    from safetensors.torch import load_file, save_file

    hf, ours = pair
    saved = load_file(tmp_path / "model.safetensors")  # as transformers 5 saves
    memory = {name: p.detach().contiguous() for name, p in hf.named_parameters()}  # as it has them
    published = {name.replace("vision_tower.", "vision_tower.vision_model."): p for name, p in saved.items()}
    assert len({frozenset(names) for names in (saved, memory, published)}) == 3
    for number, tensors in enumerate((saved, memory, published)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text((tmp_path / "config.json").read_text())
        save_file(tensors, folder / "model.safetensors")
        loaded = dict(ligermodels.from_pretrained(folder).named_parameters())
        assert loaded.keys() == dict(ours.named_parameters()).keys()
        assert all(torch.equal(p, loaded[name]) for name, p in ours.named_parameters())
    save_file(saved | {"model.vision_tower.post_layernorm.bias": torch.ones(48)}, tmp_path / "0" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"vision_tower\.post_layernorm\.bias twice"):
        ligermodels.from_pretrained(tmp_path / "0")


@one_of_each
def test_image_positions_are_not_supervised(pair, batch):
    _, ours = pair
    ids, given, _ = batch
    with torch.no_grad():
        assert torch.equal(ours(ids, labels=ids, **given).loss, ours(ids, labels=masked(ids), **given).loss)


@one_of_each
def test_text_alone_needs_no_image(pair, ids):
    hf, ours = pair
    ids = ids.clamp(max=89)
    with torch.no_grad():
        assert (ours(ids).logits - hf(input_ids=ids).logits).abs().max() <= 2e-4
        assert (ours.language_model(ids).logits - ours(ids).logits).abs().max() == 0
    expected = hf.generate(ids[:, :12], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert ours.generate(ids[:, :12], max_new_tokens=8, eos_token_id=[]).tolist() == expected.tolist()


@one_of_each
@pytest.mark.parametrize("change", [-1, 1, "all", "no image"])
def test_tokens_and_features_that_do_not_match_are_both_counted(pair, batch, change):
    _, ours = pair
    ids, given, _ = batch
    ids = ids.clone()
    count = int((ids == IMAGE).sum())
    places = (ids[1] == IMAGE).nonzero().flatten()
    features = count
    if change == -1:  # as truncation leaves it
        ids[1, places[-1]] = 5
    elif change == 1:
        ids[1, places[0] - 1] = IMAGE
    elif change == "all":
        ids = ids.masked_fill(ids == IMAGE, 5)
    else:
        given, features = {}, 0
    found = int((ids == IMAGE).sum())
    with pytest.raises(LigerError, match=rf"{found} image tokens .*give {features} image features"):
        ours(ids, **given)


@one_of_each
def test_a_row_that_ends_within_an_image_is_named(pair, batch):
    """As many image tokens as features, but one of the first row's stands in the second."""
    _, ours = pair
    ids, given, _ = batch
    ids[0, (ids[0] == IMAGE).nonzero()[0]] = 5
    ids[1, 1] = IMAGE
    with pytest.raises(LigerError, match="row 0 ends within one"):
        ours(ids, **given)


@one_of_each
def test_a_warm_cache_may_hold_the_images_or_the_text_before_them(pair, batch):
    _, ours = pair
    ids, given, _ = batch
    options = {"max_new_tokens": 6, "eos_token_id": [], **given}
    expected = ours.generate(ids, **options)
    last = int((ids == IMAGE).any(0).nonzero()[-1]) + 1
    for cut, seen in ((2, {}), (last, given)):
        cache = ours.make_cache(2, ids.shape[1] + 6)
        with torch.no_grad():
            ours(ids[:, :cut], cache=cache, **seen)
        assert torch.equal(ours.generate(ids, cache=cache, **options), expected)
    cache = ours.make_cache(2, ids.shape[1] + 6)
    ours(ids[:, :2], cache=cache)
    with pytest.raises(LigerError, match=r"image tokens .* give 0 image features"):
        ours(ids[:, 2:], cache=cache)
    cache = ours.make_cache(2, ids.shape[1] + 6)
    with torch.no_grad():
        ours.language_model(ids[:, : last - 2], cache=cache)
    with pytest.raises(LigerError, match="cannot be told which images are"):
        ours.generate(ids, cache=cache, **options)


@one_of_each
def test_what_is_no_tensor_is_named(pair, batch):
    _, ours = pair
    ids, given, _ = batch
    for name in ("input_ids", "labels", "pixel_values"):
        arguments = {"input_ids": ids, "labels": ids, **given}
        with pytest.raises(LigerError, match=f"{name} must be a tensor, found list"):
            ours(**arguments | {name: arguments[name].tolist()})


def test_the_vocabulary_keeps_the_image_token(tmp_path):
    _, ours = check.make_pair(LLAVA, tmp_path)
    with pytest.raises(LigerError, match="image_token_index 96"):
        ours.resize_vocab(90)


def elements_kept(forward: Any) -> int:
    """How many elements autograd keeps of this forward. (Under foreign hooks "fast" keeps as much as "none".)"""
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        forward()
    return sum(sizes)


@one_of_each
def test_a_frozen_tower_keeps_nothing_for_backward(pair, batch):
    """One line freezes; then neither the tower records nor a gradient reaches it."""
    _, ours = pair
    ids, given, _ = batch
    ours.requires_grad_(False).multi_modal_projector.requires_grad_(True)
    assert elements_kept(lambda: ours.vision_tower(given["pixel_values"].flatten(0, -4), [-1])) == 0
    ours(ids, labels=ids, **given).loss.backward()
    trained = {name for name, p in ours.named_parameters() if p.grad is not None}
    assert trained == {name for name, _ in ours.named_parameters() if name.startswith("multi_modal_projector.")}


@one_of_each
def test_activation_memory_levels_give_the_same_gradients_and_keep_less(pair, batch):
    _, ours = pair
    ids, given, _ = batch
    expected, kept = None, {}
    for level in ("none", "fast", "attention", "block"):
        ours.set_activation_memory(level)
        kept[level] = elements_kept(lambda: ours.vision_tower(given["pixel_values"].flatten(0, -4), [-1]))
        loss = ours(ids, labels=ids, **given).loss
        gradients = torch.autograd.grad(loss, list(ours.parameters()), allow_unused=True)
        expected = expected or gradients
        for found, truth in zip(gradients, expected, strict=True):
            assert (found is None and truth is None) or torch.equal(found, truth)
    assert kept["block"] == kept["attention"] < kept["none"] / 3
    ours.set_activation_memory(["fast", "mlp"] * 2 + ["block"] * (ours.config.num_hidden_layers - 4))
    assert ours.vision_tower.activation_memory == ("fast" if ours.config.num_hidden_layers == 4 else "block")
    with pytest.raises(LigerError, match="text models"):
        ours.fit_memory(1.0, 1, 8)


@one_of_each
def test_bf16_is_as_close_to_the_truth_as_transformers_bf16(pair, batch, tmp_path):
    hf, _ = pair
    ids, given, hf_given = batch
    half = type(hf).from_pretrained(tmp_path, dtype=torch.bfloat16)
    truth, ours = copy.deepcopy(half).float(), ligermodels.from_pretrained(tmp_path, dtype="bfloat16")
    with torch.no_grad():
        reference = truth(input_ids=ids, **hf_given).logits
        theirs = (half(input_ids=ids, **hf_given).logits - reference).square().mean().sqrt()
        own = (ours(ids, **given).logits - reference).square().mean().sqrt()
    assert own <= 1.25 * theirs


def test_torch_compile_sees_one_graph(tmp_path):
    small = {"text_config": TEXT | {"num_hidden_layers": 1}, "vision_config": CLIP | {"num_hidden_layers": 1}}
    _, ours = check.make_pair(LLAVA | small | {"vision_feature_layer": -1}, tmp_path)
    ids, given = prompt(ours.config, [[0, 1], [2]], 60), images(ours.config, 3)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids, **given).loss
    loss.backward()
    assert abs(loss - ours(ids, labels=ids, **given).loss) <= 1e-5


def test_a_mismatch_that_cannot_be_read_makes_the_features_not_a_number(tmp_path):
    """Under torch.compile as on a GPU: no value is looked at, and no wrong loss comes out."""
    model = LigerLlava(LigerLlava.config_class.from_hf(LLAVA))
    ids = prompt(model.config, [[0, 1], [2]], 60)
    merge = torch.compile(model.merge, fullgraph=True, backend="eager", dynamic=True)
    for count in (47, 48, 49):
        embeddings = merge(ids, torch.ones(count, 64), 16)
        assert embeddings[ids == IMAGE].isnan().any() == (count != 48)
    without = merge(ids, None, 16)  # images that were forgotten
    assert without[ids == IMAGE].isnan().all() and without[ids != IMAGE].isfinite().all()


PUBLISHED = check.published("llava", "llava_next", "gemma3")
CLASSES = {"llava": LigerLlava, "llava_next": LigerLlavaNext, "gemma3": LigerGemma3Multimodal}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoints_have_their_parameter_count(name):
    check.check_parameter_count(CLASSES[PUBLISHED[name]["config"]["model_type"]], PUBLISHED[name])


def test_a_gemma3_folder_gives_the_whole_model_and_its_text_model_stands_alone(tmp_path, ids):
    hf, ours = check.make_pair(GEMMA3, tmp_path)
    assert isinstance(ours, LigerGemma3Multimodal) and isinstance(ours.language_model, LigerGemma3)
    assert type(LigerGemma3.from_pretrained(tmp_path)) is LigerGemma3Multimodal
    assert ours.config.eos_token_id == [1, 6]
    ours.language_model.save_pretrained(tmp_path / "text")
    alone = ligermodels.from_pretrained(tmp_path / "text")
    assert type(alone) is LigerGemma3
    with torch.no_grad(), warnings.catch_warnings():
        assert (alone(ids.clamp(max=89)).logits - hf(input_ids=ids.clamp(max=89)).logits).abs().max() <= 2e-4


def test_the_text_model_is_the_zoos_own(tmp_path):
    _, ours = check.make_pair(LLAVA, tmp_path)
    assert type(ours.language_model) is LigerLlama
    tied = LigerLlava(LigerLlava.config_class.from_hf(VARIANTS["llava, mistral, tied, no projector bias"]))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.to(torch.float64).lm_head.weight is tied.model.embed_tokens.weight
    state = tied.state_dict()
    del state["language_model.lm_head.weight"]
    tied.load_state_dict(state)


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("llava", {"vision_config": None}, "vision_config of a 'llava' must be an object"),
        ("llava", {"text_config": [1]}, "text_config of a 'llava' must be an object"),
        ("llava", {"text_config": TEXT | {"model_type": "gemma"}}, "text_config.model_type 'gemma'"),
        ("llava", {"vision_config": CLIP | {"model_type": "pixtral"}}, "vision_config.model_type 'pixtral'"),
        ("llava", {"vision_config": CLIP | {"hidden_act": "swish"}}, "hidden_act 'swish'"),
        ("llava", {"vision_config": CLIP | {"num_attention_heads": 5}}, "multiple of num_attention_heads"),
        ("llava", {"vision_config": CLIP | {"image_size": "28"}}, "vision_config.image_size must be int"),
        ("llava", {"vision_config": CLIP | {"patch_size": 29}}, "patch_size 29 exceeds"),
        ("llava", {"vision_config": SIGLIP | {"vision_use_head": True}}, "vision_use_head"),
        ("llava", {"vision_feature_layer": -5}, "vision_feature_layer -5"),
        ("llava", {"vision_feature_layer": []}, "vision_feature_layer"),
        ("llava", {"vision_feature_select_strategy": "cls"}, "'cls'"),
        ("llava", {"projector_hidden_act": "silu"}, "projector_hidden_act 'silu'"),
        ("llava", {"image_token_index": None}, "image_token_index"),
        ("llava_next", {"vision_feature_select_strategy": "full"}, "are no grid"),
        ("llava_next", {"image_grid_pinpoints": [[28, 57]]}, "image_grid_pinpoints"),
        ("llava_next", {"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ("gemma3", {"mm_tokens_per_image": 5}, "mm_tokens_per_image 5"),
        ("gemma3", {"mm_tokens_per_image": 9}, "mm_tokens_per_image 9"),
        ("gemma3", {"vision_config": CLIP}, "no class token"),
        ("gemma3", {"model_type": "llava"}, "'llava'"),
    ],
)
def test_a_config_that_makes_no_sense_is_named(model_type, change, message):
    config = {"llava": LLAVA, "llava_next": NEXT, "gemma3": GEMMA3}[model_type]
    with pytest.raises(ConfigError, match=message):
        CLASSES[model_type].config_class.from_hf({**config, **change})


def test_missing_keys_have_the_defaults_of_transformers():
    from transformers import AutoConfig

    for name, base in (("llava", LLAVA), ("llava_next", NEXT), ("gemma3", GEMMA3)):
        vision = {"model_type": base["vision_config"]["model_type"], "vision_use_head": False}
        least = {"model_type": name, "text_config": {}, "vision_config": vision}
        vision["image_size"] = 256 if name == "gemma3" else 336  # one that tokens an image and tiles are made for
        theirs, ours = AutoConfig.for_model(**json.loads(json.dumps(least))), CLASSES[name].config_class.from_hf(least)
        for key, value in theirs.to_dict().items():
            if key in vars(ours) and key not in ("architectures", "dtype", "text_config", "vision_config"):
                assert getattr(ours, key) == value, key
        assert ours.text_config.model_type == theirs.text_config.model_type
        for key, value in theirs.vision_config.to_dict().items():
            if key in vars(ours.vision_config):
                assert getattr(ours.vision_config, key) == value, key


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pixel_values": torch.zeros(3, 3, 28, 27)}, r"pixel_values must be .* \(N, 3, 28, 28\)"),
        ({"pixel_values": torch.zeros(3, 3, 28, 28, dtype=torch.uint8)}, "pixel_values must be floating"),
    ],
)
def test_pixel_values_that_do_not_fit_are_named(tmp_path, given, message):
    model = LigerLlava(LigerLlava.config_class.from_hf(LLAVA))
    with pytest.raises(LigerError, match=message):
        model(prompt(model.config, [[0, 1], [2]], 60), **given)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (None, "image_sizes must be"),
        (torch.tensor([[30, 60]]), "hold 3 images"),
        (torch.tensor([[30, 60], [0, 29], [56, 57]]), "image_sizes must be"),
        (torch.tensor([30, 60, 10]), "image_sizes must be"),
    ],
)
def test_image_sizes_that_do_not_fit_are_named(sizes, message):
    model = LigerLlavaNext(LigerLlavaNext.config_class.from_hf(NEXT))
    with pytest.raises(LigerError, match=message):
        model(prompt(model.config, [[0, 1], [2]], 130), **images(model.config, 3) | {"image_sizes": sizes})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_on_a_gpu_a_training_step_equals_transformers(name, tmp_path):
    """fp32: the loss and the gradients. bf16: no further from them than transformers in bf16, give or take noise."""
    hf, on_cpu = check.make_pair(VARIANTS[name], tmp_path)
    ids, given = prompt(on_cpu.config, [[0, 1], [2]], 130), images(on_cpu.config, 3)
    ids, given = ids.cuda(), {k: v if k == "image_sizes" else v.cuda() for k, v in given.items()}
    hf_given = given | ({"token_type_ids": (ids == IMAGE).long()} if name.startswith("gemma") else {})

    def step(model, dtype, options):
        model.zero_grad()
        options = {k: v.to(dtype) if k == "pixel_values" else v for k, v in options.items()}
        loss = model(input_ids=ids, labels=masked(ids), **options).loss
        loss.backward()
        grads = {own_name(n): p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        return loss.detach().float(), torch.cat([grads[n].flatten() for n in sorted(grads)])

    truth_loss, truth = step(hf.cuda().float(), torch.float32, hf_given)
    ours = ligermodels.from_pretrained(tmp_path, device="cuda")
    loss, grads = step(ours, torch.float32, given)
    assert abs(loss - truth_loss) <= 1e-4 and check.relative(grads, truth) <= 1e-3
    half = type(hf).from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()
    _, theirs = step(half, torch.bfloat16, hf_given)
    _, own = step(ligermodels.from_pretrained(tmp_path, device="cuda", dtype="bfloat16"), torch.bfloat16, given)
    assert check.relative(own, truth) <= 1.25 * check.relative(theirs, truth) + 0.01


@pytest.mark.gpu
def test_on_a_gpu_a_later_mismatch_is_not_a_number_and_nothing_waits(tmp_path):
    """The first batch is read and raises; later ones do not stall the GPU, so that a mismatch shows in the loss."""
    check.make_pair(LLAVA, tmp_path)
    ours = ligermodels.from_pretrained(tmp_path, device="cuda")
    ids, given = prompt(ours.config, [[0, 1], [2]], 60).cuda(), images(ours.config, 3)
    pixel_values = given["pixel_values"].cuda()
    with pytest.raises(LigerError, match="image features"):
        ours(ids, pixel_values=pixel_values[:2])
    ours(ids, labels=ids, pixel_values=pixel_values).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = ours(ids, labels=ids, pixel_values=pixel_values).loss
        loss.backward()
        wrong = ours(ids, labels=ids, pixel_values=pixel_values[:2]).loss
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite() and wrong.isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_on_a_gpu_generation_with_images_equals_the_cpu(name, tmp_path):
    """Captured steps after a prompt with images, one row padded on the left."""
    _, ours = check.make_pair(VARIANTS[name], tmp_path)
    ids, given = prompt(ours.config, [[0, 1], [2]], 130), images(ours.config, 3)
    ids[1] = ids[1].roll(4)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = ours.generate(ids, attention_mask=mask, max_new_tokens=48, eos_token_id=[], **given)
    on_gpu = ligermodels.from_pretrained(tmp_path, device="cuda")
    found = on_gpu.generate(ids, attention_mask=mask, max_new_tokens=48, eos_token_id=[], **given)
    assert found.cpu().tolist() == expected.tolist()


@pytest.mark.gpu
def test_on_a_gpu_long_rows_with_images_equal_the_cpu(tmp_path):
    """1,200 positions take FlexAttention, in which the tokens of an image must see each other too."""
    _, ours = check.make_pair(GEMMA3 | {"mm_tokens_per_image": 16}, tmp_path)
    ids, given = prompt(ours.config, [[0, 1], [2]], 1200).roll(700, dims=1), images(ours.config, 3)
    on_gpu = ligermodels.from_pretrained(tmp_path, device="cuda")
    with torch.no_grad():
        expected = ours(ids, **given).logits
        found = on_gpu(ids.cuda(), pixel_values=given["pixel_values"].cuda()).logits.cpu()
        assert (ours(ids, token_type_ids=ids * 0, **given).logits - expected).abs().max() > 0.1
    assert (found - expected).abs().max() <= 1e-3
