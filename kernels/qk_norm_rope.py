from __future__ import annotations

from ligermodels.kernels.rms_norm import rms_norm_reference
from ligermodels.kernels.rope import rope_reference


def qk_norm_rope_reference(
    q, k, q_weight, k_weight, cos, sin, eps=1e-6, *, offset=0.0, casting="llama", interleaved=False
):
    """qk_norm_rope in plain differentiable PyTorch."""
    q = rms_norm_reference(q, q_weight, eps, offset=offset, casting=casting)
    k = rms_norm_reference(k, k_weight, eps, offset=offset, casting=casting)
    return rope_reference(q, k, cos, sin, interleaved=interleaved)


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps=1e-6, *, offset=0.0, casting="llama", interleaved=False):
    """RMSNorm of every head over D, then rotation (Triton follows)."""
    return qk_norm_rope_reference(
        q, k, q_weight, k_weight, cos, sin, eps, offset=offset, casting=casting, interleaved=interleaved
    )
