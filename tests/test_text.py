"""One answer's text: what the ids decode to, up to the first stop, each piece in its time."""

import contextlib
import math

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_stops import first_match, may_be_a_stop
from tokenizers import AddedToken, decoders, models

from spindle.config import ModelConfig
from spindle.decode.detokenize import AnswerText
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.text import TextStream, stream_text
from spindle.errors import NumericsError, RequestError
from spindle.model.weights import random_model
from spindle.tokenizer import BYTE_OF, StreamDecoder, Tokenizer

CONTEXT = 64
# Ids are places in this list: words, halves of characters, and repeats to make stops overlap.
PIECES = [
    *(b"Hel", b"lo wor", b"ld", b" own", b" foo", b"a", b"b", b"ab", b"aab", b"\n"),
    *("€".encode()[:1], "€".encode()[1:], "é".encode(), "é€".encode(), b"a\xc3", b"\xa9b"),
]
EOS, PAD, PROMPT = len(PIECES), len(PIECES) + 1, len(PIECES) + 2  # PAD: no token has the id
VOCAB = PROMPT + 1
SHAPE = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": CONTEXT,
}
SHOWN = {byte: character for character, byte in BYTE_OF.items()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """Each of PIECES is a token, and <eos> a special one; the prompt's token is "x"."""
    words = {"".join(SHOWN[byte] for byte in piece): i for i, piece in enumerate(PIECES)}
    library = tokenizers.Tokenizer(models.WordLevel(words | {"<eos>": EOS, "x": PROMPT}))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<eos>")])
    folder = tmp_path_factory.mktemp("pieces")
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


class Saying:
    """A model that, after a prompt of one token, says these ids, and then the last for ever."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, ids: list[int], eos_ids: tuple[int, ...] = (EOS,)) -> None:
        self.config = ModelConfig.from_dict(SHAPE | {"eos_token_id": list(eos_ids)})
        wanted = [ids[min(p, len(ids) - 1)] for p in range(CONTEXT)]
        self.table = F.one_hot(torch.tensor(wanted), VOCAB).float() * 9
        self.passes = 0

    def __call__(self, ids, view):
        self.passes += 1
        return view.positions[:, None].float()

    def logits(self, hidden):
        return self.table[hidden[:, 0].long()]


def ids_of(*pieces: bytes | str) -> list[int]:
    return [PIECES.index(p if isinstance(p, bytes) else p.encode()) for p in pieces]


def saying(tokenizer: Tokenizer, ids: list[int], **params) -> TextStream:
    params = {"temperature": 0, "max_tokens": len(ids), **params}
    return stream_text(Engine(Saying(ids)), tokenizer, [PROMPT], SamplingParams(**params))


def test_a_stop_across_tokens(tokenizer):
    """B64, B38: 'Hel', 'lo wor', 'ld' with the stop 'o w': 'Hell', ended at the second token.

    Ids and log-probabilities end with the token that completes the stop; it is in.
    """
    mock = Saying(ids_of("Hel", "lo wor", "ld"))
    params = SamplingParams(temperature=0, max_tokens=9, stop="o w", logprobs=1)
    stream = stream_text(Engine(mock), tokenizer, [PROMPT], params)
    assert list(stream) == ["Hel", "l"]
    assert (stream.text, stream.token_ids) == ("Hell", ids_of("Hel", "lo wor"))
    assert [one.sampled.token_id for one in stream.logprobs] == stream.token_ids
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "o w")
    assert (stream.stats.new_tokens, stream.stats.stop_reason) == (2, "o w")
    assert mock.passes == 2
    assert next(stream, None) is None
    assert stream.close() == ""
    assert stream.finish_reason == "stop"


def test_a_false_start_is_released_and_an_end_is_flushed(tokenizer):
    """B65: ' own' may begin the stop, ' foo' shows that it does not; at the length limit, too."""
    stream = saying(tokenizer, ids_of("Hel", " own", " foo"), stop=" own goal")
    assert list(stream) == ["Hel", "", " own foo"]
    stream = saying(tokenizer, ids_of("Hel", " own"), stop=" own goal")
    assert list(stream) == ["Hel", "", " own"]
    assert (stream.text, stream.finish_reason, stream.stop_reason) == ("Hel own", "length", None)


def test_no_delta_is_late_without_a_beginning_of_the_stop(tokenizer):
    """B66"""
    stream = saying(tokenizer, ids_of("Hel", "lo wor", "ld", " own"), stop="XYZXYZ")
    assert list(stream) == ["Hel", "lo wor", "ld", " own"]


IDS = st.lists(st.integers(0, EOS), min_size=1, max_size=12)
STOPS = st.lists(st.text("ab€é\ufffdl ", min_size=1, max_size=4), max_size=4)


@given(IDS, STOPS, st.integers(0, 6))
def test_the_text_is_the_decoded_answer_up_to_its_first_stop(tokenizer, ids, stops, least):
    """B38, B64, B65, B66: for random ids and stops, and at each moment what may be shown is shown.

    Stops lie across tokens, in the middle of them, and on characters that two tokens share.
    """
    least = min(least, len(ids))
    params = SamplingParams(temperature=0, max_tokens=len(ids), min_tokens=least, stop=stops)
    stream = stream_text(Engine(Saying(ids, eos_ids=())), tokenizer, [PROMPT], params)
    decoder = StreamDecoder(tokenizer, prompt_ids=[PROMPT])
    text, early, match, deltas = "", 0, None, []
    for n, token in enumerate(ids, 1):
        deltas.append(next(stream))
        text += decoder.push(token)
        early = len(text) if n <= least else early  # what is complete here is no stop
        match = first_match(text, stops, early)
        assert stream.token_ids == ids[:n]
        if match is not None:
            break
        assert stream.text == text[: len(text) - may_be_a_stop(text, stops)]
    else:
        text += decoder.flush()
        match = first_match(text, stops, len(text) if len(ids) <= least else early)
    deltas += stream
    assert "".join(deltas) == stream.text == (text if match is None else text[: match[0]])
    assert stream.stop_reason == (match and match[1])
    assert stream.finish_reason == ("length" if match is None else "stop")


def test_the_deltas_join_to_the_text(tokenizer):
    ids = ids_of("Hel", b"\xe2", b"\x82\xac", "a", b"\xe2")
    stream = saying(tokenizer, ids, stop="zz")
    assert list(stream) == ["Hel", "", "€", "a", "", "\ufffd"]
    assert stream.text == "Hel€a\ufffd" == tokenizer.decode(stream.token_ids)


def test_a_stop_within_characters_that_share_tokens(tokenizer):
    """The stop 'é' begins in the second half of one token and ends in the first of the next."""
    stream = saying(tokenizer, ids_of("Hel", b"a\xc3", b"\xa9b", "ld"), stop=["é"])
    assert list(stream) == ["Hel", "a", ""]
    assert (stream.text, stream.stop_reason) == ("Hela", "é")
    assert stream.token_ids == ids_of("Hel", b"a\xc3", b"\xa9b")


def test_a_stop_in_the_last_half_character_counts(tokenizer):
    """What the end makes of half a character is text like any other."""
    stream = saying(tokenizer, ids_of("a", b"\xe2"), stop="a\ufffd")
    assert list(stream) == ["", ""]
    assert (stream.text, stream.finish_reason, stream.stop_reason) == ("", "stop", "a\ufffd")


def test_a_stop_completed_by_the_last_token_that_fits_is_a_stop(tokenizer):
    stream = saying(tokenizer, ids_of("Hel", "lo wor"), stop="wor")
    assert list(stream) == ["Hel", "lo "]
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "wor")


def test_a_stop_in_the_prompt_or_across_its_end_is_none(tokenizer):
    """Only the answer is searched."""
    mock = Saying([PROMPT, *ids_of("a", "b")])  # a prompt of two tokens, then these
    params = SamplingParams(temperature=0, max_tokens=2, stop=["xa", "x"])
    stream = stream_text(Engine(mock), tokenizer, [*ids_of("a"), PROMPT], params)
    assert list(stream) == ["a", "b"]
    assert stream.finish_reason == "length"


@pytest.mark.parametrize(("least", "text"), [(0, ""), (1, "ab"), (2, "abab"), (3, "ababab")])
def test_min_tokens_come_before_the_end_of_a_stop(tokenizer, least, text):
    """The first `min_tokens` tokens complete none; the next one may."""
    stream = saying(tokenizer, ids_of(*["ab"] * 6), stop="ab", min_tokens=least)
    assert "".join(stream) == stream.text == text
    assert len(stream.token_ids) == least + 1
    assert stream.stop_reason == "ab"


def test_a_stop_may_begin_before_min_tokens_and_end_after(tokenizer):
    stream = saying(tokenizer, ids_of("Hel", "lo wor", "ld"), stop="rld", min_tokens=2)
    assert list(stream) == ["Hel", "lo wo", ""]
    assert stream.stop_reason == "rld"


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stop_id", [EOS, PIECES.index(b" own")])
def test_a_stop_id_leaves_the_last_word_as_it_is(tokenizer, stop_id, skip):
    """B67: the id is in the ids, and neither its text nor less than the word before is shown."""
    model = Saying([*ids_of("Hel", "lo wor"), stop_id], eos_ids=())
    stream = Engine(model).stream([PROMPT], 9, temperature=0, stop_token_ids=[stop_id])
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip, prompt_ids=[PROMPT])
    text = TextStream(stream, AnswerText(decoder, ["zzz"]))
    assert "".join(text) == "Hello wor"
    assert text.token_ids[-1] == stop_id
    assert (text.finish_reason, text.stop_reason) == ("stop", stop_id)


def test_an_eos_ends_the_text_and_releases_what_was_held(tokenizer):
    """B32, B65: also as the first token."""
    stream = saying(tokenizer, [*ids_of("Hel", " own"), EOS], stop=" own goal", max_tokens=9)
    assert list(stream) == ["Hel", "", "", " own"]
    assert (stream.finish_reason, stream.stop_reason) == ("stop", None)
    stream = saying(tokenizer, [EOS], max_tokens=9)
    assert (list(stream), stream.text, stream.token_ids) == ([""], "", [EOS])
    assert (stream.finish_reason, stream.stop_reason) == ("stop", None)


def test_an_id_without_a_token_is_empty_text(tokenizer):
    """B81, B89: models pad their vocabularies; with log-probabilities on, too."""
    stream = saying(tokenizer, [*ids_of("Hel"), PAD, *ids_of("ld")], logprobs=20)
    assert list(stream) == ["Hel", "", "ld"]
    assert len(stream.logprobs) == 3


def test_no_tokens_asked_for(tokenizer):
    """B110"""
    stream = saying(tokenizer, ids_of("a"), max_tokens=0)
    assert (list(stream), stream.text, stream.finish_reason) == ([], "", "length")


def test_closing_returns_what_was_held_back(tokenizer):
    with contextlib.closing(
        saying(tokenizer, ids_of("Hel", " own", " foo"), stop=" own goal")
    ) as stream:
        assert [next(stream), next(stream)] == ["Hel", ""]
        assert stream.close() == " own"
        assert (stream.text, stream.finish_reason) == ("Hel own", "abort")
        assert stream.close() == ""
    assert list(stream) == []
    assert stream.text == "Hel own"


def test_an_error_keeps_what_came(tokenizer):
    """B69"""
    mock = Saying(ids_of("Hel", " own", "a"))
    mock.table[2] = math.nan
    params = SamplingParams(temperature=0, max_tokens=9, stop=" own goal")
    stream, shown = stream_text(Engine(mock), tokenizer, [PROMPT], params), []
    with pytest.raises(NumericsError):
        shown.extend(stream)
    assert (stream.text, stream.finish_reason) == ("Hel", "error")
    assert stream.close() == " own"
    assert (stream.token_ids, stream.finish_reason) == (ids_of("Hel", " own"), "error")


def test_a_prompt_is_a_string_or_its_ids():
    """The same answer; a bad prompt or parameter is refused before anything runs (B107, B108)."""
    model = random_model(ModelConfig.from_dict(SHAPE | {"vocab_size": 4096}))
    engine, tok = Engine(model), Tokenizer("tiny")
    params = SamplingParams(seed=1, max_tokens=6)
    ids = tok.encode("Return the")
    texts = [stream_text(engine, tok, p, params) for p in ("Return the", ids, torch.tensor(ids))]
    answers = ["".join(text) for text in texts]
    assert answers[0] == answers[1] == answers[2] != ""
    right, _ = engine.generate(ids, 6, seed=1)
    assert texts[0].token_ids == right
    assert tok.decode(ids) + answers[0] == tok.decode([*ids, *right])
    for prompt, message in [("", "no tokens"), ([], "no tokens"), ([-1], "-1"), (b"12", "text")]:
        with pytest.raises(RequestError, match=message):
            stream_text(engine, tok, prompt, params)
    with pytest.raises(RequestError, match="n=2"):
        stream_text(engine, tok, ids, SamplingParams(n=2))


@pytest.mark.smollm2
def test_smollm2_stops_at_a_string():
    """The real tokenizer: the answer without a stop, cut before the stop."""
    from spindle.model.weights import load_hf

    engine, tok = Engine(load_hf("smollm2")), Tokenizer("smollm2")
    plain = stream_text(
        engine, tok, "The capital of France is", SamplingParams(temperature=0, max_tokens=24)
    )
    whole = "".join(plain)
    stop = whole[len(whole) // 2 - 2 : len(whole) // 2 + 3]
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop, "never said"], logprobs=3)
    stopped = stream_text(engine, tok, "The capital of France is", params)
    assert "".join(stopped) == whole[: whole.index(stop)]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    assert len(stopped.logprobs) == len(stopped.token_ids) < len(plain.token_ids)
    assert stopped.stop_reason == stop
