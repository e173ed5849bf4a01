"""ImageProcessor against transformers' processors (PIL backend) on a real photo; prompts with enough image tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import family_checks as check
import pytest
import torch

from ligermodels import CheckpointError, ConfigError, Gemma3MultimodalConfig, LigerError, LlavaConfig, LlavaNextConfig
from ligermodels.image_processor import ImageProcessor

Image = pytest.importorskip("PIL.Image")
np = pytest.importorskip("numpy")

# What the published preprocessor_config.json files say.
CLIP_336 = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "resample": 3}
SIGLIP_896 = {"size": {"height": 896, "width": 896}, "resample": 2, "do_convert_rgb": None, "do_pan_and_scan": None}
GRIDS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PUBLISHED = {name: entry["config"] for name, entry in check.published("llava", "llava_next", "gemma3").items()}
LLAVA = LlavaConfig.from_hf(PUBLISHED["llava-hf/llava-1.5-7b-hf"])
NEXT = LlavaNextConfig.from_hf(PUBLISHED["llava-hf/llava-v1.6-mistral-7b-hf"])
GEMMA = Gemma3MultimodalConfig.from_hf(PUBLISHED["google/gemma-3-4b-it"])
SIGLIP_LLAVA = LlavaConfig.from_hf(
    PUBLISHED["llava-hf/llava-1.5-7b-hf"]
    | {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "image_size": 384,
            "patch_size": 14,
            "vision_use_head": False,
        }
    }
)
KINDS = {
    "CLIPImageProcessor": (LLAVA, CLIP_336),
    "LlavaImageProcessor": (LLAVA, CLIP_336 | {"do_pad": True}),
    "LlavaNextImageProcessor": (NEXT, CLIP_336 | {"image_grid_pinpoints": GRIDS}),
    "SiglipImageProcessor": (SIGLIP_LLAVA, {"size": {"height": 384, "width": 384}}),
    "Gemma3ImageProcessor": (GEMMA, SIGLIP_896),
}


def both(kind):
    """(transformers' processor with its PIL backend, ours), from the same settings."""
    import transformers.models as models

    family = {"CLIP": "clip", "Llava": "llava", "LlavaNext": "llava_next", "Siglip": "siglip", "Gemma3": "gemma3"}
    config, settings = KINDS[kind]
    name = family[kind.removesuffix("ImageProcessor")]
    __import__(f"transformers.models.{name}.image_processing_pil_{name}")
    theirs = getattr(getattr(getattr(models, name), f"image_processing_pil_{name}"), kind + "Pil")
    return theirs(**settings), ImageProcessor(config, settings | {"image_processor_type": kind})


@pytest.fixture(scope="module")
def photos():
    """A real photo (matplotlib ships it), cut to five aspect ratios, larger and smaller than a tower's input."""
    matplotlib = pytest.importorskip("matplotlib")
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    photo = Image.open(path).convert("RGB")
    boxes = [(0, 0, 512, 600), (20, 100, 500, 340), (100, 10, 230, 590), (50, 50, 371, 371), (200, 200, 299, 261)]
    return [photo.crop(box) for box in boxes]


def pixels(outputs):
    """pixel_values of transformers' BatchFeature as one tensor."""
    return torch.from_numpy(np.stack(outputs["pixel_values"]))


@pytest.mark.parametrize("kind", KINDS)
def test_pixel_values_are_those_of_transformers(kind, photos):
    theirs, ours = both(kind)
    expected, found = theirs(photos), ours(photos)
    assert found.pixel_values.dtype == torch.float32
    assert torch.equal(found.pixel_values, pixels(expected))
    if "image_sizes" in expected:
        assert found.image_sizes.tolist() == [list(size) for size in expected["image_sizes"]]
        assert len({tuple(image.shape) for image in ours(photos[:1]).pixel_values}) == 1
    else:
        assert found.image_sizes is None and list(found.arguments) == ["pixel_values"]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA", "CMYK"])
def test_any_mode_becomes_rgb_as_in_transformers(mode, photos):
    theirs, ours = both("CLIPImageProcessor")
    photo = photos[1].convert("RGBA")
    photo.putalpha(Image.linear_gradient("L").resize(photo.size))
    photo = photo.convert(mode)
    if mode == "P":
        photo.info["transparency"] = 3
    assert (ours(photo).pixel_values - pixels(theirs(photo))).abs().max() <= 1e-6


@pytest.mark.parametrize("layout", ["hwc", "chw", "rgba", "grey"])
def test_arrays_and_tensors_equal_transformers(layout, photos):
    theirs, ours = both("CLIPImageProcessor")
    array = np.array(photos[1])
    if layout == "rgba":
        array = np.concatenate(
            [array, np.arange(array[..., :1].size, dtype=np.uint32).astype(np.uint8).reshape(array[..., :1].shape)], -1
        )
    if layout == "grey":
        array = array[..., :1]
    expected = pixels(theirs(array))
    array = array.transpose(2, 0, 1) if layout == "chw" else array
    flipped = array[::-1].copy()[::-1]
    for given in (array, flipped, torch.from_numpy(array.copy()), array[..., 0] if layout == "grey" else array):
        assert (ours(given).pixel_values - expected).abs().max() <= 1e-6


def test_a_file_is_turned_as_the_camera_was_held(photos, tmp_path):
    ours = both("CLIPImageProcessor")[1]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photos[1].save(tmp_path / "turned.png", exif=exif)
    upright = ours(photos[1].rotate(-90, expand=True)).pixel_values
    assert torch.equal(ours(tmp_path / "turned.png").pixel_values, upright)
    assert torch.equal(ours(str(tmp_path / "turned.png")).pixel_values, upright)


def tokenizer_with(**special):
    """transformers' tokenizer of single characters that knows the special tokens of images."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {chr(i + 10): i for i in range(117)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(characters, unk_token="~"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=special, unk_token="~")


@pytest.mark.parametrize("model_type", ["llava", "llava_next", "gemma3"])
def test_prompts_are_expanded_as_transformers_does(model_type, photos):
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    gemma = model_type == "gemma3"
    names = ("boi_token", "eoi_token", "image_token") if gemma else ("image_token",)
    texts = ("<start_of_image>", "<end_of_image>", "<image_soft_token>") if gemma else ("<image>",)
    tokenizer = tokenizer_with(**dict(zip(names, texts, strict=True)))
    kind = {"llava": "CLIP", "llava_next": "LlavaNext", "gemma3": "Gemma3"}[model_type] + "ImageProcessor"
    image_processor, ours = both(kind)
    if gemma:
        theirs = Gemma3Processor(image_processor, tokenizer)
    else:
        wrapper = LlavaProcessor if model_type == "llava" else LlavaNextProcessor
        theirs = wrapper(image_processor, tokenizer, patch_size=14, vision_feature_select_strategy="default",
                         num_additional_image_tokens=1)  # fmt: skip
    sign = texts[0]
    prompts = [f"USER: {sign}\nand {sign} what? ASSISTANT:", f"{sign}"]
    expected = theirs(images=[photos[:2], photos[2:3]], text=prompts)
    inputs = ours(photos[:3])
    expanded = ours.expand(prompts, inputs)
    ids = [tokenizer(text).input_ids for text in expanded]
    assert ids == expected["input_ids"]
    assert ours.expand(prompts[1], ours(photos[2])) == expanded[1]
    image_id = tokenizer.convert_tokens_to_ids(texts[-1])
    assert [row.count(image_id) for row in ids] == [sum(inputs.tokens[:2]), inputs.tokens[2]]
    assert (inputs.pixel_values - pixels(expected)).abs().max() <= 1e-6


def test_as_many_placeholders_as_images(photos):
    ours = both("CLIPImageProcessor")[1]
    for text in ("no image", "<image> and <image>"):
        with pytest.raises(LigerError, match=r"has [02] times <image>, but there are 1 images"):
            ours.expand(text, ours(photos[0]))


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "LlavaNextImageProcessor", "Gemma3ImageProcessor"])
def test_the_files_of_a_folder_are_read_and_written(kind, photos, tmp_path):
    """preprocessor_config.json, as published, and processor_config.json, as transformers 5 saves."""
    theirs, ours = both(kind)
    (tmp_path / "config.json").write_text(json.dumps(ours.config.to_hf()))
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        ImageProcessor.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path)
    expected = ours(photos).pixel_values
    assert (tmp_path / "preprocessor_config.json").is_file()
    old = ImageProcessor.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings, "image_token": "<image>"}))
    (tmp_path / "preprocessor_config.json").unlink()
    new = ImageProcessor.from_pretrained(tmp_path)
    new.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text((tmp_path / "config.json").read_text())
    for processor in (old, new, ImageProcessor.from_pretrained(tmp_path / "saved")):
        assert torch.equal(processor(photos).pixel_values, expected)


def test_old_files_with_a_single_number_and_no_type():
    old = {"size": 336, "crop_size": 336, "feature_extractor_type": "CLIPFeatureExtractor"}
    image = Image.linear_gradient("L").resize((100, 70))
    expected = both("CLIPImageProcessor")[1](image).pixel_values
    assert torch.equal(ImageProcessor(LLAVA, old)(image).pixel_values, expected)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LLAVA, {}, "makes images of {'height': 224, 'width': 224}, the model reads 336"),
        (LLAVA, CLIP_336 | {"image_processor_type": "ViltImageProcessor"}, "'ViltImageProcessor' is not known"),
        (LLAVA, CLIP_336 | {"image_processor_type": "LlavaNextImageProcessor"}, "does not fit"),
        (LLAVA, CLIP_336 | {"size": {"longest_edge": 336}}, "size of the image processor"),
        (LLAVA, CLIP_336 | {"image_mean": 0.5}, "image_mean must be a list"),
        (NEXT, CLIP_336 | {"image_grid_pinpoints": [[336, 672]]}, "are not those of the model"),
        (GEMMA, SIGLIP_896 | {"do_pan_and_scan": True}, "do_pan_and_scan"),
    ],
)
def test_settings_that_make_no_sense_are_named(config, settings, message):
    with pytest.raises(ConfigError, match=message):
        ImageProcessor(config, settings)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("absent.png", "absent.png cannot be read as an image"),
        (np.zeros((4, 4, 3)), r"must be uint8 .* found torch.float64 \(4, 4, 3\)"),
        (np.zeros((5, 6, 7), dtype=np.uint8), "1, 3 or 4 channels"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "must be uint8 of shape"),
        (object(), "found object"),
        ([], "no images"),
    ],
    ids=["absent", "doubles", "channels", "batch", "object", "none"],
)
def test_what_is_no_image_is_named(image, message):
    with pytest.raises(LigerError, match=message):
        both("CLIPImageProcessor")[1](image)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    ours = both("CLIPImageProcessor")[1]
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(LigerError, match=r"ligermodels\[vision\]"):
        ours(np.zeros((4, 4, 3), dtype=np.uint8))
