"""embedding: facts of kernels/embedding.py."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
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
    run,
    tensor,
)

from ligermodels import LigerError
from ligermodels.kernels import embedding


@pytest.fixture(params=[4, 64], ids=["chunks of 4", "chunks of 64"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(importlib.import_module("ligermodels.kernels.embedding"), "_CHUNK", request.param)


def draw(kind: str, device: str) -> torch.Tensor:
    """(5, 7) ids below 11."""
    some = torch.randint(0, 11, (35,), generator=torch.Generator().manual_seed(0))
    kinds = {
        "random": some,
        "one id": torch.full((35,), 6),
        "two hot ids side by side": torch.where(some < 6, 3, 4),
        "runs that end where a chunk ends": torch.arange(35) // 8,
    }
    return kinds[kind].view(5, 7).to(device)


KINDS = ["random", "one id", "two hot ids side by side", "runs that end where a chunk ends"]


def exact(ids, padding_idx=None):
    return lambda w: F.embedding(ids, w, padding_idx)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_their_gradient_are_as_exact_as_eager(device, dtype, kind, chunk):
    ids, w = draw(kind, device), tensor(11, 33, like=(dtype, device))
    check_exact(lambda w: embedding(ids, w), exact(ids), exact(ids), (w,))
    check_exact(lambda w: embedding(ids.int(), w, -5), exact(ids, 6), exact(ids, 6), (w,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocabulary", "dim"), [(50_257, 768), (1000, 4096), (3, 4099)])
def test_real_sizes_on_the_gpu(vocabulary, dim, dtype):
    rank = torch.rand(8000, generator=torch.Generator().manual_seed(0)).pow(6)  # few ids are frequent, as in text
    ids, w = (rank * vocabulary).long().to("cuda"), tensor(vocabulary, dim, like=(dtype, "cuda"))
    check_exact(lambda w: embedding(ids, w), exact(ids), exact(ids), (w,))
    check_repeatable(lambda w: embedding(ids, w), (w,))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_strides(device):
    w = tensor(11, 16, like=(torch.float32, device))
    check_strides(lambda w: embedding(draw("random", device).mT, w), (w,))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_an_id_out_of_range_reads_nothing(device):
    w = tensor(4, 8, like=(torch.float32, device))
    ids = torch.tensor([0, 4, -1, 2**40, 3], device=device)
    out, dw = run(lambda w: embedding(ids, w), (w,))
    assert torch.equal(out[[0, 4]], w[[0, 3]]) and out[1:4].isnan().all()
    assert torch.equal(dw[1:3], torch.zeros_like(dw[1:3])) and dw[[0, 3]].all()


def test_an_id_out_of_range_is_named_on_the_cpu():
    with pytest.raises(ValueError, match="id 7 is outside 0 … 3"):
        embedding(torch.tensor([0, 7]), torch.ones(4, 8))


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device):
    w = tensor(4, 8, like=(torch.float32, device))
    out, dw = run(lambda w: embedding(torch.zeros(2, 0, dtype=torch.long, device=device), w), (w,))
    assert out.shape == (2, 0, 8) and torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("device", FUSED_DEVICES)
def test_compiles(device):
    w = tensor(11, 8, like=(torch.float32, device))
    check_compiles(lambda ids, w: embedding(ids, w), lambda n: (torch.arange(n, device=device) % 11, w), device)


@pytest.mark.parametrize("device", [CUDA])
def test_captures(device):
    ids, w = draw("two hot ids side by side", device), tensor(11, 64, like=(torch.bfloat16, device))
    check_captures(lambda w: embedding(ids, w), (w,))


@pytest.mark.gpu
def test_more_than_2_31_elements():
    w = torch.empty(530_000, 4096, dtype=torch.bfloat16, device="cuda").normal_().requires_grad_()
    ids = torch.tensor([529_999, 0, 529_999], device="cuda")
    out, dw = run(lambda w: embedding(ids, w), (w,), [torch.ones(3, 4096, dtype=w.dtype, device="cuda")])
    assert torch.equal(out, w[ids]) and (dw[-1] == 2).all() and (dw[0] == 1).all() and not dw[1:-1].any()


def test_errors_name_the_argument():
    w = torch.ones(4, 8)
    with pytest.raises(LigerError, match="ids are torch"):
        embedding(torch.ones(3), w)
    with pytest.raises(LigerError, match=r"expected floating point \(V, D\)"):
        embedding(torch.tensor([1]), w[0])
    with pytest.raises(LigerError, match="padding_idx is 4"):
        embedding(torch.tensor([1]), w, 4)
