"""Activation memory: rebuild in backward what is cheap to rebuild, instead of keeping it from forward.

A Linear keeps its input for the weight gradient. When that input is a norm or a gated product, it costs one
memory-bound pass to rebuild, yet a third of all activation memory to keep. After Chen et al. 2016, sublinear memory.

Per token a Llama block of width H keeps, in elements (A, K heads of D, I wide inside, usually A·D = H, I = 3.5·H):

    level        kept                                              recomputed in backward
    "none"       5·H + 2·A·D + 2·K·D + 3·I                         nothing
    "fast"       2·H + 2·A·D + 2·K·D + 2·I                         norms, gated products: memory-bound passes
    "mlp"        2·H + 2·A·D + 2·K·D                               and gate_proj, up_proj
    "attention"  H + A·D                                           all but attention itself, whose output is kept
    "block"      H                                                 the whole block

Any of them but "none" may be followed by "+offload": what the level keeps then waits in pinned host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ligermodels.errors import LigerError

LEVELS = ("none", "fast", "mlp", "attention", "block")
OFFLOAD = "+offload"


class Kept(NamedTuple):
    """A tensor saved for backward as it is. torch does not notice under hooks that it was changed, so its version goes
    along (an early optimizer step, say)."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError, as torch would, if it was changed."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward needs was modified by an inplace "
                "operation after the forward (an optimizer step between them?)"
            )
        return self.tensor


class Packer:
    """A pair of saved-tensor hooks that others of its kind can nest in: torch itself only calls the innermost."""

    def pack(self, t: torch.Tensor) -> Any:
        """What to keep in place of ``t``: anything with an ``unpack()`` that gives t's values again."""
        return Kept(t, t._version)

    def hooks(self) -> contextlib.AbstractContextManager:
        """The context in which ``pack`` decides."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed.unpack())


class _Rebuilt(NamedTuple):
    recipe: recompute
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> torch.Tensor:
        return self.recipe.value(self.index).as_strided(self.size, self.stride, self.offset)


class recompute(Packer):
    """``with recompute(h, rebuild, *inputs):`` what autograd would save of ``h`` in here is rebuilt in backward.

    ``rebuild(*inputs)`` must give h's values again, bit for bit; h may be a tuple, and rebuild then gives one too. The
    inputs are kept as if an operation in here had saved them, so they may be rebuilt (or offloaded) themselves. Every
    saved view of h's storage is replaced; other tensors are saved as usual, so wrapped Linears (LoRA, FSDP, TP) work
    unchanged. All views of one backward share one rebuild; a second backward through a retained graph rebuilds again.

    Does nothing where it would be wrong or useless: without gradients, under torch.compile (its partitioner decides),
    and inside foreign saved-tensor hooks (torch.utils.checkpoint, save_on_cpu), which then own the decision.
    """

    def __init__(
        self,
        h: torch.Tensor | tuple[torch.Tensor, ...],
        rebuild: Callable[..., Any],
        *inputs: torch.Tensor,
        enabled: bool = True,
    ):
        self._h = h if isinstance(h, tuple) else (h,)
        recording = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        self._active = enabled and recording and all(t.requires_grad and t.is_contiguous() for t in self._h)
        self._rebuild, self._inputs = rebuild, inputs
        self._packed_inputs: list[Any] | None = None
        self._outer: Packer | None = None
        self._saved = self._used = 0
        self._rebuilt: tuple[torch.Tensor, ...] | None = None

    def __enter__(self) -> recompute:
        if self._active:
            top = _top_hooks()
            owner = getattr(top[0], "__self__", None) if top else None
            self._outer = owner if isinstance(owner, Packer) else None
            self._active = top is None or self._outer is not None
        if self._active:
            self._storages = [address(t) for t in self._h]
            self._hooks = self.hooks()
            self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._active:
            self._hooks.__exit__(*exc)
            # They hold this object: with the cycle, what it keeps would wait for Python's collector (measured: 50 GiB).
            self._hooks = None
        self._h = self._inputs = ()  # alive until here, so that no other tensor could take an address

    def pack(self, t: torch.Tensor) -> Any:
        plain = type(t) is torch.Tensor  # a compiler that traces in here (FlexAttention's) saves tensors without data
        if plain and (found := address(t)) in self._storages:
            index = self._storages.index(found)
            h = self._h[index]
            if (t.device, t.dtype) == (h.device, h.dtype):
                if self._packed_inputs is None:
                    self._packed_inputs = [self._pass_on(x) for x in self._inputs]
                self._saved += 1
                return _Rebuilt(self, index, t.size(), t.stride(), t.storage_offset() - h.storage_offset())
        return self._pass_on(t)

    def _pass_on(self, t: torch.Tensor) -> Any:
        return self._outer.pack(t) if self._outer is not None else super().pack(t)

    def value(self, index: int) -> torch.Tensor:
        """h, or its part ``index``, in the running backward; the last user of it lets go of it."""
        if self._rebuilt is None:
            with torch.no_grad():
                again = self._rebuild(*(x.unpack() for x in self._packed_inputs))
                again = again if isinstance(again, tuple) else (again,)
                self._rebuilt = tuple(t.contiguous() for t in again)
        found = self._rebuilt[index]
        self._used += 1
        if self._used == self._saved:
            self._rebuilt, self._used = None, 0
        return found


def address(t: torch.Tensor) -> int:
    """Of the storage: the same for all views of it."""
    return t.untyped_storage().data_ptr()


def _top_hooks() -> tuple[Callable, Callable] | None:
    """The saved-tensor hooks in force, if any. torch has no public name for this question."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(False) if top is not None else None


# ----------------------------------------------------------------------------------------------------- a whole layer


def split_level(level: str) -> tuple[str, bool]:
    """("block+offload") -> ("block", True). Raises LigerError for what is no level."""
    base = level.removesuffix(OFFLOAD) if isinstance(level, str) else level
    if base not in LEVELS or (base == "none" and level != base):
        known = ", ".join(LEVELS)
        raise LigerError(f'activation memory level must be one of {known}, all but none also with "{OFFLOAD}", '
                         f"found {level!r}")  # fmt: skip
    return base, level != base


def set_level(layer: nn.Module, level: str) -> None:
    """Tell the modules of a layer what they keep for backward; ``CausalLM.run_layer`` does the rest."""
    base, _ = split_level(level)
    layer.activation_memory = level
    for module in layer.modules():
        if hasattr(module, "recompute"):
            module.recompute = base != "none"
        if hasattr(module, "keep"):
            module.keep = {"none": "product", "fast": "gates"}.get(base, "input")


def draws(layer: nn.Module) -> bool:
    """Whether running this layer again would draw other random numbers: a dropout of its own or of an adapter."""
    return layer.training and any(
        (isinstance(m, nn.Dropout) and m.p > 0)
        or any(isinstance(p := getattr(m, name, 0), float) and p > 0 for name in ("dropout", "jitter"))
        for m in layer.modules()
    )


def can_keep_attention(layer: nn.Module, x: torch.Tensor, visible: Any) -> bool:
    """Not where FlexAttention may run: it compiles its kernels, which the mode that records results must not see."""
    module = layer.self_attn
    if visible.keep is not None or visible.image is not None or getattr(module, "softcap", None) is not None:
        return False
    masked = visible.document is not None or getattr(module, "window", None) is not None
    return not (masked and x.dtype == torch.float32)


def run_again(layer: nn.Module, x: torch.Tensor, context: Any, *, keep_attention: bool, pack: Any = None) -> Any:
    """``layer(x, context)`` of which only x is kept, and on request what attention gave: the rest runs again.

    ``pack`` (a Packer's) says how the output of attention is kept.
    """
    if torch.compiler.is_compiling():
        return checkpoint(layer, x, context, use_reentrant=False, preserve_rng_state=draws(layer))
    replay = _replaying(layer)
    forward: contextlib.AbstractContextManager = contextlib.nullcontext()
    if keep_attention:
        found: list[Any] = []
        forward = _RecordAttention(found, pack or Packer().pack)
        replay = _both(replay, _ReplayAttention(found))
    return checkpoint(
        layer, x, context, use_reentrant=False, preserve_rng_state=draws(layer), context_fn=lambda: (forward, replay)
    )  # fmt: skip


class _replaying:
    """While a layer runs again for its backward: an MLP that ends it gives no values, only their gradient is used."""

    def __init__(self, layer: nn.Module):
        ends = getattr(layer, "ends_with_mlp", False)
        self.modules = [m for m in layer.modules() if hasattr(m, "replaying")] if ends else []

    def __enter__(self) -> None:
        for module in self.modules:
            module.replaying = True

    def __exit__(self, *exc: Any) -> None:
        for module in self.modules:
            module.replaying = False


class _both:
    """Two contexts as one that can be entered again and again (a retained graph runs backward twice)."""

    def __init__(self, *contexts: Any):
        self.contexts = contexts

    def __enter__(self) -> None:
        self.stack = contextlib.ExitStack()
        for context in self.contexts:
            self.stack.enter_context(context)

    def __exit__(self, *exc: Any) -> bool | None:
        return self.stack.__exit__(*exc)


def _attention_operators() -> Iterator[Any]:
    for name in (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ):
        if hasattr(torch.ops.aten, name):
            yield getattr(torch.ops.aten, name).default


_ATTENTION = frozenset(_attention_operators())


class _RecordAttention(TorchDispatchMode):
    """Keeps what the attention operators give, below autograd."""

    def __init__(self, found: list[Any], pack: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.found, self.pack = found, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ATTENTION:
            # detached aliases: autograd makes what is returned part of the graph
            self.found.append([self.pack(t.detach()) if isinstance(t, torch.Tensor) else t for t in out])
        return out


class _ReplayAttention(TorchDispatchMode):
    """Gives what was kept, in the order of the calls, instead of computing it again."""

    def __init__(self, found: list[Any]):
        super().__init__()
        self.found, self.next = found, 0

    def __enter__(self) -> _ReplayAttention:
        self.next = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func not in _ATTENTION:
            return func(*args, **(kwargs or {}))
        kept = self.found[self.next]
        self.next += 1
        return tuple(t.unpack().detach() if hasattr(t, "unpack") else t for t in kept)
