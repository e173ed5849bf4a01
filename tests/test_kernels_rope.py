"""rope and qk_norm_rope: facts of kernels/rope.py and kernels/qk_norm_rope.py."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernel_cases import (
    CUDA,
    DEVICES,
    DTYPES,
    FUSED_DEVICES,
    check_captures,
    check_compiles,
    check_exact,
    check_repeatable,
    check_strides,
    check_tail,
    run,
    tensor,
)

from ligermodels import LigerError
from ligermodels.kernels import qk_norm_rope, rms_norm, rope
from ligermodels.kernels._dispatch import INTERPRETED

EPS = 1e-5
LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
HEADS = pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "half"), [(1, 1, 8, 4), (7, 3, 10, 5), (4, 2, 16, 3), (3, 0, 6, 3)]
)


def angles(batch, seq, half, device, dtype=torch.float32):
    theta = tensor(batch, seq, half, seed=3, grad=False).double() * 9
    return theta.cos().to(device=device, dtype=dtype), theta.sin().to(device=device, dtype=dtype)


def turn(x, cos, sin, interleaved):
    """The formula, as a product with (cos + i sin) in x's dtype: eager in half precision, exact in float64."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    cos, sin = cos.to(x.dtype)[:, :, None], sin.to(x.dtype)[:, :, None]
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def heads(q_heads, k_heads, dim, dtype, device, batch=2, seq=3):
    q = tensor(batch, seq, q_heads, dim, like=(dtype, device))
    return q, tensor(batch, seq, k_heads, dim, like=(dtype, device), seed=1)


@HEADS
@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_rope_and_its_gradients_are_as_exact_as_eager(device, dtype, interleaved, q_heads, k_heads, dim, half):
    q, k = heads(q_heads, k_heads, dim, dtype, device)
    for batch in (1, 2):  # one table for all rows, or one for each: position ids may differ
        cos, sin = angles(batch, 3, half, device)
        both = lambda q, k, c=cos, s=sin: (turn(q, c, s, interleaved), turn(k, c, s, interleaved))  # noqa: E731
        check_exact(lambda q, k, c=cos, s=sin: rope(q, k, c, s, interleaved=interleaved), both, both, (q, k))


def head_norm(x, w, offset=0.0, casting="llama"):
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)
    h = h.to(x.dtype).to(wide) if casting == "llama" else h
    return (h * (w.to(wide) + offset)).to(x.dtype)


@HEADS
@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_qk_norm_rope_and_its_gradients_are_as_exact_as_eager(device, dtype, interleaved, q_heads, k_heads, dim, half):
    seq = 3 if INTERPRETED else 65  # enough tokens that rounding is statistics and not luck
    q, k = heads(q_heads, k_heads, dim, dtype, device, seq=seq)
    weights = tensor(dim, like=(dtype, device)), tensor(dim, like=(dtype, device), seed=1)
    cos, sin = angles(2, seq, half, device)
    for offset, casting in ((0.0, "llama"), (1.0, "gemma")):
        both = lambda q, k, wq, wk, o=offset, c=casting: (  # noqa: E731
            turn(head_norm(q, wq, o, c), cos, sin, interleaved),
            turn(head_norm(k, wk, o, c), cos, sin, interleaved),
        )
        ours = lambda q, k, wq, wk, o=offset, c=casting: qk_norm_rope(  # noqa: E731
            q, k, wq, wk, cos, sin, EPS, offset=o, casting=c, interleaved=interleaved
        )
        check_exact(ours, both, both, (q, k, *weights))


@pytest.mark.gpu
@LAYOUTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "half"), [(32, 8, 128, 64), (9, 3, 64, 32), (128, 8, 80, 16), (8, 1, 256, 128)]
)
def test_real_sizes_on_the_gpu(interleaved, dtype, q_heads, k_heads, dim, half):
    q, k = heads(q_heads, k_heads, dim, dtype, "cuda", seq=301)
    w = tensor(dim, like=(dtype, "cuda"))
    cos, sin = angles(1, 301, half, "cuda")
    both = lambda q, k: (turn(q, cos, sin, interleaved), turn(k, cos, sin, interleaved))  # noqa: E731
    check_exact(lambda q, k: rope(q, k, cos, sin, interleaved=interleaved), both, both, (q, k))
    normed = lambda q, k, w: both(head_norm(q, w), head_norm(k, w))  # noqa: E731
    ours = lambda q, k, w: qk_norm_rope(q, k, w, w, cos, sin, EPS, interleaved=interleaved)  # noqa: E731
    check_exact(ours, normed, normed, (q, k, w))
    check_repeatable(ours, (q, k, w))


def test_cpu_gives_the_values_of_hugging_face():
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    q, k = heads(4, 2, 16, torch.float32, "cpu")
    for theirs, half in ((llama, 8), (glm, 4)):
        cos, sin = angles(2, 3, half, "cpu")
        full = [torch.cat((t, t), -1) for t in (cos, sin)]
        expected = theirs(q, k, *full, unsqueeze_dim=2)
        for a, b in zip(rope(q, k, cos, sin, interleaved=theirs is glm), expected, strict=True):
            assert (a - b).abs().max() <= 1e-6


@LAYOUTS
@pytest.mark.parametrize("device", DEVICES)
def test_turning_back_gives_the_input_and_lengths_are_kept(device, interleaved):
    q, k = heads(3, 2, 10, torch.float32, device)
    cos, sin = angles(1, 3, 4, device)
    turned = rope(q, k, cos, sin, interleaved=interleaved)
    for x, y, back in zip((q, k), turned, rope(*turned, cos, -sin, interleaved=interleaved), strict=True):
        assert torch.allclose(back, x, atol=1e-6) and torch.allclose(y.norm(dim=-1), x.norm(dim=-1))
        assert torch.equal(y[..., 8:], x[..., 8:])


@pytest.fixture(params=["several tiles"] if INTERPRETED else ["one tile", "several tiles"])
def tiles(request, monkeypatch):
    if request.param == "several tiles":
        for name in ("rope", "qk_norm_rope"):
            monkeypatch.setattr(importlib.import_module(f"ligermodels.kernels.{name}"), "_MAX_TILE", 2 * 16)


@pytest.mark.parametrize(("dim", "interleaved"), [(10, False), (16, True), (16, False)][: 2 if INTERPRETED else 3])
@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_strides(device, interleaved, dim, tiles):
    q, k = heads(3, 2, dim, torch.float32, device, batch=2, seq=2)
    w = tensor(dim, like=(torch.float32, device), grad=False)
    cos, sin = (t.expand(2, -1, -1) for t in angles(1, 2, 4, device))
    check_strides(lambda q, k: rope(q, k, cos.mT.contiguous().mT, sin, interleaved=interleaved), (q, k))
    check_strides(lambda q, k: qk_norm_rope(q, k, w, None, cos, sin, interleaved=interleaved), (q, k))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_views_of_a_packed_projection_and_one_gradient_missing(device):
    packed = tensor(2, 3, 8 * 4, like=(torch.float32, device))
    cos, sin = angles(1, 3, 2, device)

    def split(packed):
        q, k, _ = packed.unflatten(-1, (8, 4)).split((5, 2, 1), 2)
        return q, k

    q, k = (x.detach().contiguous().requires_grad_() for x in split(packed))
    for which in (0, 1):
        y, dpacked = run(lambda p, w=which: rope(*split(p), cos, sin)[w], (packed,))
        expected, *dqk = run(lambda q, k, w=which: rope(q, k, cos, sin)[w], (q, k))
        assert torch.equal(y, expected) and torch.equal(split(dpacked)[which], dqk[which]) and dqk[1 - which] is None


@pytest.mark.parametrize("device", DEVICES)
def test_qk_norm_rope_with_one_gradient_missing(device):
    q, k = heads(3, 2, 8, torch.float32, device)
    weights = tensor(8, like=(q.dtype, device)), tensor(8, like=(q.dtype, device), seed=1)
    cos, sin = angles(1, 3, 4, device)
    _, _, *both = run(lambda *t: qk_norm_rope(*t, cos, sin), (q, k, *weights))
    _, *only_q = run(lambda *t: qk_norm_rope(*t, cos, sin)[0], (q, k, *weights))
    assert only_q[1] is only_q[3] is None
    assert all(map(torch.allclose, only_q[::2], both[::2]))  # the weight's sum is shared out otherwise


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device):
    q, k = heads(3, 2, 8, torch.float32, device, seq=0)
    cos, sin = angles(1, 0, 4, device)
    w = tensor(8, like=(torch.float32, device))
    assert [t.shape for t in run(lambda q, k: rope(q, k, cos, sin), (q, k))] == [q.shape, k.shape] * 2
    *shapes, dw = run(lambda q, k, w: qk_norm_rope(q, k, w, w, cos, sin), (q, k, w))
    assert [t.shape for t in shapes] == [q.shape, k.shape] * 2 and torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("device", DEVICES)
def test_qk_norm_rope_is_the_norm_followed_by_the_rotation(device):
    q, k = heads(3, 2, 8, torch.float32, device)
    w = tensor(8, like=(torch.float32, device))
    cos, sin = angles(1, 3, 3, device)
    together = run(lambda q, k, w: qk_norm_rope(q, k, w, None, cos, sin, EPS), (q, k, w))
    apart = run(lambda q, k, w: rope(rms_norm(q, w, EPS), rms_norm(k, None, EPS), cos, sin), (q, k, w))
    for a, b in zip(together, apart, strict=True):
        assert torch.allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_compiles(device):
    w = tensor(8, like=(torch.float32, device))

    def both(q, k, cos, sin):
        return rope(*qk_norm_rope(q, k, w, w, cos, sin), cos, sin)

    make = lambda n: (*heads(3, 2, 8, torch.float32, device, batch=1, seq=n), *angles(1, n, 4, device))  # noqa: E731
    check_compiles(both, make, device)


@pytest.mark.parametrize("device", [CUDA])
def test_captures(device):
    q, k = heads(3, 2, 64, torch.bfloat16, device)
    w = tensor(64, like=(torch.bfloat16, device))
    cos, sin = angles(1, 3, 32, device)
    check_captures(lambda q, k: rope(q, k, cos, sin), (q, k))
    check_captures(lambda q, k, w: qk_norm_rope(q, k, w, w, cos, sin), (q, k, w))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    seq = 2**31 // (32 * 128) + 5
    q = torch.empty(1, seq, 32, 128, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    k = torch.empty(1, seq, 1, 128, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    theta = torch.rand(1, seq, 64, device="cuda")
    check_tail(lambda q, k, cos, sin: rope(q, k, cos, sin), (q, k, theta.cos(), theta.sin()), dim=1)
    check_tail(lambda q, k, cos, sin: qk_norm_rope(q, k, None, None, cos, sin), (q, k, theta.cos(), theta.sin()), dim=1)


def test_errors_name_the_argument():
    q, k = heads(3, 2, 8, torch.float32, "cpu")
    cos, sin = angles(1, 3, 4, "cpu")
    with pytest.raises(LigerError, match=r"expected \(2 or 1, 3, rotary_dim / 2\)"):
        rope(q, k, cos[:, :2], sin[:, :2])
    with pytest.raises(LigerError, match="turn 10 dimensions, but the heads have 8"):
        rope(q, k, *angles(1, 3, 5, "cpu"))
    with pytest.raises(LigerError, match="with equal B, S and D"):
        rope(q, k[:, :2], cos, sin)
