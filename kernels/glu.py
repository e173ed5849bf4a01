from __future__ import annotations

import torch
import torch.nn.functional as F


def _reference(gate, up, act):
    wide = torch.promote_types(gate.dtype, torch.float32)
    return (act(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def swiglu_reference(gate, up):
    """swiglu in plain differentiable PyTorch."""
    return _reference(gate, up, F.silu)


def geglu_reference(gate, up, approximate="tanh"):
    """geglu in plain differentiable PyTorch."""
    return _reference(gate, up, lambda x: F.gelu(x, approximate=approximate))


def swiglu(gate, up):
    """silu(gate) * up (Triton follows)."""
    return swiglu_reference(gate, up)


def swiglu_packed(gate_up):
    """swiglu of the two halves of the last dimension, (..., 2I) -> (..., I)."""
    return swiglu_reference(*gate_up.chunk(2, -1))


def geglu(gate, up, approximate="tanh"):
    """gelu(gate) * up (Triton follows)."""
    return geglu_reference(gate, up, approximate)
