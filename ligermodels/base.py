"""What every family has: loading, saving, the loss, the cache, generation. A family's file adds config and forward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ligermodels import generation
from ligermodels.checkpoints_convert.hf import Checkpoint, check_names, open_checkpoint, read_config, save_checkpoint
from ligermodels.checkpoints_convert.hub import download
from ligermodels.checkpoints_convert.reading import reserve, same_values
from ligermodels.checkpoints_convert.rewrites import to_model_names
from ligermodels.config import Config, resolve_dtype
from ligermodels.decode import KeptDecoder
from ligermodels.errors import CheckpointError, ConfigError, LigerError
from ligermodels.inputs import (
    CacheShape,
    check_cache,
    check_ids,
    check_mask,
    check_positions,
    need_tensor,
    normaliser,
    shift_labels,
)
from ligermodels.kernels.cross_entropy import cross_entropy
from ligermodels.kernels.linear_cross_entropy import linear_cross_entropy
from ligermodels.layers.attention import Visibility, check_cu_seqlens, document_positions, visibility
from ligermodels.layers.cache import KVCache
from ligermodels.layers.memory import can_keep_attention, run_again, set_level, split_level
from ligermodels.layers.meta import on_meta
from ligermodels.layers.offload import Offload, apart_of
from ligermodels.layers.rotary import RotaryEmbedding
from ligermodels.planner import Plan, plan_memory
from ligermodels.tokenizer import Tokenizer

_AHEAD = 256 << 20  # bytes of weights that are read while others are put in place


class CausalLMOutput(NamedTuple):
    """``loss`` () fp32; ``logits`` (B, S, V) in the model's dtype; ``aux_loss`` of routers. Each may be None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None


class Context(NamedTuple):
    """What a layer needs beside its input; the same for all layers of one forward."""

    cos: torch.Tensor  # (B or 1, S, rotary_dim/2) fp32
    sin: torch.Tensor
    visible: Visibility
    cache: KVCache | None
    position_ids: torch.Tensor  # (B or 1, S)
    end: int  # the largest position + 1


class CausalLM(nn.Module):
    """Base of every family.

    A subclass sets ``config_class`` and builds ``lm_head`` and ``model`` (embed_tokens, layers, norm, rotary_emb).
    """

    config_class: ClassVar[type[Config]]
    text_prefix: ClassVar[str] = ""  # before the names of head and embedding, where the text model is a part only
    model: nn.ModuleDict
    lm_head: nn.Linear

    def __init__(self, config: Config):
        super().__init__()
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"{type(self).__name__} is built from a {self.config_class.__name__}, found {type(config).__name__}"
            )
        self.config = config
        self.generation_config: dict[str, Any] = {}
        self.activation_memory: str | tuple[str, ...] = "fast"
        self._offload: Offload | None = None
        self._ids_checked = False
        self.kept_decoder = KeptDecoder()

    # ---------------------------------------------------------------------------------------------- loading, saving

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        *,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
    ) -> CausalLM:
        """Download ``repo_id`` (only what is needed) into the hub cache and load it; see ``from_pretrained``.

        Raises HubError if it cannot be fetched, with what to do about it.
        """
        folder = download(
            repo_id, revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        return cls.from_pretrained(folder, dtype=dtype, device=device)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
    ) -> CausalLM:
        """The model in a folder of Hugging Face layout, in evaluation mode.

        ``dtype`` "auto" takes what config.json says, else that of the first tensor. Weights are cast while they are
        read and go straight to ``device`` (default: torch's default device), so the host never holds them twice. On the
        CPU those that need no cast are maps of their files (copy on write): the files may be replaced or deleted, but
        not overwritten in place while the model lives. On "meta" everything is checked and no weight is read.

        Raises ConfigError for a config that this family cannot be built from, CheckpointError for files that are
        missing or broken and for tensors that are missing, surplus or misshapen.
        """
        config = cls.config_class.from_hf(folder)
        folder = Path(folder)
        weights = cls.to_model_names(open_checkpoint(folder))
        path = folder / "generation_config.json"
        generation_config = read_config(path) if path.is_file() else {}
        if dtype == "auto":
            # By name, in the first file, fp8 aside: the tensor that transformers would ask.
            first = min(weights.tensors.items(), key=lambda item: (item[1].is_fp8, str(item[1].file), item[0]))[1]
            dtype = config.dtype or first.dtype
        dtype = resolve_dtype(dtype)
        device = _resolve_device(device)
        if config.num_hidden_layers > len(weights.tensors):  # and not minutes of building layers first
            raise CheckpointError(
                f"{folder}: config.json says {config.num_hidden_layers} layers, the files hold {len(weights.tensors)} "
                "tensors"
            )
        if any(info.is_fp8 for info in weights.tensors.values()):
            config.extra.pop("quantization_config", None)  # what is loaded, and saved again, is not quantised
        with on_meta():
            model = cls(config)
        if config.tie_word_embeddings and _tied_head_differs(weights, cls.text_prefix):
            warnings.warn(
                f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding; both are loaded",
                stacklevel=2,
            )
            config.tie_word_embeddings = False
            with on_meta():
                model = cls(config)
        model._load(weights, dtype, device)
        model.generation_config = generation_config
        return model.eval()

    @classmethod
    def to_model_names(cls, weights: Checkpoint) -> Checkpoint:
        """Hook for families that read only a part of some folders: the tensors to load, under this model's names."""
        return to_model_names(weights)

    @classmethod
    def to_published_names(cls, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hook for families whose files name or cut tensors otherwise than the model: what to write for them."""
        return tensors

    def _load(self, weights: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Fill this meta model. All names and shapes are checked before the first byte is allocated."""
        expected = {name: tuple(p.shape) for name, p in self.named_parameters()}
        tied = (f"{self.text_prefix}lm_head.weight",) if self.config.tie_word_embeddings else ()
        check_names(weights, expected, optional=tied, model_type=self.config.model_type)
        reserve((prod(shape) * dtype.itemsize for shape in expected.values()), device)
        modules = dict(self.named_modules())
        for name, tensor in weights.stream(expected, dtype=dtype, device=device, mapped=True, ahead=_AHEAD):
            module, _, leaf = name.rpartition(".")
            setattr(modules[module], leaf, nn.Parameter(tensor))
        self.tie_weights()
        for module in self.modules():
            if isinstance(module, RotaryEmbedding):
                module.to(device)

    def save_pretrained(self, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write a folder of Hugging Face layout (names, shards, index, config.json) that transformers and others load.

        Tensors keep their dtype, and config.json says it. A tied head is written once, as the embedding. Raises
        LigerError, before anything is written, when the parameters are not those that the config describes (adapters
        not merged, layers cut off, a head untied behind the config's back): such a folder could not be loaded.
        """
        # Each shared parameter once; torch.compile(layer) in place of a layer shows in the names alone.
        tensors = {name.replace("_orig_mod.", ""): p.detach() for name, p in self.named_parameters()}
        with on_meta():
            expected = {name: p.shape for name, p in type(self)(self.config).named_parameters()}
        wrong = [
            f"{name} {list(tensors[name].shape) if name in tensors else 'missing'}, "
            f"expected {list(expected[name]) if name in expected else 'no such parameter'}"
            for name in dict.fromkeys((*expected, *tensors))
            if name not in tensors or name not in expected or tensors[name].shape != expected[name]
        ]
        if wrong:
            raise LigerError(
                f"the model's parameters are not those of its config: {'; '.join(wrong[:3])}"
                + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
                + ". Merge adapters, or set the config to what the model has become (tie_word_embeddings, sizes)"
            )
        config = self.config.to_hf()
        config["dtype"] = config["torch_dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        extra = {"generation_config.json": self.generation_config} if self.generation_config else {}
        tensors = self.to_published_names(tensors)
        save_checkpoint(folder, tensors, config, max_shard_size=max_shard_size, extra_json=extra)

    def tie_weights(self) -> None:
        """Make the head and the embedding one parameter, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _is_tied(self) -> bool:
        embedding = getattr(self.model.embed_tokens, "weight", None)
        return embedding is not None and getattr(self.lm_head, "weight", None) is embedding

    def _apply(self, fn: Any, recurse: bool = True) -> CausalLM:
        """Behind .to(), .half(), to_empty(): torch may make new parameters module by module; a tie must survive."""
        tied = self._is_tied()
        self.kept_decoder.drop()  # it reads the parameters where they were
        super()._apply(fn, recurse)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def train(self, mode: bool = True) -> CausalLM:
        """As torch's; training also frees what the last generation kept for the next: its cache and captured step."""
        if mode:
            self.kept_decoder.drop()
        return super().train(mode)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, but a tied head may be absent, and stays tied when tensors are assigned."""
        tied = self._is_tied()
        head, embedding = (self.text_prefix + name for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if tied and head not in state_dict and embedding in state_dict:
            state_dict = {**state_dict, head: state_dict[embedding]}
        result = super().load_state_dict(state_dict, strict=strict, assign=assign)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        return result

    def resize_vocab(self, size: int, *, multiple_of: int = 1, new_rows: str = "mean") -> int:
        """Grow or cut the vocabulary to ``size`` ids, rounded up to ``multiple_of``; returns what it became.

        Embedding, head and config change together, and a tied head stays tied. Old rows keep their bits. New ones are
        the mean of the old ("mean": then no new id outweighs all others before it is trained; Hewitt 2021), or 0
        ("zeros"). The parameters are new ones: make the optimizer, and shard, after this.

        Raises LigerError for a size that is none, for one that cuts off the config's bos, eos, pad or image id, and for
        a head or an embedding that was wrapped (merge adapters first).
        """
        config = getattr(self.config, "text_config", self.config)
        for name, value in (("size", size), ("multiple_of", multiple_of)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise LigerError(f"{name} must be a whole number from 1 to 2147483647, found {value!r}")
        if new_rows not in ("mean", "zeros"):
            raise LigerError(f'new_rows must be "mean" or "zeros", found {new_rows!r}')
        size = -(-size // multiple_of) * multiple_of
        embedding, head, tied = self.model.embed_tokens, self.lm_head, self._is_tied()
        if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
            raise LigerError(
                f"cannot resize a {type(embedding).__name__} and a {type(head).__name__}: unwrap them first"
            )
        special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        for name in ("image_token_index", "boi_token_index", "eoi_token_index"):  # of models that read images
            special[name] = getattr(self.config, name, None)
        for name, ids in special.items():
            for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
                if size <= token < config.vocab_size:
                    raise LigerError(f"{name} {token} would not be in a vocabulary of {size}")

        def resized(weight: nn.Parameter) -> nn.Parameter:
            kept = min(size, weight.shape[0])
            with torch.no_grad():
                new = torch.zeros(size, weight.shape[1], dtype=weight.dtype, device=weight.device)  # (V', H)
                new[:kept] = weight[:kept]
                if new_rows == "mean":
                    new[kept:] = weight.mean(0, dtype=torch.float32)
            return nn.Parameter(new, requires_grad=weight.requires_grad)

        if embedding.padding_idx is not None and (config.pad_token_id or 0) < 0:  # counted from an end that moves
            config.pad_token_id = embedding.padding_idx
        embedding.weight = resized(embedding.weight)
        head.weight = embedding.weight if tied else resized(head.weight)
        embedding.num_embeddings = head.out_features = config.vocab_size = size
        return size

    def init_weights(self) -> None:
        """Random weights as published models start: normal(0, initializer_range), biases 0, padding row 0."""
        if self.device.type == "meta":  # nothing to fill; torch would take its time, a millisecond a tensor
            return
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        embedding = self.model.embed_tokens
        if embedding.padding_idx is not None:
            with torch.no_grad():
                embedding.weight[embedding.padding_idx] = 0

    @property
    def device(self) -> torch.device:
        """The embedding's."""
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The embedding's."""
        return self.model.embed_tokens.weight.dtype

    # ------------------------------------------------------------------------------------------------------ forward

    def set_activation_memory(self, level: str | Sequence[str], *, lag: int = 1) -> None:
        """What backward recomputes: one level for all layers, or one for each. ``fit_memory`` chooses for a budget.

        "none"; "fast" (norms and gated products, the default: costs one memory-bound pass each); "mlp" (gate and up
        too); "attention" (all but attention, whose output is kept); "block" (all: a second forward). Each but "none"
        also with "+offload": what is kept then waits in pinned host memory; ``lag`` says for how many layers of compute
        a copy may take. See ``ligermodels.layers.memory``. Raises LigerError for an unknown level or a wrong count.
        """
        layers = self.model.layers
        levels = [level] * len(layers) if not isinstance(level, Sequence) or isinstance(level, str) else list(level)
        if len(levels) != len(layers):
            raise LigerError(f"{len(levels)} activation memory levels given for {len(layers)} layers")
        if isinstance(lag, bool) or not isinstance(lag, int) or lag < 1:
            raise LigerError(f"lag must be a whole number of at least 1, found {lag!r}")
        offloads = [split_level(level)[1] for level in levels]
        self.activation_memory = levels[0] if len(set(levels)) == 1 else tuple(levels)
        self._offload = Offload(lag) if any(offloads) else None
        for layer, level in zip(layers, levels, strict=True):
            set_level(layer, level)

    def fit_memory(self, budget_gib: float, batch: int, seq: int, **options: Any) -> Plan:
        """Choose what each layer keeps, recomputes and offloads: the fastest step of (batch, seq) within the budget.

        Sets it, prints it and returns the plan. See ``ligermodels.planner.plan_memory`` for the options.
        """
        plan = plan_memory(self, budget_gib, batch, seq, **options)
        self.set_activation_memory(plan.levels, lag=plan.lag)
        print(plan)
        return plan

    def run_layer(self, layer: nn.Module, x: torch.Tensor, context: Context) -> Any:
        """One block, at the activation memory level that was set for it, if a gradient is recorded."""
        if not torch.is_grad_enabled() or context.cache is not None:
            return layer(x, context)
        level, offloaded = split_level(getattr(layer, "activation_memory", "fast"))
        again = level in ("attention", "block")
        keep_attention = level == "attention" and can_keep_attention(layer, x, context.visible)
        if torch.compiler.is_compiling() or self._offload is None:
            return run_again(layer, x, context, keep_attention=keep_attention) if again else layer(x, context)
        if layer is self.model.layers[0]:
            self._offload.begin()
        scope = self._offload.scope(apart_of(layer, context)) if offloaded else None
        with scope.hooks() if scope else contextlib.nullcontext():
            if again:
                out = run_again(layer, x, context, keep_attention=keep_attention, pack=scope.pack if scope else None)
            else:
                out = layer(x, context)
        self._offload.passed(scope, out[0] if isinstance(out, tuple) else out)
        return out

    def prepare(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        cache: KVCache | None,
    ) -> Context:
        """Check the inputs of a forward and derive positions, rotary tables and visibility from them."""
        # On a GPU reading the values would stall every step, so only the first batch is read: it finds the wrong
        # tokenizer. A later bad id reads a row of NaN, so that the loss says it; no memory is read out of bounds.
        first = not torch.compiler.is_compiling() and not self._ids_checked
        check_ids(input_ids, self.config.vocab_size, read_on_gpu=first)
        if first:
            self._ids_checked = True
        batch, length = input_ids.shape
        past, device = 0, input_ids.device
        if cache is not None:
            self.check_cache(cache)
            cache.check(batch, length)
            past = cache.length
            if cache.step is not None:  # the device counts the positions: nothing below may depend on ``past``
                step = cache.step
                visible = visibility(batch, length, past, device, step=step)
                position_ids = (step.position - step.start).clamp(min=0)[:, None]  # (B, 1)
                cos, sin = self.model.rotary_emb(position_ids, step.longest)
                return Context(cos, sin, visible, cache, position_ids, step.longest)
        if attention_mask is not None:
            check_mask(attention_mask, (batch, past + length))
        if cu_seqlens is not None:
            if attention_mask is not None or cache is not None:
                raise LigerError("cu_seqlens packs whole documents: it goes with neither attention_mask nor cache")
            need_tensor("cu_seqlens", cu_seqlens)
            if not torch.compiler.is_compiling():  # it reads values
                check_cu_seqlens(cu_seqlens, batch, length)
            cu_seqlens = cu_seqlens.to(device)
        visible = visibility(batch, length, past, device, attention_mask=attention_mask, cu_seqlens=cu_seqlens)
        largest = past + length
        if position_ids is not None:
            by_length = self.model.rotary_emb.depends_on_length
            largest = check_positions(position_ids, input_ids, attention_mask, cu_seqlens, cache, read_on_gpu=by_length)
        elif cu_seqlens is not None:
            position_ids = document_positions(visible)
        else:
            position_ids = torch.arange(past, past + length, device=device)[None]
        trained = self.config.max_position_embeddings
        if largest > trained and not self.model.rotary_emb.depends_on_length and not torch.compiler.is_compiling():
            warnings.warn(
                f"{largest} positions, but max_position_embeddings is {trained}: quality may fall beyond it",
                stacklevel=3,
            )
        if cache is not None:
            cache.turned_for = largest
        cos, sin = self.model.rotary_emb(position_ids, largest)
        return Context(cos, sin, visible, cache, position_ids, largest)

    def output(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        logits_to_keep: int,
        num_items_in_batch: int | torch.Tensor | None,
        softcap: float | None = None,
    ) -> CausalLMOutput:
        """Loss and logits from the last hidden states (B, S, H), by the rules of ``forward``."""
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise LigerError(f"logits_to_keep must be a whole number, 0 for all, found {logits_to_keep!r}")
        loss = None
        if labels is not None:
            loss = self.loss(hidden, labels, cu_seqlens, num_items_in_batch, softcap)
        logits = None
        if logits_to_keep or labels is None or not (self.training or torch.is_grad_enabled()):
            logits = self.lm_head(hidden[:, -logits_to_keep:])  # -0 keeps all
            logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        return CausalLMOutput(loss, logits)

    def loss(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Next-token cross entropy, mean over supervised tokens, or their sum over ``num_items_in_batch``.

        hidden (B, S, H), labels (B, S) with -100 ignored. The (tokens, vocabulary) logits are never built whole.
        """
        need_tensor("labels", labels)
        if labels.shape != hidden.shape[:2]:
            raise LigerError(
                f"labels must have the shape of input_ids {tuple(hidden.shape[:2])}, found {tuple(labels.shape)}"
            )
        if labels.dtype not in (torch.int64, torch.int32):  # unsigned ones have no -100
            raise LigerError(f"labels must be int64 or int32, found {labels.dtype}")
        target = shift_labels(labels, cu_seqlens)
        if target.device.type == "cpu" and not torch.compiler.is_compiling() and not (target != -100).any():
            warnings.warn("no label is supervised (all are -100, or rows have one token): the loss is 0", stacklevel=4)
        reduction = "mean" if num_items_in_batch is None else "sum"
        if type(self.lm_head) is nn.Linear:
            loss = linear_cross_entropy(hidden, self.lm_head.weight, target, reduction=reduction, softcap=softcap)
        elif hasattr(self.lm_head, "cross_entropy"):  # a LoRA: it knows how to do without the whole logits
            loss = self.lm_head.cross_entropy(hidden, target, reduction=reduction, softcap=softcap)
        else:  # wrapped by others: only the module knows its whole weight
            loss = cross_entropy(self.lm_head(hidden), target, reduction=reduction, softcap=softcap)
        return loss if num_items_in_batch is None else loss / normaliser(num_items_in_batch, loss.device)

    # --------------------------------------------------------------------------------------------------- generation

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """Room for keys and values of ``max_length`` positions of ``batch_size`` rows, in the model's dtype."""
        shape = self._cache_shape()
        return KVCache(
            shape.num_layers, batch_size, max_length, shape.num_key_value_heads, shape.head_dim,
            dtype=self.dtype, device=self.device, windows=shape.windows,
        )  # fmt: skip

    def check_cache(self, cache: KVCache) -> None:
        """Raise LigerError unless ``cache`` is one that this model, as it is now, may use."""
        check_cache(cache, self._cache_shape())

    def _cache_shape(self) -> CacheShape:
        c = self.config
        windows = [getattr(layer.self_attn, "window", None) for layer in self.model.layers]
        return CacheShape(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, windows)

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        row_numbers: Sequence[int] | None = None,
        logprobs: bool = False,
        cache: KVCache | None = None,
        prompt_inputs: Mapping[str, Any] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """(B, S + new) ids: the prompts (B, S), padded on the left, and what follows. See ``generation.stream``."""
        return generation.generate(
            self, input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, eos_token_id=eos_token_id,
            pad_token_id=pad_token_id, stop_strings=stop_strings, tokenizer=tokenizer, seed=seed,
            row_numbers=row_numbers, logprobs=logprobs,
            cache=cache, prompt_inputs=prompt_inputs,
        )  # fmt: skip

    def stream(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        stop_strings: str | list[str] | None = None,
        tokenizer: Tokenizer | None = None,
        seed: int | None = None,
        row_numbers: Sequence[int] | None = None,
        logprobs: bool = False,
        cache: KVCache | None = None,
        prompt_inputs: Mapping[str, Any] | None = None,
    ) -> Iterator[Any]:
        """Yields the (B,) ids of each new position. See ``ligermodels.generation.stream`` for the arguments."""
        return generation.stream(
            self, input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, eos_token_id=eos_token_id,
            pad_token_id=pad_token_id, stop_strings=stop_strings, tokenizer=tokenizer, seed=seed,
            row_numbers=row_numbers, logprobs=logprobs,
            cache=cache, prompt_inputs=prompt_inputs,
        )  # fmt: skip


def _resolve_device(device: str | torch.device | None) -> torch.device:
    """``device``, by default torch's. Raises LigerError if there is none such, before anything is loaded."""
    if device is None:
        return torch.get_default_device()
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise LigerError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return found


def _tied_head_differs(weights: Checkpoint, prefix: str) -> bool:
    """Whether the file also holds a head, and it is not the embedding."""
    head, embedding = f"{prefix}lm_head.weight", f"{prefix}model.embed_tokens.weight"
    if head not in weights.tensors or embedding not in weights.tensors:
        return False
    return not same_values(weights.tensors[head], weights.tensors[embedding])
