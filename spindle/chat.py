"""`spindle chat`: a conversation with a model, at a terminal or through a pipe.

A model remembers nothing: with every turn the whole conversation goes through the chat template and
through the model once more. So a conversation is a list of messages, and the only thing that can
fill up is the context, which the answer has to fit into as well.

Answers go to stdout; the prompt of a terminal too, where that is one. Stats and remarks go to
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spindle.chat_template import ChatTemplates
from spindle.cli import INTERRUPTED, drafted, sampling_params, say, show_stream
from spindle.decode import graphs
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.stream import Streams
from spindle.decode.text import TextStream, stream_text
from spindle.errors import RequestError, TokenizerError
from spindle.hub import known_models, resolve
from spindle.model.weights import load_hf
from spindle.tokenizer import Tokenizer

PROMPT = "you> "
HELP = """/reset   forget the conversation; what --system says stays
/help    this text
/quit    leave, as Ctrl-D does
Any other line goes to the model, and so does a command with a space in front. Ctrl-C stops an
answer: what was said of it stays in the conversation, and the model takes it for its whole answer.
Ctrl-C at the prompt, twice, leaves with status 130. The whole conversation goes to the model with
every turn; when the context is full, /reset begins a new one."""
HOW_TO_LEAVE = "Ctrl-C again leaves, and so do Ctrl-D and /quit; /help lists the commands"


class Conversation:
    """What was said so far, and the model that answers it.

    `messages` has what the template is given: the system's message if there is one, then user and
    assistant by turns. A turn that has no answer is not kept.
    """

    def __init__(
        self,
        engine: Streams,
        tokenizer: Tokenizer,
        params: SamplingParams,
        system: str | None = None,
    ) -> None:
        self.engine, self.tokenizer, self.params = engine, tokenizer, params
        self._opening = opening(system)
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all but the system's message."""
        self.messages = list(self._opening)

    def ask(self, text: str, show: Callable[[TextStream], object]) -> TextStream:
        """Give the model a turn, let `show` run the answer, and keep both, unless it has no tokens.

        An answer that was cut short is kept as far as it came. RequestError: the conversation
        would not fit, or the template refuses it; then nothing is kept.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.encode_chat(messages)
        if len(ids) >= self.engine.max_seq_len:
            raise RequestError(
                f"the context is full: with this turn the conversation has {len(ids)} tokens, and "
                f"of the model's {self.engine.max_seq_len} none is left to answer with; this turn "
                "is not kept, and /reset begins a new conversation"
            )
        stream = stream_text(self.engine, self.tokenizer, ids, self.params)
        show(stream)
        if stream.token_ids:
            self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        return stream


def opening(system: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def converse(args: argparse.Namespace) -> int:
    """Load the model and talk until the input ends; returns the exit status."""
    if sys.stdin is None:
        raise RequestError("stdin is closed; expected a terminal, or a pipe with a turn a line")
    params = sampling_params(args)
    directory = resolve(args.model)
    tokenizer = Tokenizer(directory)
    if tokenizer.chat_template is None:
        raise RequestError(without_template(args.model))
    probe = {"role": "user", "content": "Hello"}  # a template or a system that it refuses
    tokenizer.encode_chat([*opening(args.system), probe])  # is refused before weights are read
    model = load_hf(directory, args.device, args.dtype, args.quantize)
    engine = drafted(graphs.enable_if_free(Engine(model, args.max_seq_len)), args)
    conversation = Conversation(engine, tokenizer, params, args.system)
    if not sys.stdin.isatty():
        return at_a_pipe(conversation, piped_lines(), args.quiet)
    remark(f"{args.model}, {engine.max_seq_len} tokens of context; /help lists the commands")
    with contextlib.suppress(ImportError):  # line editing and history, where Python has it
        import readline  # noqa: F401
    return at_a_terminal(conversation, typed_line, args.quiet)


def without_template(model: str) -> str:
    """Why a model cannot chat, and which ones can."""
    able = []
    for known in known_models():
        with contextlib.suppress(TokenizerError):  # some damaged model is not today's concern
            if known.present and ChatTemplates.read(known.directory).sources:
                able.append(known.name)
        if not known.present and known.command:
            able.append(f"{known.name} (`{known.command}`)")
    return (
        f"{model} has no chat template: it continues a text, as `spindle generate` lets it, and "
        f"knows no turns; expected a model tuned for chat, such as {', '.join(able)}"
    )


# A terminal, where somebody can be told; a pipe, where nobody can.


def at_a_terminal(conversation: Conversation, read: Callable[[], str], quiet: bool) -> int:
    """Take what `read` gives until it raises EOFError, or KeyboardInterrupt twice in a row."""
    pressed = False  # Ctrl-C was the last thing that happened
    while True:
        try:
            if respond(conversation, read(), quiet) == "quit":
                return 0
            pressed = False
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            if pressed:
                print(file=sys.stderr)
                return INTERRUPTED
            pressed = True
            remark(f"\n{HOW_TO_LEAVE}")
        except (RequestError, UnicodeDecodeError) as error:
            remark(str(error))


def at_a_pipe(conversation: Conversation, lines: Iterable[str], quiet: bool) -> int:
    """Answer each line; an error or Ctrl-C ends it, for nobody is there to go on differently."""
    for line in lines:
        done = respond(conversation, line, quiet)
        if done == "quit":
            return 0
        if done == "abort":
            return INTERRUPTED
    return 0


def respond(conversation: Conversation, line: str, quiet: bool) -> str | None:
    """Do what a line asks; returns "quit", or how the answer ended, or None if there was none."""
    command = re.match(r"/[A-Za-z]+(?=\s|$)", line)
    if command:
        return obey(conversation, command[0].lower())
    if not line.strip():
        return None
    stream = conversation.ask(line, show_stream)
    if stream.text and not stream.text.endswith("\n"):
        say("\n")
    if not stream.token_ids and stream.finish_reason == "abort":
        remark("\nstopped before it began: this turn is not kept")
    elif not quiet:
        remark(stream.stats.summary() + why_it_ended(stream, conversation))
    return stream.finish_reason


def obey(conversation: Conversation, command: str) -> str | None:
    """Do a command; returns "quit" if it is that."""
    if command == "/quit":
        return "quit"
    if command == "/reset":
        conversation.reset()
        remark("forgotten")
    elif command == "/help":
        remark(HELP)
    else:
        remark(f"{command}: no such command; expected /reset, /help or /quit, or a space in front")
    return None


def why_it_ended(stream: TextStream, conversation: Conversation) -> str:
    """What a reader should know of an answer that did not end of itself; else nothing."""
    if stream.finish_reason == "abort":
        return " · stopped by Ctrl-C"
    if stream.finish_reason != "length":
        return ""
    stats, limit = stream.stats, conversation.engine.max_seq_len
    if stats.prompt_tokens + stats.new_tokens >= limit:
        return f" · cut: the context of {limit} tokens is full; /reset begins a new conversation"
    return f" · cut after {stats.new_tokens} tokens: -n N allows more"


def typed_line() -> str:
    """One line from the terminal, after a prompt there."""
    if sys.stdout is not None and sys.stdout.isatty():
        return input(PROMPT)
    print(PROMPT, end="", file=sys.stderr, flush=True)  # stdout is a file: the answers alone
    return input()


def piped_lines() -> Iterator[str]:
    """The lines of stdin, without their ends. RequestError: names the line that is not UTF-8."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as cause:
            byte = cause.object[cause.start]
            raise RequestError(
                f"stdin: line {number}: byte {byte:#04x} is not UTF-8; expected text in UTF-8"
            ) from None
        yield text.removesuffix("\n").removesuffix("\r")


def remark(text: Any) -> None:
    """A line for the reader that is no answer."""
    print(text, file=sys.stderr, flush=True)
