"""Folders in Hugging Face layout: what is read, what is refused and how it says so, what is written."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from bad_folders import HTML, LFS, MARKER, SHARD_1, SHARD_2, Malicious
from convert_cases import same
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from tiny import TINY
from tiny_llava import write_tiny_llava

import ligermodels
from ligermodels import base
from ligermodels.checkpoints_convert import hf, reading
from ligermodels.checkpoints_convert.hf import check_names, open_checkpoint, read_config, save_checkpoint
from ligermodels.checkpoints_convert.save import parse_size
from ligermodels.errors import CheckpointError, ConfigError, LigerError
from ligermodels.layers.meta import on_meta

CONFIG = {"model_type": "llama", "vocab_size": 97}


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (97, 16), "model.norm.weight": (16,), "lm_head.weight": (97, 16)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards, 6208 + 64 and 6208 bytes of weights."""
    save_checkpoint(tmp_path / "model", some_tensors(), CONFIG, max_shard_size="6.5KB")
    return tmp_path / "model"


@pytest.fixture
def single(tmp_path) -> Path:
    save_checkpoint(tmp_path / "single", some_tensors(), CONFIG)
    return tmp_path / "single"


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("target", [None, torch.float32, torch.bfloat16])
def test_reads_what_safetensors_wrote(tmp_path, dtype, target):
    tensors = {name: tensor.to(dtype) for name, tensor in some_tensors().items()}
    tensors |= {"scalar": torch.tensor(2.5, dtype=dtype), "empty": torch.empty(0, 3, dtype=dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert same(dict(checkpoint.stream(dtype=target)), {n: t.to(target or dtype) for n, t in tensors.items()})
    assert torch.equal(checkpoint.read("lm_head.weight"), tensors["lm_head.weight"])
    assert checkpoint.tensors["scalar"].shape == () and checkpoint.tensors["scalar"].dtype == dtype


def test_a_cast_longer_than_the_staging_buffer(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK", 256)
    save_checkpoint(tmp_path, some_tensors(), CONFIG)
    read = dict(open_checkpoint(tmp_path).stream(dtype=torch.bfloat16))
    assert same(read, {name: tensor.bfloat16() for name, tensor in some_tensors().items()})


def test_stream_of_some_names_follows_the_files(folder):
    checkpoint = open_checkpoint(folder)
    names = [name for name, _ in checkpoint.stream(["lm_head.weight", "model.norm.weight"])]
    assert names == ["model.norm.weight", "lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor model\.nrom\.weight"):
        checkpoint.stream(["model.nrom.weight"])
    with pytest.raises(CheckpointError, match="int8"):
        checkpoint.stream(dtype=torch.int8)


def test_reading_under_the_meta_device_still_gives_data(folder):
    with torch.device("meta"):
        read = dict(open_checkpoint(folder).stream())
    assert same(read, some_tensors())


@pytest.mark.parametrize("target", [None, torch.bfloat16])
def test_the_ring_of_buffers_for_a_gpu(folder, monkeypatch, target):
    """On the CPU: what it does there, it does with pinned buffers and copies that nobody waits for."""
    monkeypatch.setattr(reading, "_Readers", reading._Ring)
    monkeypatch.setattr(reading, "CHUNK", 512)  # several times round
    for ahead in (0, 1 << 20):
        read = dict(open_checkpoint(folder).stream(dtype=target, ahead=ahead))
        assert same(read, {n: t.to(target or t.dtype) for n, t in some_tensors().items()})


def test_the_ring_leaves_no_thread_when_it_is_left_or_fails(folder, monkeypatch):
    monkeypatch.setattr(reading, "_Readers", reading._Ring)
    monkeypatch.setattr(reading, "CHUNK", 512)

    def reading_threads():
        return [t for t in threading.enumerate() if t.name.startswith("ligermodels-read")]

    checkpoint = open_checkpoint(folder)
    stream = checkpoint.stream(dtype=torch.bfloat16, ahead=1 << 20)
    next(stream)
    assert reading_threads()
    stream.close()
    assert not reading_threads()
    last = max(checkpoint.tensors.values(), key=lambda info: (str(info.file), info.end))
    os.truncate(last.file, last.end - 1)
    with pytest.raises(CheckpointError, match="did it change"):
        dict(checkpoint.stream(dtype=torch.bfloat16, ahead=1 << 20))
    assert not reading_threads()


@pytest.mark.gpu
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_reads_straight_to_cuda(folder, monkeypatch, target):
    monkeypatch.setattr(reading, "CHUNK", 512)  # many turns of the ring
    read = dict(open_checkpoint(folder).stream(dtype=target, device="cuda"))
    assert all(tensor.is_cuda for tensor in read.values())
    assert same({n: t.cpu() for n, t in read.items()}, {n: t.to(target) for n, t in some_tensors().items()})


GIB = 1 << 30
STATS = {"reserved_bytes.all.current": 3 * GIB, "allocated_bytes.all.current": 3 * GIB}


@pytest.mark.parametrize(
    ("sizes", "changes", "expected"),
    [
        ([GIB, 3 << 20], {}, GIB + (3 << 20)),
        ([GIB + 1, GIB + 511, GIB + 512], {}, 3 * GIB + 3 * 512),  # rounded up one by one
        ([GIB, 1 << 20, 4096], {}, GIB),  # what is small comes from segments of its own
        ([4096], {}, None),
        ([4 * GIB], {}, 4 * GIB),  # just what is free
        ([4 * GIB, 2 << 20], {}, None),
        ([GIB], {"allocated_bytes.all.current": 3 * GIB - GIB // 8 + 1}, GIB),
        ([GIB], {"allocated_bytes.all.current": 3 * GIB - GIB // 8}, None),  # a model was freed: its memory comes first
        ([GIB], {"max_split_size": -1}, GIB),
        ([GIB], {"max_split_size": 2 * GIB}, GIB),
        ([GIB], {"max_split_size": GIB}, None),
        ([GIB], {"backend": "cudaMallocAsync"}, None),
    ],
)
def test_memory_on_a_gpu_is_found_in_one_piece(monkeypatch, sizes, changes, expected):
    allocated = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: changes.get("backend", "native"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS | changes)
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, device: allocated.append((size, dtype, device)))
    reading.reserve(iter(sizes), torch.device("cuda:1"))
    monkeypatch.undo()
    assert allocated == ([] if expected is None else [(expected, torch.uint8, torch.device("cuda:1"))])


def test_memory_is_asked_for_once_all_was_checked_and_before_anything_is_read(tmp_path, monkeypatch):
    model = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf(TINY | {"tie_word_embeddings": True}))
    model.save_pretrained(tmp_path)
    calls = []
    monkeypatch.setattr(base, "reserve", lambda sizes, device: calls.append((sorted(sizes), device)))
    monkeypatch.setattr(hf, "stream_tensors", lambda *_, **__: calls.append("read") or iter(()))
    ligermodels.from_pretrained(tmp_path, dtype="bfloat16", device="meta")
    assert calls == [(sorted(p.numel() * 2 for p in model.parameters()), torch.device("meta")), "read"]
    calls.clear()
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": True, "intermediate_size": 16}))
    with pytest.raises(CheckpointError, match="other shape"):
        ligermodels.from_pretrained(tmp_path)
    assert not calls


LOAD = """
import sys
import ligermodels
before = set(sys.modules)
ligermodels.from_pretrained(sys.argv[1])
print(len(set(sys.modules) - before), "torch._dynamo" in sys.modules)
"""


def test_the_first_load_imports_next_to_nothing(tmp_path):
    """A model is built to be filled: were it filled with random numbers first, torch would import its compiler."""
    command = [sys.executable, "-c", LOAD, str(write_tiny_llava(tmp_path))]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=ENV).stdout
    new, compiler = output.split()
    assert int(new) < 20 and compiler == "False"


def test_what_has_values_is_filled_beside_a_model_without_weights():
    with on_meta():
        layer, real = torch.nn.Linear(8, 8), torch.full((8,), 7.0, device="cpu")
        torch.nn.init.uniform_(real)
        torch.nn.init.normal_(tensor=layer.weight)
    assert layer.weight.is_meta and real.max() <= 1


def test_junk_buffers_are_dropped(tmp_path):
    junk = ["rotary_emb.inv_freq", "model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    nan = torch.full((8,), float("nan"))
    positions = {"vision_tower.vision_model.embeddings.position_ids": torch.arange(5)}
    save_file(some_tensors() | {name: nan.clone() for name in junk} | positions, tmp_path / "model.safetensors")
    assert same(dict(open_checkpoint(tmp_path).stream()), some_tensors())


def test_links_of_the_hub_cache_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    folder.rename(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert same(dict(open_checkpoint(snapshot).stream()), some_tensors())


def test_other_safetensors_beside_the_index_are_ignored(folder):
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    save_file({"stale": torch.zeros(2)}, folder / "model-00001-of-00009.safetensors")
    assert same(dict(open_checkpoint(folder).stream()), some_tensors())


MEMORY = """
import re, sys, torch
from ligermodels.checkpoints_convert.hf import open_checkpoint

def peak():  # of this program only: ru_maxrss counts what the parent had before it started us, too
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

torch.set_num_threads(1)
checkpoint = open_checkpoint(sys.argv[1])
torch.ones(1 << 20).to(torch.bfloat16)  # whatever torch loads at its first cast
before = peak()
weights = dict(checkpoint.stream(dtype=getattr(torch, sys.argv[2]), mapped=sys.argv[3] == "mapped"))
assert all(t.view(torch.int16)[::99].sum() is not None for t in weights.values())  # a map is resident once it is used
print((peak() - before) / sum(t.nbytes for t in weights.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc to tell the peak")
@pytest.mark.parametrize(
    "stored, target, how",
    [("bfloat16", "bfloat16", "read"), ("bfloat16", "bfloat16", "mapped"), ("float32", "bfloat16", "mapped")],
)
def test_peak_host_memory_is_the_weights(tmp_path, stored, target, how):
    part = torch.ones(1 << 24, dtype=getattr(torch, stored))
    tensors = {f"part.{i}": part.clone() for i in range(9)}  # 302 MB at two bytes each
    save_checkpoint(tmp_path, tensors, CONFIG, max_shard_size="200MB")
    del tensors, part
    command = [sys.executable, "-c", MEMORY, str(tmp_path), target, how]
    ratio = float(subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=ENV).stdout)
    assert 0.9 < ratio < 1.2


ROOT = Path(__file__).parents[1]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


# ------------------------------------------------------------------------------------------------------ broken folders


EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def header_only(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def rewrite(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def with_header(change):
    """A file whose parsed header was changed; its length and the data are kept right."""

    def apply(content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        raw = json.dumps(change(header) or header).encode()
        return len(raw).to_bytes(8, "little") + raw + content[8 + length :]

    return apply


def entry(**values):
    return with_header(lambda header: header["lm_head.weight"].update(values))


FILES = {
    "truncated_tail": (lambda c: c[:-5], r"cut short: 6\d+ bytes expected, 6\d+ found"),
    "truncated_half": (lambda c: c[: len(c) // 2], "cut short: .* bytes expected"),
    "truncated_in_header": (lambda c: c[:50], "cut short within its header: .* 50 found"),
    "header_only": (lambda c: c[:8], "cut short within its header"),
    "longer": (lambda c: c + b"xx", "longer than its header says"),
    "empty": (lambda c: b"", "is empty"),
    "seven_bytes": (lambda c: c[:7], "only 7 bytes"),
    "lfs_pointer": (lambda c: LFS, "git-LFS pointer for a file of 12345 bytes; run `git lfs pull`"),
    "html_page": (lambda c: HTML, "web page"),
    "pickle": (lambda c: b"PK\x03\x04" + b"\x14" * 100, "pickle"),
    "gguf": (lambda c: b"GGUF\x03\0\0\0" + c, "GGUF file"),
    "huge_header": (lambda c: (200 << 20).to_bytes(8, "little") + c, "header of 209715200 bytes"),
    "not_json": (lambda c: (9).to_bytes(8, "little") + b"{broken}}", "broken header"),
    "not_text": (lambda c: (2).to_bytes(8, "little") + b"\xff\xfe", "broken header"),
    "not_object": (lambda c: (2).to_bytes(8, "little") + b"[]", "broken header"),
    "nested": (lambda c: (90000).to_bytes(8, "little") + b"[" * 90000, "broken header"),
    "twice": (lambda c: header_only(b'{"a":%s,"a":%s}' % (EMPTY, EMPTY)), "'a' occurs twice"),
    "metadata_number": (lambda c: header_only(b'{"__metadata__":{"a":1}}'), "must map strings to strings"),
    "metadata_endless": (lambda c: header_only(b'{"__metadata__":{"a":"b}}'), "does not end"),
    "text_behind": (lambda c: header_only(b'{"a":%s}}' % EMPTY), "text follows its end"),
    "no_comma": (lambda c: header_only(b'{"a":%s "b":%s}' % (EMPTY, EMPTY)), "expected a comma"),
    "open_end": (lambda c: header_only(b'{"a":%s,' % EMPTY), "expected a name"),
    "no_dtype": (with_header(lambda h: h["lm_head.weight"].pop("dtype") and None), "lm_head.weight is broken"),
    "dtype_number": (entry(dtype=3), "lm_head.weight is broken"),
    "dtype_unknown": (entry(dtype="F13"), "unknown dtype 'F13'"),
    "shape_negative": (entry(shape=[-97, -16]), "lm_head.weight is broken"),
    "shape_float": (entry(shape=[97.0, 16]), "lm_head.weight is broken"),
    "shape_huge": (entry(shape=[2**62, 2**62]), "lm_head.weight .* needs"),
    "shape_other": (entry(shape=[97, 17]), "needs 6596 bytes, the header gives 6208"),
    "offsets_three": (entry(data_offsets=[0, 1, 2]), "lm_head.weight is broken"),
    "offsets_shifted": (entry(data_offsets=[8, 6216]), "starts at byte 8 of the data, expected 0"),
    "entry_list": (with_header(lambda h: h | {"lm_head.weight": [1]}), "expected .* of tensor lm_head.weight at byte"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_broken_shard_is_named(folder, case):
    change, says = FILES[case]
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    rewrite(folder / shard, change)
    with pytest.raises(CheckpointError, match=says) as error:
        open_checkpoint(folder)
    assert shard in str(error.value)


def test_overlapping_tensors_are_refused(single):
    def overlap(header):
        header["model.norm.weight"]["data_offsets"] = [0, 64]

    rewrite(single / "model.safetensors", with_header(overlap))
    with pytest.raises(CheckpointError, match=r"starts at byte .* of the data, expected"):
        open_checkpoint(single)


def test_a_header_of_640_bytes_is_not_taken_for_a_pickle(tmp_path):
    """640 is 0x80 0x02, how a pickle begins."""
    raw = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(640)
    (tmp_path / "model.safetensors").write_bytes((640).to_bytes(8, "little") + raw + bytes(4))
    assert open_checkpoint(tmp_path).read("a").tolist() == [0.0]


def test_all_missing_shards_are_named_at_once(folder):
    (folder / SHARD_1).unlink()
    (folder / SHARD_2).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARD_1}, {SHARD_2}"):
        open_checkpoint(folder)


INDEXES = {
    "outside": ({"lm_head.weight": "../secret.safetensors"}, "not a file of the folder"),
    "absolute": ({"lm_head.weight": "/etc/passwd"}, "not a file of the folder"),
    "drive": ({"lm_head.weight": "C:secret"}, "not a file of the folder"),
    "backslash": ({"lm_head.weight": "..\\secret"}, "not a file of the folder"),
    "number": ({"lm_head.weight": 3}, "not a file of the folder"),
    "wrong_shard": ({"lm_head.weight": SHARD_1, "model.norm.weight": SHARD_2}, "lm_head.weight in .*00001-.* it is in"),
    "nowhere": ({"novel": SHARD_1}, "novel in .*, but no shard holds it"),
    "empty": ({}, "weight_map"),
    "list": ([], "weight_map"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_is_not_trusted(folder, case):
    weight_map, says = INDEXES[case]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(folder)


def test_the_index_decides_who_owns_a_tensor(folder):
    """A second, stale copy of a tensor in another shard is not the one that is read."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = SHARD_2 if weight_map["lm_head.weight"] == SHARD_1 else SHARD_1
    tensors = load_file(folder / other) | {"lm_head.weight": torch.zeros(97, 16)}
    save_file(tensors, folder / other)
    assert same(dict(open_checkpoint(folder).stream()), some_tensors())


@pytest.mark.parametrize("kind, dtype", [("F8_E4M3", torch.float8_e4m3fn), ("I8", torch.int8), ("U8", torch.uint8)])
@pytest.mark.parametrize("method", [None, "gptq"])
def test_quantised_weights_are_refused(tmp_path, kind, dtype, method):
    config = CONFIG | ({"quantization_config": {"quant_method": method}} if method else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(some_tensors() | {"model.q.weight": torch.zeros(4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"looks quantised.*model.q.weight.*{kind}") as error:
        open_checkpoint(tmp_path)
    assert ("gptq" in str(error.value)) == (method is not None)


def test_pickles_are_read_without_running_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.zeros(2), "y": Malicious()}, tmp_path / "pytorch_model.bin")
    before = (tmp_path / "pytorch_model.bin").read_bytes()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin holds more than tensors"):
        open_checkpoint(tmp_path)
    assert not MARKER.exists() and (tmp_path / "pytorch_model.bin").read_bytes() == before


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickles_that_nothing_names_are_left_alone(tmp_path, name):
    torch.save({"x": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be used without pytorch_model\.bin\.index\.json"):
        open_checkpoint(tmp_path)


def test_folders_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"consolidated\.safetensors cannot be used without an index"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_file_that_shrinks_after_the_check_is_noticed(single):
    checkpoint = open_checkpoint(single)
    rewrite(single / "model.safetensors", lambda content: content[:-5])
    for dtype in (None, torch.bfloat16):
        with pytest.raises(CheckpointError, match=r"model\.safetensors ended while tensor"):
            dict(checkpoint.stream(dtype=dtype))


CONFIGS = {
    "not_json": (b"{'model_type': 1}", "not valid JSON"),
    "list": (b"[]", "must hold a JSON object, found list"),
    "pointer": (LFS, "git-LFS pointer"),
    "html": (HTML, "web page"),
    "latin1": ('{"name": "Grüße"}'.encode("latin-1"), "not valid JSON"),
    "empty": (b"", "not valid JSON"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_broken_configs(tmp_path, case):
    content, says = CONFIGS[case]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json.*{says}"):
        read_config(tmp_path)


def test_read_config_takes_a_folder_or_a_file(single):
    assert read_config(single) == read_config(single / "config.json") == CONFIG
    (single / "config.json").write_bytes(b"\xef\xbb\xbf{}")  # an editor's byte order mark
    assert read_config(str(single)) == {}
    (single / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(single)
    with pytest.raises(CheckpointError, match="use from_hub"):
        read_config("org/model")


# -------------------------------------------------------------------------------------------------------------- names

EXPECTED = {name: tuple(tensor.shape) for name, tensor in some_tensors().items()}


def saved(path: Path, tensors: dict[str, torch.Tensor], config: dict = CONFIG) -> hf.Checkpoint:
    save_checkpoint(path, tensors, config)
    return open_checkpoint(path)


def test_exact_names_pass_and_optional_ones_may_be_absent(tmp_path):
    tensors = some_tensors()
    check_names(saved(tmp_path, tensors), EXPECTED)
    check_names(saved(tmp_path, tensors), EXPECTED, optional=["lm_head.weight"])
    del tensors["lm_head.weight"]
    check_names(saved(tmp_path, tensors), EXPECTED, optional=["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        check_names(saved(tmp_path, tensors), EXPECTED)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(96, 16), "model.norm.weight": torch.zeros(16)}
    tensors |= {f"model.layers.{i}.bias": torch.zeros(1) for i in range(7)}
    with pytest.raises(CheckpointError) as error:
        check_names(saved(tmp_path, tensors), EXPECTED)
    text = str(error.value)
    assert "missing: lm_head.weight" in text
    assert "model.embed_tokens.weight (in model.safetensors: [96, 16], the model has [97, 16])" in text
    assert "model.layers.0.bias (in model.safetensors)" in text and "and 2 more" in text
    assert "model.layers.6.bias" not in text


@pytest.mark.parametrize(
    "rename, says",
    [
        (lambda name: "module." + name, 'carry the prefix "module."'),
        (lambda name: "_orig_mod." + name, 'carry the prefix "_orig_mod."'),
        (lambda name: "_orig_mod.module." + name, "wrappers' parts"),
        (lambda name: name.replace("model.", "model._orig_mod."), "wrappers' parts"),
        (lambda name: name.removeprefix("model."), 'lack the prefix "model."'),
    ],
)
def test_a_prefix_that_explains_it_is_told(tmp_path, rename, says):
    renamed = {rename(name): tensor for name, tensor in some_tensors().items()}
    with pytest.raises(CheckpointError, match=re.escape(says)):
        check_names(saved(tmp_path, renamed), EXPECTED)


def test_another_family_is_told(tmp_path):
    checkpoint = saved(tmp_path, {"transformer.wte.weight": torch.zeros(2)}, {"model_type": "gpt2"})
    with pytest.raises(CheckpointError, match=r"model_type 'gpt2', the class is for 'llama'"):
        check_names(checkpoint, EXPECTED, model_type="llama")


# ------------------------------------------------------------------------------------------------------------- writing


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_safetensors_reads_what_we_wrote(folder, single):
    assert same(load_file(single / "model.safetensors"), some_tensors())
    assert same(load_file(folder / SHARD_1) | load_file(folder / SHARD_2), some_tensors())
    assert files(single) == {"config.json", "model.safetensors"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 3120, "total_size": 12480}


@pytest.mark.parametrize("limit", [1, 64, 6208, 6272, 6273, 12000, 12479, 12480, "12.5KB"])
def test_shards_are_cut_as_huggingface_hub_cuts_them(tmp_path, limit):
    save_checkpoint(tmp_path, some_tensors(), CONFIG, max_shard_size=limit)
    theirs = split_torch_state_dict_into_shards(some_tensors(), max_shard_size=limit)
    assert files(tmp_path) - {"config.json", "model.safetensors.index.json"} == set(theirs.filename_to_tensors)
    for file, names in theirs.filename_to_tensors.items():
        assert set(load_file(tmp_path / file)) == set(names)


@pytest.mark.parametrize(
    "text, size", [("5GB", 5 * 10**9), ("2GiB", 2**31), ("1.5 mb", 1_500_000), ("7", 7), (9, 9), ("10B", 10)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("size", ["", "GB", "5XB", "-1GB", 0, -1, None, True, 1.5, "0MB"])
def test_sizes_that_are_none(tmp_path, size):
    with pytest.raises(CheckpointError, match="max_shard_size"):
        save_checkpoint(tmp_path / "x", some_tensors(), CONFIG, max_shard_size=size)
    assert not (tmp_path / "x").exists()


def test_every_dtype_and_stride_survives_and_nothing_is_changed(tmp_path):
    base = torch.randn(6, 4)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tensors = {f"d{i}": base[i].clone().to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"t": base.t().clone().t(), "q": base[:2], "kv": base[2:], "even": base.clone()[:, ::2]}
    tensors["grad"] = torch.nn.Parameter(torch.ones(3))
    config = {"model_type": "llama"}
    save_checkpoint(tmp_path, tensors, config, extra_json={"generation_config.json": {"eos_token_id": [1, 2]}})
    assert same(dict(open_checkpoint(tmp_path).stream()), {n: t.detach() for n, t in tensors.items()})
    assert config == {"model_type": "llama"}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}


def test_transformers_reads_what_we_wrote(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    save_checkpoint(tmp_path, model.state_dict(), config.to_dict(), max_shard_size="4KB")
    reloaded, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert same(reloaded.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "bad, says",
    [
        (lambda t: {"a": t, "b": t}, "a and b share memory"),
        (lambda t: {"a": t, "b": t[1:]}, "a and b share memory"),
        (lambda t: {"a": t, "b": t.t()}, "share memory"),
        (lambda t: {"a": t.to("meta")}, "a is on the meta device"),
        (lambda t: {"a": t.to(torch.int8)}, "a is torch.int8"),
        (lambda t: {"a": t.to_sparse()}, "a is torch.sparse_coo"),
        (lambda t: {}, "no tensors"),
    ],
)
def test_what_cannot_be_saved(tmp_path, bad, says):
    with pytest.raises(CheckpointError, match=says):
        save_checkpoint(tmp_path / "x", bad(torch.randn(4, 4)), CONFIG)
    assert not (tmp_path / "x").exists()


def test_configs_that_are_not_json(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json cannot be written"):
        save_checkpoint(tmp_path / "x", some_tensors(), {"dtype": torch.float32})
    with pytest.raises(CheckpointError, match="extra_json"):
        save_checkpoint(tmp_path / "x", some_tensors(), CONFIG, extra_json={"../evil.json": {}})
    assert not (tmp_path / "x").exists()


def test_saving_again_leaves_no_stale_and_touches_no_foreign_file(folder):
    foreign = {"model-00001-of-00009.safetensors", "consolidated.safetensors", "notes.txt", "adapter.bin"}
    for name in foreign:
        (folder / name).write_text("mine")
    settings = {"generation_config.json": {"temperature": 0.5}}
    save_checkpoint(folder, some_tensors(), CONFIG, extra_json=settings)
    assert files(folder) == {"config.json", "model.safetensors", "generation_config.json"} | foreign
    save_checkpoint(folder, some_tensors(), CONFIG)
    assert files(folder) == {"config.json", "model.safetensors"} | foreign
    save_checkpoint(folder, some_tensors(), CONFIG, max_shard_size="6.5KB")
    assert files(folder) == {"config.json", "model.safetensors.index.json", SHARD_1, SHARD_2} | foreign
    assert {(folder / name).read_text() for name in foreign} == {"mine"}


@pytest.mark.parametrize("before", [None, "5GB", "6.5KB", "6KB"])
@pytest.mark.parametrize("after", ["5GB", "6.5KB"])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_model_or_none(tmp_path, monkeypatch, before, after, function):
    """Let the n-th write or renaming fail, for every n: what loads then is the whole old model, or nothing."""
    new = {name: tensor + 1 for name, tensor in some_tensors().items()}
    real = getattr(os, function)
    for fatal in range(9):
        folder = tmp_path / str(fatal)
        if before:
            save_checkpoint(folder, some_tensors(), {"old": True}, max_shard_size=before)
        calls = iter(range(100))

        def fail(*arguments, fatal=fatal, calls=calls):
            if next(calls) == fatal:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, function, fail)
        try:
            save_checkpoint(folder, new, {"new": True}, max_shard_size=after)
        except CheckpointError as error:
            assert "No space left" in str(error)
        else:
            assert same(dict(open_checkpoint(folder).stream()), new) and read_config(folder) == {"new": True}
            return  # it was never called that often
        finally:
            monkeypatch.undo()
        assert not list(folder.glob("*.tmp"))
        try:
            config = read_config(folder)
        except LigerError:
            continue
        assert config == {"old": True} and same(dict(open_checkpoint(folder).stream()), some_tensors())
    raise AssertionError("the save never succeeded")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not save to .*file"):
        save_checkpoint(tmp_path / "file", some_tensors(), CONFIG)


# ---------------------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size, multiple_of, becomes", [(109, 1, 109), (90, 1, 90), (97, 64, 128), (97, 1, 97)])
@pytest.mark.parametrize("new_rows", ["mean", "zeros"])
def test_resize_vocab(tmp_path, tied, size, multiple_of, becomes, new_rows):
    from transformers import AutoModelForCausalLM

    model = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf({**TINY, "tie_word_embeddings": tied}))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert model.resize_vocab(size, multiple_of=multiple_of, new_rows=new_rows) == becomes
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert len(list(model.parameters())) == len(before)
    kept = min(97, becomes)
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        old, new = before[name], model.get_parameter(name)
        assert new.shape == (becomes, 64) and torch.equal(new[:kept], old[:kept])
        expected = old.mean(0) if new_rows == "mean" else torch.zeros(64)
        assert torch.equal(new[kept:], expected.expand(becomes - kept, 64))
    ids = torch.tensor([[3, becomes - 1]])
    logits = model.eval()(ids).logits
    assert logits.shape == (1, 2, becomes) and model.config.to_hf()["vocab_size"] == becomes
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert (AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits - logits).abs().max() < 2e-4
    assert torch.equal(ligermodels.from_pretrained(tmp_path)(ids).logits, logits)


def test_vocabularies_that_cannot_be(tmp_path):
    model = ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf({**TINY, "eos_token_id": [2, 90]}))
    for size in (0, -1, True, 1.5, 2**31):
        with pytest.raises(LigerError, match="size must be a whole number"):
            model.resize_vocab(size)
    with pytest.raises(LigerError, match="eos_token_id 90 would not be in a vocabulary of 90"):
        model.resize_vocab(90)
    with pytest.raises(LigerError, match="new_rows"):
        model.resize_vocab(100, new_rows="random")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(LigerError, match="cannot resize a Embedding and a Sequential"):
        model.resize_vocab(100)
    assert model.config.vocab_size == 97
