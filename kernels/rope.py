from __future__ import annotations

import torch


def _rotate(x, cos, sin, interleaved):
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)  # (B or 1, S, 1, half)
    if interleaved:
        a, b = turned.unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def rope_reference(q, k, cos, sin, *, interleaved=False):
    """rope in plain differentiable PyTorch."""
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def rope(q, k, cos, sin, *, interleaved=False):
    """Rotate q and k, (B, S, H, D), by tables (B or 1, S, rotary_dim/2) (Triton follows)."""
    return rope_reference(q, k, cos, sin, interleaved=interleaved)
