"""One step of decoding as a CUDA graph: the host launches once a token, and waits for nothing.

A step reads the token that was chosen last, writes its keys into the cache, and chooses the next token; what changes
from step to step (position, token, random state) lies on the device. The step is either the model's own forward, or,
where every part of it is what ``fused_step`` knows, the same arithmetic in five launches a layer:

    norm, q, k, v    heads' norm, rotation, cache, attention    o, + residual    norm, gate·up    down, + residual

``fused_step`` reads the parameters from the model's modules and has none of its own. Any other module in their place
(LoRA's, a subclass, a hook) means the model's own forward.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.config import Config
from ligermodels.kernels.decode_attention import append_and_attend
from ligermodels.kernels.gemv import MAX_ROWS, few_rows_linear
from ligermodels.layers.cache import KVCache, Step
from ligermodels.layers.norm import RMSNorm

if TYPE_CHECKING:
    from ligermodels.base import CausalLM
    from ligermodels.generation import Sampler

_OVERLAP = False  # launch a kernel before the last one has ended: see gemv.py
_ROOM = 256  # a kept cache's length is rounded up to a multiple of this, so that the next prompt may fit too


class Decoder:
    """A step of ``model`` over ``cache`` that ends in ``sampler``; ``step()`` enqueues one.

    ``capture`` False runs the same step without a graph, on any device (for tests). ``longest``: the positions that
    rotary tables which depend on the length are made for.
    """

    key: Any = None  # what it was made for
    owns = False  # whether the cache is nobody else's

    def __init__(
        self, model: CausalLM, cache: KVCache, sampler: Sampler, *, fused: bool, longest: int, capture: bool = True,
        overlap: bool = False,
    ):  # fmt: skip
        self.model, self.cache, self.sampler, self.fused, self.overlap = model, cache, sampler, fused, overlap
        device, rows = cache.keys[0].device, cache.batch_size
        position = torch.full((1,), cache.length, device=device)  # a free slot: the trial run below writes there
        start = torch.zeros(rows, dtype=torch.long, device=device)
        widest = max(model.config.hidden_size // 16 + 1, rows * model.config.num_key_value_heads)
        counters = torch.zeros(widest, dtype=torch.int32, device=device)
        self._step = Step(position, start, longest, counters)
        self._layers = plan_layers(model, cache.max_length, longest) if fused else None
        self._graph = None
        if capture:
            self._capture()

    def begin(self, start: Tensor | None) -> None:
        """Go on from the cache's length; ``start`` (B,): each row's first position that is not padding (None: 0)."""
        self._step.position.fill_(self.cache.length)
        if start is None:
            self._step.start.zero_()
        else:
            self._step.start.copy_(start)

    def step(self) -> None:
        """Enqueue one step: the sampler's last token in, its next token out."""
        self.cache.check(self.cache.batch_size, 1)
        trained = self.model.config.max_position_embeddings
        if self.cache.length == trained and not self.model.model.rotary_emb.depends_on_length:
            warnings.warn(
                f"more than max_position_embeddings, {trained}, positions: quality may fall beyond them", stacklevel=2
            )
        if self._graph is None:
            self._run()
        else:
            with torch.cuda.device(self.cache.keys[0].device):
                self._graph.replay()
        self.cache.advance(1)

    def _run(self) -> None:
        length, self.cache.step = self.cache.length, self._step
        try:
            if self.fused:
                logits = fused_step(self.model, self._layers, self.cache, self.sampler.fed, overlap=self.overlap)
            else:
                out = self.model(self.sampler.fed[:, None], cache=self.cache, logits_to_keep=1)
                logits = out.logits[:, -1]
            self.sampler(logits)
            self._step.position.add_(1)
        finally:
            self.cache.length, self.cache.step = length, None  # the device counts; the host does in step()

    def _capture(self) -> None:
        before = self.sampler.snapshot()
        with torch.cuda.device(self.cache.keys[0].device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # compiles the kernels; a capture must not be the first run
                self._run()
            torch.cuda.current_stream().wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._run()
        self.sampler.restore(before)


class KeptDecoder:
    """The last decoder of a model, for the next call: that takes it out, so that no two use it at once, and puts it
    back at its end. Copies and pickles of the model start with none."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self.decoder: Decoder | None = None

    def take(self, key: Any, cache: KVCache | None, length: int) -> Decoder | None:
        """The decoder if it is what ``key`` says and works on ``cache``; without one, on one of its own that has room
        for ``length`` positions: never on one that a caller lent, and goes on using."""
        decoder, self.decoder = self.decoder, None
        if decoder is None or decoder.key != key:
            return None
        fits = decoder.cache is cache if cache is not None else decoder.owns and decoder.cache.max_length >= length
        return decoder if fits else None

    def __deepcopy__(self, memo: Any) -> KeptDecoder:
        return KeptDecoder()

    def __reduce__(self) -> Any:
        return KeptDecoder, ()


def decoder_for(
    model: CausalLM,
    cache: KVCache | None,
    rows: int,
    length: int,
    longest: int,
    sampler: Sampler,
    steps: int,
    *,
    lent: bool,
) -> Decoder | None:
    """A decoder with room for ``length`` positions of ``rows`` rows, over ``cache`` if given; None: run step by step.

    ``lent``: the cache is the caller's. Give the decoder back with ``model.kept_decoder.decoder = decoder``. The
    model's last one is taken if it fits: same sampling, parameters and attributes of modules. Otherwise one is
    captured, unless the ``steps`` to come are too few to pay for it, or something in the model would not be captured: a
    hook, autocast, offloaded parameters, rotary frequencies that change with every position. On a CPU there are no
    graphs, but the fused step, in fp32, has fewer calls than the modules.
    """
    if not capturable(model, length):
        return None
    if cache is not None and cache.keys[0].dtype != model.dtype:  # the model's forward converts
        return None
    capture, fused = model.device.type == "cuda", fusible(model, rows)
    if not capture and not (fused and model.dtype == torch.float32):
        return None
    kept = model.kept_decoder
    border = model.model.rotary_emb.border
    beyond = border is not None and longest > border  # LongRoPE's long factors
    key = (sampler.key, rows, beyond, _fingerprint(model))
    decoder = kept.take(key, cache, length)
    if decoder is not None or (capture and steps < 8):
        return decoder
    if cache is None:
        cache = model.make_cache(rows, -(-length // _ROOM) * _ROOM)
    try:
        decoder = Decoder(
            model, cache, sampler, fused=fused, longest=longest, capture=capture, overlap=capture and _OVERLAP
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"decoding step by step, for a step could not be captured as a graph: {reason}", stacklevel=2)
        return None
    decoder.key, decoder.owns = key, not lent
    return decoder


def capturable(model: Any, length: int) -> bool:
    """Whether a step of this model may be captured, or run fused. Reads no values from the device."""
    if not isinstance(getattr(model, "kept_decoder", None), KeptDecoder) or not hasattr(model.model, "rotary_emb"):
        return False
    kind = model.device.type
    if kind not in ("cuda", "cpu") or (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    if torch.is_autocast_enabled(kind) or torch._C._len_torch_dispatch_stack():
        return False
    rope = model.model.rotary_emb.rope["rope_type"]
    if rope == "dynamic" and length > model.config.max_position_embeddings:
        return False
    if any(_hooked(module) for module in model.modules()):
        return False
    return all(p.device == model.device and type(p) is nn.Parameter for p in model.parameters())


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _fingerprint(model: nn.Module) -> tuple:
    """Changes when a step made earlier would compute what the model no longer does.

    A step reads parameters where they lie, so values that change in place need nothing. What it has built in are the
    attributes of the modules and the config (scales, windows, eps, softcaps), and rotary tables made of buffers.
    """
    tensors = tuple((t.data_ptr(), t.dtype, t.shape) for t in (*model.parameters(), *model.buffers()))
    written = tuple(0 if t.is_inference() else t._version for t in model.buffers())
    modules = tuple((type(m), *((k, _built_in(v)) for k, v in vars(m).items() if k[0] != "_")) for m in model.modules())
    return tensors, written, modules


def _built_in(value: Any) -> Any:
    """An attribute's value, so that it can be compared: plain ones and those that hold such, others by identity."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Tensor):
        return value.data_ptr()
    return repr(value) if isinstance(value, dict | list | tuple | Config) else id(value)


# ------------------------------------------------------------------------------------------------- the fused step


class _Wiring(NamedTuple):
    """Where the norms of a block stand, by name; None where there is none."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None


class _Known(NamedTuple):
    models: set[type]
    blocks: dict[type, _Wiring]
    attentions: dict[type, bool]  # whether it rotates neighbouring pairs
    mlps: dict[type, str]  # the activation of the gate


def _known() -> _Known:
    """The parts that ``fused_step`` can put together.

    By exact class: a subclass may do anything. Imported here, because the families import base, and base this file.
    """
    from ligermodels import gemma, gemma2, gemma3, glm, glm4, llama, mistral, phi3, qwen2, qwen3

    plain = _Wiring("input_layernorm", None, "post_attention_layernorm", None)
    gemma2_like = _Wiring("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                          "post_feedforward_layernorm")  # fmt: skip
    glm4_like = _Wiring("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                        "post_mlp_layernorm")  # fmt: skip
    like_llama = (llama.LlamaBlock, mistral.MistralBlock, qwen2.Qwen2Block, qwen3.Qwen3Block, gemma.GemmaBlock,
                  phi3.Phi3Block, glm.GlmBlock)  # fmt: skip
    models = {llama.LigerLlama, mistral.LigerMistral, qwen2.LigerQwen2, qwen3.LigerQwen3, gemma.LigerGemma,
              gemma2.LigerGemma2, gemma3.LigerGemma3, phi3.LigerPhi3, glm.LigerGlm, glm4.LigerGlm4}  # fmt: skip
    blocks = dict.fromkeys(like_llama, plain)
    blocks |= {gemma2.Gemma2Block: gemma2_like, gemma3.Gemma3Block: gemma2_like, glm4.Glm4Block: glm4_like}
    half_split = (llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention,
                  gemma2.Gemma2Attention, gemma3.Gemma3Attention, phi3.Phi3Attention)  # fmt: skip
    attentions = dict.fromkeys(half_split, False) | {glm.GlmAttention: True}
    mlps = {llama.LlamaMLP: "silu", phi3.Phi3MLP: "silu", gemma.GemmaMLP: "gelu_tanh"}
    return _Known(models, blocks, attentions, mlps)


def fusible(model: CausalLM, rows: int) -> bool:
    """Whether ``fused_step`` computes what this model does, for this many rows."""
    dtypes = {p.dtype for p in model.parameters()}
    half = torch.float16 in dtypes and rows > 1  # products before the norm's scale could overflow
    if rows > MAX_ROWS or len(dtypes) != 1 or half or torch.float64 in dtypes:
        return False
    known = _known()
    if type(model) not in known.models or type(model.lm_head) is not nn.Linear or type(model.model.norm) is not RMSNorm:
        return False
    for block in model.model.layers:
        if type(block) not in known.blocks:
            return False
        attention, mlp = block.self_attn, block.mlp
        if type(attention) not in known.attentions or type(mlp) not in known.mlps:
            return False
        leaves = [*block.children(), *attention.children(), *mlp.children()]
        if any(type(m) not in (nn.Linear, RMSNorm) for m in leaves if m is not attention and m is not mlp):
            return False
    return True


class _Layer(NamedTuple):
    """A block as ``fused_step`` runs it; parameters are the model's own."""

    qkv: dict[str, Any]  # arguments of few_rows_linear
    attend: dict[str, Any]  # arguments of append_and_attend
    out: dict[str, Any]
    out_norm: nn.Module | None  # of what joins the residual stream, where a family has it
    gate_up: dict[str, Any]
    down: dict[str, Any]
    down_norm: nn.Module | None


def plan_layers(model: CausalLM, length: int, longest: int) -> list[_Layer]:
    """How to run the blocks of a fusible model, with rotary tables for ``length`` positions.

    Layers with the same frequencies share their tables; ``longest`` is for frequencies that depend on the length.
    """
    known = _known()
    positions = torch.arange(length, device=model.device)[None]
    tables: dict[nn.Module, Any] = {}
    layers = []
    for index, block in enumerate(model.model.layers):
        wiring, attention, mlp = known.blocks[type(block)], block.self_attn, block.mlp
        rotary = rotary_of_layer(model, index)
        if rotary not in tables:
            tables[rotary] = [t[0].contiguous() for t in rotary(positions, longest)]  # (length, rotary_dim / 2)
        packed = hasattr(attention, "qkv_proj")
        projections = [attention.qkv_proj] if packed else [attention.q_proj, attention.k_proj, attention.v_proj]
        attend = dict(zip(("cos", "sin"), tables[rotary], strict=True))
        attend |= {"scale": attention.scale, "window": getattr(attention, "window", None),
                   "softcap": getattr(attention, "softcap", None),
                   "interleaved": known.attentions[type(attention)]}  # fmt: skip
        if hasattr(attention, "q_norm"):
            norm = attention.q_norm
            attend |= {"q_weight": norm.weight, "k_weight": attention.k_norm.weight, "eps": norm.eps,
                       "offset": norm.offset, "casting": norm.casting}  # fmt: skip
        if hasattr(mlp, "gate_up_proj"):
            gate_up = {"weights": mlp.gate_up_proj.weight.detach().chunk(2), "biases": None}
        else:
            gate_up = _linears([mlp.gate_proj, mlp.up_proj])
        layers.append(
            _Layer(
                qkv=_linears(projections) | _norm(getattr(block, wiring.before_attention)),
                attend=attend,
                out=_linears([attention.o_proj]),
                out_norm=wiring.after_attention and getattr(block, wiring.after_attention),
                gate_up=gate_up | _norm(getattr(block, wiring.before_mlp)) | {"gate": known.mlps[type(mlp)]},
                down=_linears([mlp.down_proj]),
                down_norm=wiring.after_mlp and getattr(block, wiring.after_mlp),
            )
        )
    return layers


def rotary_of_layer(model: CausalLM, index: int) -> nn.Module:
    """The rotary embedding of a layer: Gemma 3's layers with a window have one of their own."""
    if "rotary_emb_local" in model.model and model.config.layer_types[index] == "sliding_attention":
        return model.model["rotary_emb_local"]
    return model.model["rotary_emb"]


def _linears(modules: list[nn.Linear]) -> dict[str, Any]:
    biases = [m.bias for m in modules]
    return {"weights": [m.weight for m in modules], "biases": biases if biases[0] is not None else None}


def _norm(norm: RMSNorm) -> dict[str, Any]:
    return {"norm_weight": norm.weight, "eps": norm.eps, "offset": norm.offset}


def fused_step(model: CausalLM, layers: list[_Layer], cache: KVCache, ids: Tensor, *, overlap: bool = False) -> Tensor:
    """ids (B,) at ``cache.step`` → logits (B, V) fp32. Writes the cache; ``layers`` from ``plan_layers``.

    Norms, activations and sums stay in fp32 within a launch, where the model's own forward rounds between its modules.
    """
    step, config = cache.step, model.config
    shared = {"counters": step.counters, "overlap": overlap}
    A, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    x = model.model.embed_tokens(ids[:, None])[:, 0]  # (B, H)
    rows = len(x)
    for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
        heads = few_rows_linear(x, **layer.qkv, **shared).view(rows, 1, A + 2 * K, D)
        q, k, v = heads.split([A, K, K], dim=2)
        attended = append_and_attend(
            q, k, v, keys=keys, values=values, position=step.position, start=step.start, **layer.attend, **shared
        )
        x = _join(x, attended.view(rows, A * D), layer.out, layer.out_norm, shared)
        h = few_rows_linear(x, **layer.gate_up, **shared)
        x = _join(x, h, layer.down, layer.down_norm, shared)
    head = _linears([model.lm_head]) | _norm(model.model.norm)
    logits = few_rows_linear(x, **head, out_dtype=torch.float32, **shared)
    softcap = getattr(config, "final_logit_softcapping", None)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _join(x: Tensor, h: Tensor, linear: dict[str, Any], norm: nn.Module | None, shared: dict[str, Any]) -> Tensor:
    """x + linear(h), or x + norm(linear(h)) in the families that normalise what joins the residual stream."""
    if norm is None:
        return few_rows_linear(h, residual=x, **linear, **shared)
    return x + norm(few_rows_linear(h, **linear, **shared))
