"""cross_entropy on given logits, against the plain formula in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import capture

from ligermodels.kernels import cross_entropy
from ligermodels.kernels._dispatch import INTERPRETED
from ligermodels.kernels.cross_entropy import cross_entropy_reference

interpreted = pytest.mark.skipif(not INTERPRETED, reason="run as TRITON_INTERPRET=1 pytest -m interpret")
GRID = list(
    itertools.product(
        (None, 30.0), (0.0, 0.1), (0.0, 1e-4), ("none", "half", "all"), ("mean", "sum", "none"), (False, True)
    )
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def labels(n, classes, ignored, device="cpu"):
    target = torch.randint(0, classes, (n,), device=device)
    target[{"none": slice(0, 0), "half": slice(0, None, 2), "all": slice(None)}[ignored]] = -100
    return target


def both(x, target, upstream=None, **options):
    """(loss, gradient) of ours and of the formula in float64."""
    found = []
    for function, tensor in ((cross_entropy, x), (cross_entropy_reference, x.double())):
        leaf = tensor.detach().clone().requires_grad_()
        loss = function(leaf, target, **options)
        loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
        found += [loss, leaf.grad]
    return found


def agree(x, target, tolerance=2e-6, upstream=None, **options):
    loss, grad, true_loss, true_grad = both(x, target, upstream, **options)
    assert loss.dtype == torch.float32 and grad.dtype == x.dtype
    for ours, true in ((loss, true_loss), (grad, true_grad)):
        assert ours.shape == true.shape
        # a loss is a difference of numbers as large as the logits
        scale = true.abs().max() + (x.abs().max() * tolerance if ours is loss else 0)
        assert (ours - true).abs().max() <= tolerance * scale, options


def test_all_options_together():
    for softcap, smoothing, z_loss, ignored, reduction, weighted in GRID:
        x = torch.randn(11, 101) * 60  # up to about 200
        upstream = torch.randn(11) if reduction == "none" else torch.tensor(0.3)
        agree(
            x, labels(11, 101, ignored), 5e-6, upstream, softcap=softcap, label_smoothing=smoothing, z_loss=z_loss,
            reduction=reduction, weight=torch.rand(101) if weighted else None,
        )  # fmt: skip


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_torch(reduction, weighted, smoothing):
    x, target = torch.randn(9, 33), labels(9, 33, "half")
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": torch.rand(33) if weighted else None}
    torch.testing.assert_close(cross_entropy(x, target, **options), F.cross_entropy(x, target, **options))


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_a_common_offset_changes_nothing(offset):
    x = torch.randint(-8, 8, (5, 40)).float()
    target = labels(5, 40, "none")
    assert torch.equal(cross_entropy(x + offset, target), cross_entropy(x, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_label_gradient_of_a_confident_row_is_not_cancelled(dtype):
    x = torch.zeros(1, 1000, dtype=dtype)
    x[0, 7] = 13.8125  # p = 0.999
    _, grad, _, true = both(x, torch.tensor([7]))
    assert 0.9985 < true[0, 7] + 1 < 0.9995
    assert (grad[0, 7] / true[0, 7] - 1).abs() <= max(torch.finfo(dtype).eps, 1e-3)  # s = 1.001 is an fp32 sum


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_learn_from_is_zero_and_attached(reduction):
    for x, target in ((torch.randn(4, 9), torch.full((4,), -100)), (torch.randn(0, 9), torch.zeros(0).long())):
        x.requires_grad_()
        loss = cross_entropy(x, target, reduction=reduction, z_loss=0.1, weight=torch.rand(9))
        loss.backward()
        assert loss.item() == 0.0 and x.grad.shape == x.shape and not x.grad.any()


def test_any_strides_bit_for_bit_and_inputs_untouched():
    flat = torch.randn(4, 6, 34)
    target = torch.randint(0, 17, (4, 12))
    views = [
        (flat[:, :5, ::2], target[:, 1:10:2]),
        (flat.transpose(0, 1)[..., 1:18], target[:, ::2].t()),
        (flat[:1].expand(4, 6, 34)[..., :17], target[:, :6]),
        (flat.reshape(24, 34).t()[:17].t(), target[:, :6].reshape(-1)),
        (flat.unsqueeze(1).transpose(0, 2)[..., :17], target[:, :6].t().unsqueeze(1)),
    ]
    for x, y in views:
        before = x.clone()
        results = []
        for a, b in ((x, y), (x.contiguous(), y.contiguous())):
            leaf = a.detach().requires_grad_()
            loss = cross_entropy(leaf, b.to(torch.int32), z_loss=0.01, reduction="none")
            upstream = torch.tensor(0.5).expand(loss.shape)
            results.append((loss, *torch.autograd.grad(loss, leaf, upstream)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert torch.equal(x, before)


def test_backward_twice_adds_the_same_and_a_second_derivative_is_refused():
    x, target = torch.randn(3, 8, requires_grad=True), torch.tensor([1, 2, 3])
    loss = cross_entropy(x, target)
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    (grad,) = torch.autograd.grad(cross_entropy(x, target), x, create_graph=True)
    with pytest.raises(ValueError, match="second derivative"):
        grad.sum().backward()


def test_z_loss_under_mean_counts_tokens_not_class_weights():
    x, target = torch.zeros(3, 4), torch.tensor([0, 1, -100])
    weight = torch.tensor([5.0, 1.0, 1.0, 1.0])
    lse = torch.tensor(4.0).log()
    torch.testing.assert_close(cross_entropy(x, target, weight=weight, z_loss=0.5), lse + 0.5 * lse**2)


@pytest.mark.parametrize(
    ("x", "target", "options", "words"),
    [
        (torch.zeros(2, 3, 5), torch.tensor([[0, 1, 2], [3, 7, 4]]), {}, r"label 7 at position \(1, 1\).*5 classes"),
        (torch.zeros(2, 5), torch.tensor([0, -1]), {}, r"label -1 at position \(1,\)"),
        (torch.zeros(2, 5), torch.tensor([0, 1, 2]), {}, r"\(2, 5\).*\(3,\)"),
        (torch.zeros(2, 5), torch.tensor([0.0, 1.0]), {}, "int64 or int32"),
        (torch.zeros(2, 5).double(), torch.tensor([0, 1]), {}, "float64"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), {"weight": torch.ones(4)}, r"\(5,\).*\(4,\)"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), {"reduction": "max"}, "max"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), {"softcap": 0.0}, "softcap"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), {"label_smoothing": 2.0}, "label_smoothing"),
        (torch.zeros(2, 0), torch.tensor([-100, -100]), {}, "empty"),
    ],
)
def test_errors_name_the_thing(x, target, options, words):
    with pytest.raises(ValueError, match=words):
        cross_entropy(x, target, **options)


def test_ignore_index_may_be_a_class():
    agree(torch.randn(5, 7), torch.tensor([0, 3, 3, 6, 1]), ignore_index=3)


@pytest.mark.interpret
@interpreted
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01, "weight": True}])
@pytest.mark.parametrize("classes", [64, 77, 150])
def test_triton_through_the_interpreter(options, classes):
    options = dict(options, weight=torch.rand(classes) if options else None)
    x = torch.randn(3, classes) * 4
    agree(x, labels(3, classes, "half"), upstream=torch.randn(3), reduction="none", **options)
    agree(x.t().contiguous().t(), labels(3, classes, "none"), **options)
    agree(x, labels(3, classes, "all"), **options)


# --- On a GPU


def error(ours, true):
    return (ours.double() - true).square().mean().sqrt().item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [101, 32000, 50257])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_gpu_no_worse_than_eager(dtype, classes, scale):
    x = (torch.randn(257, classes, device="cuda") * scale).to(dtype)
    target = labels(257, classes, "half", "cuda")
    loss, grad, true_loss, true_grad = both(x, target)
    leaf = x.clone().requires_grad_()
    eager = F.cross_entropy(leaf.float(), target)
    eager.backward()
    assert abs(loss.item() - true_loss.item()) <= max(1.25 * abs(eager.item() - true_loss.item()), 2e-6 * true_loss)
    assert error(grad, true_grad) <= 1.25 * error(leaf.grad, true_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"label_smoothing": 0.1, "z_loss": 1e-4}, {"weight": True}])
def test_gpu_options(options):
    options = {k: torch.rand(5003, device="cuda") if k == "weight" else v for k, v in options.items()}
    x = torch.randn(65, 5003, device="cuda") * 20
    for ignored, reduction in itertools.product(("none", "half", "all"), ("mean", "sum", "none")):
        agree(x, labels(65, 5003, ignored, "cuda"), 1e-5, reduction=reduction, **options)


@pytest.mark.gpu
def test_gpu_label_out_of_range_is_nan_in_its_row_only():
    x = torch.randn(4, 1000, device="cuda", requires_grad=True)
    loss = cross_entropy(x, torch.tensor([1, 1000, -7, 2**40], device="cuda"), reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, True, True]
    assert x.grad.isnan().all(1).tolist() == [False, True, True, True]


@pytest.mark.gpu
def test_gpu_more_than_2_to_the_31_elements():
    n, classes = 16385, 151936
    x = torch.zeros(n, classes, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(classes, device="cuda")
    target = torch.zeros(n, dtype=torch.long, device="cuda")
    target[-1] = classes - 1
    leaf = x.requires_grad_()
    loss = cross_entropy(leaf, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    alone = x.detach()[-1:].clone().requires_grad_()
    loss_alone = cross_entropy(alone, target[-1:], reduction="none")
    (grad_alone,) = torch.autograd.grad(loss_alone.sum(), alone)
    assert torch.equal(loss[-1:], loss_alone) and torch.equal(grad[-1:], grad_alone)


@pytest.mark.gpu
def test_gpu_graph_capture_compile_and_determinism():
    x = torch.randn(64, 3001, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = labels(64, 3001, "half", "cuda")

    def step():
        return torch.autograd.grad(cross_entropy(x, target), x)[0]

    captured, expected = capture(step)
    assert torch.equal(captured, expected) and torch.equal(step(), expected)
    compiled = torch.compile(lambda x: cross_entropy(x, target), fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], expected)
