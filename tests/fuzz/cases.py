"""What is damaged, by kind: a seed and a kind give one case, always the same."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz import bases, corrupt
from fuzz.bases import INDEX, Files
from fuzz.templates import hostile_template

Odd = dict[str, Callable[[Path], None]]


@dataclass
class Case:
    """Files to write, the one that was damaged, and what was done to it in words."""

    kind: str
    seed: int
    files: Files
    odd: Odd = field(default_factory=dict)
    touched: str = ""
    what: str = "nothing"

    def damage(self, name: str, what: str, content: bytes | None = None) -> None:
        """Note a fault in the file `name`, and its new content."""
        self.touched, self.what = name, f"{name}: {what}"
        if content is not None:
            self.files[name] = content


def make(kind: str, seed: int) -> Case:
    """The case of this kind and seed. Now and then nothing is damaged: that has to load."""
    rng = Random(f"{kind} {seed}")
    case = Case(kind, seed, {})
    KINDS[kind](rng, case)
    if rng.random() < 0.08:
        name, place = rng.choice(sorted(case.files)), rng.choice(corrupt.PLACES)
        case.damage(name, f"replaced by {place.__name__.replace('_', ' ')}")
        case.odd[name] = place
    return case


def damage_text(rng: Random, case: Case, name: str) -> None:
    """One fault in a JSON file, or in its bytes."""
    if rng.random() < 0.75:
        document = json.loads(case.files[name])
        what, text = corrupt.json_damage(rng, document)
        case.damage(name, what, text.encode("utf-8", "surrogatepass"))
    else:
        case.damage(name, *corrupt.bytes_damage(rng, case.files[name]))


def config(rng: Random, case: Case) -> None:
    """config.json and generation_config.json, beside weights that are whole."""
    case.files = dict(bases.one_file(rng.choice(list(bases.CONFIGS))))
    if rng.random() < 0.15:
        raw = json.loads(case.files["config.json"])
        lies = {name: rng.choice(LAYERS) for name in raw if "layer" in name and "num" in name[:3]}
        lies |= {"n_layer": rng.choice(LAYERS)} if "n_layer" in raw else {}
        lies["layer_types"] = rng.choice(LAYER_TYPES)
        case.damage("config.json", f"{lies}"[:200], json.dumps(raw | lies).encode())
    elif rng.random() < 0.97:
        damage_text(rng, case, rng.choice(["config.json"] * 5 + ["generation_config.json"]))


LAYERS = [1, 2, 3, 10_000, 10**8, 3 * 10**8, 2**31 - 1]
LAYER_TYPES: list[Any] = [[], ["full_attention"], ["full_attention"] * 2, ["full_attention"] * 3]
LAYER_TYPES += [["attention", "full_attention"], ["sliding_attention"] * 2, "full_attention", {}]


# Weights.

LENGTHS = [0, 1, 2, 7, 8, 100, 10**8, 10**8 + 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
LENGTHS += [2**64 - 8, 2**64 - 9]


def safetensors(rng: Random, case: Case) -> None:
    """One file of weights."""
    family, dtype = rng.choice(list(bases.CONFIGS)), rng.choice(["F32", "F32", "F64", "F16"])
    case.files = dict(bases.one_file(family, dtype))
    damage_weights(rng, case, "model.safetensors")


def damage_weights(rng: Random, case: Case, name: str) -> None:
    """One fault in a safetensors file: its bytes, its length, its header, its tensors' places."""
    file = case.files[name]
    how = rng.choice(
        ["bytes", "bytes", "length", "header", "header", "header", "place", "place", "none"]
    )
    if how == "bytes":
        case.damage(name, *corrupt.bytes_damage(rng, file))
    elif how == "length":
        length = rng.choice([*LENGTHS, len(file), len(file) - 8, len(file) - 7])
        case.damage(name, f"header length {length}", struct.pack("<Q", length) + file[8:])
    elif how == "header":
        header, data = bases.header_and_data(file)
        what, text = corrupt.json_damage(rng, header)
        content = bases.safetensors(text.encode("utf-8", "surrogatepass"), data)
        case.damage(name, f"header: {what}", content)
    elif how == "place":
        header, data = bases.header_and_data(file)
        what, data = move(rng, header, data)
        case.damage(name, what, bases.safetensors(header, data))


def move(rng: Random, header: dict[str, Any], data: bytes) -> tuple[str, bytes]:
    """Lies about where tensors lie, of what type and shape they are, and which there are."""
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.sample(names, 2)
    a, b = header[one], header[other]
    how = rng.choice(list(MOVES))
    return f"{how}: {one}, {other}", MOVES[how](rng, header, data, a, b, one, other) or data


def _set(entry: dict[str, Any], **changes: Any) -> None:
    entry |= changes


def _shift(rng: Random, header: dict, a: dict) -> None:
    by = rng.choice([-8, -4, -1, 1, 4, 8, 2**63, -(2**40)])
    a["data_offsets"] = [place + by for place in a["data_offsets"]]


def _flat(a: dict) -> None:
    size = a["data_offsets"][1] - a["data_offsets"][0]
    a["shape"] = [size // 4]


def _grow(rng: Random, header: dict, data: bytes) -> bytes:
    """Bytes between the tensors, which no tensor owns."""
    names = [name for name in header if name != "__metadata__"]
    for name in names[len(names) // 2 :]:
        header[name]["data_offsets"] = [place + 4 for place in header[name]["data_offsets"]]
    at = header[names[len(names) // 2]]["data_offsets"][0] - 4
    return data[:at] + b"hole" + data[at:]


def _extra(header: dict, data: bytes, name: str, dtype: str, shape: list[int], size: int) -> bytes:
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
    return data + bytes(size)


def _reordered(rng: Random, header: dict) -> None:
    """The header's entries in another order: the same tensors."""
    entries = list(header.items())
    rng.shuffle(entries)
    header.clear()
    header.update(entries)


def _bigger(rng: Random, a: dict) -> None:
    a["shape"] = rng.choice(
        [[2**62, 4], [2**63, 2], [2**64 - 1], [0], [0, 2**63], [-1], [2**32] * 2]
    )


MOVES: dict[str, Callable[..., bytes | None]] = {
    "same bytes": lambda r, h, d, a, b, one, two: _set(a, data_offsets=b["data_offsets"]),
    "swapped places": lambda r, h, d, a, b, one, two: (
        _set(a, data_offsets=b["data_offsets"]) or _set(b, data_offsets=a["data_offsets"])
    ),
    "swapped names": lambda r, h, d, a, b, one, two: h.update({one: b, two: a}),
    "shifted": lambda r, h, d, a, b, one, two: _shift(r, h, a),
    "backwards": lambda r, h, d, a, b, one, two: _set(a, data_offsets=a["data_offsets"][::-1]),
    "other type": lambda r, h, d, a, b, one, two: _set(
        a, dtype=r.choice(["I32", "U32", "F16", "F64"])
    ),
    "flat": lambda r, h, d, a, b, one, two: _flat(a),
    "other shape": lambda r, h, d, a, b, one, two: _bigger(r, a),
    "turned": lambda r, h, d, a, b, one, two: _set(a, shape=a["shape"][::-1]),
    "a hole": lambda r, h, d, a, b, one, two: _grow(r, h, d),
    "gone": lambda r, h, d, a, b, one, two: h.pop(one) and None,
    "renamed": lambda r, h, d, a, b, one, two: h.update({one + ".x": h.pop(one)}),
    "one more": lambda r, h, d, a, b, one, two: _extra(h, d, "extra", "F32", [2], 8),
    "one more of nothing": lambda r, h, d, a, b, one, two: _extra(
        h, d, "extra", "F32", [0, 2**60], 0
    ),
    "without prefix": lambda r, h, d, a, b, one, two: _extra(
        h,
        d,
        one.partition(".")[2],
        a["dtype"],
        a["shape"],
        a["data_offsets"][1] - a["data_offsets"][0],
    ),
    "a buffer": lambda r, h, d, a, b, one, two: _extra(
        h, d, "model.layers.0.self_attn.rotary_emb.inv_freq", "F32", [3], 12
    ),
    "reordered": lambda r, h, d, a, b, one, two: _reordered(r, h),
}


# Shards.


def shards(rng: Random, case: Case) -> None:
    """Two files of weights and the index that names them."""
    family = rng.choice(list(bases.CONFIGS))
    case.files = dict(bases.sharded(family))
    first, second = sorted(name for name in case.files if name.startswith("model-"))
    how = rng.choice(["index", "index", "index", "shard", "shard", "map", "map", "map", "other"])
    if how == "index":
        damage_text(rng, case, INDEX)
    elif how == "shard":
        damage_weights(rng, case, rng.choice([first, second]))
    elif how == "other":
        other = rng.choice([one for one in bases.CONFIGS if one != family])
        name = rng.choice([INDEX, first, second, "config.json"])
        case.damage(name, f"that of {other}", bases.sharded(other)[name])
    else:
        index = json.loads(case.files[INDEX])
        what = lie(rng, index["weight_map"], first, second, case)
        case.damage(INDEX, what, json.dumps(index).encode())


def lie(rng: Random, where: dict[str, Any], first: str, second: str, case: Case) -> str:
    """A map that names other files, or the wrong one of two."""
    tensor = rng.choice(list(where))
    how = rng.choice(["path", "path", "path", "other", "gone", "ghost", "turned", "copy"])
    if how == "path":
        where[tensor] = rng.choice(SHARD_NAMES)
    elif how == "other":
        where[tensor] = first if where[tensor] == second else second
    elif how == "gone":
        del where[tensor]
    elif how == "ghost":
        where["ghost"] = first
    elif how == "turned":
        for name in where:
            where[name] = first if where[name] == second else second
    else:
        case.files["copy.safetensors"] = case.files[first]
        where[tensor] = "copy.safetensors"
    return f"{how}: {tensor} in {str(where.get(tensor))[:40]!r}"


SHARD_NAMES = [
    *("../outside.safetensors", "/etc/passwd", "/dev/zero", "..", ".", "", "sub/x.safetensors"),
    *("a" * 300, "a" * 5000, "\0", "a\0b", "\ud800", "\udc80", "~", "nul", "config.json", INDEX),
    *("model-00001-of-00002.safetensors/", "./model-00001-of-00002.safetensors", 7, None, [], {}),
    *("..\\outside.safetensors", "https://example.org/x.safetensors", "pytorch_model.bin", 10**30),
]


# Tokenizers and templates.


def tokenizer(rng: Random, case: Case) -> None:
    """tokenizer.json, and the files that say which ids begin and end a text."""
    case.files = dict(bases.tokenizer(rng.choice(list(bases.TOKENIZERS))))
    if rng.random() < 0.4:
        document = json.loads(case.files["tokenizer.json"])
        what = other_part(rng, document)
        case.damage("tokenizer.json", what, json.dumps(document).encode())
    else:
        names = ["tokenizer.json"] * 8 + ["tokenizer_config.json", "generation_config.json"]
        damage_text(rng, case, rng.choice(names))


def other_part(rng: Random, document: dict[str, Any]) -> str:
    """A section of tokenizer.json that is valid JSON, and what it does not fit or never ends."""
    section = rng.choice(list(PARTS))
    part = json.loads(json.dumps(rng.choice(PARTS[section])))
    if section == "added_tokens":
        document[section].append(part)
    elif section == "model":
        document[section] |= part
    elif document.get(section) and rng.random() < 0.5:
        document[section] = {"type": "Sequence", LISTS[section]: [document[section], part]}
    else:
        document[section] = part
    return f"{section}: {json.dumps(part):.200}"


LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
LISTS |= {"post_processor": "processors"}


def added(content: str, token_id: int, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token_id, "content": content, **plain, **flags}


def split(regex: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": False}


def replace(pattern: str, content: str, kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def surrounding(times: int, ids: int, repeats: int = 1) -> dict[str, Any]:
    """A template with a special token of so many ids, so many times, before a text."""
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [{"SpecialToken": {"id": "X", "type_id": 0}}] * times + text * repeats
    pair = [*text, {"Sequence": {"id": "B", "type_id": 0}}]
    special = {"X": {"id": "X", "ids": [1] * ids, "tokens": ["a"] * ids}}
    return dict(type="TemplateProcessing", single=single, pair=pair, special_tokens=special)


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
SLOW = [
    "(a+)+$",
    "(a|a)*$",
    "(a*)*b$",
    r"(x+x+)+y",
    r"(?=(a+))\1*b",
    "(.*)*$",
    "((a{1,50}){1,50}){1,50}c",
]
ODD = [
    "",
    "(",
    "[",
    "\\",
    "a{99999999}",
    "(?<n>a)\\k<m>",
    "\\p{Nope}",
    "^",
    "$",
    "(?i)",
    "x*",
    "\\b",
]
PARTS: dict[str, list[Any]] = {
    "normalizer": [
        *(replace(regex, "b") for regex in SLOW + ODD),
        *(replace("", "x", "String"), replace("a", "a" * 100_000), replace("l", "", "String")),
        {"type": "Sequence", "normalizers": [replace("l", "ll")] * 40},
        {"type": "Sequence", "normalizers": [replace("", "l", "String")] * 40},
        {"type": "Sequence", "normalizers": [{"type": "NFKD"}, {"type": "NFKC"}] * 20},
        {"type": "Sequence", "normalizers": []},
        {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 40},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
        {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Prepend", "prepend": ""},
        {"type": "Prepend", "prepend": "x" * 100_000},
        *({"prepend": "x" * 100_000}, ["x" * 100_000], [{"String": "l"}, "l" * 100_000]),
        {"normalizers": [{"pattern": {"String": "l"}, "content": "ll"}] * 40},
        *(
            {"type": kind}
            for kind in ("NFC", "NFD", "Lowercase", "Nmt", "StripAccents", "ByteLevel")
        ),
        {"type": "Strip", "strip_left": True, "strip_right": True},
        dict(type="BertNormalizer", clean_text=True, handle_chinese_chars=True, lowercase=True)
        | {"strip_accents": None},
    ],
    "pre_tokenizer": [
        *(split(regex) for regex in SLOW + ODD),
        *(split("l", behavior) for behavior in ("Removed", "MergedWithNext", "Contiguous", "Nope")),
        {"type": "Sequence", "pretokenizers": [BYTES] * 30},
        {"type": "Sequence", "pretokenizers": []},
        {"type": "FixedLength", "length": 0},
        {"type": "FixedLength", "length": 2**63},
        {"type": "FixedLength", "length": 3},
        {"type": "Metaspace", "replacement": "", "prepend_scheme": "always", "split": True},
        {"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always", "split": True},
        {"type": "CharDelimiterSplit", "delimiter": "l"},
        {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Digits", "individual_digits": True},
        *(
            {"type": k}
            for k in ("UnicodeScripts", "Whitespace", "WhitespaceSplit", "BertPreTokenizer")
        ),
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [7, 2**32 - 1], "tokens": ["a"]}},
        },
        {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[NO]", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 9}},
            ],
            "pair": [],
            "special_tokens": {},
        },
        {"type": "BertProcessing", "sep": ["</s>", 10**6], "cls": ["<s>", 0]},
        {
            "type": "RobertaProcessing",
            "sep": ["</s>", 1],
            "cls": ["<s>", 0],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        BYTES,
        *(surrounding(*sizes) for sizes in ((3, 2), (1000, 1000), (6000, 6000), (1, 1025))),
        {"type": "Sequence", "processors": [surrounding(2, 100)] * 100},
        {"type": "Sequence", "processors": [surrounding(0, 1, repeats=2)] * 40},
        {key: value for key, value in surrounding(3000, 3000).items() if key != "type"},
    ],
    "decoder": [
        *(
            replace("▁", "", "String"),
            replace("", " ", "String"),
            {"type": "Fuse"},
            {"type": "ByteFallback"},
        ),
        {"type": "Metaspace", "replacement": "l", "prepend_scheme": "never", "split": False},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
        {"type": "Sequence", "decoders": []},
        {"type": "CTC", "pad_token": "<s>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "Strip", "content": "l", "start": 2**63, "stop": 2**63},
        BYTES,
    ],
    "model": [
        *({"unk_token": token} for token in ("<nope>", "", "<s>", None)),
        *({"unk_id": number} for number in (-1, 0, 10**6, 2**63, None)),
        *({"dropout": share} for share in (0.0, 0.5, 1.0, -1, 2, None)),
        *(
            {"vocab": some}
            for some in ({}, [], {"a": 0, "b": 0}, {"a": 2**32 - 1}, [["a", -1]], [["", 0.0]])
        ),
        *(
            {"merges": some}
            for some in ([], ["a"], ["a b"], [["a", "b", "c"]], ["h e"] * 2, [["", ""]])
        ),
        *(
            {"continuing_subword_prefix": "##"},
            {"end_of_word_suffix": "</w>"},
            {"byte_fallback": True},
        ),
        *(
            {"ignore_merges": True},
            {"fuse_unk": True},
            {"cache_capacity": 2**60},
            {"max_input_chars_per_word": 0},
        ),
        *({"type": kind} for kind in ("WordPiece", "WordLevel", "Unigram", "BPE", "Nope", None)),
    ],
    "added_tokens": [
        *(added("x", n) for n in (0, 3, 10**6, 2**31, 2**32 - 1, 2**32, -1)),
        *(
            added(text, 400)
            for text in ("", " ", "h", "hello", "\0", "€", "l" * 100_000, "\n", "<s>")
        ),
        added("he", 0, special=True),
        added("o", 5, single_word=True, lstrip=True, rstrip=True),
        added("e", 6, normalized=True),
    ],
}


def template(rng: Random, case: Case) -> None:
    """Chat templates that reach for what they should not, or for ever."""
    case.files = dict(bases.tokenizer("byte level"))
    text = hostile_template(rng)
    if rng.random() < 0.1:
        what, content = corrupt.bytes_damage(rng, text.encode())
        case.damage("chat_template.jinja", what, content)
    elif rng.random() < 0.3:
        about = json.loads(case.files["tokenizer_config.json"]) | {"chat_template": text}
        case.damage("tokenizer_config.json", text, json.dumps(about).encode())
    else:
        case.damage("chat_template.jinja", text, text.encode())


# GGUF.

NUMBERS = [0, 1, 2, 3, 5, 9, 13, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40]
NUMBERS += [2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def gguf(rng: Random, case: Case) -> None:
    """A GGUF file: its bytes, or one of its counts, lengths, types, sizes and offsets."""
    file, marks = bases.gguf()
    case.files = {"model.gguf": file}
    how = rng.choice(
        ["number"] * 6 + ["near"] * 3 + ["bytes", "bytes", "metadata", "metadata", "none"]
    )
    if how in ("number", "near"):
        what, at, size = rng.choice(important(rng, marks))
        old = int.from_bytes(file[at : at + size], "little")
        new = rng.choice(NUMBERS) if how == "number" else old + rng.choice([-32, -1, 1, 32])
        raw = (new % 2 ** (8 * size)).to_bytes(size, "little")
        case.damage("model.gguf", f"{what} {old} -> {new}", file[:at] + raw + file[at + size :])
    elif how == "bytes":
        case.damage("model.gguf", *corrupt.bytes_damage(rng, file))
    elif how == "metadata":
        what, content = other_metadata(rng)
        case.damage("model.gguf", what, content)


def important(rng: Random, marks: tuple[tuple[str, int, int], ...]) -> list[tuple[str, int, int]]:
    """Half of the time what is not one of hundreds of tokens."""
    return [m for m in marks if "[" not in m[0]] if rng.random() < 0.8 else list(marks)


VALUES: list[object] = [
    0,
    1,
    7,
    2**32 - 1,
    "",
    "gpt2",
    "x" * 5000,
    True,
    0.0,
    -1.0,
    1e30,
    float("nan"),
]
VALUES += [float("inf"), ["a"], ["a", "a"], ["a b c"], [""], [3], [-(2**31)], [1] * 3]


def other_metadata(rng: Random) -> tuple[str, bytes]:
    """A key with a value of another type, dropped, or added."""
    key = rng.choice([*bases.G_METADATA, "general.alignment", "llama.rope.dimension_count"])
    changed = dict(bases.G_METADATA)
    if key in changed and rng.random() < 0.2:
        del changed[key]
        return f"{key} dropped", bases.gguf_of(changed)[0]
    changed[key] = rng.choice(VALUES)
    return f"{key} = {changed[key]!r:.40}", bases.gguf_of(changed)[0]


KINDS: dict[str, Callable[[Random, Case], None]] = {
    "config": config,
    "safetensors": safetensors,
    "shards": shards,
    "tokenizer": tokenizer,
    "template": template,
    "gguf": gguf,
}
