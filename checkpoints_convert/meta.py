"""Meta's own layout of a Llama ↔ Hugging Face: ``params.json`` beside ``consolidated.00.pth``, ``.01.pth``, ….

- Names: ``layers.0.attention.wq.weight`` for ``model.layers.0.self_attn.q_proj.weight``, and so on.
- Meta rotates neighbouring pairs of a head's dimensions, Hugging Face its two halves: the rows of q and k differ, head
  by head, and there are fewer heads of k.
- A file per GPU of tensor parallelism: rows of wq, wk, wv, w1, w3 and output, columns of wo and w2 are cut, norms are
  in each. The embedding was cut by columns (Llama 1, 2) and is by rows (Llama 3). Of more files than heads of k and v
  (Llama 3.1 405B in 16), each has one head in wk and wv, neighbours the same.
- The width of the MLP is not in params.json but follows: ⌊2/3·4·dim⌋, times ``ffn_dim_multiplier``, rounded up to
  ``multiple_of``. Read, it is taken from the tensors.

params.json says neither the longest sequence, nor the special ids, nor (in Llama 3.1 and 3.2) the factor of the rope
scaling. For the published models these are known; ``hf_config.json``, which ``write_meta`` puts beside params.json,
says them for any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ligermodels.checkpoints_convert.companions import companions
from ligermodels.checkpoints_convert.files import listed, read_json
from ligermodels.checkpoints_convert.gguf_layout import deinterleave, interleave
from ligermodels.checkpoints_convert.hf import Checkpoint
from ligermodels.checkpoints_convert.pth import open_pth, save_pth
from ligermodels.checkpoints_convert.reading import same_values
from ligermodels.checkpoints_convert.save import parse_size, to_json
from ligermodels.checkpoints_convert.streamed import (
    Source,
    WorkFolder,
    expect_shapes,
    progress,
)
from ligermodels.errors import CheckpointError, ConfigError

__all__ = ["open_meta", "write_meta"]

PARAMS = "params.json"
HF_CONFIG = "hf_config.json"
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim")  # fmt: skip
_FILE = re.compile(r"consolidated\.(\d\d)\.pth")

# Ours → theirs, within a layer; and the dimension along which tensor parallelism cuts.
LAYER = {
    "input_layernorm": ("attention_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
}
TOP = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


def meta_name(ours: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` → ``layers.3.feed_forward.w3.weight``."""
    module = ours.removesuffix(".weight")
    if module in TOP:
        return TOP[module] + ".weight"
    _, _, layer, part = module.split(".", 3)
    return f"layers.{layer}.{LAYER[part][0]}.weight"


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes of a dense Llama without biases; a tied head is left out."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        parts = ((hidden,), (hidden,), (q, hidden), (kv, hidden), (kv, hidden), (hidden, q))
        parts += ((inner, hidden), (inner, hidden), (hidden, inner))
        shapes |= {
            f"model.layers.{layer}.{part}.weight": shape for part, shape in zip(LAYER, parts, strict=True)
        }  # fmt: skip
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def heads_of(config: Mapping[str, Any], ours: str) -> int:
    """How many heads' rows are turned in this tensor: those of q and k; 0 for any other."""
    part = ours.split(".")[-2]
    return {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(part, 0)


def whole(path: Path, params: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size in params.json. Raises CheckpointError unless it is a positive whole number of 31 bits."""
    value = params.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{path}: {key} must be a positive whole number, found {value!r}")
    return value


def number(path: Path, params: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A factor in params.json. Raises CheckpointError unless it is a positive number."""
    value = params.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**63:
        raise CheckpointError(f"{path}: {key} must be a positive number, found {value!r}")
    return value


def ffn_width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """The width of the MLP, as Meta's code computes it."""
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * -(-width // multiple_of)


def ffn_params(dim: int, width: int) -> dict[str, Any]:
    """``multiple_of`` and, where needed, ``ffn_dim_multiplier`` that give ``width``; published pairs first."""
    for multiplier in (None, 1.0, 1.2, 1.3, 1.5):
        for multiple_of in (256, 1024, 4096):
            if ffn_width(dim, multiple_of, multiplier) == width:
                return {"multiple_of": multiple_of} | ({"ffn_dim_multiplier": multiplier} if multiplier else {})
    multiple_of = min(width & -width, 256)  # the largest power of two in it
    multiplier = (width - 0.5 * (multiple_of > 1) + 0.5 * (multiple_of == 1)) / int(2 * (4 * dim) / 3)
    if ffn_width(dim, multiple_of, multiplier) != width:
        raise ConfigError(f"intermediate_size {width}: no ffn_dim_multiplier gives it for hidden_size {dim}")
    return {"multiple_of": multiple_of, "ffn_dim_multiplier": multiplier}


# ------------------------------------------------------------------------------------------------------------- reading


def open_meta(folder: Path) -> Source:
    """A folder of Meta's layout as a source. Only headers are read, and the head beside the embedding to see if it is
    tied. ``rope.freqs`` is ignored. Raises CheckpointError naming file and key or tensor."""
    params = read_json(folder / PARAMS)
    shards = _shards(folder)
    parts = [open_pth(path) for path in shards]
    tensors = [{n: t for n, t in part.tensors.items() if n != "rope.freqs"} for part in parts]
    _check_alike(shards, parts)
    for path, found in zip(shards, tensors, strict=True):
        if found.keys() != tensors[0].keys():
            odd = min(found.keys() ^ tensors[0].keys())
            raise CheckpointError(f"{path} and {shards[0].name} do not hold the same tensors: {odd}")
    needed = ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight", "layers.0.attention.wq.weight")
    for name in needed:
        if name not in tensors[0] or len(tensors[0][name].shape) != 2:
            raise CheckpointError(f"{shards[0]} lacks {name}, a matrix")
    embedding, gate, wq = (tensors[0][name] for name in needed)
    dim = whole(folder / PARAMS, params, "dim")
    _check_count(folder, len(shards), dim, wq.shape[0])
    by_rows = embedding.shape[1] == dim
    vocab = embedding.shape[0] * (len(shards) if by_rows else 1)
    width = gate.shape[0] * len(shards)
    config = _config(folder, params, vocab, width)
    head = "output.weight"
    frequencies = parts[0].tensors.get("rope.freqs")
    if frequencies is not None and frequencies.shape != (config["head_dim"] // 2,):
        raise CheckpointError(
            f"{shards[0]}: rope.freqs is {list(frequencies.shape)}, but {PARAMS} gives heads of {config['head_dim']}"
        )
    tied = head not in tensors[0] or _is_tied(parts, by_rows)
    if config["tie_word_embeddings"] is None:
        config["tie_word_embeddings"] = tied
    elif config["tie_word_embeddings"] and not tied:
        raise CheckpointError(
            f"{shards[0]}: {head} differs from tok_embeddings.weight, though {HF_CONFIG} says tie_word_embeddings true"
        )
    if config["rope_scaling"] is not None and config["rope_scaling"]["factor"] is None:
        config["rope_scaling"]["factor"] = 32.0 if config["tie_word_embeddings"] else 8.0  # Llama 3.2, 3.1
    if config["tie_word_embeddings"]:
        for found in tensors:
            found.pop(head, None)

    expected, cut = shapes_of(config), {}
    copies = _copies(folder, config, len(shards))
    for ours, shape in expected.items():
        axis = _axis(ours, by_rows)
        count = len(shards) // copies if _is_kv(ours) else len(shards)
        if axis is not None and shape[axis] % count:
            raise CheckpointError(f"{folder}: {meta_name(ours)} {list(shape)} cannot lie in {len(shards)} files")
        cut[meta_name(ours)] = tuple(s // count if i == axis else s for i, s in enumerate(shape))
    for path, found in zip(shards, tensors, strict=True):
        expect_shapes(path, found, cut, f"a Llama of this {PARAMS}")
    for rank in range(len(shards)):
        if rank % copies:
            _check_same(shards, parts, rank, rank - rank % copies, [meta_name(n) for n in expected if _is_kv(n)])

    def make(ours: str) -> torch.Tensor:
        axis, theirs = _axis(ours, by_rows), meta_name(ours)
        holders = parts[:1] if axis is None else parts[::copies] if _is_kv(ours) else parts
        pieces = [part.read(theirs) for part in holders]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=axis or 0)
        heads = heads_of(config, ours)
        return deinterleave(tensor, heads) if heads else tensor

    dtypes = {ours: tensors[0][meta_name(ours)].dtype for ours in expected}
    first = str(dtypes["model.layers.0.self_attn.q_proj.weight"]).removeprefix("torch.")
    config["torch_dtype"] = first
    meta = {ours: torch.empty(shape, dtype=dtypes[ours], device="meta") for ours, shape in expected.items()}
    return Source(folder, config, meta, make, companions(folder))


def _is_tied(parts: list[Checkpoint], by_rows: bool) -> bool:
    """Whether the head, cut by rows, is the embedding: file by file, or joined where that is cut by columns."""
    embedding, head = "tok_embeddings.weight", "output.weight"
    if by_rows or len(parts) == 1:
        return all(same_values(part.tensors[embedding], part.tensors[head]) for part in parts)
    joined, start = torch.cat([part.read(embedding) for part in parts], dim=1), 0
    for part in parts:
        rows = part.read(head)
        if not torch.equal(joined[start : start + len(rows)], rows):
            return False
        start += len(rows)
    return start == len(joined)


def _check_alike(shards: list[Path], parts: list[Checkpoint]) -> None:
    """Raise CheckpointError for files of tensor parallelism of several dtypes, or whose copies of a norm differ."""
    first = parts[0].tensors
    for rank in range(1, len(parts)):
        found = {name: info for name, info in parts[rank].tensors.items() if name in first}  # others are told of later
        for name, info in found.items():
            if info.dtype != first[name].dtype:
                raise CheckpointError(
                    f"{shards[rank]}: {name} is {info.dtype}, in {shards[0].name} it is {first[name].dtype}"
                )
        norms = [name for name, info in found.items() if name.endswith("norm.weight") and len(info.shape) == 1]
        _check_same(shards, parts, rank, 0, norms)


def _check_same(shards: list[Path], parts: list[Checkpoint], rank: int, other: int, names: Iterable[str]) -> None:
    """Raise CheckpointError unless two files hold the same tensors of these names."""
    for name in names:
        if not same_values(parts[rank].tensors[name], parts[other].tensors[name]):
            raise CheckpointError(
                f"{shards[rank]}: {name} differs from that in {shards[other].name}, of which it must be a copy: "
                "of another model?"
            )


def _is_kv(ours: str) -> bool:
    return ours.endswith(("self_attn.k_proj.weight", "self_attn.v_proj.weight"))


def _copies(folder: Path, config: Mapping[str, Any], count: int) -> int:
    """In how many of ``count`` files each head of k and v is: 1, or more where there are fewer heads than files."""
    heads = config["num_key_value_heads"]
    if count <= heads:
        return 1
    if count % heads:
        raise CheckpointError(
            f"{folder} has {count} files, among which {heads} heads of wk and wv (n_kv_heads of {PARAMS}) cannot be "
            "divided evenly"
        )
    return count // heads


def _shards(folder: Path) -> list[Path]:
    shards = sorted(path for path in folder.iterdir() if _FILE.fullmatch(path.name))
    if not shards:
        raise CheckpointError(f"{folder} holds no consolidated.00.pth")
    wanted = [folder / f"consolidated.{i:02d}.pth" for i in range(int(_FILE.fullmatch(shards[-1].name)[1]) + 1)]
    missing = [path.name for path in wanted if path not in shards]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, since it has {shards[-1].name}")
    return shards


def _check_count(folder: Path, count: int, dim: int, rows: int) -> None:
    """Raise CheckpointError if ``count`` files with so many ``rows`` of wq each are too few or too many for ``dim``."""
    if not rows or dim % rows or dim // rows == count:
        return  # what does not fit at all is told of by name and shape
    if count > dim // rows:
        raise CheckpointError(f"{folder} holds {count} files, but {dim // rows} hold the whole model of {PARAMS}")
    missing = [f"consolidated.{i:02d}.pth" for i in range(count, dim // rows)]
    raise CheckpointError(f"{folder} lacks {listed(missing)}: it holds {count} of {dim // rows} parts of the model")


def _axis(ours: str, embedding_by_rows: bool) -> int | None:
    module = ours.removesuffix(".weight")
    if module == "model.embed_tokens":
        return 0 if embedding_by_rows else 1
    if module in TOP:
        return 0 if module == "lm_head" else None
    return LAYER[module.split(".", 3)[3]][1]


def _config(folder: Path, params: dict, vocab: int, width: int) -> dict:
    path = folder / PARAMS
    dim, heads = whole(path, params, "dim"), whole(path, params, "n_heads")
    kv, layers = whole(path, params, "n_kv_heads", heads), whole(path, params, "n_layers")
    if dim % heads or heads % kv or dim // heads % 2:
        raise CheckpointError(f"{path}: dim {dim}, n_heads {heads} and n_kv_heads {kv} do not go together")
    if layers > 10_000:
        raise CheckpointError(f"{path}: n_layers is {layers}: too many")
    said = params.get("vocab_size", -1)
    if said not in (-1, None, vocab):
        raise CheckpointError(f"{path}: vocab_size is {said}, but tok_embeddings.weight has {vocab} rows")
    theta = number(path, params, "rope_theta", 10_000.0)
    eps = number(path, params, "norm_eps")
    scaled = params.get("use_scaled_rope") is True
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim // heads,
        "max_position_embeddings": _longest(vocab, theta, eps, scaled),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": None,  # seen from the tensors
        "bos_token_id": 128000 if vocab == 128256 else 1,
        "eos_token_id": 128001 if vocab == 128256 else 2,
        "pad_token_id": None,
        "use_cache": True,
    }
    if scaled:
        factor = params.get("rope_scaling_factor")
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": factor if factor is None else number(path, params, "rope_scaling_factor"),
            "low_freq_factor": 1.0,
            "high_freq_factor": float(number(path, params, "rope_high_freq_factor", 4.0)),
            "original_max_position_embeddings": 8192,
        }
    fixed = (*SIZES, "model_type", "rms_norm_eps", "rope_theta", "attention_bias", "mlp_bias")
    beside = read_beside(folder, config, fixed)
    if not beside:
        return config
    scaling = beside.get("rope_scaling")
    if bool(scaling) != scaled:
        raise CheckpointError(
            f"{folder / HF_CONFIG}: rope_scaling is {str(scaling)[:200]}, {PARAMS} says use_scaled_rope {scaled}"
        )
    if scaling is not None and not (isinstance(scaling, dict) and scaling.get("factor")):
        raise CheckpointError(f"{folder / HF_CONFIG}: rope_scaling must be null or an object with a factor")
    return config | beside | {"rope_scaling": scaling}


def read_beside(folder: Path, config: Mapping[str, Any], fixed: Sequence[str]) -> dict[str, Any]:
    """hf_config.json, which says what params.json has no keys for; {} where there is none.

    Raises CheckpointError where it says another value than ``config`` for a ``fixed`` key, or rope_parameters that are
    not its rope_theta and rope_scaling.
    """
    path = folder / HF_CONFIG
    beside = read_json(path) if path.is_file() else {}
    for key in fixed:
        if beside.get(key, config[key]) != config[key]:
            raise CheckpointError(f"{path}: {key} is {beside[key]!r}, {PARAMS} and tensors say {config[key]!r}")
    scaling, theta = beside.get("rope_scaling"), beside.get("rope_theta", config["rope_theta"])
    parts = {"rope_theta": theta} | (scaling if isinstance(scaling, dict) and scaling else {"rope_type": "default"})
    if beside.get("rope_parameters", parts) != parts:  # these would win
        raise CheckpointError(
            f"{path}: rope_parameters is {str(beside['rope_parameters'])[:200]}, "
            f"rope_theta and rope_scaling say {str(parts)[:200]}"
        )
    return beside


def _longest(vocab: int, theta: float, eps: float, scaled: bool) -> int:
    """max_position_embeddings of the published models. It is a promise to the user, without effect on the numbers."""
    if scaled:
        return 131072  # Llama 3.1, 3.2, 3.3
    if vocab == 128256:
        return 8192  # Llama 3
    if theta == 1e6:
        return 16384  # Code Llama
    return 2048 if eps == 1e-6 else 4096  # Llama 1, 2


# ------------------------------------------------------------------------------------------------------------- writing


def write_meta(
    source: Source, target: Path, *, max_shard_size: int | str | None = None, force: bool = False, plan: object = None
) -> Path:
    """Write ``source`` (a Llama, its config complete) in Meta's layout, and return the folder.

    One file, or, with ``max_shard_size``, the fewest files of tensor parallelism (a power of two) of at most that
    size. One file's tensors are held at a time, and one tensor more. Raises ConfigError naming the key of a config
    that Meta's code does not know.
    """
    config = source.config
    params = _params(config, source.path)
    expect_shapes(source.path, source.tensors, shapes_of(config), "a Llama in Meta's layout")
    names = [*source.tensors, *(["lm_head.weight"] if config["tie_word_embeddings"] else [])]
    by_rows = config["vocab_size"] > 100_000  # from Llama 3 on
    count = _count(source, config, max_shard_size, by_rows)
    files = [f"consolidated.{rank:02d}.pth" for rank in range(count)]
    texts = {PARAMS: to_json(params, PARAMS), HF_CONFIG: to_json(config, HF_CONFIG)}
    copies = source.add_files(texts)
    own = {path.name for path in target.iterdir() if _FILE.fullmatch(path.name)} if target.is_dir() else set()
    order = [PARAMS, *files, *(name for name in (*texts, *copies) if name != PARAMS)]
    shown = {name: source.tensors.get(name, source.tensors["model.embed_tokens.weight"]) for name in names}
    layout = [[name, list(shown[name].shape), str(shown[name].dtype)] for name in names]
    work = WorkFolder(target, order, [plan, layout, count], marker=PARAMS, own=own, force=force)
    with work, progress(shown, target) as bar:
        if work.finished:
            return target
        for rank, file in enumerate(files):
            shapes = {meta_name(name): _cut(shown[name], name, by_rows, rank, count) for name in names}
            if not _is_finished(work.path / file, shapes):
                state = {}
                for name in names:
                    tensor = source.make(name if name in source.tensors else "model.embed_tokens.weight")
                    heads = heads_of(config, name)
                    tensor = interleave(tensor, heads) if heads else tensor
                    state[meta_name(name)] = _cut(tensor, name, by_rows, rank, count).clone()
                save_pth(work.path / file, state)
            bar.update(sum(t.nbytes for t in shapes.values()))
        work.write(texts, copies)
    return target


def _params(config: dict, where: Path) -> dict:
    def refuse(key: str, expected: str) -> None:
        raise ConfigError(f"{where}: {key} {config.get(key)!r} has no form in Meta's layout: expected {expected}")

    if config["model_type"] != "llama":
        refuse("model_type", "'llama'")
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        refuse("head_dim", "hidden_size / num_attention_heads")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            refuse(key, "false")
    rope = config["rope_parameters"]
    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
    } | ffn_params(config["hidden_size"], config["intermediate_size"])
    if rope["rope_type"] == "llama3":
        if rope["low_freq_factor"] != 1 or rope["original_max_position_embeddings"] != 8192:
            refuse("rope_parameters", "low_freq_factor 1 and original_max_position_embeddings 8192")
        params["use_scaled_rope"] = True
        if rope["factor"] != (32 if config["tie_word_embeddings"] else 8):
            params["rope_scaling_factor"] = rope["factor"]
        if rope["high_freq_factor"] != 4:
            params["rope_high_freq_factor"] = rope["high_freq_factor"]
    elif rope["rope_type"] != "default":
        refuse("rope_parameters", "no scaling, or that of Llama 3.1")
    return json.loads(json.dumps(params))


def _count(source: Source, config: dict, limit: int | str | None, by_rows: bool) -> int:
    if limit is None:
        return 1
    total = sum(t.nbytes for t in source.tensors.values())
    count, size = 1, parse_size(limit)
    divided = [config["num_key_value_heads"], config["intermediate_size"], config["vocab_size"]]
    divided += [] if by_rows else [config["hidden_size"]]
    while total / count > size:
        count *= 2
        if any(n % count for n in divided) or count > 64:
            raise ConfigError(
                f"{source.path}: tensor parallelism over {count} files would cut heads, rows or columns that "
                f"{count} does not divide: allow larger files than {limit}"
            )
    return count


def _cut(tensor: torch.Tensor, ours: str, by_rows: bool, rank: int, count: int) -> torch.Tensor:
    axis = _axis(ours, by_rows)
    return tensor if axis is None or count == 1 else tensor.chunk(count, dim=axis)[rank]


def _is_finished(path: Path, wanted: dict[str, torch.Tensor]) -> bool:
    if not path.is_file():
        return False
    try:
        found = open_pth(path).tensors
    except CheckpointError:
        return False
    return {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (tuple(t.shape), t.dtype) for n, t in wanted.items()
    }
