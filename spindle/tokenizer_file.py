"""A tokenizer.json, read without trust: what would end the process is refused before it is tried.

The `tokenizers` library reads the file, in Rust. Some things in a file are more than it can bear: a
table of characters that claims to be larger than memory, and replacements or templates that make
millions out of a word, end the process; others make it panic, which in Python is no Exception. So
the file's sections are looked at before it is read, and once more as the library has read them: it
knows a step by its fields, too, and takes lists for objects. A panic becomes an error in words.
"""

from __future__ import annotations

import base64
import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from spindle.errors import TokenizerError, brief
from spindle.paths import why_no_file

EXPECTED = "expected a tokenizer.json as the tokenizers library and transformers write it"
MOST_GROWTH = 256  # characters that the file may make of one, beyond what Unicode does
MOST_ADDED = 1024  # ids around those of a text; real files have four at most
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
            sections = as_read(library)
            check_growth(sections)
            check_added(sections["post_processor"])
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


SEQUENCES = ("normalizers", "pretokenizers", "processors")


def as_read(library: tokenizers.Tokenizer) -> dict[str, Any]:
    """The steps around the model as the library would write them, whatever the file looks like."""
    parts = {name: getattr(library, name) for name in ("normalizer", "pre_tokenizer")}
    parts["post_processor"] = library.post_processor
    return {name: json.loads(part.__getstate__()) if part else None for name, part in parts.items()}


def check_added(section: Any) -> None:
    """ValueError: the post-processor would repeat a text, or surround it, out of proportion."""
    times, added = 1, 0
    for part in parts_of(section):
        copies, ids = _around(part)
        times, added = times * copies, added * copies + ids
        if times > MOST_GROWTH or added > MOST_ADDED:
            raise ValueError(
                f"its post_processor repeats a text {times} times, with {added} ids more; at most "
                f"{MOST_GROWTH} and {MOST_ADDED} are taken"
            )


def _around(part: dict[str, Any]) -> tuple[int, int]:
    """How often a step has each id that comes to it, and how many of its own."""
    if "special_tokens" not in part:
        return 1, 2 * ("sep" in part)  # BertProcessing and RobertaProcessing: one at each end
    tokens, most = part["special_tokens"], (1, 0)
    for form in ("single", "pair"):
        names = [piece["Sequence"]["id"] for piece in part[form] if "Sequence" in piece]
        own = [piece["SpecialToken"]["id"] for piece in part[form] if "SpecialToken" in piece]
        ids = sum(len(tokens[name]["ids"]) for name in own)
        most = max(most[0], *map(names.count, names), 1), max(most[1], ids)
    return most


def parts_of(section: Any) -> Iterator[dict[str, Any]]:
    """The steps of a section, those of sequences in sequences among them."""
    if not isinstance(section, dict):
        return
    inner = [section[key] for key in SEQUENCES if key in section]
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
        case {"precompiled_charsmap": str(table)}:
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


# How much of a text an id may stand for.

COMPOSED = 4  # characters at most become one in a form that composes; none vanishes
KEEPS = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts")
CONTINUES = range(0x80, 0xC0)  # a character of more than one byte has one of these


@dataclass(frozen=True)
class Reach:
    """How many characters one id may stand for; infinity where a step may leave text out."""

    most_chars: float
    unknown: str = ""  # characters that have no id at all, and vanish

    @staticmethod
    def of(library: tokenizers.Tokenizer, byte_alphabet: Mapping[str, int]) -> Reach:
        """What no text can exceed: the longest token's length, where all that comes in is kept.

        byte_alphabet: what a ByteLevel step writes for each byte.
        """
        sections, vocab = as_read(library), library.get_vocab()
        normalizer = list(parts_of(sections["normalizer"]))
        pre_tokenizer = list(parts_of(sections["pre_tokenizer"]))
        is_byte_level = any(part["type"] == "ByteLevel" for part in [*normalizer, *pre_tokenizer])
        names = byte_alphabet if is_byte_level else {f"<0x{byte:02X}>": byte for byte in range(256)}
        missing = [byte for name, byte in names.items() if name not in vocab]
        if (
            not all(map(_keeps, pre_tokenizer))
            or not all(map(_has_the_text, parts_of(sections["post_processor"])))
            or not _spells_bytes(library.model, is_byte_level)
            or any(byte in CONTINUES or not is_byte_level for byte in missing)
        ):
            return Reach(math.inf)
        growth = math.prod(map(growth_of, normalizer))
        added = [_reach(token, growth) for token in library.get_added_tokens_decoder().values()]
        most = math.prod(map(_composed, normalizer)) * max(*map(len, vocab), *added, 1)
        return Reach(most, bytes(byte for byte in missing if byte < 0x80).decode())

    def least_ids(self, text: str) -> int:
        """How many ids a text has at least; 0 where that cannot be known."""
        known = len(text) - sum(map(text.count, self.unknown))
        return math.ceil(known / self.most_chars)


def _composed(part: dict[str, Any]) -> float:
    """The most characters that a normalizer's step makes one of."""
    match part:
        case {"type": "NFC" | "NFKC"}:
            return COMPOSED
        case {"type": "NFD" | "NFKD" | "Lowercase" | "Prepend" | "ByteLevel"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return 1 if len(old) <= len(new) else math.inf
    return math.inf


def _keeps(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer's step leaves no character out."""
    return part["type"] in KEEPS or part.get("behavior", "Removed") != "Removed"


def _has_the_text(part: dict[str, Any]) -> bool:
    """Whether a post-processor's step has the ids of all that comes to it."""
    forms = (("single", {"A"}), ("pair", {"A", "B"})) if "special_tokens" in part else ()
    return all(
        wanted <= {piece["Sequence"]["id"] for piece in part[form] if "Sequence" in piece}
        for form, wanted in forms
    )


def _spells_bytes(model: Any, is_byte_level: bool) -> bool:
    """Whether it is a BPE that falls back on bytes for what it does not know."""
    return (
        isinstance(model, tokenizers.models.BPE)
        and (is_byte_level or model.byte_fallback)
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )


def _reach(token: tokenizers.AddedToken, growth: float) -> float:
    """Characters that an added token may stand for; some take all the space around them."""
    if token.lstrip or token.rstrip:
        return math.inf
    return _size(token.content) * (growth if token.normalized else 1)
