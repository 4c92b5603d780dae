"""A tokenizer.json, read without trust: what would end the process is refused before it is tried.

The `tokenizers` library reads the file, in Rust. Three things in a file are more than it can bear:
a table of characters that claims to be larger than memory, and a chain of replacements that doubles
a text again and again, both end the process; others make it panic, which in Python is no Exception.
So the file's sections are looked at first, and a panic becomes an error in words.
"""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from spindle.errors import TokenizerError, brief
from spindle.paths import why_no_file

EXPECTED = "expected a tokenizer.json as the tokenizers library and transformers write it"
MOST_GROWTH = 256  # characters that the file may make of one, beyond what Unicode does
MAY_MATCH_NOTHING = ("*", "?", "|", "^", "$", "{0", "{,", "\\", "()")  # in a regex
UNICODE_GROWTH = 32  # more than any character has in a form of Unicode; U+FDFA has 18


def load(path: Path) -> tuple[tokenizers.Tokenizer, frozenset[str]]:
    """The library's tokenizer, and the texts of the special tokens. TokenizerError: names `path`.

    Settings of some training run are off: a prompt is encoded whole, and always alike.
    """
    if why := why_no_file(path):
        said = "no such file" if "no such" in why else why
        raise TokenizerError(f"{path}: {said}; {EXPECTED}")
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text, object_pairs_hook=_no_part_twice)
        check_growth(document)
        with panics_named(path):
            library = tokenizers.Tokenizer.from_str(text)
            _try(library)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises no narrower kind
        raise TokenizerError(f"{path}: {brief(error)}; {EXPECTED}") from error
    library.no_truncation()
    library.no_padding()
    if getattr(library.model, "dropout", None):
        library.model.dropout = None
    added = document.get("added_tokens") or []
    return library, frozenset(token["content"] for token in added if token["special"])


@contextmanager
def panics_named(path: Path) -> Iterator[None]:
    """Turn a panic of the library into a TokenizerError that names its file."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which cannot be imported
            raise
        raise TokenizerError(
            f"{path}: the tokenizers library cannot work with it ({brief(error)}); {EXPECTED}"
        ) from error


def _try(library: tokenizers.Tokenizer) -> None:
    """Some files are read without a word, and panic at each text."""
    try:
        library.encode("a b")
    except Exception:
        return  # a text that has no ids here: others may have


def _no_part_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The library may read either of two sections with one name; a vocabulary is not looked at."""
    found = dict(pairs)
    if len(found) < len(pairs) and found.keys() & {"type", "model", "content"}:
        raise ValueError("a key stands twice in one object")
    return found


# How a text may grow on its way to the model.


def check_growth(document: Any) -> None:
    """ValueError: the file would make a text, or a table, out of all proportion."""
    if not isinstance(document, dict):
        raise ValueError(f"it holds a {type(document).__name__}")
    growth = 1.0
    for section in ("normalizer", "pre_tokenizer"):
        for part in parts_of(document.get(section)):
            growth *= growth_of(part)
    if growth > MOST_GROWTH:
        raise ValueError(
            f"its normalizer makes up to {growth:.3g} characters of one; at most {MOST_GROWTH} are "
            "taken"
        )


def parts_of(section: Any) -> Iterator[dict[str, Any]]:
    """The steps of a section, those of sequences in sequences among them."""
    if not isinstance(section, dict):
        return
    inner = [section[key] for key in ("normalizers", "pretokenizers") if key in section]
    if not inner:
        yield section
    for parts in inner:
        for part in parts if isinstance(parts, list) else []:
            yield from parts_of(part)


def growth_of(part: dict[str, Any]) -> float:
    """The most characters that a step makes of one; forms of Unicode, which end by themselves, 1.

    A ByteLevel writes each of at most four bytes as a character.
    """
    match part:
        case {"type": "Replace", "pattern": pattern, "content": str(content)}:
            return _replacement_growth(pattern, content)
        case {"type": "Prepend", "prepend": str(prefix)}:
            return 1 + _size(prefix)
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return _table_growth(table)
        case {"type": "ByteLevel"}:
            return 4
        case {"type": "Metaspace"}:
            return 2
    return 1


def _size(content: str) -> int:
    """Characters of a text in the longest of its forms."""
    return max(len(content), len(unicodedata.normalize("NFKD", content.lower())))


def _replacement_growth(pattern: Any, content: str) -> float:
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str):
        return max(1.0, _size(content) / len(literal)) if literal else 1 + _size(content)
    regex = str(pattern.get("Regex")) if isinstance(pattern, dict) else ""
    plain = regex.replace("\\s+", " ").replace("\\n", " ")  # escapes that real files have here
    may_match_nothing = any(mark in plain for mark in MAY_MATCH_NOTHING)
    return 1 + _size(content) if may_match_nothing else max(1, _size(content))


def _table_growth(table: str) -> float:
    """SentencePiece's table: 4 bytes of length, a trie of so many, texts that end with a zero."""
    raw = base64.b64decode(table)
    trie_bytes = int.from_bytes(raw[:4], "little")
    if not 0 < trie_bytes <= len(raw) - 4:
        raise ValueError(f"its precompiled_charsmap has {len(raw)} bytes and claims {trie_bytes}")
    longest = max(map(len, raw[4 + trie_bytes :].split(b"\0")))
    return 1 if longest <= UNICODE_GROWTH * 4 else longest
