"""Text to ids and back: the same as the tokenizers library and transformers, also id by id.

The tokenizers under test are trained here, on a few lines in many scripts: byte-level BPE, Unigram
with Metaspace in its three schemes, and BPE with byte fallback, with and without a first space.
"""

import base64
import itertools
import json
import os
import sys
import threading
import time
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from spindle.errors import RequestError, TokenizerError
from spindle.tokenizer import LONG, StreamDecoder, Tokenizer, check_ids

TEXTS = [
    "The capital of France is Paris, and the price is 3.50 €.",
    "Hello world! Hello, worlds; don't  stop   here.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "안녕하세요 세상, 오늘은 날씨가 좋네요.",
    "مرحبا بالعالم، كيف حالك؟",
    "日本語の文章と、中文的句子。",
    "family 👩‍👩‍👧‍👦, flag 🇨🇿, thumb 👍🏽, heart ❤️, clef 𝄞",
    "def add(x, y):\n    return x + y  # sum\n\n\tprint(add(1, 2))\r\n",
    "  two spaces first, one last ",
    "e\u0301 and é, ﷺ, \u200b zero width, \ufffd itself, \ufeff mark",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
KINDS = ["byte-level", "metaspace-always", "metaspace-first", "metaspace-never", "llama", "gemma"]


def byte_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXTS * 5,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    # Added tokens outside the byte alphabet, within it by accident, and half within.
    library.add_tokens([AddedToken("žluť"), AddedToken("é"), AddedToken("Ġx y")])
    return library


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(TEXTS * 5, trainer)
    library.add_tokens([AddedToken("▁a▁b c"), AddedToken(" d")])
    return library


def byte_fallback(strip: bool) -> tokenizers.Tokenizer:
    """Llama's layout: specials, 256 byte tokens, then pieces; what those cannot write is bytes."""
    learnt = tokenizers.Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.Metaspace()  # so that no merge crosses a word's start
    trainer = trainers.BpeTrainer(vocab_size=200, limit_alphabet=60, show_progress=False)
    learnt.train_from_iterator(TEXTS * 5, trainer)
    model = json.loads(learnt.to_str())["model"]
    pieces = [*SPECIAL[:3], *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(dict.fromkeys(pieces))},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if strip else space
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    library.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    library.add_special_tokens(SPECIAL)
    library.add_tokens([AddedToken("▁a▁b c"), AddedToken(" d")])
    return library


def build(kind: str) -> tokenizers.Tokenizer:
    name, _, scheme = kind.partition("-")
    if name == "byte":
        return byte_level()
    return metaspace(scheme) if name == "metaspace" else byte_fallback(strip=name == "llama")


class Pair:
    """One tokenizer twice: the library's object, and ours, read from the library's file."""

    def __init__(self, library: tokenizers.Tokenizer, folder) -> None:
        library.save(str(folder / "tokenizer.json"))
        self.folder = folder
        self.library = library
        self.ours = Tokenizer(folder)

    def id(self, token: str) -> int:
        token_id = self.library.token_to_id(token)
        assert token_id is not None, token
        return token_id

    def is_visible(self, token_id: int, skip: bool) -> bool:
        added = self.library.get_added_tokens_decoder().get(token_id)
        known = self.library.id_to_token(token_id) is not None
        return known and not (skip and added is not None and added.special)

    def some_ids(self, data, min_size: int = 0) -> list[int]:
        """Any ids, those without a token included; lone spaces, bytes and specials often."""
        odd = ["▁", "Ġ", "é", " d", "▁a▁b c", "<|endoftext|>", "<s>", "<0x20>", "<0xE2>", "<0x82>"]
        odd_ids = [i for token in odd if (i := self.library.token_to_id(token)) is not None]
        one = st.sampled_from(odd_ids) | st.integers(0, self.ours.vocab_size + 3)
        return data.draw(st.lists(one, min_size=min_size, max_size=40))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    return {kind: Pair(build(kind), tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def pair(request, pairs) -> Pair:
    return pairs[request.param]


def streamed(tokenizer: Tokenizer, ids, **options) -> list[str]:
    stream = StreamDecoder(tokenizer, **options)
    return [*map(stream.push, ids), stream.flush()]


def repaired(pair: Pair, ids: list[int], skip: bool) -> list[int]:
    """The ids with each run of byte tokens rewritten so that it is UTF-8: U+FFFD for what is not.

    The difference between the library's decode and ours, as a function of the ids: the library
    decodes the repaired ids as we decode the ids themselves.
    """
    first_byte = pair.library.token_to_id("<0x00>")
    if first_byte is None:
        return ids
    shown = [i for i in ids if pair.is_visible(i, skip)]
    result = []
    for is_byte, run in groupby(shown, lambda i: first_byte <= i < first_byte + 256):
        run = list(run)
        if is_byte:
            text = bytes(i - first_byte for i in run).decode("utf-8", errors="replace")
            run = [first_byte + byte for byte in text.encode()]
        result += run
    return result


# Text to ids.


@pytest.mark.parametrize("text", [*TEXTS, "", "a<|endoftext|>b", "<s>Hello", "žluť é Ġx y d▁a▁b c"])
def test_encode_is_that_of_transformers(pair, text):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(pair.folder / "tokenizer.json"))
    assert pair.ours.encode(text) == theirs.encode(text)
    without = theirs.encode(text, add_special_tokens=False)
    assert pair.ours.encode(text, add_special_tokens=False) == without


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_text_comes_back_from_its_ids(pairs, text):
    text = text.replace("é", "e")  # an added token here, and by accident a byte of the alphabet
    ours = pairs["byte-level"].ours
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_one_bos_where_the_tokenizer_adds_one_and_none_elsewhere(pairs):
    """B82: a raw prompt; one that spells the BOS itself gets a second, as the docstring says."""
    llama = pairs["llama"].ours
    assert llama.encode("Hello").count(1) == 1
    assert llama.encode("Hello", add_special_tokens=False).count(1) == 0
    assert llama.encode("<s>Hello")[:2] == [1, 1]
    assert llama.id_to_token(1) == "<s>"
    gpt = pairs["byte-level"].ours
    assert gpt.encode("Hello") == gpt.encode("Hello", add_special_tokens=False)


def test_text_that_spells_a_special_token_becomes_it(pairs):
    pair = pairs["byte-level"]
    end = pair.id("<|endoftext|>")
    ids = pair.ours.encode("a<|endoftext|>b")
    assert ids == [*pair.ours.encode("a"), end, *pair.ours.encode("b")]
    assert pair.ours.decode(ids) == "ab"
    assert pair.ours.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"


def test_empty_text(pairs):
    """B107: no ids without a BOS, the BOS alone with one, and no text from no ids."""
    assert pairs["byte-level"].ours.encode("") == []
    assert pairs["llama"].ours.encode("") == [1]
    for pair in pairs.values():
        assert pair.ours.decode([]) == ""
        assert streamed(pair.ours, []) == [""]


def test_encoding_a_decoded_text_need_not_give_its_ids(pairs):
    """B90: five tokens spell what the tokenizer writes in fewer, so text does not count tokens."""
    pair = pairs["byte-level"]
    ids = [pair.id(character) for character in "Hello"]
    again = pair.ours.encode(pair.ours.decode(ids))
    assert pair.ours.decode(ids) == pair.ours.decode(again) == "Hello"
    assert len(again) < len(ids) == 5


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_is_encoded_as_a_short_one(pair, special):
    text = " ".join(TEXTS) * 30
    assert len(text) > LONG
    wanted = pair.ours._library.encode(text, add_special_tokens=special).ids
    assert pair.ours.encode(text, special) == wanted


def test_while_a_long_text_is_encoded_other_threads_run(pairs):
    """A server's other requests do not stand still: no pause is half of the whole."""
    text = " ".join(TEXTS) * 300
    work = threading.Thread(target=pairs["byte-level"].ours.encode, args=(text,))
    times = [time.perf_counter()]
    work.start()
    while work.is_alive():
        times.append(time.perf_counter())
        time.sleep(0.001)
    times.append(time.perf_counter())
    assert max(np.diff(times)) < (times[-1] - times[0]) / 2


def test_a_prompt_is_encoded_whole_whatever_the_file_says(tmp_path):
    library = byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=64)
    text = TEXTS[0]
    assert Pair(library, tmp_path).ours.decode(Tokenizer(tmp_path).encode(text)) == text
    assert len(Tokenizer(tmp_path).encode(text)) not in (3, 64)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (["a"], "list"),
        ("ab\ud83d", r"\\ud83d.*position 2"),
    ],
)
def test_what_is_no_text_is_refused_in_words(pairs, text, said):
    with pytest.raises(RequestError, match=f"text to encode: .*{said}"):
        pairs["byte-level"].ours.encode(text)


def test_a_text_that_the_vocabulary_cannot_write_is_refused_in_words(tmp_path):
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="<none>"))
    library.decoder = decoders.Metaspace()
    with pytest.raises(RequestError, match="text to encode"):
        Pair(library, tmp_path).ours.encode("b")


# Ids to text.


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_decode_of_real_text_is_the_library_s(pair, text, skip):
    ids = pair.library.encode(text).ids
    assert pair.ours.decode(ids, skip) == pair.library.decode(ids, skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_of_any_ids_is_the_library_s(pair, data, skip):
    """B86: lone spaces first, specials anywhere, ids without a token; byte runs made UTF-8."""
    ids = pair.some_ids(data)
    assert pair.ours.decode(ids, skip) == pair.library.decode(repaired(pair, ids, skip), skip)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_of_any_ids_is_that_of_transformers(pair, data, skip):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(pair.folder / "tokenizer.json"))
    ids = [i for i in pair.some_ids(data) if pair.library.id_to_token(i) is not None]
    expected = theirs.decode(
        repaired(pair, ids, skip), skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert pair.ours.decode(ids, skip) == expected


def test_a_broken_run_of_bytes_keeps_its_valid_characters(pairs):
    """The one difference from the library, which replaces every byte of such a run."""
    pair = pairs["llama"]
    ids = [pair.id(f"<0x{byte:02X}>") for byte in (*"€".encode(), 0xFF)]
    assert pair.library.decode(ids) == "\ufffd" * 4
    assert pair.ours.decode(ids) == "€\ufffd"


def test_only_the_first_space_of_a_sequence_is_dropped(pairs):
    """B86: it is dropped once, and from the first token even where that is a space alone."""
    for kind in ("llama", "metaspace-always", "metaspace-first"):
        pair = pairs[kind]
        assert pair.ours.decode([pair.id("▁")] * 3) == "  "
        assert pair.ours.decode([pair.id("<s>")] + [pair.id("▁")] * 3) == "  "
    for kind in ("gemma", "metaspace-never"):
        assert pairs[kind].ours.decode([pairs[kind].id("▁")] * 3) == "   "


def test_token_bytes_join_to_the_text(pair):
    """In mid-text: so after a token that has taken the part of the first one."""
    ids = pair.library.encode(TEXTS[0]).ids
    opening = pair.id("a")
    joined = b"".join(map(pair.ours.token_bytes, ids)).decode()
    assert "a" + joined == pair.ours.decode([opening, *ids], skip_special_tokens=False)


def test_ids_without_a_token_are_empty_text(tmp_path):
    """B81: ids may leave gaps below the largest, and a model may have more rows than that."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 59}, []))
    library.decoder = decoders.ByteLevel()
    ours = Pair(library, tmp_path).ours
    assert library.get_vocab_size() == 2
    assert ours.vocab_size == 60
    assert ours.decode([0, 7, 62, 59, 2**32 - 1]) == "ab"
    assert streamed(ours, [0, 7, 62, 59]) == ["a", "", "", "b", ""]
    assert (ours.id_to_token(59), ours.id_to_token(7), ours.id_to_token(62)) == ("b", None, None)
    assert (ours.token_bytes(59), ours.token_bytes(62)) == (b"b", b"")


WRONG_IDS = [-1, 2**32, 2**63, -(2**70), True, 1.5, 2.0, None, "a", [3], np.True_, np.float32(2)]
WRONG_IDS += [torch.tensor(True), torch.tensor(2.0), torch.tensor([3]), np.int64(-1)]


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=repr)
def test_a_wrong_id_is_refused_by_its_position(pairs, wrong):
    """B89, B108: in a list, in a stream, in a prompt; the stream goes on afterwards."""
    ours = pairs["byte-level"].ours
    with pytest.raises(RequestError, match="at position 2: expected an integer from 0 to"):
        ours.decode([5, 6, wrong])
    with pytest.raises(RequestError, match="at position 1"):
        StreamDecoder(ours, prompt_ids=[5, wrong])
    stream = StreamDecoder(ours, prompt_ids=[5, 6, 7])
    pieces = [stream.push(70), stream.push(71)]
    with pytest.raises(RequestError, match="at position 2"):
        stream.push(wrong)
    assert [*pieces, stream.push(72)] == streamed(ours, [70, 71, 72])[:-1]
    for lookup in (ours.id_to_token, ours.token_bytes):
        with pytest.raises(RequestError, match="at position 0"):
            lookup(wrong)


def test_check_ids_takes_a_vocabulary_s_size():
    """B108: what a prompt's ids are checked with."""
    assert check_ids([0, 59], limit=60) == [0, 59]
    with pytest.raises(RequestError, match=r"token id 60 at position 1: .* from 0 to 59"):
        check_ids([0, 60], limit=60)
    for wrong in (5, None, torch.tensor(3), 1.5):
        with pytest.raises(RequestError, match="expected a list of integers, got"):
            check_ids(wrong)


def test_integers_of_numpy_and_torch_are_ids(pairs):
    """B89, B108."""
    ours = pairs["byte-level"].ours
    ids = ours.encode("Hello world")
    text = ours.decode(ids)
    assert text == "Hello world"
    for array in (
        np.array(ids),
        np.array(ids, np.uint16),
        torch.tensor(ids),
        tuple(ids),
        iter(ids),
    ):
        assert ours.decode(array) == text
    for kind in (np.int32, np.uint64, torch.tensor, np.array):
        assert ours.decode([kind(i) for i in ids]) == text
        assert "".join(streamed(ours, [kind(i) for i in ids])) == text
    assert all(type(i) is int for i in check_ids(np.array(ids)) + check_ids(torch.tensor(ids)))


# Ids to text, one at a time.


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_are_the_decode_of_any_ids(pair, data, skip):
    """B84, B86."""
    ids = pair.some_ids(data)
    pieces = streamed(pair.ours, ids, skip_special_tokens=skip)
    assert "".join(pieces) == pair.ours.decode(ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_of_real_text_holds_half_a_character(pair, text):
    """B84: what is shown is always a prefix of the text, so no U+FFFD that the text has not."""
    ids = pair.ours.encode(text)
    stream = StreamDecoder(pair.ours)
    expected = pair.ours.decode(ids)
    shown = ""
    for token_id in ids:
        shown += stream.push(token_id)
        assert expected.startswith(shown)
    assert (shown, stream.flush()) == (expected, "")
    assert pair.library.decode(ids) == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data(), skip=st.booleans(), prompt=st.sampled_from(TEXTS))
def test_a_continuation_is_the_rest_of_the_whole_text(pair, data, skip, prompt):
    """B85: decode(prompt) + pieces == decode(prompt + ids), also for a prompt of a BOS alone."""
    prompt_ids = pair.ours.encode(prompt)[: data.draw(st.sampled_from([0, 1, None]))]
    ids = pair.some_ids(data)
    if StreamDecoder(pair.ours, skip, prompt_ids).flush():
        prompt_ids = pair.ours.encode(prompt)  # a first token that ends inside a character
    pieces = streamed(pair.ours, ids, skip_special_tokens=skip, prompt_ids=prompt_ids)
    whole = pair.ours.decode(prompt_ids + ids, skip)
    assert pair.ours.decode(prompt_ids, skip) + "".join(pieces) == whole


@pytest.mark.parametrize("kind", ["metaspace-always", "metaspace-first", "llama"])
def test_a_continuation_keeps_the_space_of_its_first_word(pairs, kind):
    """B85: "Hello" and then " world!", and a continuation that begins inside a word."""
    pair = pairs[kind]
    hello, both = pair.ours.encode("Hello"), pair.ours.encode("Hello world!")
    assert both[: len(hello)] == hello
    rest = both[len(hello) :]
    assert "".join(streamed(pair.ours, rest, prompt_ids=hello)) == " world!"
    assert "".join(streamed(pair.ours, rest)) == pair.ours.decode(rest) == "world!"
    assert "".join(streamed(pair.ours, [pair.id("s"), *rest], prompt_ids=hello)) == "s world!"


def test_the_euro_sign_appears_with_its_third_byte(pairs):
    """B88: and plain letters come one a push."""
    pair = pairs["llama"]
    ids = [pair.id(token) for token in ("▁", "a", "<0xE2>", "<0x82>", "<0xAC>", "b", "<0x63>")]
    assert streamed(pair.ours, ids) == ["", "a", "", "", "€", "b", "c", ""]
    gpt = pairs["byte-level"]
    ids = [gpt.id(token) for token in ("a", "â", "Ĥ", "¬", "b")]
    assert streamed(gpt.ours, ids) == ["a", "", "", "€", "b", ""]


def test_an_unfinished_character_is_flushed_once(pairs):
    gpt = pairs["byte-level"]
    ids = [gpt.id(token) for token in ("a", "â", "Ĥ")]
    assert streamed(gpt.ours, ids) == ["a", "", "", "\ufffd"]
    assert gpt.ours.decode(ids) == "a\ufffd"
    assert streamed(gpt.ours, [gpt.id("¬")], prompt_ids=ids) == ["€", ""]
    assert streamed(gpt.ours, [*ids, gpt.id("b")]) == ["a", "", "", "\ufffdb", ""]


@given(data=st.data())
def test_a_stream_remembers_three_bytes_at_most(pair, data):
    """What makes a push cost the same after ten ids and after a hundred thousand."""
    stream = StreamDecoder(pair.ours)
    for token_id in pair.some_ids(data):
        stream.push(token_id)
        unfinished, _ = stream._utf8.getstate()
        assert len(unfinished) <= 3


# Files.


def test_the_ids_that_begin_and_end_a_text(tmp_path):
    """generation_config.json before config.json before tokenizer_config.json, name by name."""
    pair = Pair(byte_level(), tmp_path)
    assert (pair.ours.bos_id, pair.ours.eos_ids) == (None, ())
    steps = [
        ("tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, 1, (2,)),
        ("config.json", {"eos_token_id": 7}, 1, (7,)),
        ("generation_config.json", {"bos_token_id": 5, "eos_token_id": None}, 5, (7,)),
        ("generation_config.json", {"bos_token_id": 5, "eos_token_id": [8, 9]}, 5, (8, 9)),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 0}, 0, (0,)),
    ]
    for name, content, bos_id, eos_ids in steps:
        (tmp_path / name).write_text(json.dumps(content))
        ours = Tokenizer(str(tmp_path))
        assert (ours.bos_id, ours.eos_ids) == (bos_id, eos_ids), name


BAD_TOKENIZERS = [
    b"",
    b'{"version": "1.0", "model"',
    b"\xff\xfe{}",
    b"[]",
    b"{}",
    b"null",
    b'{"model": {"type": "Nope"}}',
]


@pytest.mark.parametrize("content", BAD_TOKENIZERS, ids=repr)
def test_a_damaged_tokenizer_json_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*; expected a tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_missing_tokenizer_json_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file; expected"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff{}", b"[" * 100_000], ids=len)
def test_a_damaged_config_is_named(tmp_path, name, content):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{name}: expected a JSON object"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", {"eos_token_id": "</s>"}, "eos_token_id: token id '</s>' at position 0"),
        ("config.json", {"eos_token_id": [2, -1]}, "eos_token_id: token id -1 at position 1"),
        ("config.json", {"bos_token_id": True}, "bos_token_id: token id True"),
        ("tokenizer_config.json", {"eos_token": "<nope>"}, "eos_token: .* got '<nope>'"),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token: .* got 5"),
    ],
)
def test_a_wrong_bos_or_eos_is_named(tmp_path, name, content, said):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=f"{name}: {said}"):
        Tokenizer(tmp_path)


UNKNOWN_DECODERS = {
    "none": None,
    "WordPiece": decoders.WordPiece(),
    "BPEDecoder": decoders.BPEDecoder(),
    r"Replace \+ ByteFallback": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback()]
    ),
    r"Replace \+ ByteFallback \+ Fuse \+ Strip": decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 1),
        ]
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN_DECODERS)
def test_an_unknown_kind_of_decoder_is_named_with_the_known_ones(tmp_path, kind):
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if UNKNOWN_DECODERS[kind] is not None:
        library.decoder = UNKNOWN_DECODERS[kind]
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=f"decoder is {kind}; expected ByteLevel, Metaspace"):
        Tokenizer(tmp_path)


def test_older_spellings_of_a_known_decoder_are_read(tmp_path, pairs):
    """Metaspace before its schemes had names, and a sequence of one."""
    for kind, decoder in [
        ("metaspace-always", {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}),
        ("byte-level", {"type": "Sequence", "decoders": [decoders.ByteLevel()]}),
    ]:
        content = json.loads((pairs[kind].folder / "tokenizer.json").read_text("utf-8"))
        if kind == "byte-level":
            decoder["decoders"] = [content["decoder"]]
        content["decoder"] = decoder
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        ids = pairs[kind].ours.encode("Hello world!")
        assert Tokenizer(tmp_path).decode(ids) == pairs[kind].library.decode(ids) == "Hello world!"


def test_a_bare_word_goes_to_the_hub_and_a_directory_does_not(pairs, monkeypatch):
    """So that "tiny" means one model everywhere, whatever folders lie in the current directory."""
    asked = []
    folder = pairs["llama"].folder

    def resolve(name):
        asked.append(name)
        return folder

    monkeypatch.setitem(sys.modules, "spindle.hub", SimpleNamespace(resolve=resolve))
    monkeypatch.chdir(folder.parent)
    byte_level_name = pairs["byte-level"].folder.name
    for path in (str(folder), folder, Path(folder.name), f"./{folder.name}", f"{folder.name}/"):
        assert Tokenizer(path).vocab_size == pairs["llama"].ours.vocab_size
    assert asked == []
    for name in ("a-name", byte_level_name):
        assert Tokenizer(name).vocab_size == pairs["llama"].ours.vocab_size
    assert asked == ["a-name", byte_level_name]


@pytest.mark.smollm2
def test_smollm2_decodes_and_streams_as_its_library_does():
    """B84: a vocabulary of real size, with its real splits of emoji, Czech and Korean."""
    ours = Tokenizer("smollm2")
    assert ours.vocab_size == 49152
    assert [ours.id_to_token(i) for i in ours.eos_ids] == ["<|im_end|>"]
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == ours._library.decode(ids) == "".join(streamed(ours, ids)) == text


# --- hostile files -------------------------------------------------------------------------------


def with_part(folder: Path, section: str, part: object, library=None) -> Path:
    """A tokenizer.json with one of its sections replaced; of the model, a key."""
    content = json.loads((library or byte_level()).to_str())
    content[section] = content[section] | part if section == "model" else part
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


VOCABULARY = byte_level().get_vocab()


def split(regex: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def normalizers_of(*parts: dict) -> dict:
    return {"type": "Sequence", "normalizers": list(parts)}


UNKNOWN_TOKEN = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[NO]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {},
}
PANICS = {
    "pieces of no length": ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "a table that is none": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a table of nothing": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
    "an unknown special token": ("post_processor", UNKNOWN_TOKEN),
}


@pytest.mark.parametrize("case", PANICS)
def test_what_makes_the_library_panic_is_refused_by_file(case, tmp_path):
    """A panic of Rust is no Exception in Python: it would end a server, and name nothing."""
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: .*; expected a tokenizer\.json"):
        Tokenizer(with_part(tmp_path, *PANICS[case]))


def test_a_text_that_makes_the_library_panic_is_refused_by_file(tmp_path):
    """A regex that tries every way to cut a run of a's; the library gives up after so many."""
    ours = Tokenizer(with_part(tmp_path, "pre_tokenizer", split("(a+)+$")))
    for _ in range(2):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: the tokenizers library cannot"):
            ours.encode("a" * 60 + "b")
    assert isinstance(ours.encode("bbb"), list)


TABLE = base64.b64encode((2**32 - 1).to_bytes(4, "little") + b"\0\0").decode()
LONG_ENTRY = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a" * 999 + b"\0").decode()
DOUBLINGS = {
    "doubled forty times": normalizers_of(*[replace({"String": "l"}, "ll")] * 40),
    "something from nothing": normalizers_of(*[replace({"String": ""}, "l")] * 40),
    "a regex that matches nothing": normalizers_of(*[replace({"Regex": "l*"}, "l")] * 40),
    "a look ahead": normalizers_of(*[replace({"Regex": "(?=l)"}, "l")] * 40),
    "ligatures": normalizers_of(*[replace({"String": "l"}, "\ufdfa"), {"type": "NFKC"}] * 9),
    "capitals": normalizers_of(*[replace({"String": "\u0307"}, "İ"), {"type": "Lowercase"}] * 40),
    "bytes of bytes": normalizers_of(*[{"type": "ByteLevel"}] * 40),
    "in front": normalizers_of(*[{"type": "Prepend", "prepend": "l"}] * 40),
    "a very long word": replace({"String": "l"}, "x" * 1000),
    "sequences in sequences": normalizers_of(
        *[normalizers_of(*[replace({"String": "l"}, "ll")] * 3)] * 3
    ),
    "a table larger than memory": {"type": "Precompiled", "precompiled_charsmap": TABLE},
    "a table with a long word": {"type": "Precompiled", "precompiled_charsmap": LONG_ENTRY},
}


@pytest.mark.parametrize("case", DOUBLINGS)
def test_a_text_does_not_grow_beyond_memory(case, tmp_path):
    """Some of these end the process: the library asks for more memory than there is, and aborts."""
    expected = r"tokenizer\.json: its (normalizer makes|precompiled_charsmap has)"
    with pytest.raises(TokenizerError, match=expected):
        Tokenizer(with_part(tmp_path, "normalizer", DOUBLINGS[case]))


def template(single, ids=(1,), pair=None, tokens=()):
    pair = pair or [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}},
    ]
    special = {"X": {"id": "X", "ids": list(ids), "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


A, X = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "X", "type_id": 0}}
SURROUNDED = {
    "long": template([X, A], ids=[1] * 1025),
    "often": template([X] * 6000 + [A], ids=[1] * 6000),
    "a list": template([{"SpecialToken": ["X", 0]}] * 1025 + [A]),
    "for pairs": template([A], pair=[X] * 1025 + [A, {"Sequence": {"id": "B", "type_id": 0}}]),
    "twice": {"type": "Sequence", "processors": [template([A, A])] * 9},
    "in turn": {
        "type": "Sequence",
        "processors": [{"type": "Sequence", "processors": 9 * [template([A, A, X])]}],
    },
    "added up": {"type": "Sequence", "processors": [template([X] * 9 + [A])] * 120},
}
SURROUNDED["without a type"] = {k: v for k, v in SURROUNDED["often"].items() if k != "type"}


@pytest.mark.parametrize("case", SURROUNDED)
def test_what_is_put_around_a_text_is_in_proportion(case, tmp_path):
    with pytest.raises(TokenizerError, match=r"its post_processor repeats a text \d+ times, with"):
        Tokenizer(with_part(tmp_path, "post_processor", SURROUNDED[case]))


def test_a_few_ids_around_a_text_are_no_trouble(tmp_path):
    folder = with_part(tmp_path, "post_processor", template([X, A, X], ids=[1, 2]))
    plain = byte_level().encode("hello").ids
    assert Tokenizer(folder).encode("hello") == [1, 2, *plain, 1, 2]


@pytest.mark.parametrize(
    "part",
    [
        {"pattern": {"String": "l"}, "content": "l" * 1000},
        [{"String": "l"}, "l" * 1000],
        ["x" * 1000],
        {"normalizers": [{"prepend": "x" * 1000}]},
        {"type": "Sequence", "normalizers": [["x" * 1000]]},
    ],
)
def test_a_step_is_known_by_what_it_does_not_by_what_the_file_calls_it(part, tmp_path):
    """The library takes objects without a type, and lists for objects."""
    with pytest.raises(
        TokenizerError, match=r"its normalizer makes up to 4e\+03 characters of one"
    ):
        Tokenizer(with_part(tmp_path, "normalizer", part))


# How few ids a text can have.

CUTS = {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed", "invert": False}
BYTES = json.loads(pre_tokenizers.ByteLevel(add_prefix_space=False).__getstate__())
REACHES = {  # a section and what stands there: characters that the longest token's may have been
    "as it is": ("normalizer", None, 1),
    "composed": ("normalizer", {"type": "NFC"}, 4),
    "stripped": ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}, None),
    "shortened": ("normalizer", replace({"Regex": "a+"}, "a"), None),
    "for a longer text": ("normalizer", replace({"String": "ab"}, "a"), None),
    "for a text of that length": ("normalizer", replace({"String": " "}, "a"), 1),
    "cut out": ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [CUTS, BYTES]}, None),
    "words": ("pre_tokenizer", {"type": "WhitespaceSplit"}, None),
    "no text": ("post_processor", template([X]), None),
    "a mark": ("post_processor", template([X, A]), 1),
}


@pytest.mark.parametrize("case", REACHES)
def test_how_few_ids_a_text_can_have(case, tmp_path):
    section, part, times = REACHES[case]
    ours, longest = Tokenizer(with_part(tmp_path, section, part)), max(map(len, VOCABULARY))
    for text in ("", "a" * 1000, " " * 9300, "e\u0301" * 500, "hello world " * 40):
        expected = 0 if times is None else -(-len(text) // (times * longest))
        assert ours.least_ids(text) == expected <= len(ours.encode(text, False))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_text_has_fewer_ids_than_that(pair, data):
    odd = st.sampled_from([*SPECIAL, *TEXTS, " " * 500, "\x04" * 99, "é" * 50, "žluť" * 9])
    text = "".join(data.draw(st.lists(st.one_of(st.text(), odd), max_size=6)))
    assert pair.ours.least_ids(text) <= len(pair.ours.encode(text, False))


def test_of_which_tokenizers_it_is_known(pairs):
    known = {kind for kind, pair in pairs.items() if pair.ours.least_ids("a" * 10_000)}
    assert known >= {"byte-level"} and not {kind for kind in known if "metaspace" in kind}


def test_added_tokens_count_and_one_that_takes_space_may_stand_for_any_length(tmp_path):
    library = byte_level()
    library.add_tokens([AddedToken("x" * 200)])
    ours = Tokenizer(with_part(tmp_path, "normalizer", None, library))
    assert ours.least_ids("x" * 201) == 2 and len(ours.encode("x" * 200)) == 1
    library.add_tokens([AddedToken("<r>", rstrip=True)])
    ours = Tokenizer(with_part(tmp_path, "normalizer", None, library))
    assert ours.least_ids("<r>" + " " * 9999) == 0 < len(ours.encode("<r>" + " " * 9999)) == 1


def test_bytes_that_no_token_has_are_not_counted(tmp_path):
    """They vanish: a text of nothing else has no ids, however long it is."""
    model = json.loads(byte_level().to_str())["model"]
    model["vocab"]["nothing"] = model["vocab"].pop("\u0104")  # as the byte 4 is written
    ours = Tokenizer(with_part(tmp_path, "model", model))
    longest = max(map(len, VOCABULARY))
    assert ours.encode("\x04" * 1000) == [] and ours.least_ids("\x04" * 1000) == 0
    assert ours.least_ids("\x04" * 1000 + "a" * (longest + 1)) == 2


def test_a_text_that_cannot_fit_is_not_read(monkeypatch):
    ours = Tokenizer("tiny")  # whose longest token has 93 characters
    assert ours.encode_within("a" * 93, 10) == ours.encode("a" * 93)
    monkeypatch.setattr(ours, "encode", None)
    words = "has 931 characters, which are 11 tokens or more; at most 10 fit"
    with pytest.raises(RequestError, match=words):
        ours.encode_within("a" * 931, 10)


def test_ids_without_an_end_or_an_order_are_refused():
    with pytest.raises(RequestError, match="token ids: more than 4194304 from an iterator; give a"):
        Tokenizer("tiny").decode(itertools.repeat(5))
    for ids in ({5, 6}, {5: 6}, frozenset([5])):
        with pytest.raises(RequestError, match="token ids: expected a list of integers, got"):
            Tokenizer("tiny").decode(ids)


def test_bytes_of_bytes_of_bytes_are_refused_before_words_are_cut(tmp_path):
    part = json.loads(pre_tokenizers.ByteLevel().__getstate__())
    sequence = {"type": "Sequence", "pretokenizers": [part] * 40}
    with pytest.raises(TokenizerError, match=r"its normalizer makes up to 1\.21e\+24 char"):
        Tokenizer(with_part(tmp_path, "pre_tokenizer", sequence))


ORDINARY = [
    normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]),
    normalizers.Sequence(
        [
            *(normalizers.Replace("``", '"'), normalizers.Replace("''", '"')),
            *(normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()),
        ]
    ),
    normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    normalizers.Sequence(
        [
            *(normalizers.NFC(), normalizers.Replace(tokenizers.Regex(r"\s+"), " ")),
            normalizers.Lowercase(),
        ]
    ),
    normalizers.Sequence([normalizers.Replace(c, f"<{c}{c}>") for c in "ab"]),
    normalizers.BertNormalizer(),
]


@pytest.mark.parametrize("part", ORDINARY, ids=str)
def test_what_real_tokenizers_do_is_taken(part, tmp_path):
    """Normalizers as in XLM-RoBERTa, ALBERT, Llama, CLIP and BERT."""
    library = byte_level()
    library.normalizer = part
    library.save(str(tmp_path / "tokenizer.json"))
    text = "``Hello''  ab é ﷺ"
    assert Tokenizer(tmp_path).encode(text) == library.encode(text).ids


def test_a_prompt_is_encoded_alike_each_time_whatever_the_file_says(tmp_path):
    """BPE-dropout is for training: with it, a prompt would have other ids each time."""
    plain = Tokenizer(with_part(tmp_path, "model", {"dropout": None})).encode("hello world")
    ours = Tokenizer(with_part(tmp_path, "model", {"dropout": 0.9}))
    assert [ours.encode("hello world") for _ in range(20)] == [plain] * 20


def test_a_token_that_is_special_once_is_special(tmp_path):
    """As the library has it, whatever a second entry says."""
    library = byte_level()
    content = json.loads(library.to_str())
    first = next(token for token in content["added_tokens"] if token["special"])
    content["added_tokens"].append(first | {"id": 999, "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = again.encode(f"a{first['content']}b").ids
    assert Tokenizer(tmp_path).decode(ids) == again.decode(ids)


def test_a_section_that_stands_twice_is_refused(tmp_path):
    """The library may read both, and only one was looked at."""
    bomb = json.dumps({"type": "Precompiled", "precompiled_charsmap": TABLE})
    text = byte_level().to_str()
    (tmp_path / "tokenizer.json").write_text(f'{{"normalizer": {bomb}, {text.lstrip()[1:]}')
    with pytest.raises(TokenizerError, match="a key stands twice in one object"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "place", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, place):
    place(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: it is (a directory|no file)"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("token", ["\ud800", "x" * 99999, ["a"], {"content": 7}])
def test_an_end_that_is_no_token_is_refused_in_few_words(tmp_path, token):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: eos_token: expected a token"
    ):
        Tokenizer(tmp_path)


def test_the_librarys_words_are_cut_and_printable(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"truncation": "' + "x" * 9999 + '"}')
    with pytest.raises(TokenizerError) as refusal:
        Tokenizer(tmp_path)
    assert len(str(refusal.value)) < 1000
    part = {"type": "Replace", "pattern": {"\0\x1b": "a"}, "content": ""}
    with pytest.raises(TokenizerError) as refusal:
        Tokenizer(with_part(tmp_path, "normalizer", part))
    assert str(refusal.value).isprintable()


def test_ids_are_read_no_further_than_the_first_that_is_none():
    """Of a source without end as of one that is merely long."""
    read = []

    def source():
        for i in itertools.count(3):
            read.append(i)
            yield i

    with pytest.raises(RequestError, match=r"token id 10 at position 7: expected .* 0 to 9"):
        check_ids(source(), 10)
    assert read == [*range(3, 11)]
