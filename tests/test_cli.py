"""The `spindle` command, as a shell sees it: what goes to which stream, and the exit status.

Cases that need a real process (pipes, signals, encodings) start one; the others call `main`, which
is what the process calls, and save the seconds that torch takes to import.
"""

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from spindle import Engine, StreamDecoder, Tokenizer, cli, doctor, load_hf
from spindle.config import ModelConfig
from spindle.decode.detokenize import AnswerText
from spindle.decode.logprobs import Logprob
from spindle.decode.params import SamplingParams
from spindle.decode.stream import Stream
from spindle.decode.text import TextStream, stream_text
from spindle.kernels import build
from spindle.model.weights import RandomSource, wishes

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 257,
    "n_positions": 4096,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "eos_token_id": 256,
    "bos_token_id": 256,
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""}
GREEDY = ("-p", "the cat", "-n", "12", "--temperature", "0", "--ignore-eos")


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """A random GPT-2 of 40,000 weights, whose tokens are the 256 bytes and an end."""
    raw = GPT2 | changes
    (directory / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_dict(raw)
    source = RandomSource(config, 0, torch.float32, torch.device("cpu"), 2.0)
    shapes = wishes(config).shapes
    tensors = {name: source(name, *shape) for name, shape in shapes.items() if "head" not in name}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: n for n, character in enumerate(alphabet)}
    library = Library(models.BPE(vocabulary, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("random"))


def shell(*args: object, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess:
    """One run of the command in a process of its own; streams are bytes."""
    command = [sys.executable, "-m", "spindle", *map(str, args)]
    env = ENVIRONMENT | environment
    return subprocess.run(command, input=stdin, capture_output=True, timeout=120, env=env)


def expected(checkpoint: Path, prompt: str, new: int, **sampling: Any) -> tuple[list[int], str]:
    """What the package gives for the same request."""
    tokenizer = Tokenizer(checkpoint)
    ids = tokenizer.encode(prompt)
    new_ids, _ = Engine(load_hf(checkpoint)).generate(ids, new, **sampling)
    decoder = StreamDecoder(tokenizer, prompt_ids=ids)
    return new_ids, "".join(decoder.push(i) for i in new_ids) + decoder.flush()


# What goes where.


def test_a_pipe_gets_the_text_alone(checkpoint: Path) -> None:
    run = shell("generate", "-m", checkpoint, *GREEDY)
    _, text = expected(checkpoint, "the cat", 12, temperature=0, ignore_eos=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.decode() == text
    stats = run.stderr.decode()
    assert stats.startswith("\n") != text.endswith("\n")  # the stats begin on a line of their own
    assert stats.strip().count("\n") == 0
    assert "12 tokens after a prompt of 7" in stats
    assert "ttft" in stats and "tok/s" in stats


@pytest.mark.parametrize("option", ["--quiet", "--no-stats", "-q"])
def test_quiet_leaves_stderr_empty(
    checkpoint: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "-m", str(checkpoint), *GREEDY, option]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (
        expected(checkpoint, "the cat", 12, temperature=0, ignore_eos=True)[1],
        "",
    )


def test_json_is_one_object(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = ["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
    args = ["-p", "é", "-n", "9", *sampling, "--seed", "5", "--ignore-eos", "--json"]
    assert cli.main(["generate", "-m", str(checkpoint), *args]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    ids, text = expected(
        checkpoint,
        "é",
        9,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        seed=5,
        ignore_eos=True,
    )
    keys = {"prompt", "text", "token_ids", "finish_reason", "stop_reason", "stats"}
    assert set(answer) == keys and answer["stop_reason"] is None
    assert (answer["prompt"], answer["token_ids"], answer["text"]) == ("é", ids, text)
    assert answer["finish_reason"] == "length"
    assert (answer["stats"]["seed"], answer["stats"]["new_tokens"]) == (5, 9)
    assert answer["stats"]["prompt_tokens"] == 2
    assert err == ""


def test_a_drawn_seed_is_reported_and_repeats_the_text(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(*seed: str) -> dict[str, Any]:
        assert cli.main(["generate", "-m", str(checkpoint), "-p", "a", "--json", *seed]) == 0
        return json.loads(capsys.readouterr().out)

    first = answer()
    again = answer("--seed", str(first["stats"]["seed"]))
    assert again["token_ids"] == first["token_ids"]
    assert answer()["stats"]["seed"] != first["stats"]["seed"]


def test_tokens_are_counted_as_they_came(capsys: pytest.CaptureFixture[str]) -> None:
    """B90: not as the text of the answer counts when it is encoded again."""
    args = ["-p", "A list", "-n", "40", "--temperature", "2", "--ignore-eos", "--samples", "5"]
    assert cli.main(["generate", "-m", "tiny", *args, "--seed", "1", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["outputs"]
    for answer in answers:
        assert answer["stats"]["new_tokens"] == len(answer["token_ids"]) == 40
    again = [len(Tokenizer("tiny").encode(answer["text"])) for answer in answers]
    assert any(count != 40 for count in again)


def test_an_end_token_stops_the_answer(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The greedy answer of the same weights, its third new token declared an end token."""
    ids, _ = expected(checkpoint, "the cat", 12, temperature=0, ignore_eos=True)
    end = next(n for n in range(1, 12) if ids[n] not in ids[:n])
    write_checkpoint(tmp_path, eos_token_id=ids[end])
    args = ["generate", "-m", str(tmp_path), "-p", "the cat", "-n", "12", "--temperature", "0"]
    for option, kept, reason in ([], end + 1, "stop"), (["--ignore-eos"], 12, "length"):
        assert cli.main([*args, *option, "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["token_ids"] == ids[:kept]
        assert answer["finish_reason"] == reason


def test_stdin_is_the_prompt_to_its_last_byte(checkpoint: Path) -> None:
    text = "é\r\nb\n"
    run = shell("generate", "-m", checkpoint, "-p", "-", "-n", "3", "--json", stdin=text.encode())
    answer = json.loads(run.stdout)
    assert answer["prompt"] == text
    assert answer["stats"]["prompt_tokens"] == len(text.encode())


def test_stdin_that_is_not_utf8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert cli.main(["generate", "-p", "-"]) == 2
    assert one_error(capsys).startswith("stdin: byte 0xff at offset 2 is not UTF-8")


def test_an_answer_may_end_inside_a_character(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its length: bytes that no later token completes are U+FFFD, as in the decode."""
    unfinished = 0
    for new in range(1, 9):
        args = ["generate", "-m", str(checkpoint), "-p", "ab", "--temperature", "0"]
        assert cli.main([*args, "--ignore-eos", "-q", "-n", str(new)]) == 0
        ids, text = expected(checkpoint, "ab", new, temperature=0, ignore_eos=True)
        assert capsys.readouterr().out == text
        tokenizer = Tokenizer(checkpoint)
        decoder = StreamDecoder(tokenizer, prompt_ids=tokenizer.encode("ab"))
        unfinished += "".join(map(decoder.push, ids)) != text
    assert unfinished > 0


def test_the_first_word_keeps_its_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A SentencePiece token has its space in front, which only the first word of a text drops."""
    write_checkpoint(tmp_path, vocab_size=26, eos_token_id=None, bos_token_id=None)
    words = {f"\u2581{chr(97 + n)}": n for n in range(26)}
    library = Library(models.WordLevel(words, "\u2581a"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    assert cli.main(["generate", "-m", str(tmp_path), "-p", "c", "-n", "3", "-q"]) == 0
    assert re.fullmatch("( [a-z]){3}", capsys.readouterr().out)


# What ends an answer, what is penalised, what is reported.


def as_json(checkpoint: Path, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert cli.main(["generate", "-m", str(checkpoint), "--json", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_each_option_reaches_the_sampling_params(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All at once, and each alone makes another answer than none of them."""
    options = {
        "--presence-penalty": ("presence_penalty", 1.5),
        "--frequency-penalty": ("frequency_penalty", 0.5),
        "--repetition-penalty": ("repetition_penalty", 1.3),
        "--min-tokens": ("min_tokens", 9),
    }
    base = {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
    engine, tokenizer = Engine(load_hf(checkpoint)), Tokenizer(checkpoint)

    def with_params(**more: Any) -> list[int]:
        stream = stream_text(engine, tokenizer, "the cat", SamplingParams(**base, **more))
        list(stream)
        return stream.token_ids

    common = ["-p", "the cat", "-n", "60", "--temperature", "0", "--ignore-eos"]
    given = [text for name, (_, value) in options.items() for text in (name, str(value))]
    answer = as_json(checkpoint, capsys, *common, *given)
    assert answer["token_ids"] == with_params(**dict(options.values()))
    plain = with_params()
    for name, (field, value) in options.items():
        ids = as_json(checkpoint, capsys, *common, name, str(value))["token_ids"]
        assert ids == with_params(**{field: value})
        assert (ids != plain) == (field != "min_tokens")


def test_a_stop_string_ends_the_answer_before_itself(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Repeatable, literal, and across tokens; stdout has not one character of it."""
    ids, text = expected(checkpoint, "the cat", 60, temperature=0, ignore_eos=True)
    stop = text[20:23]
    assert len(stop) == 3
    before = text[: text.index(stop)]
    args = ["-p", "the cat", "-n", "60", "--temperature", "0", "--ignore-eos"]
    stops = ["--stop", "never\\n", "--stop", stop]
    answer = as_json(checkpoint, capsys, *args, *stops)
    assert (answer["text"], answer["finish_reason"]) == (before, "stop")
    assert answer["stop_reason"] == answer["stats"]["stop_reason"] == stop
    assert answer["token_ids"] == ids[: len(answer["token_ids"])] != ids
    assert cli.main(["generate", "-m", str(checkpoint), *args, *stops, "-q"]) == 0
    assert capsys.readouterr().out == before


def test_a_stop_id_ends_the_answer_as_its_last_id(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, _ = expected(checkpoint, "the cat", 12, temperature=0, ignore_eos=True)
    end = next(n for n in range(1, 12) if ids[n] not in ids[:n])
    unseen = next(n for n in range(256) if n not in ids)
    stops = ["--stop-token-id", str(unseen), "--stop-token-id", str(ids[end])]
    answer = as_json(checkpoint, capsys, *GREEDY, *stops)
    assert (answer["token_ids"], answer["finish_reason"]) == (ids[: end + 1], "stop")
    assert answer["stop_reason"] == ids[end]
    answer = as_json(checkpoint, capsys, *GREEDY, *stops, "--min-tokens", "12")
    assert answer["token_ids"][: end + 1] != ids[: end + 1] and len(answer["token_ids"]) == 12


def test_logprobs_name_each_token_and_the_likeliest(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B89: also for a row of the model that no token has; its text is empty."""
    answer = as_json(checkpoint, capsys, *GREEDY, "--logprobs", "3")
    assert [one["id"] for one in answer["logprobs"]] == answer["token_ids"]
    engine, tokenizer = Engine(load_hf(checkpoint)), Tokenizer(checkpoint)
    logits = engine.prefill(tokenizer.encode("the cat"))
    for one in answer["logprobs"]:
        values, ids = logits[0].log_softmax(-1).topk(3)
        assert (one["id"], one["rank"]) == (int(ids[0]), 1)
        assert [top["id"] for top in one["top"]] == ids.tolist()
        assert [top["rank"] for top in one["top"]] == [1, 2, 3]
        assert [top["logprob"] for top in one["top"]] == pytest.approx(values.tolist(), abs=1e-5)
        assert one["logprob"] == one["top"][0]["logprob"]
        shown = tokenizer.token_bytes(one["id"]).decode("utf-8", errors="replace")
        assert one["text"] == one["top"][0]["text"] == shown
        logits = engine.extend([one["id"]])
    assert "logprobs" not in as_json(checkpoint, capsys, *GREEDY)


def test_logprobs_of_ids_beyond_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B81, B89: the model pads its vocabulary to 400 rows; most of the likeliest are no token."""
    write_checkpoint(tmp_path, vocab_size=400)
    answer = as_json(tmp_path, capsys, *GREEDY, "--logprobs", "20")
    shown = {one["id"]: one["text"] for step in answer["logprobs"] for one in step["top"]}
    assert max(shown) > 256
    assert all(text == "" for token, text in shown.items() if token > 256)
    assert all(text != "" for token, text in shown.items() if token <= 256)


def test_a_logprob_of_minus_infinity_is_null(checkpoint: Path) -> None:
    """What Python's json writes for it, -Infinity, is no JSON."""
    impossible = cli._logprob(Logprob(97, float("-inf"), 257), Tokenizer(checkpoint))
    assert (impossible["logprob"], impossible["rank"]) == (None, 257)


def test_logprobs_are_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "-m", "no/such-model", "-p", "a", "--logprobs", "3"]) == 2
    message = one_error(capsys)
    assert message.startswith("--logprobs: ") and "--json" in message


def test_several_answers_to_one_prompt(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each differs from the first, which is what one answer alone would be."""
    args = ["-p", "é", "-n", "9", "--seed", "5", "--ignore-eos"]
    alone = as_json(checkpoint, capsys, *args)
    several = as_json(checkpoint, capsys, *args, "--samples", "3", "--logprobs", "0")
    assert set(several) == {"prompt", "outputs"} and several["prompt"] == "é"
    ids = [output["token_ids"] for output in several["outputs"]]
    assert ids[0] == alone["token_ids"] and several["outputs"][0]["text"] == alone["text"]
    assert len({tuple(one) for one in ids}) == 3
    assert [len(output["logprobs"]) for output in several["outputs"]] == [9, 9, 9]
    command = ["generate", "-m", str(checkpoint), *args, "--samples", "3"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert out == "\n---\n".join(output["text"] for output in several["outputs"])
    assert err.count("9 tokens after a prompt of 2") == err.strip("\n").count("\n") + 1 == 3
    assert cli.main([*command, "-q"]) == 0
    assert capsys.readouterr() == (out, "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_an_example_in_the_help_can_be_copied(command, capsys: pytest.CaptureFixture[str]) -> None:
    """A newline in a shell's string is written as backslash and n."""
    assert cli.main([command, "--help"]) == 0
    examples = capsys.readouterr().out.partition("examples:")[2].partition("\n\n")[0]
    assert "\\n" in examples
    assert all(line.count("'") % 2 == 0 for line in examples.splitlines())


# Processes, pipes and signals.


def test_an_ascii_stdout_shows_escapes(checkpoint: Path) -> None:
    """Random bytes give U+FFFD, which ASCII does not have; nothing crashes, nothing is lost."""
    _, text = expected(checkpoint, "the cat", 12, temperature=0, ignore_eos=True)
    run = shell("generate", "-m", checkpoint, *GREEDY, PYTHONIOENCODING="ascii")
    assert run.returncode == 0, run.stderr
    assert "\ufffd" in text
    assert run.stdout == text.encode("ascii", errors="backslashreplace")


def test_a_reader_that_leaves_ends_it_quietly(checkpoint: Path) -> None:
    args = ["generate", "-m", str(checkpoint), "-p", "a", "-n", "4000", "--ignore-eos"]
    with subprocess.Popen(
        [sys.executable, "-m", "spindle", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as run:
        assert run.stdout is not None and run.stderr is not None
        assert len(run.stdout.read(10)) == 10  # as `| head -c 10` does
        run.stdout.close()
        assert run.wait(timeout=60) == 141
        assert run.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(checkpoint: Path) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "spindle", "generate", "-m", str(checkpoint), *GREEDY]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert run.returncode == 2
    assert run.stderr.decode() == "spindle: error: stdout: No space left on device\n"


def test_ctrl_c_keeps_the_answers_that_were_there(checkpoint: Path) -> None:
    """Of several, the one that is running ends after its token, and no other begins."""
    args = ["-p", "a", "-n", "40", "--ignore-eos", "--samples", "128", "--seed", "1"]
    command = [sys.executable, "-m", "spindle", "generate", "-m", str(checkpoint), *args]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    # a job in the background inherits that Ctrl-C is ignored
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, env=ENVIRONMENT, preexec_fn=heard) as run:
        out = b""
        while b"\n---\n" not in out:  # the second answer is coming
            out += run.stdout.read(1)
        run.send_signal(signal.SIGINT)
        rest, err = run.communicate(timeout=60)
    assert run.returncode == 130
    shown = (out + rest).split(b"\n---\n")
    assert 2 <= len(shown) < 128
    summaries = err.decode().strip("\n").splitlines()
    begun = len(shown) - (shown[-1] == b"")  # or it came before the second one had begun
    assert len(summaries) in (begun, len(shown)) and summaries[0].startswith("40 tokens")


def test_ctrl_c_keeps_what_was_generated(checkpoint: Path) -> None:
    args = ["-p", "a", "-n", "4000", "--ignore-eos", "--temperature", "0"]
    command = [sys.executable, "-m", "spindle", "generate", "-m", str(checkpoint), *args]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(command, **pipes, env=ENVIRONMENT) as run:
        first = run.stdout.read(1)  # tokens are coming
        run.send_signal(signal.SIGINT)
        rest, err = run.communicate(timeout=60)
    assert run.returncode == 130
    count = int(re.match(rb"\n?(\d+) tokens after a prompt of 1 ", err)[1])
    assert 0 < count < 4000
    _, text = expected(checkpoint, "a", count, temperature=0, ignore_eos=True)
    assert (first + rest).decode() == text
    assert err.strip().count(b"\n") == 0


PRESS_CTRL_C = """
import json, os, signal, sys
from spindle import cli
from spindle.tokenizer import StreamDecoder
push, seen = StreamDecoder.push, []
def pressing(self, token):
    seen.append(token)
    if len(seen) == 8:  # the prompt is 3 of them
        os.kill(os.getpid(), signal.SIGINT)
    return push(self, token)
StreamDecoder.push = pressing
sys.exit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_in_json_says_abort(checkpoint: Path) -> None:
    """The signal arrives at a known token, so ids, text and stats are known to the last."""
    args = ["generate", "-m", str(checkpoint), "-p", "abc", "-n", "4000", "--temperature", "0"]
    command = [sys.executable, "-c", PRESS_CTRL_C, *args, "--ignore-eos", "--json"]
    run = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=120)
    assert run.returncode == 130, run.stderr
    answer = json.loads(run.stdout)
    ids, text = expected(checkpoint, "abc", 5, temperature=0, ignore_eos=True)
    assert (answer["token_ids"], answer["text"]) == (ids, text)
    assert answer["finish_reason"] == "abort"
    assert answer["stats"]["new_tokens"] == 5
    assert run.stderr == b""


def as_text(stream: Stream, tokenizer: Tokenizer) -> TextStream:
    return TextStream(stream, AnswerText(StreamDecoder(tokenizer)))


def test_ctrl_c_before_the_first_token_ends_the_prefill(checkpoint: Path) -> None:
    engine, tokenizer = Engine(load_hf(checkpoint)), Tokenizer(checkpoint)
    stream = engine.stream([1, 2, 3], 5, temperature=0)

    def prefill() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        yield 0

    stream = as_text(Stream(prefill(), stream.stats), tokenizer)
    before, start = signal.getsignal(signal.SIGINT), time.monotonic()
    cli.show_stream(stream)
    assert (stream.token_ids, stream.text) == ([], "")
    assert time.monotonic() - start < 5
    assert stream.finish_reason == "abort"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_token(checkpoint: Path) -> None:
    stream = Engine(load_hf(checkpoint)).stream([1, 2, 3], 5, temperature=0)
    stats = stream.stats

    def tokens() -> Any:
        stats.record()
        yield 1
        stats.record()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        yield 2

    stream, start = as_text(Stream(tokens(), stats), Tokenizer(checkpoint)), time.monotonic()
    cli.show_stream(stream)
    assert time.monotonic() - start < 5
    assert (stream.token_ids, stream.finish_reason) == ([1], "abort")


def test_ctrl_c_shows_what_a_stop_string_held_back(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An "a" that may begin the stop "ab" is text after all when the answer ends there."""
    tokenizer = Tokenizer(checkpoint)
    stats = Engine(load_hf(checkpoint)).stream([1], 5).stats

    def tokens() -> Any:
        for token in tokenizer.encode("xa"):
            stats.record()
            yield token
        os.kill(os.getpid(), signal.SIGINT)
        stats.record()
        yield tokenizer.encode("a")[0]
        raise AssertionError("the answer went on after Ctrl-C")

    stream = TextStream(Stream(tokens(), stats), AnswerText(StreamDecoder(tokenizer), ("ab",)))
    cli.show_stream(stream)
    assert capsys.readouterr().out == stream.text == "xaa"
    assert stream.finish_reason == "abort"


def test_ctrl_c_elsewhere_has_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("spindle.hub.fetch", interrupted)
    assert cli.main(["fetch", "smollm2"]) == 130
    assert capsys.readouterr() == ("", "")


# Errors: one line, exit status 2.


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The message of the one line on stderr; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spindle: error: ") and err.endswith("\n") and err.count("\n") == 1
    return err.removeprefix("spindle: error: ").rstrip("\n")


BAD_SAMPLING = [
    ("--temperature", "-1", "--temperature=-1.0"),
    ("--temperature", "nan", "--temperature=nan"),
    ("--temperature", "inf", "--temperature=inf"),
    ("--temperature", "1e30", "--temperature=1e+30"),
    ("--top-p", "-1", "--top-p=-1.0"),
    ("--top-p", "1.5", "--top-p=1.5"),
    ("--top-p", "nan", "--top-p=nan"),
    ("--top-k", "-2", "--top-k=-2"),
    ("--min-p", "2", "--min-p=2.0"),
    ("--seed", "-1", "--seed=-1"),
    ("--seed", str(2**63), f"--seed={2**63}"),
    ("--seed", str(2**64), f"--seed={2**64}"),
    ("-n", "-1", "--max-new-tokens=-1"),
    ("--presence-penalty", "2.5", "--presence-penalty=2.5"),
    ("--frequency-penalty", "-3", "--frequency-penalty=-3.0"),
    ("--repetition-penalty", "0", "--repetition-penalty=0.0"),
    ("--min-tokens", "65", "--min-tokens=65"),
    ("--samples", "0", "--samples=0"),
]
OTHER_WORDS = [
    (["--stop", ""], "--stop: '' at position 0: expected a string, not empty"),
    (["--stop-token-id", "-1"], "--stop-token-id: token id -1 at position 0"),
    (["--logprobs", "21", "--json"], "--logprobs=21: expected a whole number from 0 to 20"),
]


@pytest.mark.parametrize(("option", "value", "named"), BAD_SAMPLING)
def test_a_sampling_value_out_of_range_is_refused_before_anything_is_loaded(
    option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """B113, B114: through the command line; the model does not exist, and is never looked for."""
    assert cli.main(["generate", "-m", "no/such-model", "-p", "a", option, value]) == 2
    assert one_error(capsys).startswith(f"{named}: expected ")


@pytest.mark.parametrize(("options", "words"), OTHER_WORDS)
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "-m", "no/such-model", "-p", "a", *options]) == 2
    assert one_error(capsys).startswith(words)


def test_no_new_tokens_is_an_empty_answer(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B110: -n 0 is no error."""
    assert cli.main(["generate", "-m", str(checkpoint), "-p", "a", "-n", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([], "", "length")
    assert answer["stats"]["ttft_ms"] is None


def test_an_empty_prompt_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B107: this tokenizer adds no BOS, so '' has no ids."""
    assert cli.main(["generate", "-m", str(checkpoint), "-p", ""]) == 2
    assert one_error(capsys) == "the prompt has no tokens; expected at least one"


def test_an_empty_stdin_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B107: an empty pipe is an empty prompt."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli.main(["generate", "-m", str(checkpoint), "-p", "-"]) == 2
    assert one_error(capsys) == "the prompt has no tokens; expected at least one"


def test_a_prompt_longer_than_the_context_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B111: through --max-seq-len."""
    args = ["generate", "-m", str(checkpoint), "-p", "abcd", "--max-seq-len"]
    assert cli.main([*args, "3"]) == 2
    assert one_error(capsys) == "the prompt has 4 tokens; at most 3 fit"
    assert cli.main([*args, "4097"]) == 2
    assert one_error(capsys) == "max_seq_len=4097: the model has 4096 positions"
    assert cli.main([*args, "6", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 2


def test_a_prompt_with_half_a_character_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of the command line that are no UTF-8 reach Python as lone surrogates."""
    assert cli.main(["generate", "-m", str(checkpoint), "-p", "a\udcff"]) == 2
    assert "expected whole characters" in one_error(capsys)


@pytest.mark.parametrize("option", ["--device", "--dtype"])
def test_a_device_or_dtype_that_is_none_is_refused(
    checkpoint: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "-m", str(checkpoint), "-p", "a", option, "abacus"]) == 2
    message = one_error(capsys)
    assert message.startswith(f"{option[2:]} 'abacus': expected 'auto'")


def test_mps_is_refused_in_words(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "-m", str(checkpoint), "-p", "a", "--device", "mps"]) == 2
    assert one_error(capsys).startswith("device 'mps': not supported, since")


def damage_weights(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def damage_shapes(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text()) | {"n_layer": 3}
    (directory / "config.json").write_text(json.dumps(config))


def damage_family(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "abacus"}')


def damage_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")


def no_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "file", "words"),
    [
        (damage_weights, "model.safetensors", "expected a whole safetensors file"),
        (damage_shapes, "", "the weights are not those of its config.json (gpt2): missing: h.2."),
        (damage_family, "config.json", "llama"),
        (damage_tokenizer, "tokenizer.json", "expected a tokenizer.json"),
        (no_tokenizer, "tokenizer.json", "no such file"),
        (no_config, "", "it has no config.json"),
    ],
)
def test_a_damaged_checkpoint_is_one_line(
    damage: Any, file: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(write_checkpoint(tmp_path))
    assert cli.main(["generate", "-m", str(tmp_path), "-p", "a"]) == 2
    message = one_error(capsys)
    assert message.startswith(str(tmp_path / file)) and words in message


def test_a_file_is_no_model(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = checkpoint / "model.safetensors"
    assert cli.main(["generate", "-m", str(weights), "-p", "a"]) == 2
    assert one_error(capsys).startswith(f"{weights} is no checkpoint: it is a file")


def test_a_name_that_is_none_lists_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "-p", "a", "-m"], ["fetch"]):
        assert cli.main([*command, "./nowhere"]) == 2
        message = one_error(capsys)
        assert "'./nowhere'" in message and "tiny" in message and "smollm2" in message


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "-m", "./nowhere", "-p", "a", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("spindle: error: no model './nowhere'")


def test_a_fault_of_ours_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> Path:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("spindle.hub.fetch", broken)
    assert cli.main(["fetch", "smollm2"]) == 1
    message = one_error(capsys)
    assert message.startswith("ZeroDivisionError: division by zero: this is a fault of spindle")
    assert "--debug" in message


def test_without_a_prompt_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The shortest command does something: the help says with which prompt."""
    options = ["generate", "-n", "3", "--temperature", "0", "--json"]
    assert cli.main(options) == 0
    without = json.loads(capsys.readouterr().out)
    assert without["prompt"] == cli.PROMPT
    assert cli.main([*options, "-p", cli.PROMPT]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == without["token_ids"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["generate", "-p"], "-p/--prompt"),
        (["generate", "-p", "a", "-n", "many"], "invalid int value: 'many'"),
        (["generate", "-p", "a", "--temp", "1"], "--temp"),
        (["bench"], "BENCH"),
        (["bench", "peers", "--new", "x"], "invalid int value: 'x'"),
    ],
)
def test_a_usage_error_is_one_line(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(args) == 2
    message = one_error(capsys)
    assert words in message and message.endswith(" --help`")


# Help, which is fast.


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        ["generate"],
        ["chat"],
        ["batch"],
        ["serve"],
        ["fetch"],
        ["doctor"],
        ["bench"],
        ["bench", "peers"],
    )
    for args in ([], *commands):
        assert cli.main([*args, "--help"]) == 0
        out, err = capsys.readouterr()
        assert out.startswith(f"usage: {' '.join(['spindle', *args])}") and err == ""
        if args in ([], ["generate"], ["chat"], ["batch"], ["serve"], ["fetch"]):
            assert "example" in out


NO_TORCH = """
import sys
from spindle import cli
status = cli.main(sys.argv[1:])
heavy = {"torch", "numpy", "tokenizers", "jinja2", "transformers", "huggingface_hub"}
heavy &= set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else status)
"""


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["chat"], ["batch"], ["serve"], ["doctor"], ["bench"]]
)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *command, "--help"],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: spindle")


CTRL_C_AT_TORCH = """
import sys

class CtrlC:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from spindle import cli
sys.exit(cli.main(["generate", "-p", "A list is"]))
"""


def test_ctrl_c_while_torch_is_imported_shows_no_traceback() -> None:
    run = subprocess.run(
        [sys.executable, "-c", CTRL_C_AT_TORCH], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


# doctor.


def test_doctor_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"]["found"] == torch.__version__
    assert report["threads"]["found"].startswith(f"{torch.get_num_threads()} ")
    names = ("python", "device", "c++ compiler", "nvcc", "cache", "model tiny", "model smollm2")
    names += ("native ops", "native sampling", "native fleet", "cuda kernels", "cuda emulator")
    for name in (*names, "transformers", "matplotlib", "sphinx"):
        assert f" {name} " in text
        assert set(report[name]) == {"found", "cost"}
        assert report[name]["found"] is not None or report[name]["cost"]


def test_doctor_says_what_a_missing_compiler_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "CUDA_HOMES", (str(tmp_path),))
    assert doctor.cpp_compiler().found is None and doctor.nvcc().found is None
    assert "plain torch does all the work" in doctor.cpp_compiler().cost
    assert "not compiled" in doctor.nvcc().cost
    assert doctor.as_text([doctor.nvcc()]).startswith("- nvcc  missing · no nvcc: not on")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler'" in doctor.cpp_compiler().cost


def test_doctor_finds_a_compiler_and_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path, line in ("bin/nvcc", "nvcc\nCuda, release 13.0, V13"), ("my-c++", "mine 1.2\nmore"):
        program = tmp_path / path
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\nprintf '{line}'\n")
        program.chmod(0o755)
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CXX", str(tmp_path / "my-c++"))
    assert doctor.cpp_compiler().found == f"{tmp_path / 'my-c++'}, mine 1.2"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert doctor.nvcc().found == f"{tmp_path / 'bin' / 'nvcc'}, Cuda, release 13.0, V13"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor.nvcc().found == f"{tmp_path / 'bin' / 'nvcc'}, Cuda, release 13.0, V13"


def test_doctor_says_on_a_mac_that_its_gpu_is_refused() -> None:
    assert doctor._why_no_gpu(has_apple_gpu=True).startswith("device 'mps': not supported")
    assert "no CUDA GPU" in doctor._why_no_gpu(has_apple_gpu=False)


def test_doctor_says_how_to_get_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "sphinx" else real(name)
    )
    missing = {check.name: check.cost for check in doctor.extras() if check.found is None}
    assert list(missing) == ["sphinx"]
    assert "pip install -e '.[book]'" in missing["sphinx"]


# --- several prompts at once ---------------------------------------------------------------------

TWO = ("-p", "the cat", "-p", "a dog sat", "-n", "9", "--temperature", "0", "--ignore-eos")


def test_several_prompts_are_each_what_they_are_alone(checkpoint, capsys):
    texts = []
    for prompt in ("the cat", "a dog sat"):
        args = ["-p", prompt, "-n", "9", "--temperature", "0", "--ignore-eos", "-q"]
        assert cli.main(["generate", "-m", str(checkpoint), *args]) == 0
        texts.append(capsys.readouterr().out)
    assert cli.main(["generate", "-m", str(checkpoint), *TWO]) == 0
    out, err = capsys.readouterr()
    assert out == "\n---\n".join(texts)
    assert re.search(r"18 tokens after 2 prompts of 16 · [\d.]+ s · [\d.]+ tok/s", err)
    assert cli.main(["generate", "-m", str(checkpoint), *TWO, "--json", "--logprobs", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["the cat", "a dog sat"]
    assert [line["text"] for line in lines] == texts
    for line in lines:
        assert len(line["token_ids"]) == len(line["logprobs"]) == 9
        stats = line["stats"]
        assert 0 <= stats["scheduled_ms"] <= stats["ttft_ms"] <= stats["last_ms"]


def test_several_prompts_with_several_samples(checkpoint, capsys):
    args = ["-p", "a", "-p", "b", "-n", "3", "--samples", "40", "--seed", "1", "--json"]
    assert cli.main(["generate", "-m", str(checkpoint), *args]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(line["outputs"]) for line in lines] == [40, 40]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-p", "-", "-p", "-"], 'two prompts are "-"'),
        (["-p", "a", "-p", ""], "prompt 2 of 2: the prompt has no tokens"),
        (["-p", "a", "-p", "b" * 5000], "prompt 2 of 2: the prompt has 5000 tokens"),
    ],
)
def test_several_prompts_of_which_one_cannot_be(checkpoint, capsys, args, words):
    assert cli.main(["generate", "-m", str(checkpoint), *args]) == cli.USER_FAULT
    out, err = capsys.readouterr()
    assert out == "" and words in err


def test_ctrl_c_prints_what_there_is_of_each_prompt(checkpoint, capsys, monkeypatch):
    from spindle.serve.llm import LLM

    step, steps = LLM.step, []

    def interrupted(llm):
        steps.append(None)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(llm)

    monkeypatch.setattr(LLM, "step", interrupted)
    assert cli.main(["generate", "-m", str(checkpoint), *TWO, "--json"]) == cli.INTERRUPTED
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["finish_reason"] for line in lines] == ["abort", "abort"]
    assert [len(line["token_ids"]) for line in lines] == [4, 4]


def test_several_prompts_of_a_broken_model_are_named(tmp_path, capsys):
    """Weights of NaN: an error, as for one prompt, and not an empty text."""
    broken = write_checkpoint(tmp_path)
    weights = load_file(broken / "model.safetensors")
    weights["ln_f.weight"].fill_(torch.nan)
    save_file(weights, broken / "model.safetensors")
    assert cli.main(["generate", "-m", str(broken), *TWO]) == cli.USER_FAULT
    assert "prompt 1, 2 of 2: logits that are no distribution" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_several_prompts_show_a_bar_at_a_terminal_and_none_in_a_pipe(
    checkpoint, monkeypatch, stream, shown
):
    monkeypatch.setattr("sys.stderr", stderr := stream())
    assert cli.main(["generate", "-m", str(checkpoint), *TWO, "-q"]) == 0
    assert ("2/2" in stderr.getvalue()) == shown


# --- drafts --------------------------------------------------------------------------------------

REPETITIVE = "def add(a, b):\n    return a + b\n\n" * 3
REPEAT = ("-p", REPETITIVE, "-n", "40", "--temperature", "0", "--ignore-eos")
DRAFTS = {"ngram": ["--ngram"], "model": ["--draft", "tiny-draft"], "int8": ["--draft", "int8"]}
COUNTS = {"passes", "tokens", "proposed", "judged", "accepted"}
SHARES = {"acceptance_rate", "tokens_per_pass", "draft_share"}


@pytest.mark.parametrize("by", DRAFTS)
def test_drafts_change_no_token_and_are_counted(by, capsys: pytest.CaptureFixture[str]) -> None:
    """B47: drafts were made, and some accepted; 40 tokens come from fewer passes.

    float64, so that the tokens are the same in all digits.
    """
    plain = as_json("tiny", capsys, *REPEAT, "--dtype", "float64")
    drafted = as_json("tiny", capsys, *REPEAT, "--dtype", "float64", *DRAFTS[by])
    assert drafted["token_ids"] == plain["token_ids"] and drafted["text"] == plain["text"]
    counts = drafted["stats"]["speculation"]
    assert set(counts) == COUNTS | SHARES and "speculation" not in plain["stats"]
    assert 0 < counts["accepted"] <= counts["judged"] <= counts["proposed"]
    assert counts["passes"] < counts["tokens"] == 39
    assert counts["acceptance_rate"] == counts["accepted"] / counts["judged"]
    assert 0 < counts["draft_share"] < 1


def test_k_is_the_most_that_a_pass_has(capsys: pytest.CaptureFixture[str]) -> None:
    """B47: it arrives; of 0 drafts none are made."""
    per_pass = {}
    for k in (0, 1, 3):
        stats = as_json("tiny", capsys, *REPEAT, "--ngram", "-k", str(k))["stats"]["speculation"]
        assert stats["proposed"] <= k * stats["passes"]
        per_pass[k] = stats["tokens_per_pass"]
    assert per_pass[0] == 1 < per_pass[1] <= 2
    by_default = as_json("tiny", capsys, *REPEAT, "--ngram")["stats"]["speculation"]
    as_five = as_json("tiny", capsys, *REPEAT, "--ngram", "-k", "5")["stats"]["speculation"]
    assert {name: by_default[name] for name in COUNTS} == {name: as_five[name] for name in COUNTS}


def test_the_stats_say_how_many_drafts_were_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *REPEAT, "--ngram", "-k", "3"]) == 0
    out, err = capsys.readouterr()
    counts = as_json("tiny", capsys, *REPEAT, "--ngram", "-k", "3")["stats"]["speculation"]
    rate, judged = counts["acceptance_rate"], counts["judged"]
    words = f"{counts['tokens_per_pass']:.2f} tokens a pass, {rate:.0%} of {judged} drafts accepted"
    assert err.rstrip("\n").endswith(f" · {words}")
    assert cli.main(["generate", *REPEAT, "--ngram", "-k", "3", "-q"]) == 0
    assert capsys.readouterr() == (out, "")
    assert cli.main(["generate", *REPEAT]) == 0
    assert "drafts" not in capsys.readouterr().err


def test_sampling_options_count_with_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    """B45: seed, filters, penalties and stops: with n-grams the answers are the same."""
    options = "-n 30 --temperature 0.8 --top-p 0.9 --seed 3 --frequency-penalty 0.3 --stop self"
    options = [*f"{options} --samples 3 --logprobs 1 --dtype float64 -p".split(), REPETITIVE]
    plain, drafted = (as_json("tiny", capsys, *options, *more) for more in ([], ["--ngram"]))
    for mine, its in zip(drafted["outputs"], plain["outputs"], strict=True):
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert mine[name] == its[name]
        assert [one["id"] for one in mine["logprobs"]] == mine["token_ids"]
        got, right = ([one["logprob"] for one in x["logprobs"]] for x in (mine, its))
        assert got == pytest.approx(right, abs=1e-9)
        assert "speculation" in mine["stats"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-k", "3"], "-k: it counts drafts; expected --ngram or --draft MODEL with it"),
        (["--ngram", "-k", "33"], "-k=33: expected a whole number of 0 to 32"),
        (["--draft", "int8", "-k", "-1"], "-k=-1: expected a whole number of 0 to 32"),
        (["--ngram", "-k", "five"], "invalid int value: 'five'"),
        (["--ngram", "--draft", "tiny-draft"], "--draft: not allowed with argument --ngram"),
        (["--draft"], "--draft: expected one argument"),
        (["--draft", "./nowhere"], "no model './nowhere'"),
    ],
)
@pytest.mark.parametrize("prompts", [["-p", "a"], ["-p", "a", "-p", "b"]], ids=["one", "two"])
def test_drafts_that_cannot_be_are_refused_before_anything_is_loaded(
    options, words, prompts, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is not looked for: what is wrong with the drafts is said first."""
    assert cli.main(["generate", "-m", "no/such-model", *prompts, *options]) == cli.USER_FAULT
    assert words in one_error(capsys)


def test_a_draft_model_of_other_tokens_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B43"""
    args = ["generate", "-m", str(checkpoint), "-p", "a", "--draft", "tiny-draft"]
    assert cli.main(args) == cli.USER_FAULT
    assert "the draft model's tokenizer is another one than the target's" in one_error(capsys)


@pytest.mark.parametrize("by", ["ngram", "model"])
def test_several_prompts_are_drafted_too(by, capsys: pytest.CaptureFixture[str]) -> None:
    """B47: each has counts of its own, and the line of stats their sum."""
    args = ["-p", REPETITIVE, "-p", "A list is", "-n", "20", "--temperature", "0", "--ignore-eos"]
    args += ["--dtype", "float64"]

    def lines(*more: str) -> list[dict[str, Any]]:
        assert cli.main(["generate", *args, *more, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    plain, drafted = lines(), lines(*DRAFTS[by])
    assert [one["token_ids"] for one in drafted] == [one["token_ids"] for one in plain]
    counts = [one["stats"]["speculation"] for one in drafted]
    assert counts[0]["accepted"] > 0 and not any("speculation" in one["stats"] for one in plain)
    assert cli.main(["generate", *args, *DRAFTS[by]]) == 0
    judged, accepted = (sum(one[name] for one in counts) for name in ("judged", "accepted"))
    assert f"{accepted / judged:.0%} of {judged} drafts accepted" in capsys.readouterr().err


def test_a_chat_can_be_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """B47: two turns through a pipe: the same answers, and a line of stats that counts drafts."""
    folder = write_checkpoint(tmp_path)
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    args = ["chat", "-m", str(folder), "-n", "30", "--temperature", "0", "--ignore-eos"]
    args += ["--dtype", "float64"]

    def talk(*more: str) -> tuple[str, str]:
        turns = io.BytesIO(b"la la la la la la\nand again la la la\n")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(turns))
        assert cli.main([*args, *more]) == 0
        return capsys.readouterr()

    plain, drafted = talk(), talk("--ngram", "-k", "4")
    assert drafted[0] == plain[0]
    assert re.search(r"\d tokens a pass, \d+% of \d+ drafts accepted", drafted[1])
    assert "drafts" not in plain[1]
