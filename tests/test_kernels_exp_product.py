"""linear_cross_entropy whose first product writes exponentials (exp_product.py), against the formula in float64.

Through the interpreter the reference stands in for the product, and all the rest runs, in fp32 as the interpreter has
no bf16 products: what is left of rounding in bf16 is for the GPU tests.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import capture

from ligermodels.kernels import linear_cross_entropy
from ligermodels.kernels._dispatch import INTERPRETED
from ligermodels.kernels.cross_entropy import Terms
from ligermodels.kernels.exp_product import (
    FEWEST_LOGITS,
    Workspace,
    add_label_rest,
    bytes_a_token,
    can_use,
    exp_product,
    exp_product_reference,
    scale_rows,
)
from ligermodels.kernels.linear_cross_entropy import FAST_BUFFER, linear_cross_entropy_reference

LOSS = sys.modules["ligermodels.kernels.linear_cross_entropy"]
NAN, INF = float("nan"), float("inf")
META = torch.device("meta")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def problem(n=13, dim=16, classes=601, *, scale=1.0, dtype=torch.float32, device="cpu", ignored=3):
    x = torch.randn(n, dim, device=device).to(dtype)
    head = (torch.randn(classes, dim, device=device) * scale).to(dtype)
    target = torch.randint(0, classes, (n,), device=device)
    target[::ignored] = -100
    return x, head, target


def gradients(function, x, head, target, upstream=None, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (x, head)]
    loss = function(*leaves, target, **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def truth(x, head, target, upstream=None, **options):
    return gradients(linear_cross_entropy_reference, x.double(), head.double(), target, upstream, **options)


def eager(x, head, target, **options):
    return F.cross_entropy(F.linear(x, head).float(), target, **options)


def agree(x, head, target, upstream=None, tolerance=5e-6, **options):
    for a, b in zip(
        gradients(linear_cross_entropy, x, head, target, upstream, **options),
        truth(x, head, target, upstream, **options),
        strict=True,
    ):
        assert a.isfinite().all() and (a - b).abs().max() <= tolerance * b.abs().max(), options


# --- Without a GPU


@pytest.fixture
def calls(monkeypatch):
    """Take the path whatever the device, dtype and size; how many chunks took it."""
    if not INTERPRETED:
        pytest.skip("run as TRITON_INTERPRET=1 pytest -m interpret")
    made = []
    real = LOSS.exp_step
    monkeypatch.setattr(LOSS, "can_use", lambda *_: True)
    monkeypatch.setattr(LOSS, "_defers", lambda *_: False)
    monkeypatch.setattr(LOSS, "exp_step", lambda *a: (made.append(1), real(*a))[1])
    return made


def operand(rows, dim, dtype=torch.bfloat16, address=0, cuda=True):
    """What can_use asks of a tensor."""
    return SimpleNamespace(shape=(rows, dim), dtype=dtype, is_cuda=cuda, data_ptr=lambda: address, get_device=lambda: 0)


def test_what_it_does_not_take(monkeypatch):
    module = sys.modules["ligermodels.kernels.exp_product"]
    monkeypatch.setattr(module, "is_hopper", lambda _: True)
    monkeypatch.setattr(module, "_hopper", lambda: module)
    classes = 2**16
    rows = FEWEST_LOGITS // classes
    assert can_use(operand(rows, 136), operand(classes, 136))
    for x, head in [
        (operand(rows, 136, cuda=False), operand(classes, 136)),
        (operand(rows - 1, 136), operand(classes, 136)),
        (operand(rows, 136, torch.float16), operand(classes, 136, torch.float16)),
        (operand(rows, 120), operand(classes, 120)),
        (operand(rows, 132), operand(classes, 132)),
        (operand(rows, 136, address=8), operand(classes, 136)),
        (operand(rows, 136), operand(classes, 136, address=8)),
    ]:
        assert not can_use(x, head)
    for name, nothing in (("is_hopper", False), ("_hopper", None)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, nothing=nothing: nothing)
            assert not can_use(operand(rows, 136), operand(classes, 136))


def test_the_reference_is_the_formula():
    x, head, _ = problem()
    m2 = torch.randn(13)
    e, sums = exp_product_reference(x, head, m2)
    true = torch.exp(x.double() @ head.double().t()) / torch.exp2(m2.double())[:, None]
    torch.testing.assert_close(e.double(), true, rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.sum(0).double(), true.sum(1), rtol=1e-5, atol=0)
    assert sums.shape == (3, 13)


@pytest.mark.parametrize("tokens", [4096, 8192, 12288, 16384, 32768])
@pytest.mark.parametrize(
    ("dim", "classes"), [(576, 49152), (3584, 128256), (4096, 128256), (896, 151936), (2304, 262144), (5120, 50257)]
)
def test_the_planner_is_told_of_the_way_that_takes_more(tokens, dim, classes, monkeypatch):
    monkeypatch.setattr(LOSS, "multiprocessors", lambda _: 132)
    shape, told = (dim, classes), LOSS.fast_buffer_bytes(tokens, dim, classes, 2, 132)
    taken = []
    for each in (None, bytes_a_token(*shape)):
        rows = LOSS._token_chunk(tokens, *shape, torch.bfloat16, torch.device("cuda"), each=each)
        space = Workspace.empty(rows, *shape, META) if each else ()
        taken.append(sum(t.nbytes for t in (LOSS._buffer(rows, classes, torch.bfloat16, META), *space)))
    assert told <= max(taken) <= told + 4  # the count of rows to be done again


@pytest.mark.interpret
@pytest.mark.parametrize(("n", "dim", "classes"), [(1, 16, 5), (13, 24, 601), (200, 16, 256), (13, 1100, 33)])
@pytest.mark.parametrize("elements", [2**20, 2100])
def test_loss_and_gradients(n, dim, classes, elements, calls, monkeypatch):
    monkeypatch.setattr(LOSS, "CPU_ELEMENTS", elements)
    x, head, target = problem(n, dim, classes, scale=dim**-0.5)
    target[0] = 3
    for options in ({}, {"z_loss": 1e-2}, {"weight": torch.rand(classes)}, {"reduction": "sum"}):
        agree(x, head, target, torch.tensor(0.3), **options)
    assert len(calls) >= 4


@pytest.mark.interpret
def test_each_token_its_own_incoming_gradient(calls):
    x, head, target = problem()
    agree(x, head, target, torch.randn(13), reduction="none", weight=torch.rand(601), z_loss=1e-3)
    assert calls


@pytest.mark.interpret
@pytest.mark.parametrize("n", [0, 4])
def test_nothing_to_learn_from(n, calls):
    x, head, target = torch.randn(n, 16), torch.randn(9, 16), torch.full((n,), -100)
    for grad in gradients(linear_cross_entropy, x, head, target):
        assert not grad.any()
    assert len(calls) == (n > 0)


@pytest.mark.interpret
@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_logits_that_spread_over_hundreds_are_done_again(scale, calls, monkeypatch):
    """exp(loss) overflows: of some rows, of all rows."""
    monkeypatch.setattr(LOSS, "CPU_ELEMENTS", 4000)  # a few chunks
    x, head, target = problem(130, scale=scale, ignored=7)
    x[::2] *= 0.01
    agree(x, head, target, tolerance=2e-4 if scale > 100 else 3e-5, z_loss=1e-5)  # logits of 5000: fp32 knows 3e-4 of p
    assert calls


@pytest.mark.interpret
def test_no_loss_is_negative(calls):
    """Of tokens whose s is 1 but for what another order of the same additions rounds."""
    x, head, target = problem(40, 64)
    x = head[target.clamp(min=0)] * torch.linspace(0.5, 3, 40)[:, None]
    for i in range(40):
        assert gradients(linear_cross_entropy, x[i : i + 1], head, target[i : i + 1])[0] >= 0
    assert len(calls) == 40


@pytest.mark.interpret
def test_an_ignored_token_leaks_nothing_and_an_infinite_one_is_nan(calls):
    x, head, target = problem(6, ignored=3)
    x[0], x[3] = INF, NAN  # both ignored
    ours = gradients(linear_cross_entropy, x, head, target)
    kept = target >= 0
    true = truth(x[kept], head, target[kept])
    assert not ours[1][~kept].any()
    for a, b in zip((ours[0], ours[1][kept], ours[2]), true, strict=True):
        assert (a - b).abs().max() <= 5e-6 * b.abs().max()
    for bad in (INF, NAN):
        x[1] = bad
        loss, dx, dw = gradients(linear_cross_entropy, x, head, target)
        assert loss.isnan() and dx[1].isnan().all() and dw.isnan().all() and dx[2].isfinite().all()


@pytest.mark.interpret
def test_a_label_that_is_no_class_is_nan(calls, monkeypatch):
    monkeypatch.setattr(LOSS, "check_labels", lambda *_: None)  # as on CUDA
    x, head, target = problem(6, ignored=3)
    target[1], target[2] = 601, -7
    loss, dx, dw = gradients(linear_cross_entropy, x, head, target)
    assert loss.isnan() and dw.isnan().all()
    assert dx.isnan().all(1).tolist() == [False, True, True, False, False, False]


@pytest.mark.interpret
def test_the_gradient_goes_into_a_given_buffer_and_only_where_wanted(calls):
    x, head, target = problem()
    _, dx, dw = gradients(linear_cross_entropy, x, head, target, torch.tensor(0.5))
    leaf, weight, main_grad = x.clone().requires_grad_(), head.clone().requires_grad_(), torch.ones_like(head)
    loss = linear_cross_entropy(leaf, weight, target, main_grad=main_grad, main_grad_scale=0.5)
    loss.backward(torch.tensor(0.5))
    torch.testing.assert_close(leaf.grad, dx)
    torch.testing.assert_close(main_grad - 1, dw, rtol=1e-5, atol=1e-6)
    for need_x in (False, True):
        leaf, weight = x.clone().requires_grad_(need_x), head.clone().requires_grad_(not need_x)
        linear_cross_entropy(leaf, weight, target).backward(torch.tensor(0.5))
        assert torch.equal(leaf.grad if need_x else weight.grad, dx if need_x else dw)


@pytest.mark.interpret
@pytest.mark.parametrize("dim", [24, 300])
def test_what_rounding_leaves_of_the_labels_is_added(dim, calls):
    """Labels of so many tokens that one, two, and two with once or twice sixteen more are seen; one is no class."""
    counts = {5: 1, 3: 2, 4: 3, 2: 18, 7: 19, 0: 40, -100: 3, 9: 1}
    target = torch.tensor([t for t, count in counts.items() for _ in range(count)])[torch.randperm(87)]
    x, factors, dw = torch.randn(87, dim).bfloat16(), torch.randn(2, 87), torch.randn(9, dim)
    exact = dw.clone()
    scaled = torch.empty_like(x)
    scale_rows(x, factors[0], scaled)
    known = (target >= 0) & (target < 9)
    label, some = target[known], factors[:, known, None]
    exact.index_add_(0, label, some[1] * some[0] * x[known].float())
    dw.index_add_(0, label, some[1] * scaled[known].float())
    assert (dw - exact).abs().max() > 1e-3
    add_label_rest(x, target, factors, dw, Terms(-100, 0.0, 0.0, 0.0, 9))
    torch.testing.assert_close(dw, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.interpret
def test_the_same_bits_again_and_inputs_untouched(calls):
    x, head, target = problem(40, scale=20.0)  # some rows are done again
    target[5:30] = 7
    before = x.clone(), head.clone()
    first, second = (gradients(linear_cross_entropy, x, head, target) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(x, before[0]) and torch.equal(head, before[1])


@pytest.mark.interpret
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"label_smoothing": 0.1},
        {"linear_bias": torch.zeros(601)},
        {"return_stats": True},
        {"memory": "lean"},
    ],
)
def test_what_else_the_loss_can_do_takes_the_other_path(options, calls):
    x, head, target = problem()
    linear_cross_entropy(x.requires_grad_(), head.requires_grad_(), target, **options)
    with torch.no_grad():
        linear_cross_entropy(x, head, target)
    assert not calls


# --- On a GPU


@pytest.fixture
def hopper(monkeypatch):
    x = torch.empty(FEWEST_LOGITS // 1024, 128, dtype=torch.bfloat16, device="cuda")
    if not can_use(x, x[:1024]):
        pytest.skip("needs a GPU of compute capability 9.0 and a Triton whose Gluon is known")
    made = []
    real = LOSS.exp_step
    monkeypatch.setattr(LOSS, "exp_step", lambda *a: (made.append(1), real(*a))[1])
    monkeypatch.setattr(sys.modules["ligermodels.kernels.exp_product"], "FEWEST_LOGITS", 1)
    monkeypatch.setattr(LOSS, "_defers", lambda *_: False)
    return made


def on_gpu(n, dim, classes, peaked=0.0):
    x, head, target = problem(n, dim, classes, scale=dim**-0.5, dtype=torch.bfloat16, device="cuda")
    x = (x + peaked * head[target.clamp(min=0)] * dim**0.5).to(x.dtype)  # as a trained model: the label is likely
    return x, head, target


def norm_error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "dim", "classes"), [(1, 128, 256), (130, 320, 3088), (1000, 136, 5003), (257, 4096, 999)]
)
def test_gpu_product(n, dim, classes, hopper):
    x, head, _ = on_gpu(n, dim, classes)
    padded = (n + 127) // 128 * 128
    m2 = torch.zeros(padded, device="cuda")
    m2[:n] = torch.randn(n, device="cuda")
    e = torch.full((n, classes + 15 & -16), NAN, dtype=x.dtype, device="cuda")[:, :classes]
    sums = torch.full(((classes + 255) // 256, padded), NAN, device="cuda")
    exp_product(x, head, m2, e, sums)
    true, true_sums = exp_product_reference(x.double(), head.double(), m2[:n].double())
    assert ((e.double() - true.double()).abs() <= 0.005 * true.double()).all()
    # tensor cores cut off what an addition loses: 2e-5 of a sum at D 2304 on an H200, 9e-5 at D 4096 and larger logits
    torch.testing.assert_close(sums[:, :n].double(), true_sums.double(), rtol=1e-4, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "dim", "classes"), [(1000, 576, 49152), (127, 896, 5003), (4100, 256, 32000)])
@pytest.mark.parametrize("peaked", [0.0, 0.4, 0.8, 1.2])
def test_gpu_no_worse_than_eager(n, dim, classes, peaked, hopper):
    x, head, target = on_gpu(n, dim, classes, peaked)
    true = truth(x, head, target)
    ours, plain = (gradients(function, x, head, target) for function in (linear_cross_entropy, eager))
    assert hopper
    # a confident token's s is 1 and a little: fp32 knows it to 2^-24, and so its logarithm, the loss
    assert abs(ours[0] - true[0]) <= max(1.25 * abs(plain[0] - true[0]), 1e-5 * true[0], 2**-24)
    for a, b, t in zip(ours[1:], plain[1:], true[1:], strict=True):
        assert norm_error(a, t) <= 1.25 * norm_error(b, t)


@pytest.mark.gpu
def test_gpu_options_and_extreme_logits(hopper):
    x, head, target = on_gpu(700, 256, 9001)
    for factor in (1.0, 50.0, 1000.0):
        scaled = (x * factor).to(x.dtype)
        for options in ({}, {"z_loss": 1e-3}, {"weight": torch.rand(9001, device="cuda")}):
            true = truth(scaled, head, target, **options)
            ours = gradients(linear_cross_entropy, scaled, head, target, **options)
            for a, t in zip(ours, true, strict=True):
                assert norm_error(a, t) <= 5e-3, (factor, options)
    x[0], x[1] = INF, INF  # row 0 is ignored
    loss, dx, dw = gradients(linear_cross_entropy, x, head, target)
    assert loss.isnan() and dw.isnan().all() and dx[1].isnan().all() and not dx[0].any() and dx[2].isfinite().all()
    assert hopper


@pytest.mark.gpu
def test_gpu_label_out_of_range_is_nan(hopper):
    x, head, target = on_gpu(200, 128, 1000)
    target[1], target[2] = 1000, -7
    _, dx, _ = gradients(linear_cross_entropy, x, head, target)
    assert dx.isnan().all(1).nonzero()[:, 0].tolist() == [1, 2]


@pytest.mark.gpu
def test_gpu_graph_capture_compile_and_determinism(hopper):
    x, head, target = on_gpu(900, 128, 9001)
    x[:50] *= 100  # done again
    leaves = x.requires_grad_(), head.requires_grad_()

    def step(loss_of=linear_cross_entropy):
        return torch.autograd.grad(loss_of(x, head, target), leaves)

    captured, expected = capture(step)
    for a, b, c in zip(captured, step(), expected, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)
    for a, b in zip(step(torch.compile(linear_cross_entropy, fullgraph=True)), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert hopper


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True])
def test_gpu_memory(given, hopper):
    x, head, target = on_gpu(8192, 1024, 128256)
    x.requires_grad_()
    head.requires_grad_()
    main_grad = torch.zeros(head.shape, device="cuda") if given else None
    for _ in range(2):  # the first run also compiles
        x.grad = head.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, head, target, main_grad=main_grad).backward()
    beyond = torch.cuda.max_memory_allocated() - before - x.grad.nbytes
    if given:
        assert beyond <= 2**30
    else:
        fp32_head = 4 * head.numel()
        beyond -= head.grad.nbytes
        assert beyond <= max(fp32_head, fp32_head + FAST_BUFFER - head.grad.nbytes) + 16 * 2**20
    assert hopper
