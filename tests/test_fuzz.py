"""Files from nowhere: whatever is in a header, an index, a config or a pickle, the answer is the project's own error.

No other exception, no hang, and for a hostile header no more than 50 MB. Derandomised: the same examples in every run.
"""

import json
import subprocess
import sys
import time
import tracemalloc
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tiny import TINY

import ligermodels
from ligermodels import ConfigError, LigerError
from ligermodels.checkpoints_convert.hf import open_checkpoint
from ligermodels.checkpoints_convert.pickle_file import load_pickle
from ligermodels.checkpoints_convert.safetensors_file import MAX_HEADER, read_header
from ligermodels.errors import CheckpointError

fuzz = settings(
    derandomize=True,
    database=None,
    max_examples=300,
    deadline=5000,  # ms: no hang
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SOUND = save({"a.weight": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "e": torch.zeros(0)})

numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**31 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=8))
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=8,
)
names = st.one_of(
    st.sampled_from(["a.weight", "b", "__metadata__", "", "../x", "rotary_emb.inv_freq"]), st.text(max_size=12)
)


def with_header(header: bytes, data: int = 0) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


def dump(value: object) -> bytes:
    return json.dumps(value).encode()  # lone surrogates come out as escapes, NaN as NaN


@st.composite
def edited(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` after a few edits of its bytes."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(out)))
        kind = draw(st.integers(0, 3))
        piece = draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b"0", b"\\"]))
        )
        out[place : place + (len(piece) if kind == 0 else draw(st.integers(0, 9)) if kind == 1 else 0)] = piece
        if kind == 3:
            del out[place:]
    return bytes(out)


entries = st.one_of(
    anything,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "F4", "X"]), scalars),
            "shape": st.one_of(st.lists(numbers, max_size=4), anything),
            "data_offsets": st.one_of(st.tuples(numbers, numbers), anything),
        },
        optional={"more": anything},
    ),
)
headers = st.dictionaries(names, entries, max_size=4)


@st.composite
def nearly_right(draw: st.DrawFn) -> bytes:
    """A header whose tensors fill the file one behind the other, but for at most one fault; spacing and order vary."""
    value: dict[str, object] = {}
    position = 0
    for name in draw(st.lists(names, max_size=4, unique=True)):
        kind, shape = draw(st.sampled_from(["F32", "BF16", "I8"])), draw(st.lists(st.integers(0, 3), max_size=3))
        end = position + torch.Size(shape).numel() * {"F32": 4, "BF16": 2, "I8": 1}[kind]
        value[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, end]}
        position = end
    if "__metadata__" in value and draw(st.booleans()):
        value["__metadata__"] = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
    if value and draw(st.booleans()):
        entry = value[draw(st.sampled_from(sorted(value)))]
        if entry and draw(st.booleans()):
            entry[draw(st.sampled_from(sorted(entry)))] = draw(anything)
    value = dict(draw(st.permutations(list(value.items()))))
    text = json.dumps(value, indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()))
    padding = b" " * draw(st.integers(0, 3))
    return with_header(text.encode("utf-8", "surrogatepass") + padding, position + draw(st.sampled_from([0, 0, 0, 1])))


files = st.one_of(
    st.binary(max_size=64),
    st.builds(with_header, st.binary(max_size=64), st.integers(0, 40)),
    st.builds(with_header, headers.map(dump), st.integers(0, 64)),
    nearly_right(),
    nearly_right(),
    edited(SOUND),
)


@fuzz
@given(files)
def test_headers(tmp_path, content):
    """And never is one taken, or refused, that safetensors refuses or takes."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        ours = {name: list(entry.shape) for name, entry in read_header(path).items()}
    except CheckpointError as error:
        assert path.name in str(error)
        ours = None
    try:
        with safe_open(path, "pt") as file:
            theirs = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        theirs = None
    event(f"accepted: {ours is not None}")
    assert ours == theirs


HOSTILE = {
    "brackets": b"[" * (MAX_HEADER - 8),
    "braces": b'{"a":' * (MAX_HEADER // 5 - 8),
    "lists": b"{" + b",".join([b'"a":[[],[],[],[]]'] * (MAX_HEADER // 20)) + b"}",
    "shape": b'{"a":{"dtype":"F32","shape":[' + b"1," * (MAX_HEADER // 2 - 99) + b'1],"data_offsets":[0,4]}}',
    "entries": b"{"
    + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(MAX_HEADER // 60))
    + b"}",
    "one_name": b'{"' + b"a" * (MAX_HEADER - 99) + b'":{}}',
    "escapes": b'{"' + b"\\n" * (MAX_HEADER // 2 - 99) + b'":{}}',
    "metadata": b'{"__metadata__":{' + b",".join([b'"a":"b"'] * (MAX_HEADER // 10)) + b"}}",
    "metadata_escapes": b'{"__metadata__":{"a":"' + b'\\"' * (MAX_HEADER // 2 - 99) + b'"}}',
    "metadata_backslashes": b'{"__metadata__":{"a":"' + b"\\" * (MAX_HEADER - 200) + b'"}}',
    "spaces": b" " * (MAX_HEADER - 8),
    "not_text": b'{"\xf0\x90\x80\x80' + b"\xff" * (MAX_HEADER - 99),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_of_full_size_takes_little(tmp_path, case):
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header(HOSTILE[case]))
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path)
        seconds, (_, peak) = time.process_time() - start, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000 and seconds < 10


def test_sizes_that_a_header_only_claims_are_never_allocated(tmp_path):
    """In a process that may have 2 GB of addresses beyond what it starts with."""
    claims = [
        (2**63).to_bytes(8, "little"),
        (MAX_HEADER).to_bytes(8, "little") + b"{",
        with_header(dump({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})),
        with_header(dump({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}})),
    ]
    for number, content in enumerate(claims):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "model.safetensors").write_bytes(content)
        (tmp_path / str(number) / "config.json").write_text(json.dumps(TINY))
    code = f"""
import resource, ligermodels
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, used + 2**31))
for number in range({len(claims)}):
    try:
        ligermodels.from_pretrained({str(tmp_path)!r} + f"/{{number}}")
    except ligermodels.CheckpointError:
        print("refused")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert result.stdout.split() == ["refused"] * len(claims), result.stderr[-500:]


@st.composite
def indexes(draw: st.DrawFn) -> bytes:
    """The right index of a few of the tensors, but for at most two faults."""
    value = {name: "s.safetensors" for name in ("a.weight", "b", "e") if draw(st.booleans())}
    for _ in range(draw(st.integers(0, 2))):
        place = st.one_of(st.sampled_from(["s.safetensors", "./s.safetensors", "x/../s.safetensors", "t"]), anything)
        value[draw(names)] = draw(place)
    whole = draw(st.sampled_from([{"weight_map": value}, {"weight_map": value, "metadata": {"total_size": 1}}, value]))
    return dump(whole)


@fuzz
@given(
    st.one_of(
        indexes(), anything.map(dump), st.binary(max_size=64), edited(dump({"weight_map": {"b": "s.safetensors"}}))
    )
)
def test_indexes(tmp_path, content):
    (tmp_path / "s.safetensors").write_bytes(SOUND)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    try:
        checkpoint = open_checkpoint(tmp_path)
    except LigerError:
        return
    event("accepted")
    assert {info.file for info in checkpoint.tensors.values()} == {tmp_path / "s.safetensors"}
    assert dict(checkpoint.stream()).keys() == checkpoint.tensors.keys()


KEYS = sorted({f.name for f in fields(ligermodels.LlamaConfig)} - {"extra"} | {"torch_dtype", "quantization_config"})
ROPE_KEYS = (
    "type", "rope_type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor",
    "original_max_position_embeddings", "beta_fast", "partial_rotary_factor", "mscale",
)  # fmt: skip
kinds = st.sampled_from(["linear", "llama3", "yarn", "longrope", "dynamic"])
ropes = st.dictionaries(
    st.sampled_from(ROPE_KEYS), st.one_of(scalars, kinds, st.lists(numbers, max_size=20)), max_size=6
)
plausible = st.one_of(st.integers(1, 128), st.floats(0, 1), st.booleans(), st.none(), st.lists(st.integers(0, 9)))


@st.composite
def changes(draw: st.DrawFn, keys: list[str]) -> dict:
    """One to three keys, of which most have a value of a kind that some key might have."""
    chosen = draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3, unique=True))
    return {key: draw(draw(st.sampled_from([plausible, plausible, plausible, anything, ropes]))) for key in chosen}


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    ligermodels.LigerLlama(ligermodels.LlamaConfig.from_hf(TINY)).save_pretrained(folder)
    return folder


@fuzz
@given(changes(KEYS))
def test_configs(tiny_files, change):
    (tiny_files / "config.json").write_bytes(dump({**TINY, **change}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = ligermodels.from_pretrained(tiny_files)
        except LigerError:
            return
    event("accepted")
    ids = torch.tensor([[3, 14, 15]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert model(ids).logits.shape == (1, 3, 97)
    type(model.config).from_hf(json.loads(dump(model.config.to_hf())))


@fuzz
@given(st.sampled_from(sorted(ligermodels.MODELS)), st.data())
def test_configs_of_every_family(model_type, data):
    config_class = ligermodels.MODELS[model_type].config_class
    keys = sorted({f.name for f in fields(config_class)} - {"extra"} | {"text_config", "vision_config"})
    change = data.draw(changes(keys))
    try:
        config = config_class.from_hf(json.loads(dump({"model_type": model_type, **change})))
    except ConfigError:
        return
    event("accepted")
    json.dumps(config.to_hf())


@pytest.fixture(scope="module")
def sound_pickle(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("pickle") / "x.bin"
    torch.save({"a": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.float16)}, path)
    return path.read_bytes()


@settings(fuzz, max_examples=200)
@given(st.data())
def test_pickles(tmp_path, sound_pickle, data):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data.draw(edited(sound_pickle)))
    try:
        tensors = load_pickle(path)
    except CheckpointError as error:
        assert path.name in str(error)
        return
    event("accepted")
    for tensor in tensors.values():
        tensor.double().sum()  # whatever was read lies within the file
