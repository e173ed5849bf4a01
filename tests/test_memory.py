"""recompute(h, rebuild), the levels made of it, and offloading: the same gradients, bit for bit, with less kept."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from families import CONFIGS, tiny_model
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint

from ligermodels import LigerError
from ligermodels.kernels import rms_norm, swiglu
from ligermodels.layers import attention as attention_file
from ligermodels.layers.memory import LEVELS, address, recompute
from ligermodels.layers.offload import HostPool, Offload, Scope


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


# ------------------------------------------------------------------------------------------ levels of a whole model


OFFLOADED = [f"{level}+offload" for level in LEVELS[1:]]


def step(model, ids, level, lag=1, **options):
    """Gradients of a step at a level; everything larger than 64 bytes counts as worth offloading."""
    model.set_activation_memory(level, lag=lag)
    if model._offload is not None:
        model._offload.smallest = 64
    torch.manual_seed(3)  # for dropout
    return torch.autograd.grad(model(ids, labels=ids, **options).loss, list(model.parameters()))


@pytest.fixture
def tokens():
    return torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", CONFIGS)
def test_every_level_gives_the_gradients_of_none(family, tokens):
    model = tiny_model(family)
    expected = step(model, tokens, "none")
    for level in [*LEVELS[1:], *OFFLOADED]:
        assert equal(step(model, tokens, level), expected), level


def test_levels_may_differ_by_layer(tokens):
    model = tiny_model("llama", num_hidden_layers=6)
    levels = ["block+offload", "fast+offload", "attention", "mlp", "fast", "none"]
    assert equal(step(model, tokens, levels, lag=2), step(model, tokens, "none"))
    assert (
        model.activation_memory == "none" and step(model, tokens, levels) and model.activation_memory == tuple(levels)
    )


@pytest.mark.parametrize("options", [{"attention_mask": "keep"}, {"cu_seqlens": "packed"}], ids=["padded", "packed"])
def test_levels_under_padding_and_packing(options, tokens):
    model = tiny_model("mistral")
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    given = {"keep": mask, "packed": torch.tensor([0, 7, 20, 33, 40], dtype=torch.int32)}
    options = {name: given[value] for name, value in options.items()}
    expected = step(model, tokens, "none", **options)
    for level in ("mlp", "attention", "block+offload"):
        assert equal(step(model, tokens, level, **options), expected), level


@pytest.mark.parametrize("level", [*LEVELS[1:], *OFFLOADED])
def test_dropout_draws_the_same_numbers_again(level, tokens):
    model = tiny_model("phi3", attention_dropout=0.3, resid_pdrop=0.3)
    assert equal(step(model, tokens, level), step(model, tokens, "none"))


@pytest.mark.parametrize("level", ["mlp", "attention", "block", "block+offload"])
def test_dropout_of_adapters_draws_the_same_numbers_again(level, tokens):
    from ligermodels.training.lora import add_lora

    model = tiny_model("llama")
    add_lora(model, rank=2, dropout=0.4)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    found = []
    for chosen in ("none", level):
        model.set_activation_memory(chosen)
        torch.manual_seed(3)
        trained = [p for p in model.parameters() if p.requires_grad]
        found.append(torch.autograd.grad(model(tokens, labels=tokens).loss, trained))
    assert equal(*found)


@pytest.mark.parametrize("level", [*LEVELS, *OFFLOADED])
def test_a_retained_graph_of_a_model_can_be_used_again(level, tokens):
    model = tiny_model("llama")
    expected = step(model, tokens, "none")
    step(model, tokens, level)
    loss, parameters = model(tokens, labels=tokens).loss, list(model.parameters())
    for retain in (True, False):
        assert equal(torch.autograd.grad(loss, parameters, retain_graph=retain), expected)


def test_each_level_keeps_less(tokens):
    def kept(level):
        """Bytes of the storages that the graph of a step keeps alive, beside the model's."""
        model = tiny_model("llama", vocab_size=97)
        model.set_activation_memory(level)
        gc.collect()
        before = {address(t) for t in tensors()}
        loss = model(tokens, labels=tokens).loss
        gc.collect()
        new = {address(t): t.untyped_storage().nbytes() for t in tensors() if address(t) not in before}
        assert loss.requires_grad
        return sum(new.values())

    def tensors():
        return [t for t in gc.get_objects() if type(t) is torch.Tensor]

    # only what Python can see, which is what the hooks hold: at "none" and in the loss torch holds tensors itself
    sizes = [kept(level) for level in LEVELS[1:]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[-1]


def test_unknown_levels_are_named():
    model = tiny_model("llama")
    for wrong in ("tiny", "none+offload", "fast+", None):
        with pytest.raises(LigerError, match="must be one of none, fast, mlp, attention, block"):
            model.set_activation_memory([wrong] * 3)
    with pytest.raises(LigerError, match="2 activation memory levels given for 3 layers"):
        model.set_activation_memory(["fast", "mlp"])
    with pytest.raises(LigerError, match="must be one of none"):
        model.set_activation_memory(3)
    for lag in (0, -1, 1.5):
        with pytest.raises(LigerError, match="lag must be"):
            model.set_activation_memory("block+offload", lag=lag)


def test_host_memory_is_used_again_and_device_memory_let_go(tokens):
    model = tiny_model("llama", num_hidden_layers=6)
    model.set_activation_memory("fast+offload")
    model._offload = offload = Offload(pool=HostPool(chunk=256), smallest=64)
    chunks, scopes = [], []
    offload.scope = lambda apart: scopes.append(Scope(offload, apart)) or scopes[-1]
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        assert [bool(s.stored) for s in scopes] == [False] * 5 + [True]  # the last one stays where it is
        loss.backward()
        chunks.append(offload.pool.chunks)
        scopes.clear()
        offload.begin()  # as the next forward does
        assert len(offload.pool.free) == offload.pool.chunks  # also while the loss is alive
    assert chunks[0] == chunks[-1] > 0


def test_a_model_that_offloads_can_be_copied(tokens):
    model = tiny_model("llama")
    expected = step(model, tokens, "mlp+offload")
    assert equal(step(copy.deepcopy(model), tokens, "mlp+offload"), expected)


def test_a_recipe_of_a_recipe(x):
    """What is rebuilt from something that is itself rebuilt, from something that is offloaded."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    offload = Offload(pool=HostPool(chunk=64), smallest=8)

    def run(enabled):
        scope = offload.scope({address(p) for p in (*first.parameters(), *second.parameters())})
        with scope.hooks() if enabled else contextlib.nullcontext():
            h = torch.sin(x)
            with recompute(h, torch.sin, x, enabled=enabled):
                a, b = first(h), torch.cos(h)
                with recompute((a, b), lambda h: (first(h), torch.cos(h)), h, enabled=enabled):
                    out = second(a) * b
        scope.settle()
        return torch.autograd.grad(out.square().sum(), [x, *first.parameters(), *second.parameters()])

    assert equal(run(True), run(False))


# ------------------------------------------------------------------------------------------------------------ on CUDA


@pytest.fixture(scope="module")
def wide():
    """Layers of a few MiB each, so that copies to the host take their time."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = tiny_model("llama", vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
                           num_attention_heads=16, num_key_value_heads=4, head_dim=64,
                           max_position_embeddings=4096)  # fmt: skip
    return model.to(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [*LEVELS[1:], *OFFLOADED])
@pytest.mark.parametrize(("lag", "exact"), [(1, True), (3, True), (1, False)])
def test_levels_on_the_gpu(wide, level, lag, exact, monkeypatch):
    """Three steps in a row: a copy that comes too late or too early would show. Bit for bit with plain attention; the
    backward of the fast kernels adds up in an order of its own in each run."""
    if exact:
        monkeypatch.setattr(attention_file, "_BACKENDS", [SDPBackend.MATH])
    ids = torch.randint(3, 4096, (4, 1024), device="cuda")

    def run(level):
        wide.set_activation_memory(level, lag=lag)
        if wide._offload is not None:
            wide._offload.smallest = 2**20
        return [torch.autograd.grad(wide(ids.roll(i), labels=ids).loss, list(wide.parameters())) for i in range(3)]

    for found, expected in zip(run(level), run("none"), strict=True):
        if exact:
            assert equal(found, expected)
        assert all((a - b).norm() <= 0.01 * b.norm() for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_offloaded_layers_leave_the_device(wide):
    ids = torch.randint(3, 4096, (8, 2048), device="cuda")

    def peak(level):
        wide.set_activation_memory(level)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(wide(ids, labels=ids).loss, list(wide.parameters()))
        return torch.cuda.max_memory_allocated()

    assert peak("fast+offload") < peak("mlp") < peak("fast") < peak("none")
    assert peak("block") < peak("attention") < peak("mlp")


@pytest.mark.gpu
@pytest.mark.parametrize("level", [*LEVELS, "fast+offload", "block+offload"])
def test_nothing_in_a_step_waits_for_the_device(wide, level):
    ids = torch.randint(3, 4096, (2, 1024), device="cuda")
    optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-6, fused=True)
    wide.set_activation_memory(level)
    if wide._offload is not None:
        wide._offload.smallest = 2**20
    for number in range(3):
        torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")
        try:
            wide(ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(wide.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_tiles_on_the_gpu(monkeypatch):
    from ligermodels.layers import mlp as mlp_file
    from ligermodels.llama import LlamaConfig, LlamaMLP

    config = LlamaConfig(vocab_size=8, hidden_size=512, intermediate_size=1408, num_attention_heads=4)
    torch.manual_seed(0)
    model = LlamaMLP(config).cuda().to(torch.bfloat16)
    model.keep = "input"
    h = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn_like(h)
    inputs = [h, *model.parameters()]
    whole = torch.autograd.grad(model(h), inputs, weight)
    wide = copy.deepcopy(model).double()
    exact = h.detach().double().requires_grad_()
    truth = torch.autograd.grad(wide(exact), [exact, *wide.parameters()], weight.double())
    monkeypatch.setattr(mlp_file, "WHOLE", 0)
    monkeypatch.setattr(mlp_file, "TILE", 1000 * 1408 * 2)
    tiled = torch.autograd.grad(model(h), inputs, weight)
    for a, b, t in zip(tiled, whole, truth, strict=True):
        assert (a - t).norm() <= 1.05 * (b - t).norm()
