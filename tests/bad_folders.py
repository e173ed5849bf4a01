"""Every kind of broken, odd and old model folder that users have met, made from one sound folder of a tiny Llama.

A case is ``(change, says)``: what is done to the folder, and what the error must say, or None if the folder loads with
the same logits as the sound one. Names begin with the number of the fault in the list of faults that were reported.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tiny import TINY

INDEX = "model.safetensors.index.json"
SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"
MARKER = Path("MARKER_code_was_run")


class Case(NamedTuple):
    change: Callable[[Path], None]
    says: str | None = None
    warns: str | None = None


class Malicious:
    """A pickle of it runs code when it is opened carelessly."""

    def __reduce__(self):
        return Path.touch, (MARKER,)


def sound_folder(folder: Path) -> Path:
    """Two shards, an index, config.json; weights of scale 0.25, so that any mix-up changes the logits."""
    from family_checks import scaled_hf

    scaled_hf(TINY).save_pretrained(folder, max_shard_size="500KB")
    assert (folder / SHARD_1).exists() and (folder / SHARD_2).exists()
    return folder


def make(case: str, sound: Path, folder: Path) -> Path:
    shutil.copytree(sound, folder)
    CASES[case].change(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------- changes


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in sorted(folder.glob("model*.safetensors")) for name, tensor in load_file(file).items()
    }


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """These tensors, in one file, in place of what was there."""
    for file in folder.glob("model*.safetensors*"):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def config(**keys: Any) -> Callable[[Path], None]:
    """Set keys of config.json; ``...`` removes one."""

    def change(folder: Path) -> None:
        value = {**copy.deepcopy(TINY), **keys}
        value = {name: v for name, v in value.items() if v is not ...}
        (folder / "config.json").write_text(json.dumps(value))

    return change


def content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor] | None], **keys: Any):
    def apply(folder: Path) -> None:
        tensors = tensors_of(folder)
        changed = change(tensors)
        put(folder, tensors if changed is None else changed)
        if keys:
            config(**keys)(folder)

    return apply


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    return weights(lambda tensors: {change(name): tensor for name, tensor in tensors.items()})


def added(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return weights(lambda all: all | {name.replace("__", "."): tensor for name, tensor in tensors.items()})


def remove(*names: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for name in names:
            for file in folder.glob(name):
                file.unlink()

    return apply


def then(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def write(name: str, text: bytes | dict) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else json.dumps(text).encode())

    return apply


def index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / INDEX).read_text())
        value["weight_map"] = change(value["weight_map"]) or value["weight_map"]
        (folder / INDEX).write_text(json.dumps(value))

    return apply


def swap_shards(folder: Path) -> None:
    (folder / SHARD_1).rename(folder / "x")
    (folder / SHARD_2).rename(folder / SHARD_1)
    (folder / "x").rename(folder / SHARD_2)


def hub_cache(folder: Path) -> None:
    """As the hub's client stores it: every file a link to a blob outside the snapshot."""
    blobs = folder.with_name("blobs")
    blobs.mkdir(exist_ok=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(Path("../blobs") / f"{number:064x}")


def half_downloaded(folder: Path) -> None:
    hub_cache(folder)
    (folder / SHARD_2).resolve().unlink()


def bins(*, shards: int = 1, change: Callable[[dict], Any] = lambda tensors: tensors, **options: Any):
    def apply(folder: Path) -> None:
        tensors = tensors_of(folder)
        remove("model*.safetensors*")(folder)
        if shards == 1:
            torch.save(change(tensors), folder / "pytorch_model.bin", **options)
            return
        names = sorted(tensors)
        weight_map = {}
        for number in range(shards):
            file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
            torch.save({name: tensors[name] for name in names[number::shards]}, folder / file)
            weight_map |= dict.fromkeys(names[number::shards], file)
        write("pytorch_model.bin.index.json", {"metadata": {}, "weight_map": weight_map})(folder)

    return apply


# ------------------------------------------------------------------------------------------------------- quantised

_UP = "model.layers.0.mlp.up_proj."


def quantised(tensors: dict[str, torch.Tensor], method: str | None = None, **keys: Any) -> Callable[[Path], None]:
    """``up_proj`` of layer 0 stored as ``tensors``."""

    def change(all: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del all[_UP + "weight"]
        return all | {_UP + name: tensor for name, tensor in tensors.items()}

    settings = {"quantization_config": {"quant_method": method, **keys}} if method else {}
    return weights(change, **settings)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


GPTQ = {"qweight": ints(8, 112), "qzeros": ints(1, 14), "g_idx": ints(64), "scales": torch.ones(1, 112)}
AWQ = {"qweight": ints(64, 14), "qzeros": ints(1, 14), "scales": torch.ones(1, 112)}
NF4 = {
    "weight": ints(3584, 1, dtype=torch.uint8),
    "weight.absmax": torch.ones(112),
    "weight.quant_map": torch.ones(16),
    "weight.quant_state.bitsandbytes__nf4": ints(90, dtype=torch.uint8),
}
INT8_BNB = {"weight": ints(112, 64, dtype=torch.int8), "SCB": torch.ones(112)}
INT8 = {"weight": ints(112, 64, dtype=torch.int8), "weight_scale": torch.ones(112, 1)}
PACKED = {"weight_packed": ints(112, 8), "weight_scale": torch.ones(112, 1), "weight_shape": ints(2)}
FP8 = torch.full((112, 64), 2.0).to(torch.float8_e4m3fn)


# ----------------------------------------------------------------------------------------------------------- the cases

CASES: dict[str, Case] = {
    "sound": Case(lambda folder: None),
    # C01: missing, cut short, something else
    "C01/missing_shard": Case(remove(SHARD_2), f"lacks 1 of the 2 files .*{SHARD_2}"),
    "C01/missing_shards": Case(remove(SHARD_1, SHARD_2), f"lacks 2 of the 2 files .*{SHARD_1}, {SHARD_2}"),
    "C01/one_shard_truncated": Case(
        content(SHARD_2, lambda c: c[: len(c) // 2]), rf"{SHARD_2} is cut short: \d+ bytes expected, \d+ found"
    ),
    "C01/two_shards_truncated": Case(
        then(content(SHARD_1, lambda c: c[:-1]), content(SHARD_2, lambda c: c[:9000])),
        f"{SHARD_1} is cut short.*1 more files are broken: {SHARD_2}",
    ),
    "C01/truncated_tail": Case(content(SHARD_1, lambda c: c[:-1]), f"{SHARD_1} is cut short"),
    "C01/truncated_in_header": Case(content(SHARD_1, lambda c: c[:100]), f"{SHARD_1} is cut short within its header"),
    "C01/longer": Case(content(SHARD_1, lambda c: c + b"\n"), f"{SHARD_1} is longer than its header says"),
    "C01/empty_file": Case(content(SHARD_1, lambda c: b""), f"{SHARD_1} is empty"),
    "C01/seven_bytes": Case(content(SHARD_1, lambda c: c[:7]), f"{SHARD_1} has only 7 bytes"),
    "C01/zeros": Case(content(SHARD_1, lambda c: bytes(len(c))), f"{SHARD_1} begins with zeros"),
    "C01/lfs_pointer": Case(content(SHARD_1, lambda c: LFS), f"{SHARD_1} .*git-LFS pointer for a file of 12345 bytes"),
    "C01/html_page": Case(content(SHARD_1, lambda c: HTML), f"{SHARD_1} .*web page"),
    "C01/bin_as_safetensors": Case(content(SHARD_1, lambda c: b"PK\x03\x04" + c), f"{SHARD_1} .*it is a pickle"),
    "C01/no_weights": Case(remove("model*"), r"holds no weights: neither model\.safetensors nor"),
    "C01/no_index": Case(remove(INDEX), f"{SHARD_1}, {SHARD_2} cannot be used without an index"),
    "C01/no_config": Case(remove("config.json"), r"holds no config\.json"),
    "C01/lfs_config": Case(write("config.json", LFS), r"config\.json is not valid JSON: it is a git-LFS pointer"),
    "C01/html_config": Case(write("config.json", HTML), r"config\.json is not valid JSON: it is a web page"),
    "C01/config_list": Case(write("config.json", b"[]"), r"config\.json must hold a JSON object, found list"),
    "C01/config_huge": Case(write("config.json", b" " * 3_000_000), r"config\.json has 3000000 bytes: far too large"),
    "C01/lfs_index": Case(write(INDEX, LFS), "index.json is not valid JSON: it is a git-LFS pointer"),
    "C01/index_cut": Case(content(INDEX, lambda c: c[: len(c) // 2]), "index.json is not valid JSON"),
    "C01/index_outside": Case(index(lambda m: m | {"model.norm.weight": "../x"}), "'../x', which is not a file of the"),
    "C01/index_absolute": Case(index(lambda m: m | {"model.norm.weight": "/etc/x"}), "'/etc/x', which is not a file"),
    "C01/index_names_nonsense": Case(index(lambda m: m | {"model.norm.weight": "\ud800"}), "lacks 1 of the 3 files"),
    "C01/index_names_too_long": Case(index(lambda m: m | {"model.norm.weight": "x" * 300}), "lacks 1 of the 3 files"),
    "C01/index_without_map": Case(write(INDEX, {"metadata": {}}), '"weight_map" must map'),
    "C01/index_names_more": Case(index(lambda m: m | {"ghost": SHARD_1}), "places tensor ghost in .*no shard holds it"),
    "C01/shards_swapped": Case(swap_shards, "but it is in .*: the index belongs to other shards"),
    "C01/folder_as_file": Case(
        then(remove("model*"), lambda folder: (folder / "model.safetensors").mkdir()), "holds no weights"
    ),
    "C01/hub_cache": Case(hub_cache),
    "C01/half_downloaded": Case(half_downloaded, f"lacks 1 of the 2 files .*{SHARD_2}"),
    "C01/stale_set": Case(write("model-00001-of-00003.safetensors", b"stale")),
    "C01/consolidated_beside": Case(write("consolidated.safetensors", b"stale")),
    "C01/index_and_single": Case(write("model.safetensors", b"stale"), warns="holds both .*: the shards are read"),
    "C01/other_sizes": Case(config(intermediate_size=113), r"up_proj.*\[112, 64\], the model has \[113, 64\]"),
    "C01/one_layer_less": Case(config(num_hidden_layers=3), "unexpected: model.layers.3"),
    "C01/more_layers_than_tensors": Case(config(num_hidden_layers=5000), "says 5000 layers, the files hold 39 tensors"),
    # C05: tied heads (the logits are other ones; test_bad_folders.py compares them with transformers')
    "C05/untied_no_head": Case(
        weights(lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"}), r"missing: lm_head\.weight"
    ),
    # C07: names
    "C07/module_prefix": Case(rename(lambda n: "module." + n), 'carry the prefix "module."'),
    "C07/orig_mod_prefix": Case(rename(lambda n: "_orig_mod." + n), 'carry the prefix "_orig_mod."'),
    "C07/no_model_prefix": Case(rename(lambda n: n.removeprefix("model.")), 'lack the prefix "model."'),
    "C07/nan_inv_freq": Case(
        added(
            model__rotary_emb__inv_freq=torch.full((16,), torch.nan),
            model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(16),
        )
    ),
    "C07/misspelt": Case(
        rename(lambda n: n.replace("layers.1.mlp.up_proj", "layers.1.mlp.up_porj")),
        r"(?s)missing: model\.layers\.1\.mlp\.up_proj\.weight.*up_porj\.weight \(in model\.safetensors\)",
    ),
    "C07/surplus_layer": Case(added(model__layers__4__mlp__up_proj__weight=torch.zeros(112, 64)), "unexpected: .*4"),
    "C07/denied_bias": Case(added(model__layers__0__self_attn__q_proj__bias=torch.zeros(128)), "unexpected: .*bias"),
    "C07/other_family": Case(config(model_type="qwen3"), "missing: .*q_norm"),
    "C07/unknown_family": Case(config(model_type="gpt2"), "model_type 'gpt2' is not in the zoo"),
    "C07/no_family": Case(config(model_type=...), "model_type None is not in the zoo"),
    # C09: dtype (which one is read: test_bad_folders.py)
    "C09/unknown": Case(config(torch_dtype="bfloat17"), "unknown dtype 'bfloat17'"),
    "C09/number": Case(config(torch_dtype=16), "dtype must be"),
    # C10: vocabulary rows
    "C10/embedding_short": Case(
        weights(lambda t: t | {"model.embed_tokens.weight": t["model.embed_tokens.weight"][:96]}),
        r"embed_tokens\.weight .*\[96, 64\], the model has \[97, 64\]",
    ),
    "C10/head_short": Case(
        weights(lambda t: t | {"lm_head.weight": t["lm_head.weight"][:96]}),
        r"lm_head\.weight .*\[96, 64\], the model has \[97, 64\]",
    ),
    "C10/config_larger": Case(config(vocab_size=128), r"embed_tokens\.weight .*\[97, 64\], the model has \[128, 64\]"),
    # C12: pickles
    "C12/bin_only": Case(bins()),
    "C12/bin_sharded": Case(bins(shards=3)),
    "C12/bin_parameters": Case(bins(change=lambda t: {n: torch.nn.Parameter(x) for n, x in t.items()})),
    "C12/bin_malicious": Case(bins(change=lambda t: t | {"x": Malicious()}), "holds more than tensors"),
    "C12/bin_nested": Case(bins(change=lambda t: {"state_dict": t}), "must hold dense tensors .*not so are state_dict"),
    "C12/bin_list": Case(bins(change=lambda t: [1]), "holds a list, expected tensors by name"),
    "C12/bin_sparse": Case(
        bins(change=lambda t: t | {"lm_head.weight": t["lm_head.weight"].to_sparse()}),
        "rebuild_sparse_tensor",
    ),
    "C12/bin_int8": Case(
        bins(change=lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.int8)}), "looks quantised.*int8"
    ),
    "C12/bin_old_format": Case(bins(_use_new_zipfile_serialization=False), "files of torch before 1.6"),
    "C12/bin_cut": Case(then(bins(), content("pytorch_model.bin", lambda c: c[: len(c) // 2])), "cut short or damaged"),
    "C12/bin_empty": Case(then(bins(), write("pytorch_model.bin", b"")), "pytorch_model.bin is empty"),
    "C12/bin_lfs": Case(then(bins(), write("pytorch_model.bin", LFS)), "pytorch_model.bin .*git-LFS pointer"),
    "C12/bin_html": Case(then(bins(), write("pytorch_model.bin", HTML)), "pytorch_model.bin .*web page"),
    "C12/bin_missing_shard": Case(
        then(bins(shards=3), remove("pytorch_model-00002*")),
        "lacks 1 of the 3 files .*-00002-of-00003.bin",
    ),
    "C12/bin_without_index": Case(
        then(bins(shards=2), remove("*.bin.index.json")), r"cannot be used without pytorch_model\.bin\.index\.json"
    ),
    "C12/bin_beside_safetensors": Case(write("pytorch_model.bin", b"never opened")),
    # C15: spellings of rope that must fail (those that are equal: test_bad_folders.py)
    "C15/unknown_type": Case(config(rope_scaling={"type": "bogus", "factor": 2.0}), "unknown rope_type 'bogus'"),
    "C15/no_type": Case(config(rope_scaling={"factor": 2.0}), "rope_scaling has no 'rope_type'"),
    "C15/no_factor": Case(config(rope_scaling={"rope_type": "linear"}), "factor"),
    "C15/text_factor": Case(config(rope_scaling={"rope_type": "linear", "factor": "two"}), "factor"),
    "C15/null": Case(config(rope_scaling=None)),
    # C18: keys that contradict each other
    "C18/heads_do_not_divide": Case(config(num_attention_heads=5, head_dim=None), "hidden_size 64 .*heads 5"),
    "C18/kv_heads_do_not_divide": Case(config(num_key_value_heads=3), "num_attention_heads 4 .*num_key_value_heads 3"),
    "C18/no_layers": Case(config(num_hidden_layers=0), "num_hidden_layers must be between 1"),
    "C18/layers_text": Case(config(num_hidden_layers="4"), "num_hidden_layers must be int, found '4'"),
    "C18/vocab_bool": Case(config(vocab_size=True), "vocab_size must be int, found True"),
    "C18/eps_nan": Case(config(rms_norm_eps=float("nan")), "rms_norm_eps must be between"),
    "C18/act": Case(config(hidden_act="relu"), "hidden_act 'relu'"),
    "C18/pad_outside": Case(config(pad_token_id=97), "pad_token_id 97 is not in a vocabulary of 97"),
    # other layouts
    "C20/meta": Case(
        then(remove("*"), write("params.json", {}), write("consolidated.00.pth", b"")),
        "Meta's layout.*`ligermodels convert FOLDER NEW_FOLDER`",
    ),
    "C20/mistral": Case(
        then(remove("*"), write("params.json", {}), write("consolidated.safetensors", b"")),
        "Mistral's layout.*ligermodels convert",
    ),
    "C20/litgpt": Case(then(remove("*"), write("lit_model.pth", b"")), "LitGPT's layout.*ligermodels convert"),
    "C20/gguf": Case(then(remove("*"), write("m.gguf", b"")), r"convert m\.gguf with `ligermodels convert"),
    "C20/adapter": Case(then(remove("*"), write("adapter_config.json", {})), "it is a LoRA adapter, not a model"),
    # quantised: named by config.json, or by the tensors' names
    "quantised/gptq": Case(quantised(GPTQ, "gptq", bits=4), r"looks quantised \(config.json says: gptq\)"),
    "quantised/gptq_unsaid": Case(quantised(GPTQ), "its names look like GPTQ"),
    "quantised/awq": Case(quantised(AWQ, "awq"), "config.json says: awq"),
    "quantised/awq_unsaid": Case(quantised(AWQ), "its names look like AWQ"),
    "quantised/nf4": Case(quantised(NF4, "bitsandbytes"), "config.json says: bitsandbytes"),
    "quantised/nf4_unsaid": Case(quantised(NF4), r"its names look like bitsandbytes \(4 bit\)"),
    "quantised/int8_bnb": Case(quantised(INT8_BNB), r"its names look like bitsandbytes \(8 bit\)"),
    "quantised/int8": Case(quantised(INT8, "compressed-tensors"), "config.json says: compressed-tensors"),
    "quantised/packed": Case(quantised(PACKED), "its names look like compressed-tensors"),
    "quantised/fp8_no_scale": Case(quantised({"weight": FP8}), "is F8_E4M3 without a scale"),
    "quantised/fp8_e5m2": Case(
        quantised({"weight": FP8.float().to(torch.float8_e5m2), "weight_scale": torch.ones(1)}, "fp8"), "is F8_E5M2"
    ),
    "quantised/fp8_of_another_scheme": Case(
        quantised({"weight": FP8, "weight_scale": torch.ones(1)}, "quark"), "config.json says: quark"
    ),
    "quantised/fp8_blocks_unsaid": Case(
        quantised({"weight": FP8, "weight_scale_inv": torch.ones(4, 2)}, "fp8"),
        r"\[4, 2\].*no weight_block_size",
    ),
    "quantised/fp8_blocks_of_other_size": Case(
        quantised({"weight": FP8, "weight_scale_inv": torch.ones(4, 2)}, "fp8", weight_block_size=[64, 32]),
        r"one a block .*blocks of \[64, 32\]",
    ),
}
