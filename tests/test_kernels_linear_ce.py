"""linear_cross_entropy, against the plain formula in float64."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import capture

from ligermodels.kernels import cross_entropy, linear_cross_entropy, linear_logprob
from ligermodels.kernels._dispatch import INTERPRETED
from ligermodels.kernels.linear_cross_entropy import (
    FAST_BUFFER,
    _fast_op,
    chunk_size,
    linear_cross_entropy_reference,
    linear_logprob_reference,
    wave_efficiency,
)

interpreted = pytest.mark.skipif(not INTERPRETED, reason="run as TRITON_INTERPRET=1 pytest -m interpret")
MODES = ("fast", "lean")
MODULE = sys.modules["ligermodels.kernels.linear_cross_entropy"]  # the package's attribute is the function
GRID = list(
    itertools.product(
        (None, 30.0), (0.0, 0.1), (0.0, 1e-4), ("none", "half", "all"), ("mean", "sum", "none"), (False, True)
    )
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def problem(n=13, dim=16, classes=101, *, scale=3.0, dtype=torch.float32, device="cpu", ignored="half"):
    x = (torch.randn(n, dim, device=device) * scale).to(dtype)
    head = (torch.randn(classes, dim, device=device) * scale).to(dtype)
    target = torch.randint(0, classes, (n,), device=device)
    target[{"none": slice(0, 0), "half": slice(0, None, 2), "all": slice(None)}[ignored]] = -100
    return x, head, target


def gradients(function, tensors, target, upstream=None, **options):
    """[loss, gradient of input, of linear_weight, of linear_bias if there is one]."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    if len(leaves) == 3:
        options["linear_bias"] = leaves[2]
    loss = function(*leaves[:2], target, **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def truth(tensors, target, upstream=None, **options):
    return gradients(linear_cross_entropy_reference, [t.double() for t in tensors], target, upstream, **options)


def agree(tensors, target, tolerance=5e-6, upstream=None, memory="fast", **options):
    ours = gradients(linear_cross_entropy, tensors, target, upstream, memory=memory, **options)
    for a, b in zip(ours, truth(tensors, target, upstream, **options), strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert (a - b).abs().max() <= tolerance * b.abs().max(), options
    assert ours[0].dtype == torch.float32
    assert all(g.dtype == t.dtype for g, t in zip(ours[1:], tensors, strict=True))


def error(ours, true):
    return (ours.double() - true).square().mean().sqrt().item()


def eager(x, head, target, **options):
    return F.cross_entropy(F.linear(x, head).float(), target, **options)


@pytest.mark.parametrize(("memory", "elements"), [("fast", 2**20), ("fast", 400), ("lean", 400)])
@pytest.mark.parametrize("bias", [False, True])
def test_all_options_together(memory, elements, bias, monkeypatch):
    monkeypatch.setattr(MODULE, "CPU_ELEMENTS", elements)  # one chunk; four of tokens; four of the vocabulary
    for softcap, smoothing, z_loss, ignored, reduction, weighted in GRID:
        x, head, target = problem(ignored=ignored)
        tensors = (x, head, torch.randn(101)) if bias else (x, head)
        upstream = torch.randn(13) if reduction == "none" else torch.tensor(0.3)
        # logits up to 150: in fp32 they, and so the relative error of p, are known to about 1e-5
        agree(
            tensors, target, 2e-5, upstream, memory, softcap=softcap, label_smoothing=smoothing, z_loss=z_loss,
            reduction=reduction, weight=torch.rand(101) if weighted else None,
        )  # fmt: skip


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch < 2.13 has no linear_cross_entropy")
def test_equals_torch(memory, reduction, smoothing):
    x, head, target = problem(scale=1.0)
    options = {"reduction": reduction, "label_smoothing": smoothing, "weight": torch.rand(101)}
    tensors, upstream = (x, head, torch.randn(101)), torch.rand(13) if reduction == "none" else None
    ours = gradients(linear_cross_entropy, tensors, target, upstream, memory=memory, **options)
    theirs = gradients(F.linear_cross_entropy, tensors, target, upstream, **options)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def by_chunks(tensors, target, chunk):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    one = torch.ones((), device=target.device)
    needs = (True, True, False)
    constants = (-100, 0.0, 0.0, 0.0, leaves[0].dtype)
    loss = _fast_op(*leaves, None, target, None, one, one, one, *constants, *needs, False, False, chunk)[0]
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_do_not_change_the_result(dtype):
    """dW is added up in fp32: its error must not grow with the number of chunks."""
    x, head, target = problem(64, 16, 50, scale=1.0, dtype=dtype, ignored="none")
    true = truth((x, head), target, reduction="sum")
    errors = [
        [(a.double() - b).norm() / b.norm() for a, b in zip(by_chunks((x, head), target, chunk), true, strict=True)]
        for chunk in (64, 16, 1)
    ]
    for one, four, many in zip(*errors, strict=True):
        assert max(four, many) <= 1.05 * one + 3e-7


@pytest.mark.parametrize("memory", MODES)
def test_uneven_micro_batches_add_up_to_the_full_batch(memory):
    """Supervised tokens 2, 8, 9, 9: dividing each sum by 28 is right, averaging the means is not."""
    x, head, target = problem(40, ignored="none")
    for row, count in enumerate((2, 8, 9, 9)):
        target[row * 10 + count : row * 10 + 10] = -100
    full = truth((x, head), target)
    head = head.requires_grad_()
    losses, grads = [], []
    for x_part, target_part in zip(x.split(10), target.split(10), strict=True):
        leaf = x_part.clone().requires_grad_()
        loss = linear_cross_entropy(leaf, head, target_part, reduction="sum", memory=memory) / 28
        loss.backward()
        losses.append(loss.detach())
        grads.append(leaf.grad)
    for a, b in zip((sum(losses), torch.cat(grads), head.grad), full, strict=True):
        assert (a - b).abs().max() <= 3e-6 * b.abs().max()


@pytest.mark.parametrize("elements", [2**20, 1600])
def test_the_incoming_gradient_is_applied_in_fp32(elements, monkeypatch):
    monkeypatch.setattr(MODULE, "CPU_ELEMENTS", elements)  # one chunk, four chunks
    x, head, target = problem(64, 32, 100, dtype=torch.bfloat16)
    plain, scaled = (
        gradients(linear_cross_entropy, (x, head), target, torch.tensor(g), reduction="sum") for g in (1.0, 1 / 28)
    )
    for a, b in zip(plain[1:], scaled[1:], strict=True):
        # 1/28 is no bf16 number: rounding it first would move every entry by the same 0.15 %
        ratio = (b.double() / (a.double() / 28))[a != 0]
        assert abs(ratio.mean() - 1) < 5e-4


@pytest.mark.parametrize(
    ("dtype", "n", "logits"),
    [(torch.bfloat16, 32, True), (torch.bfloat16, 33, False), (torch.float32, 16, True), (torch.float32, 17, False),
     (torch.float16, 1, False)],
)  # fmt: skip
def test_the_smaller_of_two_gradients_waits_for_the_backward(dtype, n, logits):
    """Of all logits, in their dtype, or of the weight, in fp32."""
    x, head, target = problem(n, 16, 112, dtype=dtype)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(x, head.requires_grad_(), target)
    found = [(t.dtype, tuple(t.shape)) for t in saved if 112 in t.shape]
    assert found == [(dtype, (n, 112)) if logits else (torch.float32, (112, 16))]


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(("need_x", "need_head"), list(itertools.product((False, True), repeat=2)))
def test_only_the_gradients_asked_for(memory, reduction, need_x, need_head, monkeypatch):
    x, head, target = problem()
    _, true_x, true_head = truth((x, head), target, reduction="sum")
    x.requires_grad_(need_x)
    head.requires_grad_(need_head)
    products = []
    real = MODULE._product
    monkeypatch.setattr(MODULE, "_product", lambda *a, **k: (products.append(1), real(*a, **k))[1])
    loss = linear_cross_entropy(x, head, target, reduction=reduction, memory=memory).sum()
    assert loss.requires_grad == (need_x or need_head)
    if loss.requires_grad:
        loss.backward()
    assert len(products) == need_x + need_head
    assert (x.grad is not None) == need_x and (head.grad is not None) == need_head
    for needed, tensor, true in ((need_x, x, true_x), (need_head, head, true_head)):
        if needed:
            assert (tensor.grad - true).abs().max() <= 3e-6 * true.abs().max()


@pytest.mark.parametrize("memory", MODES)
def test_a_gradient_of_each_token(memory):
    """With reduction none, a first token without gradient must not decide for the others."""
    x, head, target = problem(8, 10, 15, ignored="none")
    upstream = torch.randn(8)
    upstream[0] = 0
    agree((x, head), target, upstream=upstream, memory=memory, reduction="none")


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_label_gradient_of_a_confident_token_is_not_cancelled(memory, dtype):
    x, head = torch.tensor([[13.8125]], dtype=dtype), torch.zeros(1000, 1, dtype=dtype)
    head[7] = 1  # the label's logit is 13.8125, p = 0.999
    ours = gradients(linear_cross_entropy, (x, head), torch.tensor([7]), memory=memory)[1]
    true = truth((x, head), torch.tensor([7]))[1]
    assert abs(ours.item() / true.item() - 1) <= max(2 * torch.finfo(dtype).eps, 1e-3)


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", [0, 4])
def test_nothing_to_learn_from_is_zero_and_attached(memory, reduction, n):
    x, head = torch.randn(n, 6), torch.randn(9, 6)
    loss, *grads = gradients(
        linear_cross_entropy, (x, head, torch.randn(9)), torch.full((n,), -100), memory=memory, reduction=reduction
    )
    assert loss.item() == 0.0
    for grad, shape in zip(grads, ((n, 6), (9, 6), (9,)), strict=True):
        assert grad.shape == shape and not grad.any()


@pytest.mark.parametrize("memory", MODES)
def test_any_strides_bit_for_bit_and_inputs_untouched(memory):
    x, head = torch.randn(3, 7, 20)[:, 1:6, ::2], torch.randn(10, 60).t()[::2]
    target = torch.randint(0, 30, (5, 6)).t()[:3, :5]
    before = x.clone(), head.clone()
    results = []
    for tensors in ((x, head, target), (x.contiguous(), head.contiguous(), target.contiguous())):
        leaves = [t.detach().requires_grad_() for t in tensors[:2]]  # detach keeps the strides
        loss = linear_cross_entropy(*leaves, tensors[2], memory=memory, reduction="none")
        upstream = torch.tensor(0.3).expand(loss.shape)
        results.append((loss, *torch.autograd.grad(loss, leaves, upstream)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(x, before[0]) and torch.equal(head, before[1])


@pytest.mark.parametrize("memory", MODES)
def test_backward_twice_adds_the_same_and_a_second_derivative_is_refused(memory):
    x, head, target = problem()
    x.requires_grad_()
    loss = linear_cross_entropy(x, head, target, memory=memory)
    (loss * 0.3).backward(retain_graph=True)
    once = x.grad.clone()
    (loss * 0.3).backward()
    assert torch.equal(x.grad, 2 * once)
    (grad,) = torch.autograd.grad(linear_cross_entropy(x, head, target, memory=memory), x, create_graph=True)
    with pytest.raises(ValueError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "head_dtype"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16,) * 2]
)
def test_autocast(memory, bias, x_dtype, head_dtype):
    x, head, target = problem(scale=1.0)
    tensors = [x.to(x_dtype), head.to(head_dtype), *([torch.randn(101).to(head_dtype)] if bias else [])]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *grads = gradients(linear_cross_entropy, tensors, target, memory=memory)
        inside = gradients(linear_cross_entropy, [t.bfloat16() for t in tensors], target, memory=memory)
    assert torch.equal(loss, inside[0])
    for grad, tensor, low in zip(grads, tensors, inside[1:], strict=True):
        assert grad.dtype == tensor.dtype
        torch.testing.assert_close(grad.float(), low.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("memory", MODES)
def test_compile_without_graph_breaks_or_recompilation(memory):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, head, _ = problem(33, 64)
    compiled = torch.compile(
        lambda x, head, target: linear_cross_entropy(x, head, target, memory=memory),
        fullgraph=True,
        backend="aot_eager",
    )
    for n in (7, 8, 9, 33):
        target = torch.arange(n)
        ours = gradients(compiled, (x[:n], head), target)
        for a, b in zip(ours, gradients(linear_cross_entropy, (x[:n], head), target, memory=memory), strict=True):
            torch.testing.assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # one of fixed and one of any length


@pytest.mark.parametrize(
    ("x", "head", "target", "options", "words"),
    [
        ((2, 4), (9, 5), (2,), {}, r"\(2, 4\).*\(9, 5\)"),
        ((2, 4), (9, 4), (3,), {}, r"\(2, 4\).*\(3,\)"),
        ((2, 4), (0, 4), (2,), {}, r"empty.*\(0, 4\)"),
        ((2, 4), (9, 4), (2,), {"linear_bias": torch.zeros(8)}, r"\(9,\).*\(8,\)"),
        ((2, 4), (9, 4), (2,), {"memory": "small"}, "small"),
        ((2, 4), (9, 4), (2,), {"ignore_index": 0, "weight": torch.ones(8)}, r"\(9,\).*\(8,\)"),
    ],
)
def test_errors_name_both_shapes(x, head, target, options, words):
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(torch.zeros(x), torch.zeros(head), torch.zeros(target).long(), **options)


@pytest.mark.parametrize("memory", MODES)
def test_errors_of_dtypes_and_labels(memory):
    x, head = torch.zeros(2, 3, 4), torch.zeros(9, 4)
    with pytest.raises(ValueError, match=r"bfloat16.*float32.*autocast"):
        linear_cross_entropy(x.bfloat16(), head, torch.zeros(2, 3).long(), memory=memory)
    target = torch.zeros(2, 3).long()
    target[1, 2] = 9
    with pytest.raises(ValueError, match=r"label 9 at position \(1, 2\).*9 classes"):
        linear_cross_entropy(x, head, target, memory=memory)


def test_chunks_fill_the_multiprocessors():
    largest = 5000
    for total, dim in itertools.product((1, 127, 500, 8192, 16384, 131072), (576, 896, 1152, 2048, 2304, 3584, 4096)):
        rows = chunk_size(total, dim, largest, 132)
        assert 1 <= rows <= min(total, largest)
        if total >= 8192:
            assert rows >= 1024 and wave_efficiency(rows, dim, 132) >= 0.7


# --- Log-probabilities, statistics, a given buffer for the gradient


def agree_logprob(tensors, target, tolerance, upstream, upstream_entropy, **options):
    """Values and gradients of linear_logprob, with and without the entropy, are those of the formula in float64."""
    found = []
    for function, given in (
        (lambda *a, **k: linear_logprob(*a, **k, return_entropy=True), tensors),
        (linear_logprob_reference, [t.double() for t in tensors]),
    ):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        logp, entropy = function(*leaves[:2], target, linear_bias=leaves[2], **options)
        torch.autograd.backward((logp, entropy), (upstream.to(logp.dtype), upstream_entropy.to(logp.dtype)))
        found.append([logp, entropy, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*found, strict=True):
        assert a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max(), options
    alone = linear_logprob(*tensors[:2], target, linear_bias=tensors[2], **options)
    assert torch.equal(alone, found[0][0]) and alone.dtype == torch.float32


def slices_of(monkeypatch, classes, tokens):
    """Make lean work in slices of so many classes and tokens."""
    monkeypatch.setattr(MODULE, "_lean_shape", lambda n, dim, v, *_: (min(classes, v), max(1, min(tokens, n))))


@pytest.mark.parametrize(("classes", "tokens"), [(101, 13), (30, 13), (30, 5)])
def test_logprob_and_entropy(classes, tokens, monkeypatch):
    slices_of(monkeypatch, classes, tokens)
    for softcap, temperature in itertools.product((None, 10.0), (1.0, 0.7, 3.0)):
        x, head, target = problem(scale=1.5)
        agree_logprob(
            (x, head, torch.randn(101)), target, 2e-5, torch.randn(13), torch.randn(13),
            softcap=softcap, temperature=temperature,
        )  # fmt: skip


def test_logprob_is_the_negated_loss_and_entropy_has_its_limits():
    x, head, target = problem()
    assert torch.equal(linear_logprob(x, head, target), -linear_cross_entropy(x, head, target, reduction="none"))
    flat, sharp = torch.zeros(1, 4), torch.full((1, 4), 100.0)
    head = torch.zeros(50, 4)
    head[3] = 1
    logp, entropy = linear_logprob(torch.cat((flat, sharp)), head, torch.tensor([3, 3]), return_entropy=True)
    assert abs(entropy[0] - math.log(50)) < 1e-5 and abs(logp[0] + math.log(50)) < 1e-5
    assert 0 <= entropy[1] < 1e-30 and logp[1] == 0
    with pytest.raises(ValueError, match="temperature"):
        linear_logprob(flat, head, torch.tensor([0]), temperature=0.0)


def test_logprob_and_statistics_compile():
    torch._dynamo.reset()
    x, head, target = problem()

    def both(x, head):
        return *linear_logprob(x, head, target, return_entropy=True), *linear_cross_entropy(
            x, head, target, return_stats=True
        )

    leaves = [x.requires_grad_(), head.requires_grad_()]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    results = [function(*leaves) for function in (both, compiled)]
    grads = [torch.autograd.grad(sum(t.sum() for t in found[:3]), leaves) for found in results]
    for a, b in (*zip(*results, strict=True), *zip(*grads, strict=True)):
        torch.testing.assert_close(a, b)


def test_logprob_of_one_of_the_two_outputs_only():
    given = problem()
    for which in (0, 1):
        grads = []
        for function, dtype in (
            (lambda *a: linear_logprob(*a, return_entropy=True), torch.float32),
            (linear_logprob_reference, torch.float64),
        ):
            leaves = [t.to(dtype, copy=True).requires_grad_() for t in given[:2]]
            grads.append(torch.autograd.grad(function(*leaves, given[2])[which].sum(), leaves))
        for ours, true in zip(*grads, strict=True):
            assert (ours - true).abs().max() <= 2e-5 * true.abs().max()


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("elements", [2**20, 400])
def test_statistics_come_with_the_same_loss(memory, reduction, elements, monkeypatch):
    monkeypatch.setattr(MODULE, "CPU_ELEMENTS", elements)
    formula = {"softcap": 30.0, "label_smoothing": 0.1, "z_loss": 1e-2, "weight": torch.rand(101)}
    x, head, target = problem()
    upstream = torch.ones(13 if reduction == "none" else ())
    options = formula | {"memory": memory, "reduction": reduction}
    plain = gradients(linear_cross_entropy, (x, head), target, upstream, **options)
    for needs in (False, True):
        leaves = [x.clone().requires_grad_(needs), head.clone().requires_grad_(needs)]
        found = linear_cross_entropy(*leaves, target, return_stats=True, **options)
        assert torch.equal(found.loss, plain[0])
        assert found.loss.requires_grad == needs and not found.token_loss.requires_grad
        logits = 30 * torch.tanh(x.double() @ head.double().t() / 30)
        true = linear_cross_entropy_reference(x.double(), head.double(), target, **(formula | {"reduction": "none"}))
        torch.testing.assert_close(found.token_loss.double(), true, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.logsumexp.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(found.argmax, logits.argmax(-1))
        if needs:
            found.loss.sum().backward()
            assert all(torch.equal(leaf.grad, g) for leaf, g in zip(leaves, plain[1:], strict=True))


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weight_goes_into_a_given_buffer(memory, reduction, dtype, monkeypatch):
    monkeypatch.setattr(MODULE, "CPU_ELEMENTS", 400)
    x, head, target = problem(dtype=dtype)
    bias = torch.randn(101).to(dtype)
    upstream = torch.randn(13) if reduction == "none" else torch.tensor(0.3)
    options = {"memory": memory, "reduction": reduction}
    true = truth((x, head, bias), target, upstream, reduction=reduction)
    plain = gradients(linear_cross_entropy, (x, head, bias), target, upstream, **options)
    before = torch.randn(101, 16)
    main_grad = before.clone()
    leaves = [t.clone().requires_grad_() for t in (x, head, bias)]
    options |= {"linear_bias": leaves[2], "main_grad": main_grad, "main_grad_scale": 0.3}
    loss = linear_cross_entropy(*leaves[:2], target, **options)
    loss.backward(upstream)
    assert leaves[1].grad is None and leaves[0].grad.dtype == leaves[2].grad.dtype == dtype
    for ours, usual, right in zip((loss, leaves[0].grad, main_grad - before, leaves[2].grad), plain, true, strict=True):
        # no further from the truth than without the buffer, beside the rounding of the sum with what was in it
        assert (ours - right).abs().max() <= 1.25 * (usual - right).abs().max() + 2e-6 * right.abs().max()
    added = main_grad.clone()
    with torch.no_grad():  # an evaluation adds nothing
        linear_cross_entropy(*leaves[:2], target, **options)
    assert torch.equal(main_grad, added)


def test_another_incoming_gradient_than_announced_is_loud():
    x, head, target = problem()
    x.requires_grad_()
    head.requires_grad_()
    main_grad = torch.zeros(101, 16)
    loss = linear_cross_entropy(x, head, target, main_grad=main_grad, main_grad_scale=0.5)
    (loss * 0.25).backward(retain_graph=True)
    assert x.grad.isnan().all()
    with pytest.raises(ValueError, match="second backward"):
        loss.backward()
    for wrong in (torch.zeros(101, 15), torch.zeros(101, 16).half(), torch.zeros(16, 101).t()):
        with pytest.raises(ValueError, match=r"main_grad.*\(101, 16\)"):
            linear_cross_entropy(x, head, target, main_grad=wrong)


@pytest.mark.parametrize("tokens", [13, 5])
def test_lean_in_parts_of_tokens_too(tokens, monkeypatch):
    slices_of(monkeypatch, 30, tokens)
    x, head, target = problem()
    agree((x, head, torch.randn(101)), target, 1e-5, torch.tensor(0.3), "lean", label_smoothing=0.1, z_loss=1e-3)


def test_a_sharded_head_is_refused(tmp_path):
    """A DTensor read as plain memory would be a wrong loss, or an illegal access."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, head, target = problem()
        sharded = distribute_tensor(head, mesh, [Shard(0)])
        for function in (linear_cross_entropy, linear_logprob):
            with pytest.raises(ValueError, match=r"linear_weight is a DTensor.*full_tensor"):
                function(x, sharded, target)
        assert torch.equal(
            linear_cross_entropy(x, sharded.full_tensor(), target), linear_cross_entropy(x, head, target)
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.interpret
@interpreted
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01, "weight": True}])
def test_triton_through_the_interpreter(memory, options):
    options = dict(options, weight=torch.rand(77) if options else None)
    for ignored in ("half", "all"):
        x, head, target = problem(3, 8, 77, scale=1.5, ignored=ignored)
        agree((x, head, torch.randn(77)), target, 1e-5, torch.randn(3), memory, reduction="none", **options)
        agree((x, head), target, 1e-5, torch.tensor(0.3), memory, **options)


@pytest.mark.interpret
@interpreted
def test_logprob_entropy_and_statistics_through_the_interpreter(monkeypatch):
    slices_of(monkeypatch, 40, 2)
    x, head, target = problem(3, 8, 77, scale=1.5)
    for softcap, temperature in ((None, 1.0), (10.0, 0.7)):
        agree_logprob(
            (x, head, torch.randn(77)), target, 2e-5, torch.randn(3), torch.randn(3),
            softcap=softcap, temperature=temperature,
        )  # fmt: skip
    for memory in MODES:
        found = linear_cross_entropy(x, head.requires_grad_(), target, memory=memory, return_stats=True)
        logits = x.double() @ head.double().t()
        torch.testing.assert_close(found.logsumexp.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.loss, found.token_loss.sum() / (target >= 0).sum())
        assert torch.equal(found.argmax, logits.argmax(-1))


@pytest.mark.interpret
@interpreted
def test_slices_carry_the_statistics(monkeypatch):
    monkeypatch.setattr(MODULE, "CPU_ELEMENTS", 3 * 30)  # three slices of 30 classes
    x, head, target = problem(3, 8, 77, ignored="none")
    agree((x, head), target, 1e-5, memory="lean", label_smoothing=0.1, softcap=20.0)


@pytest.mark.parametrize("memory", MODES)
def test_unused_memory_beside_the_logits_does_not_matter(memory, monkeypatch):
    """Rows of 97 logits are kept 112 apart, and bf16 products of CPUs with AMX read beyond their factors' rows."""
    x, head, target = problem(32, 32, 97, dtype=torch.bfloat16)
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: t.fill_(math.nan) if (t := empty(*a, **k)).is_floating_point() else t
    )
    assert all(t.isfinite().all() for t in gradients(linear_cross_entropy, (x, head), target, memory=memory))
    assert not MODULE._buffer(3, 97, torch.bfloat16, x.device).any()


# --- On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "dim", "classes"), [(1000, 576, 49152), (127, 896, 5003), (4100, 256, 32000)])
@pytest.mark.parametrize("peaked", [False, True])
def test_gpu_no_worse_than_eager(memory, dtype, n, dim, classes, peaked):
    x, head, target = problem(n, dim, classes, scale=1.0, dtype=dtype, device="cuda")
    head = head * dim**-0.5
    if peaked:  # as a trained model: most of the probability on the label
        x = (x + 0.4 * head[target.clamp(min=0)] * dim**0.5).to(dtype)
    true = truth((x, head), target)
    ours = gradients(linear_cross_entropy, (x, head), target, memory=memory)
    plain = gradients(eager, (x, head), target)
    assert abs(ours[0] - true[0]) <= max(1.25 * abs(plain[0] - true[0]), 1e-5 * true[0])
    for a, b, t in zip(ours[1:], plain[1:], true[1:], strict=True):
        assert error(a, t) <= 1.25 * error(b, t)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
def test_gpu_options(memory):
    torch.set_float32_matmul_precision("highest")
    grid = itertools.product((None, 30.0), (0.0, 0.1), (0.0, 1e-4), ("none", "half", "all"), ("mean", "sum", "none"))
    for softcap, smoothing, z_loss, ignored, reduction in grid:
        x, head, target = problem(device="cuda", ignored=ignored)
        upstream = torch.randn(13, device="cuda") if reduction == "none" else None
        agree(
            (x, head, torch.randn(101, device="cuda")), target, 1e-5, upstream, memory, softcap=softcap,
            label_smoothing=smoothing, z_loss=z_loss, reduction=reduction, weight=torch.rand(101, device="cuda"),
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
def test_gpu_peak_memory(memory):
    x, head, target = problem(8192, 1024, 128256, scale=0.1, dtype=torch.bfloat16, device="cuda")
    x.requires_grad_()
    head.requires_grad_()
    for _ in range(2):  # the first run also compiles
        x.grad = head.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, head, target, memory=memory).backward()
    returned = x.grad.nbytes + head.grad.nbytes
    beyond = torch.cuda.max_memory_allocated() - before - returned
    if memory == "lean":
        assert beyond <= 0.4 * 2**30
    else:
        fp32_head = 4 * head.numel()
        assert beyond <= max(fp32_head, fp32_head + FAST_BUFFER - head.grad.nbytes) + 32 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
def test_gpu_label_out_of_range_is_nan(memory):
    x, head, target = problem(4, 64, 1000, dtype=torch.bfloat16, device="cuda", ignored="none")
    target[1], target[2] = 1000, -7
    loss = linear_cross_entropy(x, head, target, reduction="none", memory=memory)
    assert loss.isnan().tolist() == [False, True, True, False]


@pytest.mark.gpu
def test_gpu_more_than_2_to_the_31_logits_in_one_chunk():
    x, head, target = problem(16400, 64, 151936, scale=0.3, dtype=torch.bfloat16, device="cuda", ignored="none")
    loss, dx, _ = by_chunks((x, head), target, 16400)
    loss_parts, dx_parts, _ = by_chunks((x, head), target, 1024)
    torch.testing.assert_close(loss, loss_parts)
    torch.testing.assert_close(dx, dx_parts)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
def test_gpu_graph_capture_compile_and_determinism(memory):
    x, head, target = problem(300, 128, 3001, scale=0.3, dtype=torch.bfloat16, device="cuda")
    x.requires_grad_()
    head.requires_grad_()

    def step(loss_of=linear_cross_entropy):
        loss = loss_of(x, head, target, memory=memory, reduction="sum") / (target >= 0).sum()
        return torch.autograd.grad(loss, (x, head))

    captured, expected = capture(step)
    again = step()
    for a, b, c in zip(captured, again, expected, strict=True):
        assert torch.equal(a, c) and torch.equal(b, c)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)
    for a, b in zip(step(compiled), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_gpu_model_head_agrees_with_given_logits():
    x, head, target = problem(64, 128, 5000, scale=0.3, device="cuda")
    logits = F.linear(x, head)
    torch.testing.assert_close(linear_cross_entropy(x, head, target), cross_entropy(logits, target))


@pytest.mark.gpu
@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (30.0, 0.7)])
def test_gpu_logprob_and_entropy(softcap, temperature):
    x, head, target = problem(700, 128, 32001, scale=0.3, device="cuda")
    torch.set_float32_matmul_precision("highest")
    upstream = torch.randn(2, 700, device="cuda")
    tensors = (x, head, torch.randn(32001, device="cuda"))
    agree_logprob(tensors, target, 2e-5, *upstream, softcap=softcap, temperature=temperature)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
def test_gpu_statistics(memory):
    x, head, target = problem(700, 128, 50257, scale=0.3, dtype=torch.bfloat16, device="cuda")
    head.requires_grad_()
    found = linear_cross_entropy(x, head, target, memory=memory, return_stats=True)
    logits = F.linear(x, head).double()
    torch.testing.assert_close(found.logsumexp.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    chosen = logits.gather(1, found.argmax[:, None])[:, 0]  # equal bf16 logits may be found in either order
    assert torch.equal(chosen, logits.amax(1))
    torch.testing.assert_close(found.loss, found.token_loss.sum() / (target >= 0).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("memory", MODES)
def test_gpu_main_grad_is_exact_and_takes_less_than_1_gib(memory):
    x, head, target = problem(8192, 1024, 128256, scale=0.1, dtype=torch.bfloat16, device="cuda")
    plain = gradients(linear_cross_entropy, (x, head), target, torch.tensor(0.5, device="cuda"), memory=memory)
    x.requires_grad_()
    head.requires_grad_()
    main_grad = torch.zeros(head.shape, device="cuda")
    for _ in range(2):  # the first run also compiles
        x.grad = None
        main_grad.zero_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = linear_cross_entropy(x, head, target, memory=memory, main_grad=main_grad, main_grad_scale=0.5)
        (loss * 0.5).backward()
    assert torch.cuda.max_memory_allocated() - before - x.grad.nbytes <= 2**30
    assert head.grad is None and torch.equal(loss, plain[0])
    for ours, usual in ((x.grad, plain[1]), (main_grad, plain[2])):
        assert (ours.float() - usual.float()).norm() <= 5e-3 * usual.float().norm()  # both are rounded to bf16 once
