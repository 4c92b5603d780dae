"""Text to token ids, ids to text, and text from ids that arrive one at a time.

A token is a run of bytes, and it need not end where a character ends: "€" is three bytes, and a
vocabulary may hold any part of them. So both ways back to text join the same bytes:

    decode   all bytes, joined, read as UTF-8
    stream   the same bytes, read as UTF-8 by a decoder that keeps an unfinished character for later

What a token's bytes are depends on its neighbours in one respect only. SentencePiece writes a word
with its space in front ("▁Hello"), and the space of the first word was never in the text. Hence
`first`: true for the first visible token of a sequence, false ever after.

Encoding, and the file format, are the `tokenizers` library's.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from spindle import tokenizer_file
from spindle.chat_template import DEFAULT, ChatTemplates, read_json
from spindle.errors import RequestError, TokenizerError, shown

ID_LIMIT = 2**32  # the library counts ids in 32 bits
MOST_IDS = 2**22  # of an iterator: there may be no end to it
LONG = 10_000  # characters, whose ids take milliseconds or more


class Tokenizer:
    """A tokenizer.json, with the ids that begin and end a text.

    `path_or_name` is a directory, or a name as `spindle.hub.resolve` takes it. `bos_id` is an id or
    None; `eos_ids` is a tuple, possibly empty. Each comes from the first of generation_config.json,
    config.json and tokenizer_config.json that states it. `chat_template` is the checkpoint's own,
    in Jinja, or None. TokenizerError: a file is missing or damaged, or the tokenizer's decoder is
    of a kind that we do not know.

    Examples:

        >>> from spindle import Tokenizer
        >>> tok = Tokenizer("tiny")
        >>> ids = tok.encode("The capital of France is")
        >>> [tok.id_to_token(token) for token in ids[:3]], len(ids)
        (['The', 'Ġc', 'ap'], 10)
        >>> tok.decode(ids)
        'The capital of France is'
    """

    def __init__(self, path_or_name: str | Path) -> None:
        folder = _folder(path_or_name)
        self._path = folder / "tokenizer.json"
        self._library, self._special = tokenizer_file.load(self._path)
        self._spell = _spelling(self._library.decoder, self._path)
        # Not a count: ids may leave gaps, and a table indexed by id needs the largest one.
        self.vocab_size = max(self._library.get_vocab().values(), default=-1) + 1
        self._reach = tokenizer_file.Reach.of(self._library, BYTE_OF)
        self.bos_id = next(iter(_declared_ids(self._library, folder, "bos_token")), None)
        self.eos_ids = _declared_ids(self._library, folder, "eos_token")
        self._chat = ChatTemplates.read(folder)
        self.chat_template = self._chat.sources.get(DEFAULT)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. RequestError: not a str, or a text that has no ids here.

        TokenizerError: the library gave up, since tokenizer.json asks for too much.

        Special tokens are added where tokenizer.json's post-processor says so, and nowhere else.
        Text that spells a special token, such as "<|endoftext|>", becomes that token, as it does in
        transformers; so a prompt that spells out the BOS of a tokenizer that adds one begins with
        two. Encoding a decoded text need not give the ids that it came from.
        """
        if not isinstance(text, str):
            raise RequestError(f"text to encode: expected a str, got {type(text).__name__}")
        try:
            text.encode()  # half of a surrogate pair is no character
            with tokenizer_file.panics_named(self._path):
                if len(text) < LONG:
                    return self._library.encode(text, add_special_tokens=add_special_tokens).ids
                # The same, but other threads can run meanwhile.
                (only,) = self._library.encode_batch([text], add_special_tokens=add_special_tokens)
                return only.ids
        except TokenizerError:
            raise
        except Exception as error:  # the library raises no narrower kind
            raise RequestError(f"text to encode: expected whole characters: {error}") from error

    def encode_within(self, text: str, most: int, add_special_tokens: bool = True) -> list[int]:
        """`encode`, for one who takes `most` ids. RequestError: at once, if they cannot be so few.

        So megabytes are not read to find that they are too long. The ids may yet be more than that.
        """
        if (least := self.least_ids(text)) > most:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are {least} tokens or more; at most "
                f"{most} fit"
            )
        return self.encode(text, add_special_tokens)

    def least_ids(self, text: str) -> int:
        """How many ids a text has at least, without reading it: 0 where that cannot be known.

        An id stands for no more characters than the longest token has, unless the tokenizer leaves
        text out.
        """
        return self._reach.least_ids(text) if isinstance(text, str) else 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. RequestError: names the first position with no valid id.

        An id that no token has (models pad their vocabularies) is empty text, bytes that are no
        UTF-8 are U+FFFD, and nothing is cleaned up around punctuation. A continuation, whose first
        token is not the first of its text, is `StreamDecoder`'s.
        """
        tokens = [self._visible(token_id, skip_special_tokens) for token_id in check_ids(ids)]
        visible = [token for token in tokens if token is not None]
        pieces = [self._spell(token, n == 0) for n, token in enumerate(visible)]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether both give every token the same id."""
        return self._library.get_vocab() == other._library.get_vocab()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation, as the checkpoint's chat template writes it.

        messages: objects with `role` and `content`; content is text, or what the template takes.
        add_generation_prompt: end with the mark that the assistant speaks next.
        template: the name of one, where a checkpoint has several; "tool_use" if there are tools.
        tools: JSON schemas; documents: objects. `variables`: what else the template asks for, such
        as enable_thinking=False. TokenizerError: there is no template, or it is no Jinja, or asks
        for what the sandbox denies. RequestError: the messages are none, or the template refuses
        them. Equal to transformers' apply_chat_template(tokenize=False).
        """
        return self._chat.render(
            messages, add_generation_prompt, template, tools, documents, variables
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """The ids of a conversation; `options` and errors are those of `render_chat`.

        The template alone writes the special tokens, a BOS among them: nothing is added, so there
        is one BOS where it writes one, and none where it writes none, whatever `encode` would add.
        Text of a message that spells a special token becomes that token. As in transformers.
        """
        text = self.render_chat(messages, add_generation_prompt, **options)
        return self.encode(text, add_special_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, such as "Ġworld"; None where no token has it."""
        (valid_id,) = check_ids([token_id])
        return self._library.id_to_token(valid_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for in mid-text; none where no token has the id."""
        token = self.id_to_token(token_id)
        return b"" if token is None else self._spell(token, False)

    def _visible(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The token behind an id, unless there is none or it is to be left out of the text."""
        token = self._library.id_to_token(token_id)
        return None if skip_special_tokens and token in self._special else token


class StreamDecoder:
    """Turns ids into text as they arrive: never half a character, and nothing shown is taken back.

    The pieces, and then `flush`, join to `tokenizer.decode` of all ids, whatever the ids. To
    continue a prompt, pass its ids: the pieces then join to decode(prompt + ids) without
    decode(prompt), the first word keeps its space, and a character that the prompt left unfinished
    appears whole. Each push costs the same, however long the text has become: all that is kept is
    the bytes, three at most, of an unfinished character.

    Examples:

        >>> from spindle import StreamDecoder, Tokenizer
        >>> tok = Tokenizer("tiny")
        >>> stream = StreamDecoder(tok)
        >>> [stream.push(token) for token in tok.encode("5 €")]  # of three bytes
        ['5', ' ', '', '', '€']
        >>> stream.flush()
        ''
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True
        self._num_pushed = 0
        for token_id in check_ids(prompt_ids):
            self.push(token_id)
        self._num_pushed = 0

    def push(self, token_id: int) -> str:
        """The text that this id completes, which may be empty. RequestError: it is no valid id."""
        (valid_id,) = check_ids([token_id], start=self._num_pushed)
        self._num_pushed += 1
        token = self._tokenizer._visible(valid_id, self._skip_special_tokens)
        if token is None:
            return ""
        piece = self._tokenizer._spell(token, self._first)
        self._first = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """U+FFFD if the ids ended inside a character, else nothing; call it once, at the end."""
        return self._utf8.decode(b"", final=True)


def check_ids(ids: Iterable[Any], limit: int = ID_LIMIT, start: int = 0) -> list[int]:
    """The ids as Python integers; RequestError names the first position that is not in [0, limit).

    Takes Python, numpy and torch integers, and arrays and tensors of one dimension; refuses
    booleans and floats, and an iterator of more than 4,194,304, which may have no end. Positions
    are counted from `start`.
    """
    ids = _plain(ids)
    if not isinstance(ids, Iterable) or isinstance(ids, Mapping | set | frozenset):
        raise RequestError(f"token ids: expected a list of integers, got {type(ids).__name__}")
    values = list[int]()
    for position, value in enumerate(map(_plain, ids), start):
        if len(values) == MOST_IDS and isinstance(ids, Iterator):
            raise RequestError(f"token ids: more than {MOST_IDS} from an iterator; give a list")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise RequestError(
                f"token id {shown(value)} at position {position}: "
                f"expected an integer from 0 to {limit - 1}"
            )
        values.append(value)
    return values


def _plain(ids: Any) -> Any:
    """An array, a tensor, or one number of theirs as Python has it. RequestError: has none."""
    if not hasattr(ids, "tolist"):
        return ids
    try:
        return ids.tolist()
    except Exception as cause:  # a tensor that has a shape and no data, for one
        raise RequestError(f"token ids: {type(ids).__name__} without numbers ({cause})") from cause


# The kinds of decoder: how each one spells a token in bytes.

Spelling = Callable[[str, bool], bytes]  # (token, first) -> bytes


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's visible character for each byte: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _byte_level(token: str, first: bool) -> bytes:
    """A token is written in the byte alphabet; one that is not (an added token) is plain text."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _metaspace(token: str, first: bool, mark: str, drops_first: bool) -> bytes:
    """A mark is a space, but nothing in the first token if a mark was put before the text."""
    return token.replace(mark, "" if first and drops_first else " ").encode()


def _byte_fallback(token: str, first: bool, mark: str, drops_first: bool) -> bytes:
    """A mark is a space, <0xE2> is the byte E2, and one space at the very start was never there.

    Where a run of byte tokens is not UTF-8, the library shows U+FFFD for every byte of the run.
    We keep the run's valid characters, for a stream has already shown them.
    """
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    piece = bytes.fromhex(byte[1]) if byte else token.replace(mark, " ").encode()
    return piece.removeprefix(b" ") if first and drops_first else piece


def _spelling(decoder: tokenizers.decoders.Decoder | None, path: Path) -> Spelling:
    """The spelling that the decoder section of tokenizer.json asks for."""
    section = json.loads(decoder.__getstate__()) if decoder else {"type": "none"}
    parts = section.get("decoders", [section])
    strip_one = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    match parts:
        case [{"type": "ByteLevel"}]:
            return _byte_level
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}]:
            return partial(_metaspace, mark=mark, drops_first=scheme != "never")
        case [
            {"type": "Replace", "pattern": {"String": mark}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if rest in ([], [strip_one]):
            return partial(_byte_fallback, mark=mark, drops_first=bool(rest))
    raise TokenizerError(
        f"{path}: its decoder is {' + '.join(part['type'] for part in parts)}; expected ByteLevel, "
        "Metaspace, or Replace + ByteFallback + Fuse with or without a Strip of one leading space"
    )


# Files.


def _folder(path_or_name: str | Path) -> Path:
    """A path is itself; a bare word is a name first, so that it means the model of that name."""
    if isinstance(path_or_name, str | Path):  # what is neither is refused by `resolve`
        path = Path(os.path.expanduser(path_or_name))
        if os.path.isdir(path) and path.name != path_or_name:  # a Path of one word equals no str
            return path
    from spindle.hub import resolve  # only here: a directory needs no hub

    return resolve(path_or_name)


def _declared_ids(library: tokenizers.Tokenizer, folder: Path, name: str) -> tuple[int, ...]:
    """The ids of "bos_token" or "eos_token", from the first file that states any."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        stated = read_json(path).get(f"{name}_id")
        if stated is not None:
            try:
                return tuple(check_ids(stated if isinstance(stated, list) else [stated]))
            except RequestError as error:
                raise TokenizerError(f"{path}: {name}_id: {error}") from error
    path = folder / "tokenizer_config.json"
    stated = read_json(path).get(name)
    token = stated.get("content") if isinstance(stated, dict) else stated
    if token is None:
        return ()
    try:
        token_id = library.token_to_id(token) if isinstance(token, str) else None
    except UnicodeEncodeError:  # half a character
        token_id = None
    if token_id is None:
        said = shown(token)
        raise TokenizerError(f"{path}: {name}: expected a token of the vocabulary, got {said}")
    return (token_id,)
