"""The kernels of decoding beside their references, and those beside other formulas; mostly in the interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, INTERPRETER

from ligermodels.errors import LigerError
from ligermodels.kernels.decode_attention import append_and_attend, decode_attention, decode_attention_reference
from ligermodels.kernels.gemv import few_rows_linear, few_rows_linear_reference
from ligermodels.kernels.greedy import choose_greedily, choose_greedily_reference
from ligermodels.kernels.qk_norm_rope import qk_norm_rope_reference
from ligermodels.kernels.rms_norm import rms_norm_reference
from ligermodels.kernels.rope import rope_reference


@pytest.fixture
def values():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape, dtype=torch.float32: torch.randn(*shape, generator=generator).to(dtype)


def close(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    error = (a.float() - b.float()).norm() / b.float().norm()
    assert error <= (2e-3 if b.dtype == torch.float16 else 1e-2 if b.dtype == torch.bfloat16 else 2e-6), error


# ----------------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (6, None), (6, 3.0)])
def test_the_reference_sees_what_a_plain_history_shows(values, window, softcap):
    """A ring that has come round, rows padded on the left: row by row over the keys in their order."""
    room, position, start = 10, 23, [0, 19]
    history = values(2, position + 1, 2, 8), values(2, position + 1, 2, 8)
    ring = [torch.empty(2, room, 2, 8) for _ in history]
    for p in range(position + 1):
        for buffer, x in zip(ring, history, strict=True):
            buffer[:, p % room] = x[:, p]
    q = values(2, 1, 6, 8)
    window = window or room
    found = decode_attention_reference(
        q, *ring, torch.tensor([position]), torch.tensor(start), scale=0.3, window=window, softcap=softcap
    )
    for row in range(2):
        first = max(start[row], position + 1 - window)
        k, v = (x[row, first:].repeat_interleave(3, dim=1) for x in history)
        scores = torch.einsum("ad,tad->at", q[row, 0], k) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        close(found[row, 0], torch.einsum("at,tad->ad", scores.softmax(-1), v))


CASES = {  # B, A, K, D, room, position, start, window, softcap, half, interleaved, norm
    "several chunks, padding": (2, 4, 2, 32, 200, 150, [0, 7], None, None, 16, False, False),
    "ring, odd heads, part of a head turned in neighbours": (2, 6, 2, 24, 100, 250, [0, 7], 84, None, 6, True, False),
    "first position, cap, normed heads": (1, 3, 1, 16, 50, 0, [0], None, 2.0, 8, False, True),
    "a row that starts late": (2, 4, 2, 80, 290, 280, [279, 2], None, None, 40, False, True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", [INTERPRETER])
def test_attention_kernels_equal_their_references(values, device, case, dtype):
    B, A, K, D, room, position, start, window, softcap, half, interleaved, norm = CASES[case]
    q, k, v = (values(B, 1, n, D, dtype=dtype) for n in (A, K, K))
    keys, caches = values(B, room, K, D, dtype=dtype), values(B, room, K, D, dtype=dtype)
    at, start = torch.tensor([position]), torch.tensor(start)
    options = {"scale": D**-0.5, "window": window, "softcap": softcap}
    counters = torch.zeros(B * K, dtype=torch.int32)
    found = decode_attention(q, keys, caches, at, start, **options, counters=counters)
    close(found, decode_attention_reference(q, keys, caches, at, start, **options))
    angle = values(position + 1, half)
    weights = (values(D, dtype=dtype), values(D, dtype=dtype)) if norm else (None, None)
    mine, theirs = (keys.clone(), caches.clone()), (keys.clone(), caches.clone())
    found = append_and_attend(
        q, k, v, angle.cos(), angle.sin(), *mine, at, start, **options, q_weight=weights[0], k_weight=weights[1],
        interleaved=interleaved, counters=counters,
    )  # fmt: skip
    row = (at - start).clamp(min=0)
    tables = angle.cos()[row][:, None], angle.sin()[row][:, None]
    if norm:
        q, k = qk_norm_rope_reference(q, k, *weights, *tables, interleaved=interleaved)
    else:
        q, k = rope_reference(q, k, *tables, interleaved=interleaved)
    theirs[0][:, position % room], theirs[1][:, position % room] = k[:, 0], v[:, 0]
    close(found, decode_attention_reference(q, *theirs, at, start, **options))
    close(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1]) and not counters.any()


def test_shapes_that_do_not_fit_are_named(values):
    q, keys = values(2, 1, 4, 8), values(2, 5, 2, 8)
    at = torch.tensor([3])
    with pytest.raises(LigerError, match=r"\(3, 5, 2, 8\)"):
        decode_attention(q, values(3, 5, 2, 8), values(3, 5, 2, 8), at, scale=1.0)
    with pytest.raises(LigerError, match="4 heads of 8 do not go with 3 of 8"):
        decode_attention(q, values(2, 5, 3, 8), values(2, 5, 3, 8), at, scale=1.0)
    with pytest.raises(LigerError, match="append_and_attend"):
        append_and_attend(q, q, q, at, at, keys, keys, at, at, scale=1.0)


# ------------------------------------------------------------------------------------------------------------ products


def test_the_reference_of_few_rows_is_the_modules_it_stands_for(values):
    x, residual, norm = values(3, 12), values(3, 5), values(12)
    weights, biases = [values(5, 12), values(7, 12)], [values(5), values(7)]
    h = rms_norm_reference(x, norm, 1e-5, offset=1.0, casting="none")
    expected = torch.cat([F.linear(h, w, b) for w, b in zip(weights, biases, strict=True)], 1)
    options = {"norm_weight": norm, "eps": 1e-5, "offset": 1.0}
    close(few_rows_linear_reference(x, weights, biases, **options), expected)
    pair = [weights[0], values(5, 12)]
    close(few_rows_linear(x, pair, gate="silu"), F.silu(x @ pair[0].T) * (x @ pair[1].T))
    close(few_rows_linear(x, pair, gate="gelu_tanh"), F.gelu(x @ pair[0].T, approximate="tanh") * (x @ pair[1].T))
    close(few_rows_linear(x, pair[:1], residual=residual), x @ pair[0].T + residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "k", "ns", "options"),
    [
        (1, 64, (48, 16, 20), {"norm": True, "bias": True}),
        (1, 100, (33,), {"residual": True, "out_dtype": torch.float32}),
        (1, 4608, (5,), {"residual": True, "bias": True}),
        (1, 96, (40, 40), {"norm": True, "gate": "silu"}),
        (3, 64, (48, 16, 20), {"norm": True, "bias": True}),
        (5, 100, (33,), {"residual": True}),
        (20, 512, (33,), {"residual": True, "shape": (16, 64, 4, 4, 2)}),
        (33, 96, (40, 40), {"norm": True, "gate": "gelu_tanh"}),
        (70, 32, (20, 10), {"norm": True, "bias": True}),
    ],
)
@pytest.mark.parametrize("device", [INTERPRETER])
def test_few_rows_kernels_equal_the_reference(values, device, rows, k, ns, options, dtype):
    options = dict(options)
    shape, norm, bias, residual = (options.pop(name, None) for name in ("shape", "norm", "bias", "residual"))
    x, weights = values(rows, k, dtype=dtype), [values(n, k, dtype=dtype) / k**0.5 for n in ns]
    options["norm_weight"] = values(k, dtype=dtype) if norm else None
    options["offset"] = 1.0
    options["residual"] = values(rows, ns[0], dtype=dtype) if residual else None
    biases = [values(n, dtype=dtype) for n in ns] if bias else None
    expected = few_rows_linear_reference(x, weights, biases, **options)
    counters = torch.zeros(64, dtype=torch.int32)
    for _ in range(2):
        close(few_rows_linear(x, weights, biases, **options, shape=shape, counters=counters), expected)
    assert not counters.any()


def test_products_that_do_not_fit_are_named(values):
    x, w = values(2, 8), values(3, 8)
    with pytest.raises(LigerError, match=r"weights \[\(3, 7\)\]"):
        few_rows_linear(x, [values(3, 7)])
    with pytest.raises(LigerError, match="two with a gate"):
        few_rows_linear(x, [w], gate="silu")
    with pytest.raises(LigerError, match="gate must be one of"):
        few_rows_linear(x, [w, w], gate="relu")
    with pytest.raises(LigerError, match="a bias for each weight"):
        few_rows_linear(x, [w, w], [values(3), None])


# -------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("vocab", [50, 4096, 9000])
@pytest.mark.parametrize("device", [INTERPRETER])
def test_greedy_choice_equals_the_reference(values, device, vocab):
    logits = values(6, vocab)
    logits[1, 7], logits[2, -1], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, vocab - 3] = logits[4, 5] = 99.0
    best = int(logits[0].argmax())
    for eos in (torch.tensor([5, best]), torch.tensor([], dtype=torch.long)):
        states = []
        for choose in (choose_greedily, choose_greedily_reference):
            state = torch.zeros(6, dtype=torch.long), torch.zeros(6, dtype=torch.long), torch.arange(6) == 5
            choose(logits, *state, eos, 3)
            states.append(state)
        token, fed, ended = states[1]
        assert token.tolist() == [best, -1, -1, -1, 5, 3] and fed.tolist() == [best, 0, 0, 0, 5, 3]
        assert ended.tolist() == [len(eos) > 0, False, False, False, len(eos) > 0, True]
        assert all(map(torch.equal, *states))
