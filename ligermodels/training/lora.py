"""LoRA: train a low-rank addition to frozen Linears (Hu et al. 2021), in and out of PEFT's files.

    y = x·Wᵀ + b + s · (dropout(x)·Aᵀ)·Bᵀ          A (r, in), B (out, r), s = alpha / r, or alpha / √r ("rslora")

Only A and B train; W costs no gradient, and autograd keeps x only where A needs it. ``add_lora`` puts a ``LoraLinear``
in the place of each target. It keeps the parameter name of W (``…q_proj.weight``), so everything that goes by names
still works, and adds ``…q_proj.lora_A.weight`` and ``…q_proj.lora_B.weight``, PEFT's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ligermodels.checkpoints_convert import adapters
from ligermodels.config import resolve_dtype
from ligermodels.errors import LigerError
from ligermodels.kernels import cross_entropy

LOGITS = 1 << 27  # elements of the head's logits that exist at once


class LoraLinear(nn.Linear):
    """A frozen Linear with a low-rank addition; shapes as nn.Linear.

    A and B may be fp32 beside a half-precision W: they are rounded for the product and updated in fp32, as autocast
    does, and no fp32 copy of x is made.
    """

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, *, dropout: float = 0.0, rslora: bool = False, dtype=None
    ):
        nn.Module.__init__(self)  # W and b are those of ``base``, not copies
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.alpha, self.dropout, self.rslora = rank, alpha, float(dropout), rslora
        self.scale = alpha / math.sqrt(rank) if rslora else alpha / rank
        options = {"bias": False, "device": base.weight.device, "dtype": dtype or torch.float32}
        self.lora_A = nn.Linear(self.in_features, rank, **options)  # its start is Kaiming's, as in PEFT
        self.lora_B = nn.Linear(rank, self.out_features, **options)
        nn.init.zeros_(self.lora_B.weight)  # the start is the model as it was

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        low = F.linear(x, self.lora_A.weight.to(x.dtype))  # (..., in) -> (..., r)
        return y + F.linear(low * self.scale, self.lora_B.weight.to(x.dtype))

    def cross_entropy(
        self, hidden: torch.Tensor, target: torch.Tensor, *, reduction: str, softcap: float | None = None
    ) -> torch.Tensor:
        """Loss () of this module as a model's head: hidden (..., H), target (...), -100 ignored.

        The logits exist slice by slice, in forward and again in backward. A merged weight for the fused loss would be
        shorter, but rounds small additions away in bf16, and its (V, H) gradient is large where A's and B's are small.
        """
        hidden, target = hidden.reshape(-1, self.in_features), target.reshape(-1)
        total = hidden.new_zeros((), dtype=torch.float32)
        size = max(1, LOGITS // self.out_features)

        def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self(x), labels, reduction="sum", softcap=softcap)

        keep = bool(self.dropout) and self.training  # backward must draw the same numbers again
        for x, labels in zip(hidden.split(size), target.split(size), strict=True):
            total = total + checkpoint(loss_of, x, labels, use_reentrant=False, preserve_rng_state=keep)
        return total / (target != -100).sum().clamp(min=1) if reduction == "mean" else total

    def merged(self) -> nn.Linear:
        """A plain Linear that computes the same; its weight is rounded once."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight = adapters.merged(self.weight.detach(), self.lora_A.weight, self.lora_B.weight, self.scale)
        linear.weight = nn.Parameter(weight.detach(), requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"


def lora_modules(model: nn.Module) -> dict[str, LoraLinear]:
    """The model's LoraLinears by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def add_lora(
    model: nn.Module,
    *,
    rank: int = 16,
    alpha: float | None = None,
    targets: str | Iterable[str] = "all-linear",
    dropout: float = 0.0,
    rslora: bool = False,
    dtype: str | torch.dtype = "float32",
) -> list[str]:
    """Freeze ``model`` and add trainable low-rank parts to its ``targets``; returns their names.

    targets: "all-linear" (every Linear but the head), a regular expression for the whole name, or names, whole or their
        last parts, such as ["q_proj", "v_proj", "lm_head"]. A target that matches nothing is an error.
    alpha: by default 2 · rank. dtype: of A and B.

    Raises LigerError for a rank, a dropout or a target that does not fit, and where there is a LoRA already.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise LigerError(f"rank must be a whole number of at least 1, found {rank!r}")
    alpha = 2 * rank if alpha is None else alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < math.inf:
        raise LigerError(f"alpha must be a number above 0, found {alpha!r}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise LigerError(f"dropout must be at least 0 and below 1, found {dropout!r}")
    if lora_modules(model):
        raise LigerError("the model has a LoRA already: merge it first (merge_lora)")
    names, dtype = _matching(model, targets), resolve_dtype(dtype)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in names:
        linear = model.get_submodule(name)
        wrapped = LoraLinear(linear, rank, alpha, dropout=dropout, rslora=rslora, dtype=dtype)
        _put(model, name, wrapped.train(linear.training))
    return names


def _matching(model: nn.Module, targets: str | Iterable[str]) -> list[str]:
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    if targets == "all-linear":
        return [name for name in linears if not _is_head(name)]
    if isinstance(targets, str):
        try:
            matching = [name for name in linears if re.fullmatch(targets, name)]
        except re.error as error:
            raise LigerError(f"targets {targets!r} is not a regular expression: {error}") from error
        unmatched = [] if matching else [targets]
    else:
        targets = list(targets) if isinstance(targets, Iterable) else [targets]
        if not all(isinstance(target, str) for target in targets):
            raise LigerError(f"targets must be a text or a list of texts, found {targets}")
        fits = {target: {n for n in linears if n == target or n.endswith("." + target)} for target in targets}
        matching = [name for name in linears if any(name in found for found in fits.values())]
        unmatched = [target for target, found in fits.items() if not found] or ([] if targets else ["(none given)"])
    if unmatched:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise LigerError(f"LoRA target {', '.join(unmatched)} is no Linear of this model; it has {', '.join(known)}")
    return matching


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _need_lora(model: nn.Module) -> dict[str, LoraLinear]:
    if not (found := lora_modules(model)):
        raise LigerError("the model has no LoRA: call add_lora or load_adapter first")
    return found


def merge_lora(model: nn.Module, *, keep: bool = False) -> dict[str, LoraLinear]:
    """Put the additions into the weights: a plain model again (frozen still), that save_pretrained saves.

    A tied head that is a target is untied (config.tie_word_embeddings becomes False): it differs from the embedding
    now. With ``keep`` both weights stay in memory, and the result gives ``unmerge_lora`` the model as it was, bit for
    bit; without, the result is empty.
    """
    found = _need_lora(model)
    kept = {}
    for name in list(found):
        module = found.pop(name)
        if _is_head(name) and model.config.tie_word_embeddings:
            model.config.tie_word_embeddings = False
        _put(model, name, module.merged())
        if keep:
            kept[name] = module
    return kept


def unmerge_lora(model: nn.Module, kept: dict[str, LoraLinear]) -> None:
    """Undo ``kept = merge_lora(model, keep=True)``, exactly.

    Raises LigerError where the model was moved or converted since then: what was kept was not.
    """
    for name, module in kept.items():
        now, then = model.get_submodule(name).weight, module.weight
        if (now.device, now.dtype) != (then.device, then.dtype):
            raise LigerError(
                f"{name} was {then.dtype} on {then.device} when it was merged and is {now.dtype} on {now.device}: "
                "put the model back to that first"
            )
    for name, module in kept.items():
        _put(model, name, module)
        if _is_head(name) and module.weight is model.model.embed_tokens.weight:
            model.config.tie_word_embeddings = True


def save_adapter(model: nn.Module, folder: str | Path, *, base: str | None = None) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which PEFT and ``load_adapter`` read.

    ``base``: repository or folder of the model that the adapter belongs to, for people and for PEFT.
    """
    found = _need_lora(model)
    first = next(iter(found.values()))
    config = {
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "target_modules": sorted(found),
    }
    for key, of in (("rank_pattern", "rank"), ("alpha_pattern", "alpha")):
        config[key] = {n: getattr(m, of) for n, m in found.items() if getattr(m, of) != getattr(first, of)}
    pairs = {name: (m.lora_A.weight, m.lora_B.weight) for name, m in found.items()}
    adapters.save_adapter(folder, pairs, config)


def load_adapter(model: nn.Module, folder: str | Path) -> list[str]:
    """Add the LoRA of a folder in PEFT's layout to ``model``, which is frozen; returns the names of its targets.

    Raises CheckpointError for what PEFT can do and this cannot (see ``checkpoints_convert.adapters.read_adapter``), and
    LigerError where the adapter is of another model. ``model`` is then as it was.
    """
    adapter = adapters.read_adapter(folder)
    if lora_modules(model):
        raise LigerError("the model has a LoRA already: merge it first (merge_lora)")
    weights, modules = model.state_dict(), dict(model.named_modules())
    # PEFT writes the base's own head along where it is a target; that is no more than this model has.
    own = {name for name, info in adapter.saved.items() if _equals(weights.get(name), adapter.read(info))}
    if beyond := [*sorted(adapter.saved.keys() - own), *sorted(adapter.embeddings)]:
        raise LigerError(
            f"{folder}: the adapter replaces or adapts {beyond[0]}, here only Linears have a LoRA; merge it into a "
            "model folder instead (checkpoints_convert.adapters.merge_adapter)"
        )
    if adapter.config.get("fan_in_fan_out"):
        raise LigerError(f"{folder}: fan_in_fan_out is of models whose weights are stored (in, out), unlike this one's")
    rslora, dropout = bool(adapter.config.get("use_rslora")), adapter.config.get("lora_dropout", 0.0)
    for name, (a, b) in adapter.pairs.items():
        linear, shape = modules.get(name), (b.shape[0], a.shape[1])
        if type(linear) is not nn.Linear or shape != tuple(linear.weight.shape):
            has = f"is {tuple(linear.weight.shape)}" if type(linear) is nn.Linear else "is no Linear"
            raise LigerError(f"{folder}: the adapter has {shape} for {name}, which {has} here")
    wrapped = {}
    for name in (name for name in modules if name in adapter.pairs):
        a, b = adapter.pairs[name]
        rank = a.shape[0]
        alpha = adapter.scale(name) * (math.sqrt(rank) if rslora else rank)
        alpha = round(alpha) if math.isclose(alpha, round(alpha)) else alpha
        module = LoraLinear(modules[name], rank, alpha, dropout=dropout, rslora=rslora, dtype=a.dtype)
        for part, info in ((module.lora_A, a), (module.lora_B, b)):
            part.weight.data.copy_(adapter.read(info))
        wrapped[name] = module.train(modules[name].training)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in wrapped.items():
        _put(model, name, module)
    return list(wrapped)


def _equals(mine: torch.Tensor | None, theirs: torch.Tensor) -> bool:
    return mine is not None and mine.shape == theirs.shape and torch.equal(mine.cpu(), theirs.to(mine.dtype))
