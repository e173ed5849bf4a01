"""recompute(h, rebuild): the same gradients, bit for bit, without keeping h."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ligermodels.kernels import rms_norm, swiglu
from ligermodels.layers.memory import recompute


class LoRALinear(nn.Module):
    """A wrapped Linear, as adapters make them: two paths use the input."""

    def __init__(self, size: int):
        super().__init__()
        self.base = nn.Linear(size, size, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, h):
        return self.base(h) + self.b(self.a(h))


class Block(nn.Module):
    """Norm → three users of h → gated product → Linear, nested as in a model."""

    def __init__(self, linear=lambda size: nn.Linear(size, size)):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16) + 0.5)
        self.q, self.gate, self.up, self.down = (linear(16) for _ in range(4))
        self.enabled, self.rebuilt = True, 0

    def rebuild(self, x):
        self.rebuilt += not torch.is_grad_enabled()
        return rms_norm(x, self.weight)

    def forward(self, x):
        h = self.rebuild(x)
        with recompute(h, lambda: self.rebuild(x), enabled=self.enabled):
            gate, up = self.gate(h), self.up(h)
            product = swiglu(gate, up)
            with recompute(product, lambda: swiglu(gate, up), enabled=self.enabled):
                out = self.down(product)
            return x + out + self.q(h)


@pytest.fixture(params=[lambda size: nn.Linear(size, size), LoRALinear], ids=["linear", "lora"])
def block(request):
    torch.manual_seed(0)
    return Block(request.param)


@pytest.fixture
def x():
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(block, x, run=None, **options):
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    return torch.autograd.grad((block if run is None else run)(x).square().sum(), inputs, **options)


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def plain(block):
    block = copy.deepcopy(block)
    block.enabled = False
    return block


def test_gradients_are_the_same_bits(block, x):
    assert equal(gradients(block, x), gradients(plain(block), x))
    assert block.rebuilt == 1  # q, gate and up share one rebuild


def test_h_and_the_product_are_not_kept(block, x):
    def kept(block):
        count, seen = 0, set()
        nodes = [block(x).grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [f for f, _ in node.next_functions]
            for name in dir(node):
                if name.startswith("_raw_saved_"):
                    try:
                        count += isinstance(getattr(node, name).data, torch.Tensor)
                    except (RuntimeError, AttributeError):  # replaced by a recipe, or not a tensor
                        continue
        return count

    assert kept(block) < kept(plain(block))


def test_a_retained_graph_can_be_used_again(block, x):
    out = block(x).square().sum()
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    assert equal(first, torch.autograd.grad(out, inputs))
    assert block.rebuilt == 2


def test_a_partial_backward_leaves_the_next_one_right(block, x):
    """Only some of the saved views are used the first time."""
    out = block(x).square().sum()
    inputs = [x, *(p for p in block.parameters() if p.requires_grad)]
    torch.autograd.grad(out, inputs[-1:], retain_graph=True)
    assert equal(torch.autograd.grad(out, inputs), gradients(plain(block), x))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_weight_changed_between_forward_and_backward_is_an_error_as_without_hooks(block, x, enabled):
    block.enabled = enabled
    loss = block(x).square().sum()
    with torch.no_grad():
        next(block.gate.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inside_a_checkpoint_the_checkpoint_decides(block, x):
    run = lambda t: checkpoint(block, t, use_reentrant=False)  # noqa: E731
    assert equal(gradients(block, x, run), gradients(plain(block), x))


def test_a_checkpoint_inside(block, x):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.enabled = block, True

        def forward(self, x):
            h = rms_norm(x, self.inner.weight)
            with recompute(h, lambda: rms_norm(x, self.inner.weight), enabled=self.enabled):
                return checkpoint(self.inner, h, use_reentrant=False) + self.inner.q(h)

    outer = Outer()
    assert equal(gradients(outer, x), gradients(plain(outer), x))


def test_under_save_on_cpu(block, x):
    with torch.autograd.graph.save_on_cpu():
        found = gradients(block, x)
    assert equal(found, gradients(plain(block), x))


def test_under_autocast(block, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(block, x)
        expected = gradients(plain(block), x)
    assert equal(found, expected)


def test_under_compile(block, x):
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert all(torch.allclose(a, b) for a, b in zip(gradients(block, x, compiled), gradients(block, x), strict=True))


def test_without_gradients_nothing_happens(block, x):
    with torch.no_grad():
        assert torch.equal(block(x), plain(block)(x))
