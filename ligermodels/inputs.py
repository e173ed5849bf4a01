"""What a forward may be given: checks that name what does not fit, and labels and counts in the form the loss takes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from ligermodels.errors import LigerError
from ligermodels.layers.cache import KVCache


class CacheShape(NamedTuple):
    """What a cache must be to fit a model."""

    num_layers: int
    num_key_value_heads: int
    head_dim: int
    windows: list[int | None]  # how many keys a query sees, by layer; None: all


def check_cache(cache: KVCache, expected: CacheShape) -> None:
    """Raise LigerError unless ``cache`` was made for a model of this kind."""
    if not isinstance(cache, KVCache):
        raise LigerError(f"cache must come from make_cache, found {type(cache).__name__}")
    found = (len(cache.keys), *cache.keys[0].shape[2:])
    if found != expected[:3]:
        raise LigerError(
            f"the cache is of another model: (layers, key/value heads, head_dim) is {found}, expected {expected[:3]}"
        )
    for layer, (kept, seen) in enumerate(zip(cache.windows, expected.windows, strict=True)):
        if kept is not None and (seen is None or kept < seen):
            raise LigerError(
                f"the cache is of another model: in layer {layer} it keeps a window of {kept} positions, this model "
                f"sees {'all' if seen is None else seen}"
            )


def check_mask(attention_mask: torch.Tensor, shape: tuple[int, int], *, document: torch.Tensor | None = None) -> None:
    """Raise LigerError unless the mask is (batch, cached + new) and, where values can be read, not an additive one.

    ``document`` (B, S), the number of each position's document: then padding must be at the end of one, as nothing
    hides it from later tokens.
    """
    need_tensor("attention_mask", attention_mask)
    if attention_mask.shape != shape:
        raise LigerError(f"attention_mask must be (batch, cached + new) = {shape}, found {tuple(attention_mask.shape)}")
    readable = attention_mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and attention_mask.is_floating_point() and not bool((attention_mask >= 0).all()):
        raise LigerError(
            "attention_mask holds negative numbers or NaN: expected nonzero = keep, 0 = padding, not a mask that "
            "is added to the scores"
        )
    if readable and document is not None:
        kept = attention_mask != 0
        seen = kept[:, 1:] & ~kept[:, :-1] & (document[:, 1:] == document[:, :-1])
        if bool(seen.any()):
            raise LigerError(
                "attention_mask marks padding before a token of the same document: with cu_seqlens padding must be "
                "at a document's end, or a document of its own"
            )


def check_ids(input_ids: torch.Tensor, vocab_size: int, *, read_on_gpu: bool) -> None:
    """Raise LigerError unless these are (B, S) token ids; on a GPU their values are read only if asked."""
    need_tensor("input_ids", input_ids)
    if input_ids.dim() != 2 or input_ids.numel() == 0 or input_ids.dtype not in (torch.int64, torch.int32):
        raise LigerError(
            "input_ids must be a non-empty (batch, length) tensor of int64 or int32, "
            f"found {input_ids.dtype} of shape {tuple(input_ids.shape)}"
        )
    if input_ids.is_meta or torch.compiler.is_compiling():
        return
    if input_ids.is_cuda and (not read_on_gpu or torch.cuda.is_current_stream_capturing()):
        return
    low, high = (int(x) for x in torch.aminmax(input_ids))
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise LigerError(f"token id {bad} in input_ids is outside the vocabulary of {vocab_size}")


def check_positions(
    position_ids: torch.Tensor,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cache: KVCache | None,
    *,
    read_on_gpu: bool,
) -> int:
    """The largest position + 1. Positions that start anew mean packed documents, and those need cu_seqlens.

    On a GPU the values are read only if ``read_on_gpu`` (rotary tables that depend on the length need them).
    """
    batch, length = input_ids.shape
    need_tensor("position_ids", position_ids)
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise LigerError(f"position_ids must be int64 or int32, found {position_ids.dtype}")
    if position_ids.shape not in ((batch, length), (1, length)):
        raise LigerError(f"position_ids must be {(batch, length)} or {(1, length)}, found {tuple(position_ids.shape)}")
    if position_ids.device.type != "cpu" and not read_on_gpu:
        return length  # not read: it would stall the GPU
    if torch.compiler.is_compiling():  # reading breaks the graph, which beats a wrong angle
        return int(position_ids.max()) + 1 if read_on_gpu else length
    if attention_mask is None and cu_seqlens is None and cache is None and bool((position_ids.diff() != 1).any()):
        raise LigerError(
            "position_ids do not rise by 1. If documents are packed in a row, give cu_seqlens: positions alone "
            "would let one document attend to the one before; if the row is padded, give attention_mask"
        )
    if int(position_ids.min()) < 0:
        raise LigerError(f"position_ids must not be negative, found {int(position_ids.min())}")
    return int(position_ids.max()) + 1


def shift_labels(labels: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """(B, S): at each position the label of the next one; -100 at the end of a row and of a document."""
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    if cu_seqlens is None:
        return shifted
    last = cu_seqlens[1:].to(labels.device, torch.long) - 1  # last position of each document, over B·S
    last = last % labels.numel()  # -1, of an empty first document: the very last position, which has no label anyhow
    return shifted.reshape(-1).index_fill(0, last, -100).view_as(labels)


def normaliser(count: int | float | torch.Tensor, device: torch.device) -> float | torch.Tensor:
    """num_items_in_batch, checked where that costs no wait; 0 (nothing supervised) becomes 1."""
    tensor = isinstance(count, torch.Tensor)
    readable = not torch.compiler.is_compiling() and not (tensor and count.device.type != "cpu")
    try:
        good = not isinstance(count, bool) and (not tensor or (count.numel() == 1 and count.dtype != torch.bool))
        good = good and (not readable or bool(0 <= count < math.inf))
    except (TypeError, ValueError):
        good = False
    if not good:
        raise LigerError(f"num_items_in_batch must be a number of tokens, 0 or more, found {count!r}")
    if not tensor:
        return count or 1
    count = count.reshape(()).to(device)
    return count.masked_fill(count == 0, 1)


def need_tensor(name: str, value: object) -> None:
    """Raise LigerError unless the argument called ``name`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise LigerError(f"{name} must be a tensor, found {type(value).__name__}")
