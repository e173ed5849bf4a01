"""Two processes (gloo, CPU) compute what one does: loss, gradients, steps."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

import ligermodels
from ligermodels import LigerError, LigerLlama, LigerPhi3, LlamaConfig, Phi3Config
from ligermodels.training.data import Document, Loader
from ligermodels.training.optimizer import AdamW

SIZES = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, pad_token_id=None)  # fmt: skip
WORLD = 2


def make_model(kind="llama"):
    torch.manual_seed(0)
    cls = ligermodels.MODELS[kind]
    model = cls(cls.config_class(**SIZES))
    for p in model.parameters():
        p.data.add_(torch.randn_like(p) * 0.1)
    return model


def make_batches():
    """One for each rank, of unequal numbers of supervised tokens."""
    generator = torch.Generator().manual_seed(1)
    source = [{"ids": torch.randint(3, 97, (n,), generator=generator).tolist()} for n in (9, 5, 14, 2, 6)]
    data = Loader(source, lambda r: Document(r["ids"], r["ids"]), batch=1, seq=20, shuffle=False, epochs=1)
    batches = [next(data) for _ in range(WORLD)]
    assert len({b.supervised for b in batches}) == WORLD
    return batches


def loss_of(model, batch, count):
    ids, labels, bounds, *_ = batch
    return model(ids, labels=labels, cu_seqlens=bounds, num_items_in_batch=count).loss


def full(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def worker(rank, job, port, folder):
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        for name, found in job(rank, mesh):
            if rank == 0:
                torch.save(found, f"{folder}/{name}.pt")
    finally:
        torch.distributed.destroy_process_group()


def sharded(rank, mesh):
    from ligermodels.training.parallel import all_sum, shard

    for level in ("fast", "block"):
        model, batches = make_model(), make_batches()
        model.set_activation_memory(level)
        shard(model, mesh)
        held = sum(p.to_local().numel() for p in model.parameters())
        optimizer = AdamW(model, eps=1e-2)  # else the first update is the sign of g, and rounding decides it at 0
        count = all_sum(batches[rank].supervised, mesh)
        loss = loss_of(model, batches[rank], count)
        loss.backward()
        grads = {n: full(p.grad) for n, p in model.named_parameters()}
        norm = optimizer.step(1e-2, clip=0.5)
        weights = {n: full(p.detach()) for n, p in model.named_parameters()}
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        yield f"sharded-{level}", (total, grads, norm, weights, held)


def cut(rank, mesh):
    from ligermodels.training.parallel import tensor_parallel

    for kind in ("llama", "qwen3", "gemma2"):
        model, batch = make_model(kind), make_batches()[0]
        tensor_parallel(model, mesh)
        loss = loss_of(model, batch, batch.supervised)
        loss.backward()
        grads = {n: full(p.grad).clone() for n, p in model.named_parameters()}
        norm = AdamW(model, eps=1e-2).step(1e-2, clip=0.5)
        yield f"cut-{kind}", (loss.detach(), grads, norm, {n: full(p.detach()) for n, p in model.named_parameters()})


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    mp.spawn(worker, args=(both, free_port(), str(folder)), nprocs=WORLD)
    return lambda name: torch.load(folder / f"{name}.pt")


def both(rank, mesh):
    yield from sharded(rank, mesh)
    yield from cut(rank, mesh)


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("level", ["fast", "block"])
def test_shards_learn_as_one_process_with_all_batches(results, level):
    loss, grads, norm, weights, held = results(f"sharded-{level}")
    model, batches = make_model(), make_batches()
    count = sum(b.supervised for b in batches)
    expected = sum(loss_of(model, b, count) for b in batches)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    close(grads, {n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(norm, AdamW(model, eps=1e-2).step(1e-2, clip=0.5), rtol=1e-5, atol=1e-6)
    close(weights, {n: p.detach() for n, p in model.named_parameters()})
    assert held <= sum(p.numel() for p in model.parameters()) // WORLD + 200  # half of them, and rounding


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_cut_heads_give_the_same_loss_and_gradients(results, kind):
    loss, grads, norm, weights = results(f"cut-{kind}")
    model, batch = make_model(kind), make_batches()[0]
    expected = loss_of(model, batch, batch.supervised)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    close(grads, {n: p.grad.clone() for n, p in model.named_parameters()})
    torch.testing.assert_close(norm, AdamW(model, eps=1e-2).step(1e-2, clip=0.5), rtol=1e-5, atol=1e-6)
    close(weights, {n: p.detach() for n, p in model.named_parameters()})


class Mesh:
    def __init__(self, size):
        self.size = lambda: size


def test_what_cannot_be_cut_is_named():
    from ligermodels.training.parallel import tensor_parallel

    with pytest.raises(LigerError, match="num_key_value_heads 2 cannot be cut into 4 equal parts"):
        tensor_parallel(LigerLlama(LlamaConfig(**SIZES)), Mesh(4))
    with pytest.raises(LigerError, match=r"LigerPhi3 has no Linear self_attn.q_proj in a block"):
        tensor_parallel(LigerPhi3(Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})), Mesh(2))
