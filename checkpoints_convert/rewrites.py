"""Where a published layout names or cuts tensors otherwise than the model does: rules from one to the other, and back.

A rule works on names and byte ranges only, so a rewritten checkpoint is read exactly like any other: splitting a
tensor by rows is nothing but two ranges of the same file. Layouts are recognised by their names.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from ligermodels.checkpoints_convert.hf import Checkpoint, TensorInfo
from ligermodels.errors import CheckpointError

__all__ = [
    "stacked_experts",
    "text_tower",
    "to_chatglm_names",
    "to_expert_names",
    "to_model_names",
    "vision_language",
]


def to_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights under the names of the model that they are for; unchanged where the names already fit.

    Raises CheckpointError for a tensor that cannot be cut as its layout says.
    """
    if any(name.startswith("transformer.encoder.layers.") for name in checkpoint.tensors):
        return _from_chatglm(checkpoint)
    return stacked_experts(checkpoint)


# ---------------------------------------------------------------------------------------------------------- ChatGLM

# ChatGLM2, ChatGLM3, glm-4-9b as their own code stores them. The rows of query_key_value are [q | k | v].
_CHATGLM = {
    "transformer.embedding.word_embeddings.": "model.embed_tokens.",
    "transformer.encoder.final_layernorm.": "model.norm.",
    "transformer.output_layer.": "lm_head.",
    "transformer.encoder.layers.": "model.layers.",
    ".self_attention.dense.": ".self_attn.o_proj.",
    ".self_attention.query_key_value.": ".self_attn.query_key_value.",
    ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.",
    ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
}
_CHATGLM_JUNK = "transformer.rotary_pos_emb.inv_freq"
_PACKED = re.compile(r"(.*\.self_attn\.)query_key_value(\..*)")
_SPLIT = re.compile(r"(.*\.self_attn\.)[qkv]_proj(\..*)")


def _from_chatglm(checkpoint: Checkpoint) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    for theirs, info in checkpoint.tensors.items():
        if theirs == _CHATGLM_JUNK:
            continue
        name = _renamed(theirs, _CHATGLM)
        packed = _PACKED.fullmatch(name)
        if packed is None:
            tensors[name] = info
            continue
        # The query's rows are as many as the columns of the output projection, which is beside it.
        dense = checkpoint.tensors.get(theirs.rpartition(".query_key_value.")[0] + ".dense.weight")
        if dense is None or len(dense.shape) != 2:
            raise CheckpointError(f"{checkpoint.folder}: {theirs} has no 'dense.weight' beside it to say how to cut it")
        total, query = info.shape[0], dense.shape[1]
        if (total - query) % 2 or not 0 < query < total:
            raise CheckpointError(
                f"{info.file}: {theirs} has {total} rows: expected the {query} of the query, which dense.weight has "
                "columns for, and as many for the key as for the value"
            )
        key = query + (total - query) // 2
        bounds = {"q_proj": (0, query), "k_proj": (query, key), "v_proj": (key, total)}
        tensors |= {packed[1] + part + packed[2]: info.rows(*b) for part, b in bounds.items()}
    return Checkpoint(checkpoint.folder, tensors)


def to_chatglm_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A GLM's tensors in ChatGLM's own layout: the inverse of ``to_model_names`` on such a folder, bit for bit.

    Takes names of ``LigerGlm`` (transformers' ``glm``); q, k and v are copied into one tensor, all others are shared.
    Raises CheckpointError where one of the three is missing.
    """
    back = {ours: theirs for theirs, ours in _CHATGLM.items()}
    out: dict[str, torch.Tensor] = {}
    for ours, tensor in tensors.items():
        part = _SPLIT.fullmatch(ours)
        if part is None:
            out[_renamed(ours, back)] = tensor
            continue
        name = _renamed(f"{part[1]}query_key_value{part[2]}", back)
        if name not in out:
            names = [f"{part[1]}{x}_proj{part[2]}" for x in "qkv"]
            if not all(n in tensors for n in names):
                raise CheckpointError(f"{ours} needs its two companions among {', '.join(names)}")
            out[name] = torch.cat([tensors[n] for n in names])
    return out


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        if name.startswith(old) or (old.startswith(".") and old in name):
            name = name.replace(old, new, 1)
    return name


# ---------------------------------------------------------------------------------------------------- vision-language

# As published (and as transformers 5 saves), and as transformers 5 has them in memory.
_TEXT = re.compile(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.)")
_WHOLE = (
    (re.compile(r"^model\.(?=(vision_tower|multi_modal_projector|image_newline)\b)"), ""),
    (re.compile(r"^model\.language_model\."), "language_model.model."),
    (re.compile(r"^lm_head\."), "language_model.lm_head."),
    (re.compile(r"^vision_tower\.vision_model\."), "vision_tower."),
)
_IMAGE = re.compile(r"^(?:model\.)?(vision_tower|multi_modal_projector|image_newline)\b")


def vision_language(checkpoint: Checkpoint) -> Checkpoint:
    """A whole vision-language checkpoint under one spelling: that in which transformers 5 saves.

    Known are the published one (``vision_tower.vision_model.…``), transformers' in memory (``model.language_model.…``,
    ``model.vision_tower.…``, ``lm_head.weight``), and the one that is given: ``language_model.model.…``,
    ``language_model.lm_head.weight``, ``vision_tower.…``, ``multi_modal_projector.…``, ``image_newline``.

    Raises CheckpointError where two tensors would get one name.
    """
    tensors: dict[str, TensorInfo] = {}
    for old, info in checkpoint.tensors.items():
        name = old
        for pattern, new in _WHOLE:
            name = pattern.sub(new, name)
        if name in tensors:
            raise CheckpointError(f"{checkpoint.folder} holds {name} twice, once as {old}")
        tensors[name] = info
    return replace(checkpoint, tensors=tensors)


def text_tower(checkpoint: Checkpoint) -> Checkpoint:
    """The language model of a vision-language checkpoint, under the names of a model that reads text only.

    ``language_model.model.X`` and ``model.language_model.X`` become ``model.X``, ``language_model.lm_head.weight``
    becomes ``lm_head.weight``. The vision tower and its projector are left out, and a warning counts their tensors. A
    checkpoint without these prefixes is given back as it is.

    Raises CheckpointError where two tensors would get one name.
    """
    tensors: dict[str, TensorInfo] = {}
    left_out: dict[str, int] = {}
    for old, info in checkpoint.tensors.items():
        if found := _IMAGE.match(old):
            left_out[found[1]] = left_out.get(found[1], 0) + 1
            continue
        name = _TEXT.sub(lambda prefix: "model." if prefix[1].startswith("model.") else "", old)
        if name in tensors:
            raise CheckpointError(f"{checkpoint.folder} holds {name} twice, once as {old}")
        tensors[name] = info
    if left_out:
        parts = ", ".join(f"{part} ({count} tensors)" for part, count in left_out.items())
        warnings.warn(f"{checkpoint.folder}: the model reads text only; not loaded are {parts}", stacklevel=4)
    return replace(checkpoint, tensors=tensors)


# ------------------------------------------------------------------------------------------------ mixtures of experts

# Published files have a tensor for each matrix of each expert. In memory, as in transformers 5, the experts of a layer
# are stacked, gate above up: (E, 2I, H), and down (E, H, I).
_EXPERT = re.compile(r"(.*\.)(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_KINDS = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_STACKED = re.compile(r"(.*\.)mlp\.experts\.(gate_up_proj|down_proj)")


def stacked_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Per-expert tensors as the stacked ones of the model: nothing but a list of byte ranges, each read into its place.

    ``…block_sparse_moe.experts.0.w1.weight`` (Mixtral) and ``…mlp.experts.0.gate_proj.weight`` (Qwen) become parts of
    ``…mlp.experts.gate_up_proj``; Mixtral's ``block_sparse_moe.gate.weight`` becomes ``mlp.gate.weight``. Names that
    are stacked already stay. Raises CheckpointError for an expert that is missing or of another shape.
    """
    tensors: dict[str, TensorInfo] = {}
    layers: dict[str, dict[tuple[int, str], tuple[str, TensorInfo]]] = {}
    for name, info in checkpoint.tensors.items():
        if found := _EXPERT.fullmatch(name):
            layers.setdefault(found[1], {})[int(found[2]), _KINDS[found[3]]] = name, info
        else:
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = info
    for prefix, experts in layers.items():
        count = 1 + max(number for number, _ in experts)
        for target, kinds in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            wanted = [(number, kind) for number in range(count) for kind in kinds]
            missing = [f"{kind} of expert {number}" for number, kind in wanted if (number, kind) not in experts]
            if missing:
                raise CheckpointError(
                    f"{checkpoint.folder}: of the {count} experts of {prefix.rstrip('.')} {len(missing)} tensors are "
                    f"missing, the first is {missing[0]}"
                )
            parts = [experts[key] for key in wanted]
            shape = parts[0][1].shape
            for name, info in parts:
                if info.shape != shape or len(shape) != 2:
                    raise CheckpointError(f"{info.file}: {name} is {list(info.shape)}, but {parts[0][0]} {list(shape)}")
            shape = (count, len(kinds) * shape[0], shape[1])
            tensors[f"{prefix}mlp.experts.{target}"] = TensorInfo.joined((info for _, info in parts), shape)
    return replace(checkpoint, tensors=tensors)


def to_expert_names(tensors: Mapping[str, torch.Tensor], *, mixtral: bool) -> dict[str, torch.Tensor]:
    """Stacked experts under their published names, as views: the inverse of ``stacked_experts``.

    ``mixtral`` says in whose names: w1, w3, w2 below block_sparse_moe, or gate_proj, up_proj, down_proj below mlp.
    """
    names = ("block_sparse_moe", "w1", "w3", "w2") if mixtral else ("mlp", "gate_proj", "up_proj", "down_proj")
    block, gate, up, down = names
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            out[name.replace(".mlp.gate.", f".{block}.gate.")] = tensor
            continue
        for number, expert in enumerate(tensor.unbind()):
            prefix = f"{found[1]}{block}.experts.{number}"
            parts = {down: expert} if found[2] == "down_proj" else dict(zip((gate, up), expert.chunk(2), strict=True))
            out |= {f"{prefix}.{kind}.weight": part for kind, part in parts.items()}
    return out
