"""`spindle chat`: what is remembered, what is shown, and how it is left.

The loop is driven by a list of lines, by a pipe, and by a person at a terminal: a pseudo-terminal,
whose reader waits for text and never for time. The model is a random one whose tokens are bytes.
"""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_cli import ENVIRONMENT, one_error, shell, write_checkpoint

from spindle import Engine, SamplingParams, StreamDecoder, Tokenizer, chat, cli, load_hf
from spindle.chat import Conversation, at_a_terminal
from spindle.errors import RequestError

TEMPLATE = """
{%- for message in messages %}
    {{- '[' + message.role + ']' + message.content }}
    {%- if 'forbidden' in message.content %}{{ raise_exception('not that word') }}{% endif %}
{%- endfor %}
{{- '[assistant]' if add_generation_prompt }}"""
GREEDY = {"temperature": 0, "ignore_eos": True}
GREEDY_OPTIONS = ("--temperature", "0", "--ignore-eos")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("chat"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine(load_hf(checkpoint))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def answer(engine: Engine, tokenizer: Tokenizer, messages: list, new: int, **sampling) -> str:
    """What follows these messages, by the parts that `chat` is made of."""
    ids = tokenizer.encode_chat(messages)
    new_ids, _ = engine.generate(ids, new, **(GREEDY | sampling))
    decoder = StreamDecoder(tokenizer, prompt_ids=ids)
    return "".join(map(decoder.push, new_ids)) + decoder.flush()


def dialogue(engine: Engine, tokenizer: Tokenizer, turns: list[str], new: int) -> list[dict]:
    """The messages of a conversation whose every turn is answered."""
    messages: list[dict] = []
    for text in turns:
        messages.append(user(text))
        messages.append(assistant(answer(engine, tokenizer, messages, new)))
    return messages


def greedy(engine: Engine, tokenizer: Tokenizer, new: int = 6, **more) -> Conversation:
    return Conversation(engine, tokenizer, SamplingParams(max_tokens=new, **GREEDY), **more)


def talk(conversation: Conversation, *lines: str | BaseException, quiet: bool = True) -> int:
    """At a terminal: each line is typed, each exception happens at the prompt; then Ctrl-D."""
    script: Iterator[str | BaseException] = iter([*lines, EOFError()])

    def read() -> str:
        line = next(script)
        if isinstance(line, BaseException):
            raise line
        return line

    return at_a_terminal(conversation, read, quiet)


# What is remembered.


def test_every_turn_sees_the_whole_conversation(engine, tokenizer, capsys) -> None:
    conversation = greedy(engine, tokenizer)
    turns = ["one", "žluť 👍", "a\nb\0c"]
    assert talk(conversation, *turns) == 0
    expected = dialogue(engine, tokenizer, turns, 6)
    assert conversation.messages == expected
    shown = [message["content"] for message in expected if message["role"] == "assistant"]
    out, err = capsys.readouterr()
    assert out == "".join(text if text.endswith("\n") else text + "\n" for text in shown)
    assert err == "\n"  # after the Ctrl-D
    alone = answer(engine, tokenizer, [user(turns[2])], 6)
    assert alone != shown[2]  # so it did matter what went before


def test_reset_forgets_all_but_the_system(engine, tokenizer, capsys) -> None:
    conversation = greedy(engine, tokenizer, system="Be kind.")
    opening = [{"role": "system", "content": "Be kind."}]
    assert conversation.messages == opening
    assert talk(conversation, "one", "two", "/reset", "one") == 0
    first = answer(engine, tokenizer, [*opening, user("one")], 6)
    assert conversation.messages == [*opening, user("one"), assistant(first)]
    assert first != answer(engine, tokenizer, [user("one")], 6)
    assert talk(conversation, "/reset") == 0
    assert conversation.messages == opening
    assert capsys.readouterr().err == "forgotten\n\nforgotten\n\n"


def test_commands_and_what_is_none(engine, tokenizer, capsys) -> None:
    conversation = greedy(engine, tokenizer, new=1)
    assert talk(conversation, "", "   ", "/help", "/HELP please", "/rest", "\t") == 0
    out, err = capsys.readouterr()
    assert out == "" and conversation.messages == []
    assert err.count(chat.HELP) == 2
    assert "/rest: no such command; expected /reset, /help or /quit" in err
    texts = ["/etc/passwd?", " /reset", "/", "/3", "a /quit", "/\u010d"]
    assert talk(conversation, *texts, "/quit", "after") == 0
    asked = [message["content"] for message in conversation.messages[::2]]
    assert asked == texts


def test_a_turn_that_does_not_fit_is_refused_with_the_numbers(
    checkpoint, tokenizer, capsys
) -> None:
    """B111: it is not kept, and /reset makes room."""
    small = Engine(load_hf(checkpoint), 40)
    conversation = greedy(small, tokenizer)
    assert talk(conversation, "abc", "d" * 5) == 0  # 6 + 3 + 11 tokens, answered by 6
    kept = list(conversation.messages)
    assert len(kept) == 2
    err = capsys.readouterr().err
    used = len(tokenizer.encode_chat([*kept, user("d" * 5)]))
    assert used >= 40
    assert f"the context is full: with this turn the conversation has {used} tokens, and of " in err
    assert "model's 40 none is left to answer with; this turn is not kept, and /reset" in err
    assert talk(conversation, "/reset", "d" * 5) == 0
    assert len(conversation.messages) == 2


def test_the_context_is_full_to_its_last_token(checkpoint, tokenizer, capsys) -> None:
    """One token short of full is answered by one token, and the reader is told why."""
    small = Engine(load_hf(checkpoint), 40)
    conversation = greedy(small, tokenizer)
    marks = len(tokenizer.encode_chat([user("")]))
    with pytest.raises(RequestError, match=r"has 40 tokens, and of the model's 40 none is left"):
        conversation.ask("a" * (40 - marks), list)
    assert conversation.messages == []
    assert talk(conversation, "a" * (39 - marks), quiet=False) == 0
    err = capsys.readouterr().err
    assert f"1 tokens after a prompt of {39}" in err
    assert "cut: the context of 40 tokens is full; /reset begins a new conversation" in err
    assert talk(greedy(small, tokenizer, new=3), "a", quiet=False) == 0
    assert "cut after 3 tokens: -n N allows more" in capsys.readouterr().err


def test_a_turn_that_the_template_or_the_tokenizer_refuses_is_not_kept(
    engine, tokenizer, capsys
) -> None:
    conversation = greedy(engine, tokenizer)
    broken = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert talk(conversation, "forbidden", "a\ud800", broken, "fine") == 0
    err = capsys.readouterr().err
    assert "refuses these messages: not that word" in err
    assert "expected whole characters" in err and "can't decode byte 0xff" in err
    assert conversation.messages == dialogue(engine, tokenizer, ["fine"], 6)


def test_an_end_token_is_kept_out_of_text_and_history(engine, tokenizer, capsys) -> None:
    """<|endoftext|>, a special token, ends the answer and is not seen; nor is a stop string."""
    ids = tokenizer.encode_chat([user("a")])
    for seed in range(200):
        new_ids, stats = engine.generate(ids, 64, seed=seed)
        if stats.finish_reason == "stop":
            break
    assert new_ids[-1] == 256
    conversation = Conversation(engine, tokenizer, SamplingParams(max_tokens=64, seed=seed))
    assert talk(conversation, "a") == 0
    text = answer(engine, tokenizer, [user("a")], 64, temperature=1, seed=seed, ignore_eos=False)
    assert "endoftext" not in text and conversation.messages == [user("a"), assistant(text)]
    assert capsys.readouterr().out.rstrip("\n") == text.rstrip("\n")

    long = answer(engine, tokenizer, [user("a")], 30)
    params = SamplingParams(max_tokens=30, stop=long[10:12], **GREEDY)
    conversation = Conversation(engine, tokenizer, params)
    assert talk(conversation, "a") == 0
    before = long[: long.index(long[10:12])]
    assert conversation.messages == [user("a"), assistant(before)]
    assert capsys.readouterr().out.rstrip("\n") == before.rstrip("\n")


# Ctrl-C.


class CtrlC:
    """Pressed when a stream decoder is given its nth token after `arm`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wait = -1
        push = StreamDecoder.push

        def pressing(decoder: StreamDecoder, token: int) -> str:
            self.wait -= 1
            if self.wait == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return push(decoder, token)

        monkeypatch.setattr(StreamDecoder, "push", pressing)


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    engine, tokenizer, capsys, monkeypatch
) -> None:
    press = CtrlC(monkeypatch)
    conversation = greedy(engine, tokenizer, new=50)
    press.wait = len(tokenizer.encode_chat([user("one")])) + 4
    assert talk(conversation, "one", quiet=False) == 0
    said = answer(engine, tokenizer, [user("one")], 4)
    assert conversation.messages == [user("one"), assistant(said)]
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == said.rstrip("\n")
    assert "4 tokens after a prompt of" in err and " · stopped by Ctrl-C" in err
    conversation.params = SamplingParams(max_tokens=5, **GREEDY)
    assert talk(conversation, "two") == 0  # the model sees the half answer as its own
    expected = [user("one"), assistant(said), user("two")]
    assert conversation.messages[:3] == expected
    assert conversation.messages[3] == assistant(answer(engine, tokenizer, expected, 5))


def test_ctrl_c_before_the_answer_begins_drops_the_turn(
    engine, tokenizer, capsys, monkeypatch
) -> None:
    prefill = Engine.prefill

    def interrupted(self, ids):
        monkeypatch.setattr(Engine, "prefill", prefill)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(Engine, "prefill", interrupted)
    conversation, start = greedy(engine, tokenizer), time.monotonic()
    assert talk(conversation, "lost", "kept") == 0
    assert time.monotonic() - start < 8
    assert conversation.messages == dialogue(engine, tokenizer, ["kept"], 6)
    assert "stopped before it began: this turn is not kept" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_twice_leaves(engine, tokenizer, capsys) -> None:
    """130, as a shell has it for a program that Ctrl-C ended; with a line between, it stays."""
    press = KeyboardInterrupt()
    conversation = greedy(engine, tokenizer)
    assert talk(conversation, press, "one", press, "", press, press, "never") == 130
    assert conversation.messages == dialogue(engine, tokenizer, ["one"], 6)
    assert capsys.readouterr().err.count(chat.HOW_TO_LEAVE) == 3
    assert talk(conversation, press) == 0  # then Ctrl-D


# A pipe.


def ends_its_line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def test_a_pipe_is_a_turn_a_line_and_stdout_has_the_answers_alone(
    checkpoint, engine, tokenizer
) -> None:
    turns = ["one", "žluť 👍", "a\0b", "x" * 1500]
    stdin = "one\nžluť 👍\r\n\n  \na\0b\n" + "x" * 1500  # no end of line at the end
    run = shell("chat", "-m", checkpoint, "-n", "6", *GREEDY_OPTIONS, stdin=stdin.encode())
    said = [m["content"] for m in dialogue(engine, tokenizer, turns, 6)[1::2]]
    assert run.returncode == 0
    assert run.stdout.decode() == "".join(map(ends_its_line, said))
    stats = run.stderr.decode().splitlines()
    assert [line.split(" · ")[0].split(" after")[0] for line in stats] == ["6 tokens"] * 4


def test_commands_work_in_a_pipe(checkpoint, engine, tokenizer, monkeypatch, capsys) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"one\n/reset\none\n/quit\nnever\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["chat", "-m", str(checkpoint), "-n", "6", *GREEDY_OPTIONS, "-q"]) == 0
    once = ends_its_line(answer(engine, tokenizer, [user("one")], 6))
    assert capsys.readouterr() == (once * 2, "forgotten\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"ab\xff", "stdin: line 3: byte 0xff is not UTF-8; expected text in UTF-8"),
        (b"y" * 9000, "the context is full: with this turn the conversation has 9"),
        (b"forbidden", "the chat template refuses these messages: not that word"),
    ],
)
def test_an_error_ends_a_pipe_with_status_2(checkpoint, monkeypatch, capsys, line, words) -> None:
    """Nobody is there to go on differently; what was answered before is on stdout."""
    stdin = io.TextIOWrapper(io.BytesIO(b"one\n\n" + line + b"\nnever\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["chat", "-m", str(checkpoint), "-n", "3", *GREEDY_OPTIONS, "-q"]) == 2
    out, err = capsys.readouterr()
    assert out != "" and err.startswith(f"spindle: error: {words}") and err.count("\n") == 1


def test_ctrl_c_ends_a_pipe(checkpoint, tokenizer, monkeypatch, capsys) -> None:
    press = CtrlC(monkeypatch)
    press.wait = len(tokenizer.encode_chat([user("one")])) + 2
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\nnever\n")))
    assert cli.main(["chat", "-m", str(checkpoint), *GREEDY_OPTIONS]) == 130
    assert "2 tokens after a prompt" in capsys.readouterr().err


def test_a_closed_stdin_is_refused(checkpoint, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["chat", "-m", str(checkpoint)]) == 2
    assert one_error(capsys).startswith("stdin is closed; expected a terminal, or a pipe")


# What is refused before anything is loaded.


def test_a_model_without_a_template_is_refused_and_others_are_named(capsys) -> None:
    assert cli.main(["chat", "-m", "tiny"]) == 2
    message = one_error(capsys)
    assert message.startswith("tiny has no chat template") and "`spindle generate`" in message
    assert "expected a model tuned for chat, such as smollm2" in message


def test_what_the_template_refuses_is_refused_before_weights_are_read(tmp_path, capsys) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    command = ["chat", "-m", str(tmp_path)]
    for template, options, words in [
        (TEMPLATE, ["--system", "forbidden"], "refuses these messages: not that word"),
        ("{% if %}", [], "chat template 'default', line 1: Expected an expression"),
        (TEMPLATE, ["--temperature", "-1"], "temperature=-1.0: expected"),
        (TEMPLATE, [], "model.safetensors"),  # which goes to show that it is damaged
    ]:
        content = json.dumps({"chat_template": template})
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert cli.main([*command, *options]) == 2
        assert words in one_error(capsys)


def test_a_damaged_model_in_the_cache_is_not_in_the_way(tmp_path, monkeypatch) -> None:
    from spindle.hub import KnownModel

    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder, content in (good, '{"chat_template": "x"}'), (bad, "{"):
        folder.mkdir()
        (folder / "tokenizer_config.json").write_text(content)
    models = [KnownModel(folder.name, "", folder, 0, True) for folder in (bad, good)]
    models.append(KnownModel("far", "", tmp_path / "far", 0, False, "spindle fetch far"))
    monkeypatch.setattr(chat, "known_models", lambda: models)
    message = chat.without_template("mine")
    assert message.endswith("such as good, far (`spindle fetch far`)")


# A person at a terminal.

IN_ITS_OWN_SESSION = """
import fcntl, os, signal, sys, termios
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background inherits that it is ignored
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Person:
    """Types into a pseudo-terminal, and reads until something appears there."""

    def __init__(self, *args: object, stdout: int | None = None) -> None:
        self._end, terminal = pty.openpty()
        size = (40).to_bytes(2, sys.byteorder) + (500).to_bytes(2, sys.byteorder) + bytes(4)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)  # no line that has to be wrapped
        command = [sys.executable, "-c", IN_ITS_OWN_SESSION, "-m", "spindle", "chat"]
        self.process = subprocess.Popen(
            [*command, *map(str, args)],
            stdin=terminal,
            stdout=terminal if stdout is None else stdout,
            stderr=terminal,
            env=ENVIRONMENT | {"TERM": "dumb", "PYTHONUTF8": "1"},
        )
        os.close(terminal)
        self._seen, self._read = b"", 0

    def __enter__(self) -> "Person":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def types(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def sees(self, pattern: str, again: str = "") -> str:
        """What has come up to and with the pattern, since it was last looked.

        `again` is typed whenever nothing has come for ten seconds. A Ctrl-C in the instant between
        readline's prompt and its waiting is noticed with the next key; two of them count as one.
        """
        deadline = time.monotonic() + 240  # of a busy machine
        while not (found := re.compile(pattern.encode()).search(self._seen, self._read)):
            assert time.monotonic() < deadline, self._seen[self._read :]
            if select.select([self._end], [], [], 10)[0]:
                self._seen += os.read(self._end, 1 << 16)
            else:
                self.types(again)
        text = self._seen[self._read : found.end()]
        self._read = found.end()
        return text.decode(errors="replace").replace("\r\n", "\n")

    def leaves(self, again: str = "") -> int:
        """The exit status, once the process has ended; what it still writes is read meanwhile."""
        while True:
            try:
                if not select.select([self._end], [], [], 10)[0]:
                    self.types(again)
                elif not os.read(self._end, 1 << 16):
                    break
            except OSError:  # Linux: the other end is closed
                break
        return self.process.wait(timeout=240)


STATS = r"tokens after a prompt of [^\n]*\n"


def test_two_turns_at_a_terminal(checkpoint, engine, tokenizer) -> None:
    messages = dialogue(engine, tokenizer, ["one", "two"], 12)
    with Person("-m", checkpoint, "-n", 12, *GREEDY_OPTIONS) as person:
        opening = person.sees("you> ")
        assert f"{checkpoint}, 4096 tokens of context; /help lists the commands" in opening
        for text, said in ("one", messages[1]["content"]), ("two", messages[3]["content"]):
            person.types(f"{text}\n")
            screen = person.sees(STATS)
            shown = screen.removeprefix(f"{text}\n")
            assert shown.startswith(said)
            assert shown.removeprefix(said).lstrip("\n").startswith("12 tokens after a prompt of")
            person.sees("you> ")
        person.types("\x04")
        assert person.leaves() == 0


def test_ctrl_c_at_a_terminal_stops_an_answer_then_the_program(
    checkpoint, engine, tokenizer
) -> None:
    with Person("-m", checkpoint, "-n", 3000, *GREEDY_OPTIONS) as person:
        person.sees("you> ")
        person.types("one\n")
        person.sees("one\r\n(?s:.){40}")  # the answer is coming
        person.types("\x03")
        screen = person.sees(STATS)
        assert "stopped by Ctrl-C" in screen
        count = int(re.search(r"(\d+) tokens after", screen)[1])
        assert 0 < count < 3000
        said = answer(engine, tokenizer, [user("one")], count)
        person.sees("you> ")
        person.types("two\n")
        person.sees("two\r\n(?s:.){40}")
        person.types("\x03")
        screen = person.sees(STATS)
        history = [user("one"), assistant(said), user("two")]
        prompt = len(tokenizer.encode_chat(history))
        assert f"after a prompt of {prompt} " in screen
        person.sees("you> ")
        person.types("\x03")
        person.sees(re.escape(chat.HOW_TO_LEAVE), again="\x03")
        person.sees("you> ")
        person.types("\x03")
        assert person.leaves(again="\x03") == 130


def test_reset_and_help_at_a_terminal(checkpoint, engine, tokenizer) -> None:
    said = answer(engine, tokenizer, [user("one")], 12)
    with Person("-m", checkpoint, "-n", 12, *GREEDY_OPTIONS, "-q") as person:
        person.sees("you> ")
        for _ in range(2):
            person.types("one\n")
            screen = person.sees("you> ")
            assert screen == f"one\n{ends_its_line(said)}you> "
            person.types("/reset\n")
            assert person.sees("you> ") == "/reset\nforgotten\nyou> "
        person.types("/help\n")
        assert chat.HELP in person.sees("you> ")
        person.types("/quit\n")
        assert person.leaves() == 0


def test_answers_in_a_file_have_no_prompt_between_them(
    checkpoint, engine, tokenizer, tmp_path
) -> None:
    said = answer(engine, tokenizer, [user("one")], 12)
    with open(tmp_path / "answers", "wb") as file:
        person = Person("-m", checkpoint, "-n", 12, *GREEDY_OPTIONS, stdout=file.fileno())
    with person:
        person.sees("you> ")
        person.types("one\n")
        person.sees(STATS)
        person.sees("you> ")
        person.types("\x04")
        assert person.leaves() == 0
    assert (tmp_path / "answers").read_bytes().decode() == ends_its_line(said)


@pytest.mark.smollm2
def test_smollm2_answers_and_remembers() -> None:
    """Greedy, with its own template; what it says of Italy needs the turn before."""
    with Person("-n", 24, "--temperature", 0) as person:
        person.sees("you> ")
        person.types("What is the capital of France?\n")
        assert "The capital of France is Paris.\n" in person.sees(STATS)
        person.sees("you> ")
        person.types("And of Italy?\n")
        screen = person.sees(STATS)
        assert "The capital of Italy is Rome.\n" in screen and "<|im_end|>" not in screen
        person.types("/quit\n")
        assert person.leaves() == 0
