"""Which layers keep, recompute and offload their activations, so that a training step is fastest within a budget.

The timeline of a step's device memory is known from shapes alone. With W weights, O optimiser states, G gradients and
a_i what layer i keeps for backward (``activation_bytes``), of layers 0 … L − 1:

    loss                W + O + Σ a_i + the loss's own buffers
    backward of layer i W + O + Σ_{j > i} G_j + G_head + Σ_{j ≤ i} a_j + what layer i's backward makes for itself
    update              W + O + G

Gradients take the place of activations while the backward goes down. So what the *last* layers keep costs nothing at
the end of backward, and what the first ones keep costs most; a step with full checkpointing has room to keep its last
layers. The planner starts with everything kept and, at the point that is furthest over the budget, takes the cheapest
seconds per byte until all points fit; then it gives back what still fits. Copies to the host cost least, but only as
many as the link moves beside the forward.

Bytes are those that the allocator hands out (torch.cuda.max_memory_allocated). Seconds come from ``Rates`` and only
rank the choices.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ligermodels.errors import LigerError
from ligermodels.kernels._launch import multiprocessors
from ligermodels.kernels.linear_cross_entropy import fast_buffer_bytes, keeps_logits
from ligermodels.layers.memory import LEVELS, OFFLOAD, split_level
from ligermodels.layers.mlp import GatedMLP, tile_rows
from ligermodels.layers.norm import RMSNorm
from ligermodels.training.in_backward import waiting_bytes

GIB = 2**30
WORKSPACE = 96 * 2**20  # of cuBLAS, which torch allocates
_SENT = ((), ("fast",), ("mlp",), ("attention",), ("attention", "block"), ("block",), LEVELS)  # to the host


class Rates(NamedTuple):
    """What a device does in a second, as measured on an H200; only the ratios matter to a plan."""

    matmul: float = 650e12  # FLOP/s in bf16
    attention: float = 500e12  # FLOP/s
    memory: float = 3.6e12  # bytes/s
    link: float = 45e9  # bytes/s to the host, and as many back at the same time


class Block(NamedTuple):
    """Widths of one layer, in elements per token, and what else its memory and time depend on."""

    hidden: int
    norms: int  # over the stream: each keeps its input
    heads: int  # A·D
    kv: int  # K·D
    packed: bool  # q, k and v are one product: v keeps all of it
    raw: int  # copies of q and k before their norm: 0, 1, or 2 if the turned ones are kept as well
    inner: int  # I, times the experts a token passes
    experts: int  # that a token passes; 0 for a dense MLP, which alone is cut into tiles
    routing: int  # bytes that the choice of the experts keeps
    lazy: bool  # a replay leaves out the MLP's values
    num_heads: int
    attention_weights: int
    mlp_weights: int
    gradients: int  # bytes
    mlp_gradients: int  # bytes
    window: int | None
    keeps_attention: bool


def block_of(layer: nn.Module) -> Block:
    """Read from a layer's modules (on any device, meta too). Raises LigerError for a layer of another kind."""
    layer = getattr(layer, "_orig_mod", layer)  # of torch.compile(layer)
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    experts = getattr(mlp, "experts", None)
    if attention is None or not (isinstance(mlp, GatedMLP) or experts is not None):
        raise LigerError(f"{type(layer).__name__}: memory can be planned for layers of self_attn and a gated mlp only")
    norms = [m for m in layer.children() if isinstance(m, RMSNorm)]
    hidden = norms[0].weight.shape[0]
    heads = attention.o_proj.in_features
    packed = hasattr(attention, "qkv_proj")
    kv = (attention.qkv_proj.out_features - heads) // 2 if packed else attention.k_proj.out_features
    raw = 0
    if hasattr(attention, "q_norm"):
        raw = 1 if hasattr(attention, "recompute") else 2
    inner = mlp.down_proj.in_features if experts is None else experts.down_proj.shape[2] * mlp.top_k
    size = attention.o_proj.weight.element_size()
    return Block(
        hidden=hidden,
        norms=len(norms),
        heads=heads,
        kv=kv,
        packed=packed,
        raw=raw,
        inner=inner,
        experts=0 if experts is None else mlp.top_k,
        routing=0 if experts is None else experts.down_proj.shape[0] * size + 16 * mlp.top_k,
        lazy=getattr(layer, "ends_with_mlp", False) and experts is None,
        num_heads=heads // attention.head_dim,
        attention_weights=hidden * (2 * heads + 2 * kv),
        mlp_weights=3 * hidden * inner,
        gradients=_gradients(layer),
        mlp_gradients=_gradients(mlp),
        window=getattr(attention, "window", None),
        keeps_attention=getattr(attention, "softcap", None) is None,
    )


def _gradients(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)


def activation_bytes(block: Block, level: str, tokens: int, size: int) -> int:
    """Bytes that a layer keeps from forward to backward at a level (without "+offload"), its input included.

    ``size``: bytes of an element of the activations.
    """
    b = block
    stream, softmax, rstd = b.norms * b.hidden, 4 * b.num_heads, 4 * b.norms  # elements, bytes, bytes
    if level == "block":
        return tokens * size * b.hidden
    if level == "attention":
        return tokens * (size * (b.hidden + b.heads) + softmax)
    turned = 0 if b.raw == 1 and level != "none" else b.heads + b.kv
    elements = stream + turned + (b.heads + b.kv) * min(b.raw, 1) + (b.heads + 2 * b.kv if b.packed else b.kv) + b.heads
    if level in ("none", "fast"):
        elements += 2 * b.inner
    if level == "none":
        elements += 2 * b.hidden + (0 if b.experts else b.inner)
    return tokens * (size * elements + softmax + rstd + b.routing)


def backward_bytes(block: Block, level: str, tokens: int, size: int) -> tuple[int, int, int]:
    """Bytes that exist only in the layer's backward, the incoming gradient included, at three of its points.

    While the product meets the gradient of ``down`` (a third of the MLP's gradients exists), when those of gate and up
    are done (all), and beside attention's backward, when the MLP's own share is gone: there it is subtracted.
    """
    b = block
    stream, again = tokens * size * b.hidden, 0
    if level in ("attention", "block"):  # what runs again, and is kept until the layer is done; norms stay, too
        again = activation_bytes(b, "mlp", tokens, size) - activation_bytes(b, level, tokens, size)
        again += 1 * stream if b.lazy else 2 * stream
    rows = tile_rows(tokens, b.inner * size) if level in ("mlp", "attention", "block") and not b.experts else tokens
    tile = rows * size * b.inner
    sums = 3 * b.hidden * b.inner * 4 if rows < tokens else 0  # the weights' gradients in fp32, where tiles add up
    gathered = 2 * b.experts * stream  # a row of x and one of the gradient for each expert
    early = 2 * stream + 3 * tile + sums // 3 + gathered + (stream if rows < tokens else 0)
    late = 3 * stream + 2 * tile + sums + gathered
    attention = 2 * stream + tokens * size * (4 * b.heads + 3 * b.kv) + tokens * 4 * b.heads
    if level in ("none", "fast"):
        attention -= tokens * size * b.inner * (3 if level == "none" else 2)
    return again + early, again + late, again + attention


def forward_seconds(block: Block, tokens: int, seq: int, size: int, rates: Rates) -> float:
    """A layer's forward over ``tokens`` tokens in rows of ``seq``; ``size`` as in ``activation_bytes``."""
    b = block
    seen = min(seq, b.window or seq)
    attention = 4 * tokens * (seen if seen < seq else seq / 2) * b.heads / rates.attention
    passes = tokens * size * (5 * b.hidden + 3 * b.inner + 2 * (b.heads + b.kv)) / rates.memory
    return 2 * tokens * (b.attention_weights + b.mlp_weights) / rates.matmul + attention + passes


def extra_seconds(block: Block, level: str, tokens: int, seq: int, size: int, rates: Rates) -> float:
    """What a level costs beyond "none"."""
    b = block
    cost = 0.0
    if level != "none":
        cost += tokens * size * (4 * b.hidden + b.inner) / rates.memory
    if level in ("mlp", "attention", "block"):
        cost += 2 * tokens * b.mlp_weights * 2 / 3 / rates.matmul
    if level in ("attention", "block"):
        cost += 2 * tokens * b.attention_weights / rates.matmul
        cost += tokens * size * (3 * b.hidden + 2 * (b.heads + b.kv)) / rates.memory
        if not b.lazy:
            cost += 2 * tokens * b.mlp_weights / 3 / rates.matmul
    if level == "block" or (level == "attention" and not b.keeps_attention):
        seen = min(seq, b.window or seq)
        cost += 4 * tokens * (seen if seen < seq else seq / 2) * b.heads / rates.attention
    return cost


@dataclass(frozen=True)
class Plan:
    """What ``fit_memory`` chose, and what it expects of it. Bytes; ``str()`` is a table for people."""

    batch: int
    seq: int
    budget: int
    levels: tuple[str, ...]
    lag: int
    peak: int
    peak_at: str
    weights: int
    optimizer: int
    gradients: int
    activations: int
    loss: int
    host: int
    seconds: float  # of forward and backward, by the rates
    extra: float  # of these, for recomputing and copying

    def __str__(self) -> str:
        def gib(x: float) -> str:
            return f"{x / GIB:.1f}"

        lines = [
            f"{self.batch} x {self.seq} tokens within {gib(self.budget)} GiB: peak {gib(self.peak)}, {self.peak_at}",
            f"  weights {gib(self.weights)}, optimiser {gib(self.optimizer)}, gradients {gib(self.gradients)}, "
            f"activations {gib(self.activations)}, loss {gib(self.loss)} GiB (not all at once)"
            + (f"; on the host {gib(self.host)} GiB" if self.host else ""),
            f"  recomputing and copying: {self.extra / self.seconds:.1%} of the step",
        ]
        for level in dict.fromkeys(self.levels):
            numbers = [i for i, found in enumerate(self.levels) if found == level]
            lines.append(f"  {level}: layers {_ranges(numbers)}")
        return "\n".join(lines)


def _ranges(numbers: Sequence[int]) -> str:
    out: list[str] = []
    start = previous = numbers[0]
    for n in [*numbers[1:], math.inf]:
        if n != previous + 1:
            out.append(f"{start}" if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ", ".join(out)


class _Option(NamedTuple):
    level: str
    kept: int  # bytes on the device
    host: int
    beside: tuple[int, int, int]  # backward_bytes
    cost: float
    copy: float  # seconds on the link


class _Step:
    """The timeline of one model's step, and a choice of one option a layer."""

    def __init__(
        self, model: Any, batch: int, seq: int, state_bytes: float | None, accumulation: int, in_backward: bool
    ):
        self.layers = list(model.model.layers)
        self.blocks = [block_of(layer) for layer in self.layers]
        self.tokens, self.seq = batch * seq, seq
        self.size = model.dtype.itemsize
        parameters = list(model.parameters())  # a tied one once
        trained = [p for p in parameters if p.requires_grad]
        self.weights = sum(p.nbytes for p in parameters)
        each = (2 * p.element_size() if state_bytes is None else state_bytes for p in trained)
        self.optimizer = int(sum(p.numel() * size for p, size in zip(trained, each, strict=True)))
        self.static = self.weights + self.optimizer + WORKSPACE + 24 * self.tokens
        self.static += 2 * self.tokens * 4 * getattr(model.model.rotary_emb, "rotary_dim", 0) // 2
        self.all_gradients = sum(p.nbytes for p in trained)
        head, embedding = model.lm_head, model.model.embed_tokens.weight
        self.in_backward, self.accumulates = in_backward, accumulation > 1
        self.waiting = waiting_bytes(trained) if in_backward else 0  # on CUDA, for which plans are made
        self.vocabulary, hidden = head.out_features, head.in_features
        self.stream = self.tokens * self.size * hidden
        weight = self.vocabulary * hidden
        self.tied = head.weight is embedding
        trains = head.weight.requires_grad
        self.head_gradient = weight * head.weight.element_size() if trains else 0
        self.embedding_gradient = embedding.nbytes if embedding.requires_grad else 0
        device = model.device
        processors = multiprocessors(device) if device.type == "cuda" else 132  # an H100's and an H200's
        logits = self.tokens * self.vocabulary
        self.loss = 3 * self.stream
        if type(head) is not nn.Linear:
            self.loss += 3 * self.size * min(logits, 2**27)
        elif trains and keeps_logits(self.tokens, hidden, model.dtype):
            self.loss += logits * self.size + self.head_gradient
        else:
            buffer = fast_buffer_bytes(self.tokens, hidden, self.vocabulary, self.size, processors)
            self.loss += (4 * weight if trains else 0) + max(buffer, self.head_gradient)

    def kept_gradients(self, after: int) -> int:
        """Bytes of gradients that exist when the backward comes to layer ``after``."""
        if self.accumulates:
            return self.all_gradients
        if self.in_backward:
            return self.waiting + (self.head_gradient if self.tied else 0)
        return self.head_gradient + sum(b.gradients for b in self.blocks[after + 1 :])

    def timeline(self, chosen: Sequence[_Option], lag: int) -> list[tuple[int, int]]:
        """(bytes, layer) of each point; layer L is the loss, −1 the embedding and the update."""
        count = len(self.blocks)
        prefix = [0, *itertools.accumulate(option.kept for option in chosen)]
        accumulated = self.all_gradients if self.accumulates else 0
        points = [(self.static + accumulated + prefix[-1] + self.loss, count)]
        for i in reversed(range(count)):
            option, b = chosen[i], self.blocks[i]
            fetched = sum(o.host for o in chosen[max(0, i - lag) : i + 1])
            base = self.static + self.kept_gradients(i) + prefix[i + 1] + fetched
            # What was kept of later layers and never left the device is gone; what stays of this one is in prefix.
            attention = b.gradients - b.mlp_gradients if self.in_backward else b.gradients
            for beside, mine in zip(option.beside, (b.mlp_gradients // 3, b.mlp_gradients, attention), strict=True):
                points.append((base + beside + (0 if self.accumulates else mine), i))
        last = self.embedding_gradient + self.waiting if self.in_backward else self.all_gradients
        total = self.static + self.stream + last
        if self.tied:
            total += self.embedding_gradient * (1 + self.in_backward)
        if self.accumulates:
            total += max(self.embedding_gradient, self.head_gradient)
        points.append((total, -1))
        return points


def plan_memory(
    model: Any,
    budget_gib: float,
    batch: int,
    seq: int,
    *,
    state_bytes: float | None = None,
    accumulation: int = 1,
    optimizer_in_backward: bool = False,
    host_gib: float = 0.0,
    reserve: float = 0.02,
    levels: Sequence[str] = LEVELS,
    rates: Rates | None = None,
) -> Plan:
    """The fastest way to train ``model`` on micro-batches of (batch, seq) within ``budget_gib`` of device memory.

    model: on any device, meta too; parameters that do not require a gradient cost none and no optimiser state.
    state_bytes: of the optimiser, for each trained parameter; by default AdamW's two moments in the parameter's dtype
        (bf16 4, fp32 8; fp32 master weights with fp32 moments and gradients beside a bf16 model: 16).
    accumulation: micro-batches a step; with more than one, all gradients exist all the time.
    optimizer_in_backward: each gradient is used and freed as it comes (``ligermodels.training.in_backward``).
    host_gib: pinned host memory that may hold activations; 0 for none.
    reserve: share of the budget left to fragmentation and to what is not counted.
    levels: that may be chosen, one or several.

    Raises LigerError if nothing fits, naming the least that would, and for arguments that make no sense.
    """
    rates = rates or Rates()
    for name, value in (("batch", batch), ("seq", seq), ("accumulation", accumulation)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LigerError(f"{name} must be a whole number of at least 1, found {value!r}")
    numbers = all(isinstance(x, int | float) for x in (budget_gib, reserve, host_gib))
    if not numbers or not (0 < budget_gib < math.inf and 0 <= reserve < 1 and 0 <= host_gib < math.inf):
        raise LigerError(f"budget_gib must be above 0, reserve from 0 to below 1, host_gib not below 0, found "
                         f"{budget_gib!r}, {reserve!r}, {host_gib!r}")  # fmt: skip
    if state_bytes is not None and not (isinstance(state_bytes, int | float) and 0 <= state_bytes < math.inf):
        raise LigerError(f"state_bytes must be a number of bytes, not below 0, found {state_bytes!r}")
    if accumulation > 1 and optimizer_in_backward:
        raise LigerError("the optimiser cannot run in backward and gradients add up over micro-batches as well")
    if not isinstance(levels, Iterable) or not (levels := (levels,) if isinstance(levels, str) else tuple(levels)):
        raise LigerError(f"levels must be some of {', '.join(LEVELS)}, found {levels!r}")
    for level in levels:
        if split_level(level)[1]:
            raise LigerError(f"levels takes levels without {OFFLOAD!r}; host_gib allows to offload")
    step = _Step(model, batch, seq, state_bytes, accumulation, optimizer_in_backward)
    usable = int(budget_gib * GIB * (1 - reserve))
    forward = [forward_seconds(b, step.tokens, seq, step.size, rates) for b in step.blocks]
    kinds: dict[Block, list[_Option]] = {}
    for b in step.blocks:
        if b not in kinds:
            kinds[b] = _options(b, step, levels, host_gib > 0, rates)
            if not kinds[b]:
                raise LigerError('the level "attention" alone is not for layers that cap their scores: add "block"')
    # Host memory and the link are scarce too, so several choices of what may go there are tried.
    found, least = [], math.inf
    for sent in _SENT if host_gib else _SENT[:1]:
        options = [[o for o in kinds[b] if not o.host or o.level.removesuffix(OFFLOAD) in sent] for b in step.blocks]
        lag = _lag(options, forward)
        try:
            chosen = _search(step, options, usable, int(host_gib * GIB), lag, forward)
        except _TooLarge as error:
            least = min(least, error.bytes)
        else:
            found.append((sum(o.cost for o in chosen), len(found), lag, chosen))
    if not found:
        raise LigerError(
            f"the step does not fit: it needs {least / GIB:.1f} GiB, of which {usable / GIB:.1f} GiB can be used. Take "
            "a smaller batch or seq, allow host_gib, or let the optimiser run in backward"
        )
    _, _, lag, chosen = min(found)
    points = step.timeline(chosen, lag)
    peak, where = max(points)
    names = {len(step.blocks): "at the loss", -1: "at the update"}
    # a backward takes twice its forward; the head is a product of its own
    head = 6 * step.tokens * step.vocabulary * step.stream / step.tokens / step.size / rates.matmul
    extra = sum(o.cost for o in chosen)
    return Plan(
        batch=batch,
        seq=seq,
        budget=int(budget_gib * GIB),
        levels=tuple(o.level for o in chosen),
        lag=lag,
        peak=peak,
        peak_at=names.get(where, f"in the backward of layer {where}"),
        weights=step.weights,
        optimizer=step.optimizer,
        gradients=0 if optimizer_in_backward else step.all_gradients,
        activations=sum(o.kept for o in chosen),
        loss=step.loss,
        host=sum(o.host for o in chosen),
        seconds=3 * sum(forward) + head + extra,
        extra=extra,
    )


def _options(b: Block, step: _Step, levels: Sequence[str], offload: bool, rates: Rates) -> list[_Option]:
    found = []
    for level in levels:
        if level == "attention" and not b.keeps_attention:
            continue
        kept = activation_bytes(b, level, step.tokens, step.size)
        beside = backward_bytes(b, level, step.tokens, step.size)
        cost = extra_seconds(b, level, step.tokens, step.seq, step.size, rates)
        found.append(_Option(level, kept, 0, beside, cost, 0.0))
        if offload and level != "none":
            copy = kept / rates.link
            # Copies take a little of the memory's bandwidth: 11 layers of 1.4 GiB made an H200's step 5.7 ms longer.
            cost += 0.02 * copy
            found.append(_Option(level + OFFLOAD, 0, kept, beside, cost, copy))
    return found


def _lag(options: Sequence[Sequence[_Option]], forward: Sequence[float]) -> int:
    """For how many layers the longest useful copy takes."""
    longest = max((o.copy for layer in options for o in layer), default=0.0)
    return max(1, math.ceil(longest / min(forward)))


def _link_keeps_up(chosen: Sequence[_Option], forward: Sequence[float], lag: int) -> bool:
    """Whether every copy is done when its layer's memory is to be freed, so that nothing waits for the link."""
    now = done = 0.0
    ends, copies = [], []
    for i, option in enumerate(chosen):
        if option.copy:
            done = max(done, now) + option.copy  # the copy starts within the layer at best
            copies.append((i, done))
        now += forward[i]
        ends.append(now)
    return all(i + lag < len(chosen) and done <= ends[i + lag] for i, done in copies)


class _TooLarge(Exception):
    def __init__(self, bytes: int):
        self.bytes = bytes


def _search(
    step: _Step, options: list[list[_Option]], usable: int, host: int, lag: int, forward: list[float]
) -> list[_Option]:
    fastest = operator.attrgetter("cost")
    chosen = [min(layer, key=fastest) for layer in options]

    def usage(option: _Option, own: bool) -> int:
        return option.kept + (option.host + max(option.beside) if own else 0)

    def allowed(i: int, option: _Option) -> bool:
        if not option.host:
            return True
        tried = [*chosen[:i], option, *chosen[i + 1 :]]
        return sum(o.host for o in tried) <= host and _link_keeps_up(tried, forward, lag)

    while (worst := max(step.timeline(chosen, lag)))[0] > usable:
        at = worst[1]
        steps = []
        for i in range(len(chosen) if at == len(chosen) else at + 1):
            own = i == at
            for option in options[i]:
                saved = usage(chosen[i], own) - usage(option, own)
                if not own and at < len(chosen) and i >= at - lag:  # on its way back already
                    saved -= option.host - chosen[i].host
                if saved > 0 and option.cost >= chosen[i].cost:
                    steps.append(((option.cost - chosen[i].cost) / saved, i, option))
        for _, i, option in sorted(steps, key=lambda s: s[:2]):
            if allowed(i, option):
                chosen[i] = option
                break
        else:
            raise _TooLarge(worst[0])
    for _ in range(2):  # give back what fits after all
        for i in reversed(range(len(chosen))):
            for option in sorted(options[i], key=fastest):
                if option.cost >= chosen[i].cost:
                    break
                tried = [*chosen[:i], option, *chosen[i + 1 :]]
                if allowed(i, option) and max(step.timeline(tried, lag))[0] <= usable:
                    chosen[i] = option
                    break
    return chosen
