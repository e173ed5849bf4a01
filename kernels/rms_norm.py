from __future__ import annotations

import torch

from ligermodels.errors import LigerError

_CASTINGS = ("llama", "gemma", "none")


def rms_norm_reference(x, weight, eps=1e-6, *, offset=0.0, casting="llama"):
    """rms_norm in plain differentiable PyTorch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = x.to(wide)
    normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if casting == "llama":
        normed = normed.to(x.dtype).to(wide)
    return (normed * (weight.to(wide) + offset)).to(x.dtype)


def add_rms_norm_reference(x, residual, weight, eps=1e-6, *, offset=0.0, casting="llama"):
    """add_rms_norm in plain differentiable PyTorch."""
    total = residual + x
    return rms_norm_reference(total, weight, eps, offset=offset, casting=casting), total


def _check(name, x, weight, casting):
    if casting not in _CASTINGS:
        raise LigerError(f"{name}: casting is {casting!r}; expected one of {', '.join(_CASTINGS)}")
    if weight is not None and (x.dim() == 0 or tuple(weight.shape) != (x.shape[-1],)):
        raise LigerError(f"{name}: weight has shape {tuple(weight.shape)}, but x has shape {tuple(x.shape)}")


def rms_norm(x, weight, eps=1e-6, *, offset=0.0, casting="llama"):
    """x / rms(x) * (weight + offset) over the last dimension; see rms_norm_reference (Triton follows)."""
    _check("rms_norm", x, weight, casting)
    return rms_norm_reference(x, weight, eps, offset=offset, casting=casting)


def add_rms_norm(x, residual, weight, eps=1e-6, *, offset=0.0, casting="llama"):
    """(rms_norm(residual + x), residual + x)."""
    _check("add_rms_norm", x, weight, casting)
    if x.shape != residual.shape:
        raise LigerError(f"add_rms_norm: x is {tuple(x.shape)} and residual {tuple(residual.shape)}; expected equal")
    return add_rms_norm_reference(x, residual, weight, eps, offset=offset, casting=casting)
