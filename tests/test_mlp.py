"""Linears that share an input and gated MLPs as one node: the same numbers as separate modules, and fewer tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ligermodels import LigerError
from ligermodels.layers import mlp as mlp_file
from ligermodels.layers.linear import linears
from ligermodels.layers.mlp import GatedMLP, tile_rows


class Separate(nn.Linear):
    """A Linear that is more than a plain one, as an adapter is: it takes the path through the modules."""


class MLP(GatedMLP):
    def __init__(self, linear=nn.Linear, *, packed: bool = False, activation: str = "silu", bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up = nn.ModuleList([linear(12, 40, bias)] if packed else [linear(12, 20, bias) for _ in range(2)])
        self.down, self.activation = linear(20, 12, bias), activation

    def forward(self, h):
        return self.gated(h, tuple(self.gate_up), self.down, self.activation)


@pytest.fixture
def h():
    return torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(function, inputs):
    out = function()
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, inputs, weight, allow_unused=True)]


def close(found, expected, tolerance=1e-6):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [(), (0,), (0, 1, 2)])
def test_linears_equal_separate_modules(h, bias, frozen):
    torch.manual_seed(0)
    modules = [nn.Linear(12, size, bias) for size in (8, 4, 4)]
    for i in frozen:
        modules[i].weight.requires_grad_(False)
    inputs = [h, *(p for m in modules for p in m.parameters() if p.requires_grad)]
    together = gradients(lambda: torch.cat(linears(h, *modules), -1), inputs)
    close(together, gradients(lambda: torch.cat([m(h) for m in modules], -1), inputs))


def test_linears_of_which_some_results_are_unused(h):
    modules = [nn.Linear(12, 4) for _ in range(3)]
    inputs = [h, *(m.weight for m in modules)]
    close(gradients(lambda: linears(h, *modules)[1], inputs), gradients(lambda: modules[1](h), inputs))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("keep", "packed"), list(itertools.product(["product", "gates", "input"], [False, True])))
def test_gated_mlp_equals_separate_modules(h, activation, keep, packed):
    one, other = (MLP(linear, packed=packed, activation=activation) for linear in (nn.Linear, Separate))
    one.keep = other.keep = keep
    close(*(gradients(lambda m=m: m(h), [h, *m.parameters()]) for m in (one, other)))


@pytest.mark.parametrize("keep", ["product", "gates", "input"])
@pytest.mark.parametrize("trained", ["down", "gate_up.0", "h"])
def test_only_what_is_asked_for_gets_a_gradient(h, keep, trained):
    one, other = MLP(), MLP(Separate)
    for m in (one, other):
        m.keep = keep
        for name, p in m.named_parameters():
            p.requires_grad_(name.startswith(trained))
    given = h if trained == "h" else h.detach()
    inputs = [[given] if trained == "h" else [p for p in m.parameters() if p.requires_grad] for m in (one, other)]
    close(*(gradients(lambda m=m: m(given), i) for m, i in zip((one, other), inputs, strict=True)))


@pytest.mark.parametrize("bias", [False, True])
def test_hooks_biases_and_adapters_take_the_modules_own_way(h, bias):
    model, seen = MLP(bias=bias), []
    model.gate_up[0].register_forward_hook(lambda *_: seen.append("gate"))
    if bias:
        close(gradients(lambda: model(h), [h]), gradients(lambda: MLP(Separate, bias=True)(h), [h]))
    model(h)
    assert seen[-1] == "gate"


def test_values_are_left_out_while_a_layer_is_replayed(h):
    model = MLP()
    model.keep = "input"
    expected = gradients(lambda: model(h), [h, *model.parameters()])
    model.replaying = True
    found = gradients(lambda: model(h), [h, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def test_tiles(monkeypatch):
    assert tile_rows(16384, 14336 * 2) == 16384  # 0.44 GiB: whole
    rows = tile_rows(262_144, 14336 * 2)
    assert rows % 128 == 0 and rows * 14336 * 2 <= 1.02 * mlp_file.TILE and -(-262_144 // rows) == 14


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_in_tiles_are_exact(monkeypatch, packed, dtype):
    """fp32: as in one piece. bf16: weights' gradients add up in fp32, so they are as close to the truth as before."""
    h = torch.randn(1, 1000, 12, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    model = MLP(packed=packed).to(dtype)
    model.keep = "input"
    whole = gradients(lambda: model(h), [h, *model.parameters()])
    monkeypatch.setattr(mlp_file, "WHOLE", 0)
    monkeypatch.setattr(mlp_file, "TILE", 200 * 20 * h.element_size())
    tiled = gradients(lambda: model(h), [h, *model.parameters()])
    if dtype == torch.float32:
        close(tiled, whole, 1e-5)
        return
    wide = MLP(packed=packed).to(torch.float64)
    wide.load_state_dict(model.state_dict())
    exact = h.detach().double().requires_grad_()
    truth = gradients(lambda: wide(exact), [exact, *wide.parameters()])
    for a, b, t in zip(tiled, whole, truth, strict=True):
        assert (a - t).norm() <= 1.05 * (b - t).norm()


def test_empty_input():
    h = torch.zeros(0, 12, requires_grad=True)
    for keep in ("product", "gates", "input"):
        model = MLP()
        model.keep = keep
        out, *found = gradients(lambda m=model: m(h), [h, *model.parameters()])
        assert out.shape == (0, 12) and all(torch.equal(g, torch.zeros_like(g)) for g in found)


def test_a_second_derivative_is_refused(h):
    """Also where the incoming gradient is a constant, so that autograd alone would call the result one too."""
    for run in (MLP(), lambda h: linears(h, nn.Linear(12, 12))[0]):
        (g,) = torch.autograd.grad(run(h).sum(), h, create_graph=True)
        with pytest.raises(LigerError, match="second derivative"):
            g.square().sum().backward()
