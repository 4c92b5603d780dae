"""Whole files to damage: small checkpoints of every family, tokenizers of every kind, a GGUF file.

Each is a dict of file name -> bytes, built once a process. Where a format has lengths, counts and
offsets, the writer here says where they lie, so that each of them can be made to lie.
"""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import dataclass, field

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

Files = dict[str, bytes]

V, E, L, F = 31, 8, 2, 12
LLAMA = dict(model_type="llama", vocab_size=V, max_position_embeddings=16, hidden_size=E)
LLAMA |= dict(intermediate_size=F, num_hidden_layers=L, num_attention_heads=2)
LLAMA |= dict(num_key_value_heads=1, head_dim=6, rms_norm_eps=1e-5, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=1e4)
CONFIGS: dict[str, dict] = {
    "gpt2": dict(model_type="gpt2", vocab_size=V, n_positions=16, n_embd=E, n_layer=L, n_head=2),
    "llama": LLAMA | dict(rope_theta=1e4, attention_bias=False, tie_word_embeddings=False),
    "llama3": LLAMA | dict(rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral": LLAMA | dict(model_type="mistral", sliding_window=None),
    "qwen2": LLAMA | dict(model_type="qwen2", use_sliding_window=False, rope_parameters=YARN),
    "qwen3": LLAMA | dict(model_type="qwen3", torch_dtype="bfloat16"),
}


# safetensors.


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers writes them, spelled out and not asked of the package."""
    if family == "gpt2":
        parts = {"attn.c_attn": (E, 3 * E), "attn.c_proj": (E, E)}
        parts |= {"mlp.c_fc": (E, 4 * E), "mlp.c_proj": (4 * E, E)}
        named = {"wte.weight": (V, E), "wpe.weight": (16, E)}
        for n in range(L):
            for part, (inputs, outputs) in parts.items():
                named[f"h.{n}.{part}.weight"] = (inputs, outputs)
                named[f"h.{n}.{part}.bias"] = (outputs,)
            named |= {f"h.{n}.ln_{i}.{kind}": (E,) for i in (1, 2) for kind in ("weight", "bias")}
        named |= {"ln_f.weight": (E,), "ln_f.bias": (E,)}
        return {f"transformer.{name}": shape for name, shape in named.items()}
    parts = {"self_attn.q_proj": (12, E), "self_attn.k_proj": (6, E), "self_attn.v_proj": (6, E)}
    parts |= {"self_attn.o_proj": (E, 12), "mlp.gate_proj": (F, E), "mlp.up_proj": (F, E)}
    parts |= {"mlp.down_proj": (E, F), "input_layernorm": (E,), "post_attention_layernorm": (E,)}
    if family == "qwen3":
        parts |= {"self_attn.q_norm": (6,), "self_attn.k_norm": (6,)}
    named = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    for n in range(L):
        named |= {f"model.layers.{n}.{part}.weight": shape for part, shape in parts.items()}
        if family == "qwen2":
            named |= {
                f"model.layers.{n}.self_attn.{p}_proj.bias": (12 if p == "q" else 6,) for p in "qkv"
            }
    if family != "llama3":
        named["lm_head.weight"] = (V, E)
    return named


def safetensors(header: dict | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def header_and_data(file: bytes) -> tuple[dict, bytes]:
    """A whole safetensors file taken apart again."""
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def weights(shapes: dict[str, tuple[int, ...]], dtype: str, start: int = 0) -> bytes:
    """Numbers that count up, no two tensors alike, so that a mix-up shows."""
    kind = {"F32": "<f4", "F64": "<f8", "F16": "<f2"}[dtype]
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        numbers = (np.arange(start, start + count) % 2003 / 64).astype(kind).tobytes()
        place = [len(data), len(data) + len(numbers)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        data, start = data + numbers, start + count
    return safetensors(header, data)


@functools.cache
def one_file(family: str, dtype: str = "F32") -> Files:
    config = json.dumps(CONFIGS[family]).encode()
    generation = json.dumps({"eos_token_id": [2, 3], "bos_token_id": 1}).encode()
    named = {"config.json": config, "generation_config.json": generation}
    return named | {"model.safetensors": weights(shapes_of(family), dtype)}


INDEX = "model.safetensors.index.json"


@functools.cache
def sharded(family: str) -> Files:
    shapes = shapes_of(family)
    names, half = list(shapes), len(shapes) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half]}
    parts["model-00002-of-00002.safetensors"] = names[half:]
    where = {name: file for file, held in parts.items() for name in held}
    files = {"config.json": json.dumps(CONFIGS[family]).encode()}
    files[INDEX] = json.dumps({"metadata": {"total_size": 1}, "weight_map": where}).encode()
    for n, (file, held) in enumerate(parts.items()):
        files[file] = weights({name: shapes[name] for name in held}, "F32", start=777 * n)
    return files


# Tokenizers.


def _byte_level() -> tokenizers.Tokenizer:
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w"), ("he", "ll")]
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["".join(merge) for merge in merges]
    made = tokenizers.Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}|\s+(?!\S)"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    made.add_special_tokens(["<s>", "</s>"])
    return made


def _unigram() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁he", -3.0), ("llo", -3.5)]
    pieces += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    made = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>", "</s>"])
    return made


def _byte_fallback() -> tokenizers.Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "h", "e", "l", "o", "he", "ll", "hell"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    vocabulary = {token: n for n, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>", "</s>"])
    return made


TOKENIZERS = {"byte level": _byte_level, "unigram": _unigram, "byte fallback": _byte_fallback}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m['content'] | trim }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}{% endif %}"
)


@functools.cache
def tokenizer(kind: str) -> Files:
    about = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    return {
        "tokenizer.json": TOKENIZERS[kind]().to_str().encode(),
        "tokenizer_config.json": json.dumps(about).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 1}).encode(),
    }


# GGUF.

U8, U32, F32_KIND, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
GGML_F32, GGML_Q8_0 = 0, 8
G_E, G_H, G_HK, G_D, G_F = 32, 2, 1, 16, 32  # whole blocks of 32
G_TOKENS = ["<|end|>", "<|start|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
G_METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 16,
    "llama.embedding_length": G_E,
    "llama.feed_forward_length": G_F,
    "llama.attention.head_count": G_H,
    "llama.attention.head_count_kv": G_HK,
    "llama.attention.key_length": G_D,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 1e4,
    "llama.vocab_size": len(G_TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": G_TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(G_TOKENS) - 2),
    "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
# GGUF's name -> Hugging Face's, and the shape, slowest axis first.
G_TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "token_embd.weight": ("model.embed_tokens.weight", (len(G_TOKENS), G_E)),
    "blk.0.attn_norm.weight": ("model.layers.0.input_layernorm.weight", (G_E,)),
    "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", (G_H * G_D, G_E)),
    "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj.weight", (G_HK * G_D, G_E)),
    "blk.0.attn_v.weight": ("model.layers.0.self_attn.v_proj.weight", (G_HK * G_D, G_E)),
    "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj.weight", (G_E, G_H * G_D)),
    "blk.0.ffn_norm.weight": ("model.layers.0.post_attention_layernorm.weight", (G_E,)),
    "blk.0.ffn_gate.weight": ("model.layers.0.mlp.gate_proj.weight", (G_F, G_E)),
    "blk.0.ffn_up.weight": ("model.layers.0.mlp.up_proj.weight", (G_F, G_E)),
    "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", (G_E, G_F)),
    "output_norm.weight": ("model.norm.weight", (G_E,)),
    "output.weight": ("lm_head.weight", (len(G_TOKENS), G_E)),
}


@dataclass
class GGUF:
    """A GGUF file as it grows, and where its numbers lie: (what, offset, size in bytes)."""

    data: bytearray = field(default_factory=bytearray)
    marks: list[tuple[str, int, int]] = field(default_factory=list)

    def number(self, what: str, layout: str, value: float) -> None:
        raw = struct.pack("<" + layout, value)
        self.marks.append((what, len(self.data), len(raw)))
        self.data += raw

    def string(self, what: str, text: str) -> None:
        raw = text.encode()
        self.number(f"length of {what}", "Q", len(raw))
        self.data += raw

    def value(self, key: str, value: object) -> None:
        if isinstance(value, list):
            kind, layout = (STRING, "") if isinstance(value[0], str) else (5, "i")
            self.number(f"type of {key}", "I", ARRAY)
            self.number(f"element type of {key}", "I", kind)
            self.number(f"count of {key}", "Q", len(value))
            for n, one in enumerate(value):
                if kind == STRING:
                    self.string(f"{key}[{n}]", one)
                else:
                    self.number(f"{key}[{n}]", layout, one)
        elif isinstance(value, str):
            self.number(f"type of {key}", "I", STRING)
            self.string(key, value)
        else:
            kinds = {bool: (BOOL, "B"), float: (F32_KIND, "f"), int: (U32, "I")}
            kind, layout = kinds[type(value)]
            self.number(f"type of {key}", "I", kind)
            self.number(key, layout, value)


def _stored(shape: tuple[int, ...], n: int) -> tuple[int, bytes]:
    """Matrices as Q8_0 (a float16 scale and 32 integers a block), vectors as float32."""
    count = int(np.prod(shape))
    numbers = np.arange(n * 97, n * 97 + count)
    if len(shape) == 1:
        return GGML_F32, (numbers % 61 / 32).astype("<f4").tobytes()
    blocks = (numbers % 251 - 125).astype("i1").reshape(-1, 32)
    scales = ((1 + numbers[::32] % 7) / 64).astype("<f2")
    return GGML_Q8_0, b"".join(
        s.tobytes() + b.tobytes() for s, b in zip(scales, blocks, strict=True)
    )


@functools.cache
def gguf() -> tuple[bytes, tuple[tuple[str, int, int], ...]]:
    """The whole file, and the marks of its numbers."""
    return gguf_of(G_METADATA)


def gguf_of(metadata: dict[str, object]) -> tuple[bytes, tuple[tuple[str, int, int], ...]]:
    """A file with these keys and the tensors above."""
    out = GGUF()
    out.data += b"GGUF"
    out.number("version", "I", 3)
    out.number("tensor count", "Q", len(G_TENSORS))
    out.number("key count", "Q", len(metadata))
    for key, value in metadata.items():
        out.string(f"key {key}", key)
        out.value(key, value)
    contents = {name: _stored(shape, n) for n, (name, (_, shape)) in enumerate(G_TENSORS.items())}
    offset = 0
    for name, (_, shape) in G_TENSORS.items():
        out.string(f"tensor {name}", name)
        out.number(f"dimensions of {name}", "I", len(shape))
        for axis, size in enumerate(reversed(shape)):
            out.number(f"dimension {axis} of {name}", "Q", size)
        kind, raw = contents[name]
        out.number(f"type of tensor {name}", "I", kind)
        out.number(f"offset of {name}", "Q", offset)
        offset += len(raw) + -len(raw) % 32
    for _, raw in contents.values():
        out.data += bytes(-len(out.data) % 32) + raw
    return bytes(out.data), tuple(out.marks)
