"""How an operation finds its implementation, and how it is made known to torch.

CUDA tensors take the Triton kernel. CPU tensors take the plain PyTorch reference, unless ``TRITON_INTERPRET=1`` is
set before the import (tests only): then they take the Triton kernel through Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

try:
    import triton
    import triton.language as tl

    INTERPRETED = bool(triton.knobs.runtime.interpret)
except ImportError:  # macOS, Windows: only the references are used, but the kernel files must still import

    class _NoTriton:
        constexpr = None

        @staticmethod
        def jit(fn: Callable | None = None, **_: object) -> Callable:
            return fn if fn is not None else (lambda f: f)

    triton = tl = _NoTriton()
    INTERPRETED = False

__all__ = ["INTERPRETED", "register", "tl", "triton", "use_triton"]

_LIBRARY = torch.library.Library("ligermodels", "FRAGMENT")


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on ``tensor`` run as Triton kernels (CUDA, or CPU under the interpreter)."""
    return tensor.is_cuda or (INTERPRETED and tensor.device.type == "cpu")


def register(
    schema: str,
    implementation: Callable,
    fake: Callable,
    *,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
) -> Callable:
    """Define ``ligermodels::<schema>`` and return a callable of its arguments.

    Under torch.compile and under dispatch modes (fake tensors, counters) the call goes through the operator, otherwise
    straight to ``implementation``, inside an autograd.Function if a gradient may be recorded.

    ``fake`` gives outputs of the right shape, dtype and device without computing (torch.compile, meta tensors).
    With ``backward``, gradients follow ``ctx.needs_input_grad``; both get torch.library.register_autograd's arguments.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"ligermodels::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"ligermodels::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
    operator = getattr(torch.ops.ligermodels, name).default

    def forward(ctx, *args):
        output = implementation(*args)
        if setup_context is not None:
            setup_context(ctx, args, output)
        return output

    # The same formula without the dispatcher, whose Python hooks cost more time than a small kernel. Made by type() so
    # that the node of a traceback or a graph bears the operation's name.
    methods = {"forward": staticmethod(forward)}
    if backward is not None:
        methods["backward"] = staticmethod(backward)
    eager = type(f"Liger_{name}", (torch.autograd.Function,), methods)

    def call(*args):
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return operator(*args)
        if backward is None or not torch.is_grad_enabled():
            return implementation(*args)
        return eager.apply(*args)

    return call
