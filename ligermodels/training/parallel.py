"""Several GPUs, applied to a model from outside: FSDP2 (shards of the weights) and tensor parallelism (parts of heads).

    mesh = init_device_mesh("cuda", (world,))
    shard(model, mesh, dtype=torch.bfloat16)         # fp32 shards, bf16 to compute: master weights for free
    tensor_parallel(model, mesh)                     # within one node
    count = all_sum(sum(b.supervised for b in batches), mesh)   # num_items_in_batch, over all ranks

Model files know nothing of it. Parameter names stay, so the plans are data: which Linear is cut which way.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ligermodels.base import CausalLM
from ligermodels.errors import LigerError

# Of a block: outputs cut (heads, inner features) with no communication, then inputs cut with one sum of the results.
PLAN = {
    "self_attn.q_proj": "columns",
    "self_attn.k_proj": "columns",
    "self_attn.v_proj": "columns",
    "self_attn.o_proj": "rows",
    "mlp.gate_proj": "columns",
    "mlp.up_proj": "columns",
    "mlp.down_proj": "rows",
}
# Weights that every rank holds whole but sees its own heads pass through: their gradients are parts of a sum.
PER_HEAD = ("self_attn.q_norm", "self_attn.k_norm")


def shard(
    model: CausalLM, mesh: DeviceMesh, *, dtype: torch.dtype | None = None, reshard_after_forward: bool = True
) -> None:
    """FSDP2: every rank holds 1/n of each parameter, of its gradient and of the optimiser's states.

    A block is gathered when it runs and freed after; embedding, last norm and head stay gathered from forward to
    backward, as the loss reads the head whole. ``dtype``: computing happens in it, shards and their gradients keep the
    parameters' own.

    Gradients are *summed* over the ranks, not averaged: divide each rank's loss by the tokens of all ranks
    (``num_items_in_batch=all_sum(...)``), and the result is that of one large batch however unequal the parts are.
    """
    # Inputs are left as they are: the rotary tables among them must stay in fp32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in (*model.model.layers, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def tensor_parallel(model: CausalLM, mesh: DeviceMesh) -> None:
    """Cut the heads and the inner features of every block over the ranks of ``mesh``; each sees the same batch.

    Embedding and head stay whole on every rank. Apply it before ``shard`` (of another dimension of the mesh) and before
    the optimiser is made. For training: a cache is made for all heads.

    Raises LigerError for a model whose blocks are otherwise made (Linears that hold several projections, experts), and
    where the ranks do not divide the heads or the inner features.
    """
    ranks, c = mesh.size(), model.config
    for name, count in (
        ("num_attention_heads", c.num_attention_heads),
        ("num_key_value_heads", c.num_key_value_heads),
        ("intermediate_size", c.intermediate_size),
    ):
        if count % ranks:
            raise LigerError(f"{name} {count} cannot be cut into {ranks} equal parts")
    first = dict(model.model.layers[0].named_modules())
    if missing := [name for name in PLAN if type(first.get(name)) is not nn.Linear]:
        raise LigerError(f"{type(model).__name__} has no Linear {missing[0]} in a block: its layers cannot be cut so")
    group = mesh.get_group()

    def sum_over_heads(grad: torch.Tensor) -> torch.Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    for layer in model.model.layers:
        ways = {"columns": ColwiseParallel, "rows": RowwiseParallel}
        parallelize_module(layer, mesh, {name: ways[way]() for name, way in PLAN.items()})
        modules = dict(layer.named_modules())
        for name in PER_HEAD:
            if name in modules and modules[name].weight.requires_grad:
                modules[name].weight.register_hook(sum_over_heads)


def all_sum(count: int, mesh: DeviceMesh) -> torch.Tensor:
    """The sum () of every rank's ``count``, on the device: nothing waits for it."""
    total = torch.tensor(float(count), device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return total
