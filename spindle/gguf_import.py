"""A GGUF file of a Llama model -> an ordinary Hugging Face directory, with exactly its values.

GGUF (the format of llama.cpp) keeps metadata, tokenizer and tensors in one file, the tensors in
blocks of 32 small integers that share a scale: Q8_0 is `scale * q`, Q4_1 is `scale * q + minimum`.
Written out as float32 nothing is lost, only the file grows; any library then reads it.

Three things differ from the Hugging Face layout: the names; the order of the rows of q and k
(llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head); and a tied output
head, which the file simply does not contain. What the metadata states is taken from there, what we
would convert wrongly is refused by name. The keys: "GGUF", in the documentation of ggml.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spindle.config import MOST, ModelConfig
from spindle.errors import CheckpointError, brief, shown
from spindle.gguf_file import Metadata, StoredTensor, read

WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ONE_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Without these there is nothing to go by.
REQUIRED = (
    "llama.attention.head_count",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.vocab_size",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
)
# Another value here would need another conversion; None stands for a key that the file lacks.
CONVERTED = {
    "general.architecture": ("llama",),
    "llama.rope.scale_linear": (None, 1.0),
    "llama.rope.scaling.type": (None, "none"),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.pre": ("smollm",),
    "tokenizer.ggml.add_bos_token": (None, False),
}
CONTROL_TOKEN, USER_TOKEN = 3, 4


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _is_number(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1e300


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(_is_id(one) for one in value)


# What a key must be where it stands, and that in words.
COUNT, NUMBER = (_is_count, f"a whole number from 1 to {MOST}"), (_is_number, "a float above 0")
TEXTS = (_are_texts, "a list of texts")
EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "llama.attention.head_count": COUNT,
    "llama.attention.head_count_kv": COUNT,
    "llama.attention.key_length": COUNT,
    "llama.attention.layer_norm_rms_epsilon": NUMBER,
    "llama.block_count": COUNT,
    "llama.context_length": COUNT,
    "llama.embedding_length": COUNT,
    "llama.feed_forward_length": COUNT,
    "llama.rope.dimension_count": COUNT,
    "llama.rope.freq_base": NUMBER,
    "llama.vocab_size": COUNT,
    "tokenizer.chat_template": (_is_text, "a text"),
    "tokenizer.ggml.merges": TEXTS,
    "tokenizer.ggml.token_type": (_are_ids, "a list of whole numbers"),
    "tokenizer.ggml.tokens": TEXTS,
}
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def convert(
    file: Path, directory: Path, on_bytes: Callable[[int], object] = lambda size_bytes: None
) -> None:
    """Write the Llama model in the GGUF `file` into `directory` as a Hugging Face checkpoint.

    `directory` exists and gains config.json, generation_config.json, tokenizer.json,
    tokenizer_config.json and model.safetensors (float32). `on_bytes` hears how many bytes each
    write added. CheckpointError when the file is no GGUF file or holds something that would be
    converted wrongly.
    """
    metadata, tensors = read(file)
    check_convertible(metadata, file)
    names = {tensor.name: hugging_face_name(tensor.name, file) for tensor in tensors}
    check_complete(set(names), metadata, file)
    check_tensors(tensors, metadata, file)
    documents = {
        "config.json": model_config(metadata, tied="output.weight" not in names),
        "generation_config.json": special_ids(metadata),
        "tokenizer.json": json.loads(checked_tokenizer(metadata, file).to_str()),
        "tokenizer_config.json": tokenizer_config(metadata),
    }
    ModelConfig.from_dict(documents["config.json"], f"{file}, as a config.json")
    for name, document in documents.items():
        text = json.dumps(document, indent=2, ensure_ascii=False)
        on_bytes((directory / name).write_bytes(f"{text}\n".encode()))
    shapes = {names[tensor.name]: tensor.shape for tensor in tensors}
    values = (values_of(tensor, metadata) for tensor in tensors)
    write_safetensors(directory / "model.safetensors", shapes, values, on_bytes)


def check_convertible(metadata: Metadata, file: Path) -> None:
    """Refuse, by the name of the key, every file whose conversion would be wrong."""
    for key, known in CONVERTED.items():
        if (value := metadata.get(key)) not in known:
            said = shown(value)
            raise CheckpointError(f"{file}: {key} is {said}; converted is only {known[-1]!r}")
    if missing := [key for key in REQUIRED if key not in metadata]:
        raise CheckpointError(f"{file}: its metadata lacks {', '.join(missing)}")
    for key, (is_right, right) in EXPECTED.items():
        if key in metadata and not is_right(metadata[key]):
            raise CheckpointError(f"{file}: {key} is {shown(metadata[key])}; expected {right}")
    check_vocabulary(metadata, file)
    rotated = metadata.get("llama.rope.dimension_count", head_size(metadata))
    if rotated != head_size(metadata):
        raise CheckpointError(
            f"{file}: llama.rope.dimension_count is {rotated}; "
            f"converted are only heads that are rotated whole ({head_size(metadata)})"
        )


def check_vocabulary(metadata: Metadata, file: Path) -> None:
    """As many tokens as the model has rows, no two alike, and the special ids among them."""
    tokens, size = metadata["tokenizer.ggml.tokens"], metadata["llama.vocab_size"]
    counts = [len(tokens), len(set(tokens)), len(metadata["tokenizer.ggml.token_type"])]
    if counts != [size] * 3:
        raise CheckpointError(
            f"{file}: with llama.vocab_size = {size} expected are as many tokens, no two alike, "
            f"each with a type; there are {counts[0]}, {counts[1]} different ones and "
            f"{counts[2]} types"
        )
    for name in SPECIAL:
        token_id = metadata.get(key := f"tokenizer.ggml.{name}_token_id", 0)
        if not _is_id(token_id) or token_id >= size:
            raise CheckpointError(
                f"{file}: {key} is {shown(token_id)}; expected an id below {size}"
            )


def hugging_face_name(name: str, file: Path) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    part = re.fullmatch(r"(?:blk\.(?P<layer>\d+)\.)?(?P<stem>\w+)\.weight", name)
    layer, stem = part.group("layer", "stem") if part else (None, "")
    if layer is None and stem in WHOLE_MODEL:
        return f"{WHOLE_MODEL[stem]}.weight"
    if layer is not None and stem in ONE_LAYER:
        return f"model.layers.{layer}.{ONE_LAYER[stem]}.weight"
    raise CheckpointError(f"{file}: the tensor {brief(name)} has no place in a Llama model")


def check_complete(present: set[str], metadata: Metadata, file: Path) -> None:
    """Every tensor that a model of this depth has, and no layer more; a head is optional."""
    layers = range(metadata["llama.block_count"])
    if len(layers) > len(present):
        raise CheckpointError(
            f"{file}: with {len(layers)} layers (llama.block_count) expected are more tensors than "
            f"the {len(present)} that it has"
        )
    expected = {f"{stem}.weight" for stem in WHOLE_MODEL}
    expected |= {f"blk.{layer}.{stem}.weight" for layer in layers for stem in ONE_LAYER}
    missing = sorted(expected - present - {"output.weight"})
    if missing or present - expected:
        raise CheckpointError(
            f"{file}: with {len(layers)} layers (llama.block_count), missing are "
            f"{brief(missing or 'no tensors')}, "
            f"beyond them are {brief(sorted(present - expected) or 'none')}"
        )


def check_tensors(tensors: list[StoredTensor], metadata: Metadata, file: Path) -> None:
    """Each has the shape that the metadata says, and a type whose numbers we can read."""
    shapes = expected_shapes(metadata)
    for tensor in tensors:
        right = shapes[tensor.name.split(".")[-2]]
        if tensor.shape != right:
            raise CheckpointError(
                f"{file}: the tensor {tensor.name} is {list(tensor.shape)}; its metadata asks for "
                f"{list(right)}"
            )
        try:
            gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(f"{file}: the GGUF tensor {tensor.name}: {error}") from error


def expected_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """The stem of a tensor's name -> its shape, slowest axis first."""
    V, E = metadata["llama.vocab_size"], metadata["llama.embedding_length"]
    D, F = head_size(metadata), metadata["llama.feed_forward_length"]
    H, Hk = metadata["llama.attention.head_count"], key_value_heads(metadata)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (V, E), "output": (V, E)}
    shapes |= dict.fromkeys(("output_norm", "attn_norm", "ffn_norm"), (E,))
    shapes |= {"attn_q": (H * D, E), "attn_k": (Hk * D, E), "attn_v": (Hk * D, E)}
    return shapes | {
        "attn_output": (E, H * D),
        "ffn_gate": (F, E),
        "ffn_up": (F, E),
        "ffn_down": (E, F),
    }


def head_size(metadata: Metadata) -> int:
    """Numbers in a head: stated, or an even share of the width."""
    width: int = metadata["llama.embedding_length"]
    even_share = width // metadata["llama.attention.head_count"]
    return metadata.get("llama.attention.key_length", even_share)


def key_value_heads(metadata: Metadata) -> int:
    """Key and value heads: stated, or as many as there are query heads."""
    heads: int = metadata["llama.attention.head_count"]
    return metadata.get("llama.attention.head_count_kv", heads)


def shortest_decimal(value: float) -> float:
    """The number that was meant by a float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def model_config(metadata: Metadata, tied: bool) -> dict[str, Any]:
    """config.json; the constants at its top are what the architecture "llama" means."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": key_value_heads(metadata),
        "head_dim": head_size(metadata),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),  # the default that GGUF states
        "rms_norm_eps": shortest_decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": tied,
        **special_ids(metadata),
    }


def special_ids(metadata: Metadata) -> dict[str, int]:
    """The ids that generation needs to know, as far as the file states them."""
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    keys = {f"tokenizer.ggml.{stem}_token_id": name for stem, name in names.items()}
    return {name: metadata[key] for key, name in keys.items() if key in metadata}


def checked_tokenizer(metadata: Metadata, file: Path) -> Tokenizer:
    """The tokenizer, in which each token has its own id."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    known = {token: id for id, token in enumerate(tokens)}
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known.keys():
            raise CheckpointError(
                f"{file}: tokenizer.ggml.merges has {shown(merge)}; expected two tokens, with a "
                f"space between, that together are a third"
            )
    result = tokenizer(metadata)
    if result.get_vocab() != known:
        raise CheckpointError(f"{file}: tokenizer.ggml.tokens has a token that cannot be added")
    return result


def tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE as in GPT-2, each digit on its own: what the kind "smollm" means.

    There is no unknown token. Of the 256 bytes SmolLM2 lacks 21 (six control characters, and
    bytes that UTF-8 never or hardly ever uses): the encoding of a text leaves them out.
    """
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    result.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL_TOKEN, USER_TOKEN):
            special = kind == CONTROL_TOKEN
            result.add_tokens([AddedToken(token, normalized=False, special=special)])
    return result


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    """tokenizer_config.json: a class that takes tokenizer.json as it is, names, chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {f"tokenizer.ggml.{stem}_token_id": name for stem, name in SPECIAL.items()}
    result = {name: tokens[metadata[key]] for key, name in keys.items() if key in metadata}
    if "tokenizer.chat_template" in metadata:
        result["chat_template"] = metadata["tokenizer.chat_template"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **result,
    }


def values_of(tensor: StoredTensor, metadata: Metadata) -> np.ndarray:
    """One tensor as float32, its rows in Hugging Face's order."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if tensor.name.endswith("attn_q.weight"):
        return halves_from_pairs(values, metadata["llama.attention.head_count"])
    if tensor.name.endswith("attn_k.weight"):
        return halves_from_pairs(values, key_value_heads(metadata))
    return values


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k in their own order; llama.cpp puts each head's as 0, D/2, 1, D/2+1, ..."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])  # [H, D/2, 2, E]
    return pairs.swapaxes(1, 2).reshape(weight.shape)  # [H*D, E]


def write_safetensors(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    values: Iterator[np.ndarray],
    on_bytes: Callable[[int], object],
) -> None:
    """Write float32 tensors one after the other, so that only one is ever held.

    The format: the length of the header in 8 bytes, the header in JSON (dtype, shape and place of
    each tensor), then the tensors without gaps. `values` come in the order of `shapes`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end_bytes = 0
    for name, shape in shapes.items():
        start_bytes, end_bytes = end_bytes, end_bytes + 4 * int(np.prod(shape))
        place = [start_bytes, end_bytes]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with open(file, "wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for shape, tensor in zip(shapes.values(), values, strict=True):
            assert tensor.shape == shape, f"{tensor.shape} is not the announced {shape}"
            output.write(np.ascontiguousarray(tensor, dtype="<f4").data)
            on_bytes(tensor.nbytes)
