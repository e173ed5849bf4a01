"""What the block of every family must obey, whatever it computes."""

from __future__ import annotations

import pytest
import torch
from families import CONFIGS, SPARSE, tiny_model

from ligermodels.kernels import rms_norm
from ligermodels.layers import norm as norm_file


@pytest.mark.parametrize("family", [*CONFIGS, *SPARSE])
def test_the_stream_has_one_user_in_the_graph(family, monkeypatch):
    """Two users of x would be two gradients, which autograd adds in a pass of its own: x may only enter the fork."""
    model = tiny_model(family) if family in CONFIGS else tiny_model("llama", **SPARSE[family])

    def fork(x, *args, **options):  # CPU tensors take no fused fork, whose one node this stands for
        x = x.view_as(x)
        return rms_norm(x, *args, **options), x

    monkeypatch.setattr(norm_file, "fork_rms_norm", fork)
    ids = torch.arange(3, 12)[None]
    context = model.prepare(ids, None, None, None, None)
    for block in model.model.layers:
        x = model.model.embed_tokens(ids).detach().requires_grad_()
        out = block(x, context)
        todo, nodes, users = [(out[0] if isinstance(out, tuple) else out).grad_fn], set(), 0
        while todo:
            if (node := todo.pop()) in nodes:
                continue
            nodes.add(node)
            users += sum(getattr(f, "variable", None) is x for f, _ in node.next_functions)
            todo += [f for f, _ in node.next_functions if f is not None]
        assert users == 1
