"""Attention over (B, S, heads, head_dim): who may look at whom, and the fastest exact kernel for it.

The arithmetic is torch's: scaled_dot_product_attention, flash attention for windows and documents of unequal length,
FlexAttention for soft caps and long padded rows. This file decides the mask and the backend; no (S, S) matrix of scores
is built on CUDA beyond _SHORT positions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ligermodels.errors import LigerError
from ligermodels.kernels.decode_attention import decode_attention
from ligermodels.layers.cache import Step

# Measured on an H200 (bf16, 4×4096, 32/8 heads of 128): cuDNN 4.15 ms, flash 7.17 ms forward and backward.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SHORT = 1024  # up to here a mask or plain scores are cheaper than compiling FlexAttention


@dataclass
class Visibility:
    """Which keys a query sees; made once per forward, its masks are made once per window and shared by the layers.

    Query i of ``length`` stands at position ``past`` + i and sees the keys 0 … past + i; in a sliding window only the
    last ``window`` of these (itself included), in a packed row only those of its document, in a padded row only those
    to keep. It always sees itself, also where it is padding: no softmax runs over nothing. Where ``image`` is given,
    the positions of one image also see each other forwards; windows, documents and padding hold for them as well.
    """

    length: int
    past: int
    device: torch.device
    keep: torch.Tensor | None = None  # bool (B, past + S)
    cu_seqlens: torch.Tensor | None = None  # int32, bounds over the B·S positions, every row start among them
    document: torch.Tensor | None = None  # (B, S), the document of each position
    image: torch.Tensor | None = None  # (B, S), the number of the image that each new position is of, -1 for text
    step: Step | None = None  # one query a row, at a position that only the device knows; nothing else then holds
    _masks: dict[Any, Any] = field(default_factory=dict)

    def mask_is_needed(self, window: int | None) -> bool:
        """Whether anything but "causal from the first key on" has to be said."""
        if self.keep is not None or self.document is not None or self.image is not None:
            return True
        return self.length > 1 and (self.past > 0 or window is not None)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """bool (B or 1, 1, S, past + S), True = sees; None where plain causal attention says it all."""
        if not self.mask_is_needed(window):
            return None
        if window not in self._masks:
            query = torch.arange(self.past, self.past + self.length, device=self.device)[:, None]
            key = torch.arange(self.past + self.length, device=self.device)
            mask = (key <= query)[None, None]
            if self.image is not None:
                mine, theirs = self.image[:, :, None], self._image_of_keys()[:, None]
                mask = mask | ((mine == theirs) & (mine >= 0))[:, None]
            if window is not None:
                mask = mask & (key > query - window)
            if self.document is not None:
                mask = mask & (self.document[:, None, :, None] == self.document[:, None, None, :])
            if self.keep is not None:
                mask = (mask & self.keep[:, None, None, :]) | (key == query)
            self._masks[window] = mask
        return self._masks[window]

    def block_mask(self, window: int | None, keys: int) -> BlockMask:
        """The same rule for FlexAttention, which skips whole blocks of it, over the last ``keys`` positions."""
        key = ("block", window, keys)
        if key not in self._masks:
            past, keep, document, image = self.past, self.keep, self.document, self.image
            image_of_keys = None if image is None else self._image_of_keys()
            dropped = past + self.length - keys
            if dropped:  # keys are counted from the first that is given
                past, keep = past - dropped, None if keep is None else keep[:, dropped:]
                image_of_keys = None if image is None else image_of_keys[:, dropped:]

            def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
                seen = k <= q + past
                if image is not None:
                    seen = seen | ((image[b, q] >= 0) & (image[b, q] == image_of_keys[b, k]))
                if window is not None:
                    seen = seen & (k > q + past - window)
                if document is not None:
                    seen = seen & (document[b, q] == document[b, k])
                if keep is not None:
                    seen = (seen & keep[b, k]) | (k == q + past)
                return seen

            rows = next((x.shape[0] for x in (keep, document, image) if x is not None), None)
            self._masks[key] = create_block_mask(sees, rows, None, self.length, keys, device=self.device)
        return self._masks[key]

    def _image_of_keys(self) -> torch.Tensor:
        """(B, past + S): ``image`` for all keys; no new position is of an image that is already in the cache."""
        return F.pad(self.image, (self.past, 0), value=-1)


def visibility(
    batch: int,
    length: int,
    past: int,
    device: torch.device,
    *,
    attention_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    step: Step | None = None,
) -> Visibility:
    """Causal visibility of ``length`` queries after ``past`` cached keys.

    ``attention_mask`` (B, past + S), nonzero = keep; ``cu_seqlens`` int32 (documents + 1,) packs documents; ``step``
    takes the place of ``past`` where the device counts.
    """
    if step is not None:
        if length != 1:
            raise LigerError(f"a captured step has one token a row, found {length}")
        return Visibility(length, past, device, step=step)
    if cu_seqlens is None:
        return Visibility(length, past, device, keep=None if attention_mask is None else attention_mask != 0)
    bounds = _with_row_starts(cu_seqlens, batch, length)
    return Visibility(length, past, device, cu_seqlens=bounds, document=document_index(bounds, batch, length))


def _with_row_starts(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """Documents never reach over a row: every row start is a boundary too (doubles are documents of length 0)."""
    if batch == 1:
        return cu_seqlens.to(torch.int32)
    starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=cu_seqlens.device)
    return torch.cat((cu_seqlens.to(torch.int32), starts)).sort().values


def document_index(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(B, S): the number of the document that each position belongs to."""
    positions = torch.arange(batch * length, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, positions, right=True).view(batch, length)


def document_positions(visible: Visibility) -> torch.Tensor:
    """(B, S): each position of packed rows counted from the start of its document."""
    document = visible.document
    starts = visible.cu_seqlens[(document - 1).long()]
    return torch.arange(document.numel(), device=document.device).view_as(document) - starts


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visibility,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """softmax(cap(q·kᵀ·scale))·v over the keys that are ``visible`` and within the ``window``.

    q (B, S, A, D); k, v (B, T, K, D), the last T of the past + S positions, with A a multiple of K (grouped queries);
    in a captured step the whole buffers of the cache. ``window`` counts the keys a query sees, itself included (None:
    all). ``softcap`` c bounds the scores by c·tanh(score / c) (Gemma 2). Returns (B, S, A, D).
    """
    if visible.step is not None:
        position, start, _, counters = visible.step
        options = {"window": window, "softcap": softcap, "counters": counters}
        return decode_attention(q, k, v, position, start, scale=scale, **options)
    if window is not None and k.shape[1] <= window:
        window = None  # it hides nothing
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and dropout == 0.0
    if (
        half
        and softcap is None
        and visible.keep is None
        and visible.image is None
        and visible.past == 0
        and (window or visible.document is not None)
    ):
        return _flash(q, k, v, visible.cu_seqlens, window, scale)
    long = q.is_cuda and dropout == 0.0 and q.shape[1] > _SHORT
    if long and (softcap is not None or visible.mask_is_needed(window)):
        return _flex(q, k, v, visible.block_mask(window, k.shape[1]), scale, softcap)
    mask = visible.mask(window)
    if window is not None and q.shape[1] + window - 1 < k.shape[1]:  # keys that no query reaches
        reach = q.shape[1] + window - 1
        k, v = k[:, -reach:], v[:, -reach:]
    if mask is not None:
        mask = mask[..., -k.shape[1] :]
    if softcap is not None:
        return _capped(q, k, v, mask, scale, softcap, dropout)
    return _sdpa(q, k, v, mask, visible.past, scale, dropout)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    past: int,
    scale: float,
    dropout: float,
) -> torch.Tensor:
    grouped = q.shape[2] != k.shape[2]
    if mask is not None and q.is_cuda and grouped:
        # No fused backend takes both a mask and grouped queries; without this copy torch would build all scores.
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        grouped = False
    q, k, v = (rearrange(x, "b s h d -> b h s d") for x in (q, k, v))
    causal = mask is None and past == 0
    if not (q.is_cuda and torch.is_grad_enabled()):
        # cuDNN plans anew for every shape: right for training, wrong for a cache that grows by one.
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    else:
        with sdpa_kernel(_BACKENDS, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return rearrange(out, "b h s d -> b s h d")


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> torch.Tensor:
    """Plain arithmetic with the scores in full, for short sequences, decoding and the CPU."""
    if mask is None and q.shape[1] > 1:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    q = rearrange(q, "b s (k g) d -> b k g s d", k=k.shape[2])
    k, v = (rearrange(x, "b t k d -> b k 1 t d") for x in (k, v))
    scores = softcap * torch.tanh(q @ k.mT * scale / softcap)  # (B, K, A/K, S, T)
    if mask is not None:
        scores = scores.masked_fill(~mask.unsqueeze(1) if mask.dim() == 4 else ~mask, -math.inf)
    weights = F.dropout(scores.float().softmax(-1).to(q.dtype), dropout)
    return rearrange(weights @ v, "b k g s d -> b s (k g) d")


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Windows and packed documents without a mask: the flash attention that torch carries."""
    batch, length = q.shape[:2]
    if cu_seqlens is not None:
        q, k, v = (rearrange(x, "b s h d -> (b s) h d") for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, length, length, 0.0, True, False, scale=scale,
        window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out if cu_seqlens is None else rearrange(out, "(b s) h d -> b s h d", b=batch)


@functools.cache
def _compiled_flex(softcap: float | None) -> Any:
    """FlexAttention is a template: it is only fast, and only lean, once compiled."""

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return torch.compile(functools.partial(flex_attention, score_mod=None if softcap is None else cap))


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask, scale: float, softcap: float | None
) -> torch.Tensor:
    q, k, v = (rearrange(x, "b s h d -> b h s d") for x in (q, k, v))
    out = _compiled_flex(softcap)(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(out, "b h s d -> b s h d")


def check_cu_seqlens(cu_seqlens: torch.Tensor, batch: int, length: int) -> None:
    """Raise LigerError unless these are document bounds over batch·length positions (values are read on the CPU)."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.numel() < 2:
        raise LigerError(
            "cu_seqlens must be an int32 vector of documents + 1 bounds, "
            f"found {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.device.type == "cpu":
        first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if first != 0 or last != batch * length or bool((cu_seqlens.diff() < 0).any()):
            raise LigerError(
                f"cu_seqlens must rise from 0 to batch·length = {batch * length}, found {cu_seqlens.tolist()[:8]}…"
            )
