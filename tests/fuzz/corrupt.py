"""How files are damaged: bytes, JSON values, whole files. All from one `random.Random`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzz.bases import Files

Steps = tuple[Any, ...]

# What no value of a JSON file should be; as text, for half of it Python's own writer would refuse.
DIGITS = "9" * 5000  # more than Python turns into an integer
RAW = [
    *("null", "true", "false", "0", "-1", "1", "2", "7", "0.5", "-0.0", "1e-320", "1e308"),
    *("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "65536", "1000000"),
    *("2147483647", "2147483648", "4294967295", "4294967296", "9223372036854775807"),
    *(
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
    ),
    *(str(10**30), "1" + "0" * 4000, DIGITS, "1" + "0" * 400 + ".0"),
    *('""', '"a"', '"\\ud800"', '"\\u0000"', '"../x"', '"/etc/passwd"', '"gpt2"', '"llama"'),
    *(
        '"F64"',
        '"F16"',
        '"BF16"',
        '"I64"',
        '"BOOL"',
        '"F8_E4M3"',
        '"yarn"',
        '"dynamic"',
        '"linear"',
    ),
    *("[]", "[[]]", "{}", "[null]", "[1, 2]", '["a"]', '{"a": 1}', '{"": {"": []}}', "[-1, 1]"),
    *("[0]", "[4611686018427387904, 4]", "[9223372036854775807, 2]", "[0, 18446744073709551615]"),
    *("[" * 500 + "]" * 500, "[" * 100_000, "[" * 3000 + "]" * 3000),
    *('{"a":' * 900 + "1" + "}" * 900, '"' + "x" * 5000 + '"', '"' + "€" * 3000 + '"'),
]


def paths_in(document: Any, at: Steps = ()) -> list[Steps]:
    """Where each value of a JSON document stands, the outermost first; long lists are sampled."""
    found = [at]
    if isinstance(document, dict):
        for key, value in document.items():
            found += paths_in(value, (*at, key))
    elif isinstance(document, list):
        for n in [*range(min(len(document), 4)), *range(4, len(document))[-1:]]:
            found += paths_in(document[n], (*at, n))
    return found


def pick_path(rng: Random, document: Any) -> Steps:
    """A place in a document; every level of nesting has its chance, however many leaves it has."""
    paths = paths_in(document)[1:]
    depth = rng.choice(sorted({len(path) for path in paths}))
    return rng.choice([path for path in paths if len(path) == depth])


def parent_of(document: Any, path: Steps) -> Any:
    for step in path[:-1]:
        document = document[step]
    return document


MARK = "\x00here\x00"
MARKED = json.dumps(MARK)


def replaced(document: Any, path: Steps, raw: str) -> str:
    """The text of a document with the value at `path` replaced by `raw`, whatever that is."""
    copy = json.loads(json.dumps(document))
    parent_of(copy, path)[path[-1]] = MARK
    return json.dumps(copy).replace(MARKED, raw)


def json_damage(rng: Random, document: Any) -> tuple[str, str]:
    """One fault in a JSON document: (what was done, the new text)."""
    path = pick_path(rng, document)
    copy = json.loads(json.dumps(document))
    parent, last = parent_of(copy, path), path[-1]
    where = "/".join(map(str, path))[:80]
    how = rng.choice(["raw"] * 5 + ["drop", "twice", "rename", "swap", "near", "near", "add"])
    if how == "drop":
        del parent[last]
        return f"{where} dropped", json.dumps(copy)
    if how == "twice" and isinstance(parent, dict):
        raw, first = rng.choice(RAW), rng.random() < 0.5
        pair = f"{json.dumps(last)}: {json.dumps(parent[last])}"
        other = f"{json.dumps(last)}: {raw}"
        both = f"{other}, {pair}" if first else f"{pair}, {other}"
        parent[last] = MARK
        text = json.dumps(copy).replace(f"{json.dumps(last)}: {MARKED}", both)
        return f"{where} twice, {raw:.40} {'first' if first else 'last'}", text
    if how == "rename" and isinstance(parent, dict):
        name = rng.choice(
            [last + "x", last[:-1], last.upper(), "\ud800", "", "__metadata__", "a\0"]
        )
        parent[name] = parent.pop(last)
        return f"{where} renamed {name!r}", json.dumps(copy)
    if how == "swap":
        other_path = pick_path(rng, document)
        a, b = parent, parent_of(copy, other_path)
        longer, shorter = sorted((path, other_path), key=len)[::-1]
        if longer[: len(shorter)] != shorter:
            a[last], b[other_path[-1]] = b[other_path[-1]], a[last]
            return f"{where} swapped with {'/'.join(map(str, other_path))[:80]}", json.dumps(copy)
    if how == "near" and isinstance(parent[last], int | float):
        raw = str(rng.choice([parent[last] + 1, parent[last] - 1, parent[last] * 2, -parent[last]]))
        return f"{where} -> {raw}", replaced(document, path, raw)
    if how == "add":
        name, raw = rng.choice(EXTRA)
        text = json.dumps(copy)
        if text.startswith("{"):
            return f"{name} added", f'{{"{name}": {raw}{", " * (len(copy) > 0)}{text[1:]}'
    raw = rng.choice(RAW)
    return f"{where} -> {raw:.60}", replaced(document, path, raw)


# Keys that ask for code, other files or other computations.
EXTRA = [
    ("auto_map", '{"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", null]}'),
    ("trust_remote_code", "true"),
    ("transformers_weights", '"pytorch_model.bin"'),
    ("quantization_config", '{"quant_method": "gptq"}'),
    ("tokenizer_class", '"../../evil"'),
    ("base_model_name_or_path", '"/etc"'),
    ("torch_dtype", '"float8"'),
    ("sliding_window", "4"),
    ("rope_scaling", '{"type": "longrope", "factor": 2}'),
    ("chat_template", '{"a": 1}'),
]


def bytes_damage(rng: Random, data: bytes) -> tuple[str, bytes]:
    """One fault in bytes, of any format."""
    at, size = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 4, 8, 64])
    how = rng.choice(["flip", "flip", "cut", "insert", "remove", "repeat", "zero", "front", "ends"])
    if how == "flip" and data:
        at = rng.randrange(len(data))
        bit = 1 << rng.randrange(8)
        return f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
    if how == "cut":
        at = rng.choice([at, 0, 1, 7, 8, 9, len(data) - 1, len(data) // 2])
        return f"cut at {at}", data[: max(at, 0)]
    if how == "insert":
        junk = rng.choice([rng.randbytes(size), b"\xff" * size, b"\0" * size, b"\xef\xbb\xbf"])
        return f"{junk[:8]!r} at {at}", data[:at] + junk + data[at:]
    if how == "remove":
        return f"{size} bytes gone at {at}", data[:at] + data[at + size :]
    if how == "repeat":
        return f"{size} bytes twice at {at}", data[: at + size] + data[at:]
    if how == "zero":
        return f"{size} bytes zero at {at}", data[:at] + bytes(size) + data[at + size :]
    if how == "front":
        front = rng.choice(
            [b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b" " * 9, b"\x1f\x8b\x08", b"PK\x03\x04"]
        )
        return f"{front!r} in front", front + data
    end = rng.choice([b"\0", b"}", b"]", b"\n\n", b"x", bytes(4096)])
    return f"{len(end)} bytes at the end", data + end


# Something else in a file's place.


def no_file(path: Path) -> None:
    pass


def empty(path: Path) -> None:
    path.touch()


def directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def outside(path: Path) -> None:
    path.symlink_to("/etc/passwd")


PLACES: list[Callable[[Path], None]] = [
    no_file,
    empty,
    directory,
    fifo,
    endless,
    loop,
    dangling,
    outside,
]


def put(files: Files, folder: Path, odd: dict[str, Callable[[Path], None]]) -> None:
    """Write the files of a case; those in `odd` are made by their function instead."""
    for name, content in files.items():
        if name not in odd:
            (folder / name).write_bytes(content)
    for name, make in odd.items():
        make(folder / name)
