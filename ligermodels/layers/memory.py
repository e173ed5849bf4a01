"""Activation memory: rebuild in backward what is cheap to rebuild, instead of keeping it from forward.

A Linear keeps its input for the weight gradient. When that input is a norm or a gated product, it costs one
memory-bound pass to rebuild, yet a third of all activation memory to keep. After Chen et al. 2016, sublinear memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LEVELS = ("none", "fast", "block")


class recompute:
    """``with recompute(h, rebuild):`` whatever autograd would save of ``h`` in here is rebuilt in backward instead.

    ``rebuild()`` must give h's values again, bit for bit, from tensors that are kept anyway. Every saved view of h's
    storage is replaced; other tensors are saved as usual, so wrapped Linears (LoRA, FSDP, TP) work unchanged. All
    views of one backward share one rebuild; a second backward through a retained graph rebuilds again.

    Does nothing where it would be wrong or useless: without gradients, under torch.compile (its partitioner decides),
    and inside foreign saved-tensor hooks (torch.utils.checkpoint, save_on_cpu), which then own the decision.
    """

    def __init__(self, h: torch.Tensor, rebuild: Callable[[], torch.Tensor], *, enabled: bool = True):
        recording = torch.is_grad_enabled() and h.requires_grad and not torch.compiler.is_compiling()
        self._active = enabled and recording and h.is_contiguous()
        self._h: torch.Tensor | None = h
        self._rebuild = rebuild
        self._outer: recompute | None = None
        self._saved = self._used = 0
        self._rebuilt: torch.Tensor | None = None

    def __enter__(self) -> recompute:
        if self._active:
            top = _top_hooks()
            owner = getattr(top[0], "__self__", None) if top else None
            self._outer = owner if isinstance(owner, recompute) else None
            self._active = top is None or self._outer is not None
        if self._active:
            self._storage = _address(self._h)
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, recompute._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._active:
            self._hooks.__exit__(*exc)
        self._h = None  # alive until here, so that no other tensor could take its address

    def _pack(self, t: torch.Tensor) -> Any:
        plain = type(t) is torch.Tensor  # a compiler that traces in here (FlexAttention's) saves tensors without data
        if plain and t.device == self._h.device and t.dtype == self._h.dtype and _address(t) == self._storage:
            self._saved += 1
            return self, t.size(), t.stride(), t.storage_offset() - self._h.storage_offset()
        # Hooks do not nest by themselves: only the innermost pair is called. Nor does torch itself notice, under hooks,
        # that a saved tensor was changed before the backward (an early optimizer step, say), so its version goes along.
        return self._outer._pack(t) if self._outer is not None else (t, t._version)

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        if len(packed) == 2:
            t, version = packed
            if t._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(t.shape)} that the backward needs was modified by an inplace operation "
                    "after the forward (an optimizer step between them?)"
                )
            return t
        self, size, stride, offset = packed
        if self._rebuilt is None:
            with torch.no_grad():
                self._rebuilt = self._rebuild().contiguous()
        view = self._rebuilt.as_strided(size, stride, offset)
        self._used += 1
        if self._used == self._saved:  # the last user of this backward: let go of it
            self._rebuilt, self._used = None, 0
        return view


def _address(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _top_hooks() -> tuple[Callable, Callable] | None:
    """The saved-tensor hooks in force, if any. torch has no public name for this question."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None
