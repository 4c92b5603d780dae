"""The `spindle` command: generate, chat, batch, serve, fetch, doctor, bench.

Text goes to stdout and everything else to stderr, so that a pipe gets the text alone. The exit
status is 0 when it is done, 1 for a fault of ours, 2 for a fault in what we were given (one line
says which), 3 if `batch` is done but for lines that it refused, 130 after Ctrl-C, 141 when the
reader of our output has gone away. Torch takes seconds to import, so only what needs it imports it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spindle.bench import BENCHES
from spindle.errors import RequestError, SpindleError, printable

if TYPE_CHECKING:
    from spindle.decode.engine import Engine
    from spindle.decode.logprobs import Logprob
    from spindle.decode.params import SamplingParams
    from spindle.decode.stats import Stats
    from spindle.decode.stream import Streams
    from spindle.decode.text import TextStream
    from spindle.serve.outputs import Completion
    from spindle.tokenizer import Tokenizer

OUR_FAULT, USER_FAULT, REFUSED = 1, 2, 3
INTERRUPTED, NO_READER = 130, 141  # shells count 128 + the signal

ERROR = "spindle: error: "
LONGEST = 1000  # characters of an error: an option's value may be a whole file

PROMPT = "The capital of France is"  # where none is given

EXAMPLES = """examples:
  spindle generate -m tiny -p "A list is"
  spindle fetch smollm2
  spindle generate -m smollm2 -p "The capital of France is" -n 16 --temperature 0
  spindle chat -m smollm2
  spindle batch prompts.jsonl answers.jsonl -m smollm2
  spindle serve -m smollm2
  spindle doctor
"""
GENERATE_EXAMPLES = r"""examples:
  spindle generate -p "A list is" --temperature 0.7 --top-p 0.9 --seed 1
  spindle generate -p "A list is" -p "A tuple is" -p "A set is" -n 32
  printf 'Once upon a time' | spindle generate -m smollm2 -p - -n 100 > story.txt
  spindle generate -m path/to/checkpoint -p "Hello" --json | python -m json.tool
  spindle generate -m smollm2 -p "Repeat: to be or not to be, that is the question" --ngram
  spindle generate -p "def area(" --stop $'\n\n' --stop "def "
  torchrun --nproc-per-node 3 -m spindle generate -m smollm2 -p "Once upon a time"

torchrun has as many processes run one model, each a part of it: their number divides its heads.
A stop string is taken as it is: a backslash is a backslash, and $'\n' is the shell's newline.
MODEL is a bundled name (tiny, tiny-draft), a fetched one (smollm2), a directory with config.json,
*.safetensors and tokenizer.json, or the id of a model on the hub.
"""
CHAT_EXAMPLES = r"""examples:
  spindle chat -m smollm2
  spindle chat -m smollm2 --system "Answer in one sentence." --temperature 0.2 --top-p 0.9
  printf 'What is a list?\nAnd a tuple?\n' | spindle chat -m smollm2 -q > answers.txt

At a terminal: /reset forgets the conversation, /help says more, /quit or Ctrl-D leaves. Ctrl-C
stops an answer, and what was said of it stays in the conversation; at the prompt, Ctrl-C twice
leaves with status 130. From a pipe each line is a turn, and stdout gets the answers alone. The
model needs a chat template, as models tuned for chat have one.
"""
BATCH_EXAMPLES = r"""examples:
  spindle batch prompts.jsonl answers.jsonl -m smollm2
  spindle batch prompts.jsonl answers.jsonl -m smollm2 --errors refused.jsonl -q
  spindle batch prompts.jsonl answers.jsonl -m path/to/checkpoint --replicas 8

Each line of IN is an object as in OpenAI's batch files:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions",
   "body": {"prompt": "A list is", "max_tokens": 16, "temperature": 0}}
or, with "url": "/v1/chat/completions", has "messages" in its body. Each line of OUT is one of their
results, in the order in which they end. The same command again goes on where it was stopped, by
whatever means: a line that has its result in OUT is not run again. OUT must have been made of
these lines, and with what each result names in its system_fingerprint: the checkpoint's bytes, the
device, whose kernels for which vectors, dtype, quantize, max_model_len and batch_invariant, as they
turn out. If not, what differs is said. Lines may be added to IN meanwhile, refused ones mended.

A line that cannot be run is told on stderr with its number, and has no result; with --errors FILE,
which begins anew each time, it is written there too. If all lines are done but for such ones, the
status is 3; 2 is for what ended the whole, such as a full disk. Without a seed in its body a line
draws by its custom_id. With batch invariance the results are the same however often it was
stopped, and with any number of replicas: that is the default where native code makes it cheap
(float32 on a CPU); elsewhere each token would have a pass of its own.
"""
SERVE_EXAMPLES = r"""examples:
  spindle serve -m smollm2
  spindle serve -m smollm2 --port 0 --max-seqs 64 --ngram
  SPINDLE_API_KEY="$(cat key.txt)" spindle serve -m path/to/checkpoint --host 0.0.0.0
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
    -d '{"prompt": "A list is", "max_tokens": 16, "temperature": 0}'

What speaks OpenAI's API can talk to it, with http://127.0.0.1:8000/v1 for its base URL: completions
and chat completions, streamed or not, and the list of models. What a field asks for is done, or
refused by name; the header Spindle-Unused-Fields names those that have no effect here. Beside them
/health says whether it takes requests, and /metrics counts, for Prometheus.

The address is printed when it is ready; --port 0 takes a free port. With an API key everything but
/health asks for it, as a bearer token. Give it in SPINDLE_API_KEY: what is on the command line can
be read by every user of the machine. Without one, whoever reaches the port may use it; on a
loopback address it takes no requests for other host names, behind which a web page could hide.

A client that goes away ends its requests. Ctrl-C, and SIGTERM, take no more requests and give those
that run --grace seconds; Ctrl-C again ends it at once. The status is 130 after Ctrl-C, 0 after
SIGTERM.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; what is wrong is one line on stderr."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if is_rank():
        from spindle import launched

        return launched.main(argv)
    return command(argv)


def is_rank() -> bool:
    """Whether this process is one of several that torchrun has started, to run one model."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def command(argv: Sequence[str]) -> int:
    """`main` in this process, whatever others there are."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # an ASCII terminal shows \u20ac, and nothing crashes
            stream.reconfigure(errors="backslashreplace")
    try:
        args = _parser(argv).parse_args(argv)
        status: int = args.run(args)
        say("")  # what is still in the buffer: a full disk or a closed pipe shows itself here
        return status
    except SystemExit as end:  # argparse: --help, or a usage error that it has reported
        return int(end.code or 0)
    except BaseException as error:
        if "--debug" in argv and not isinstance(error, BrokenPipeError):
            traceback.print_exc()
        return report(error)


def report(error: BaseException) -> int:
    """Say in one line what ended the command; returns its exit status."""
    _drop_unwritten_output()
    if isinstance(error, BrokenPipeError):
        return NO_READER
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SpindleError):
        complain(str(error))
        return USER_FAULT
    complain(
        f"{type(error).__name__}: {error}: this is a fault of spindle, not of yours; "
        "the same command with --debug shows where"
    )
    return OUR_FAULT


def complain(message: str) -> None:
    """`spindle: error: ...` on stderr, the lines of the message joined to one."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    joined = "; ".join(lines).replace(":; ", ": ")
    half = LONGEST // 2
    cut = joined if len(joined) <= LONGEST else f"{joined[:half]} ... {joined[-half:]}"
    print(f"{ERROR}{printable(cut)}", file=sys.stderr)
    if is_rank():
        from spindle import launched

        launched.note(printable(cut))


def say(text: str) -> None:
    """Write to stdout at once. SpindleError if it cannot be written, as on a full disk."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as cause:
        raise SpindleError(f"stdout: {cause.strerror or cause}") from None


def _drop_unwritten_output() -> None:
    """Python flushes stdout once more as it ends, and must not fail a second time."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttributeError:  # stdout was closed from the start
        pass


# The command line.


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        complain(f"{message}; try `{self.prog} --help`")
        raise SystemExit(USER_FAULT)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for all commands; a benchmark's own options are there when argv names it."""
    parser = _Parser(
        prog="spindle", description="An LLM inference engine to read.", epilog=EXAMPLES
    )
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    model, drafts, pool = _model_options(), _draft_options(), _pool_options()
    _add_generate(commands, debug, _sampling_options(), model, drafts)
    _add_chat(commands, debug, _sampling_options(), model, drafts)
    _add_batch(commands, debug, model, pool)
    _add_serve(commands, debug, model, pool, drafts)
    _add_fetch(commands, debug)
    _add_doctor(commands, debug)
    _add_bench(commands, debug, argv)
    return parser


def _model_options() -> argparse.ArgumentParser:
    """What all share that run a model: where, and in what numbers."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16 or float64")
    about = "int8: weights of linear layers in 8 bits, a quarter of the memory of float32"
    add("--quantize", choices=("int8",), help=about)
    return parser


def _draft_options() -> argparse.ArgumentParser:
    """What `generate`, `chat` and `serve` share: who drafts."""
    parser = argparse.ArgumentParser(add_help=False)
    drafts = parser.add_mutually_exclusive_group()
    about = "draft tokens with a smaller model, for one pass to check; int8: with the model's own "
    about += "weights in 8 bits"
    drafts.add_argument("--draft", metavar="MODEL", help=about)
    about = "draft what followed the last time that the text ended like this"
    drafts.add_argument("--ngram", action="store_true", help=about)
    parser.add_argument("-k", type=int, metavar="N", help="drafts a pass, at most (default: 5)")
    return parser


def _pool_options() -> argparse.ArgumentParser:
    """What `batch` and `serve` share: how many answers, and in what memory."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--max-seqs", default=32, **number, help="answers that run at once (default: 32)")
    add("--max-model-len", **number, help="prompt and answer together (default: the model's)")
    add("--num-blocks", **number, help="of the KV cache (default: by the free memory)")
    return parser


def _sampling_options() -> argparse.ArgumentParser:
    """What `generate` and `chat` share: what picks a token, and what ends an answer."""
    parser = argparse.ArgumentParser(add_help=False)
    add, given = parser.add_argument, argparse.SUPPRESS  # defaults are SamplingParams'
    add("--temperature", type=float, default=given, help="0: greedy (default: 1)")
    add("--top-k", type=int, default=given, help="keep the k likeliest tokens (default: all)")
    add("--top-p", type=float, default=given, help="keep the likeliest that hold this much")
    add("--min-p", type=float, default=given, help="keep tokens this likely, beside the likeliest")
    penalty: dict[str, Any] = {"type": float, "default": given, "metavar": "X"}
    add("--presence-penalty", **penalty, help="off the logits of tokens that were said")
    add("--frequency-penalty", **penalty, help="off their logits for each time they were said")
    add("--repetition-penalty", **penalty, help="divides logits of tokens said or asked (1: none)")
    add("--seed", type=int, default=given, help="same seed, same text (default: drawn, see --json)")
    add("--stop", action="append", default=given, metavar="TEXT", help="end before it; repeatable")
    stop_id: dict[str, Any] = {"type": int, "action": "append", "dest": "stop_token_ids"}
    add("--stop-token-id", **stop_id, default=given, metavar="ID", help="end at it; repeatable")
    add("--min-tokens", type=int, default=given, metavar="N", help="nothing ends it before these")
    add("--ignore-eos", action="store_true", default=given, help="go on after an end token")
    add("--max-seq-len", type=int, metavar="N", help="prompt and answer together, in tokens")
    add("-q", "--quiet", "--no-stats", action="store_true", help="no line of stats on stderr")
    return parser


def _add_generate(commands: Any, *shared: argparse.ArgumentParser) -> None:
    about = "continue a prompt, token by token"
    parser = commands.add_parser(
        "generate", parents=shared, help=about, description=about, epilog=GENERATE_EXAMPLES
    )
    add, given = parser.add_argument, argparse.SUPPRESS
    add("-m", "--model", default="tiny", help="what to run (default: tiny)")
    about = 'the text to continue; "-": stdin, to its last byte; repeatable: all are run at once '
    about += f"(default: {PROMPT!r})"
    add("-p", "--prompt", action="append", help=about)
    add("-n", "--max-new-tokens", type=int, default=64, metavar="N", help="tokens (default: 64)")
    add("--samples", type=int, default=1, metavar="N", help="so many answers, one after another")
    add(
        "--json",
        action="store_true",
        help="one object a prompt, a line each: text, token ids, finish reason, stats",
    )
    add("--logprobs", type=int, default=given, metavar="K", help="with --json: the K likeliest too")
    parser.set_defaults(run=generate)


def _add_chat(commands: Any, *shared: argparse.ArgumentParser) -> None:
    about = "talk with a model at a terminal, or line by line through a pipe"
    parser = commands.add_parser(
        "chat", parents=shared, help=about, description=about, epilog=CHAT_EXAMPLES
    )
    add = parser.add_argument
    add("-m", "--model", default="smollm2", help="what to run (default: smollm2)")
    add("-n", "--max-new-tokens", type=int, default=512, metavar="N", help="an answer's (512)")
    add("--system", metavar="TEXT", help="what the model is told first, after each /reset too")
    parser.set_defaults(run=chat)


def _add_batch(commands: Any, *shared: argparse.ArgumentParser) -> None:
    about = "answer a file of prompts, line by line; it can be stopped and goes on"
    parser = commands.add_parser(
        "batch", parents=shared, help=about, description=about, epilog=BATCH_EXAMPLES
    )
    add = parser.add_argument
    add("input", type=Path, metavar="IN", help="lines in the form of OpenAI's batch files")
    add("output", type=Path, metavar="OUT", help="their results; what is there is not done again")
    add("-m", "--model", required=True, help="what to run")
    about = "what bodies call the model, and results (default: MODEL)"
    add("--served-model-name", metavar="NAME", help=about)
    add("--errors", type=Path, metavar="FILE", help="write the refused lines there too")
    about = "the same tokens whatever runs beside them (default: where that is cheap)"
    add("--batch-invariant", action=argparse.BooleanOptionalAction, help=about)
    about = "so many engines; with more than one by Ray Data, on its cluster if there is one"
    add("--replicas", type=int, default=1, metavar="N", help=about)
    add("-q", "--quiet", action="store_true", help="stderr has the refused lines alone")
    parser.set_defaults(run=batch)


def _add_serve(commands: Any, *shared: argparse.ArgumentParser) -> None:
    about = "answer OpenAI's API over HTTP, many requests at once"
    parser = commands.add_parser(
        "serve", parents=shared, help=about, description=about, epilog=SERVE_EXAMPLES
    )
    add, number = parser.add_argument, {"type": int, "metavar": "N"}
    add("-m", "--model", required=True, help="what to run")
    add("--served-model-name", metavar="NAME", help="what clients call it (default: MODEL)")
    add("--host", default="127.0.0.1", help="the address to listen at (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="0: a free one, which is printed (default: 8000)")
    about = "what clients have to send; SPINDLE_API_KEY in the environment is safer"
    add("--api-key", metavar="KEY", help=about)
    about = "a page's origin, whose scripts may read the answers; *: of all; repeatable"
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=about)
    add("--max-body-bytes", default=2**20, **number, help="of a request (default: 1048576)")
    add("--max-prompts", default=64, **number, help="prompts in a request (default: 64)")
    add("--max-prompt-tokens", **number, help="tokens of a prompt (default: what the model takes)")
    add("--max-n", default=16, **number, help="answers to a prompt (default: 16)")
    add("--max-queue", default=256, **number, help="answers that may wait (default: 256)")
    add("--grace", type=float, default=10.0, metavar="S", help="seconds to end in (default: 10)")
    add("--max-batch-tokens", **number, help="tokens of a step (default: 512, or what drafts need)")
    add("--block-size", default=16, **number, help="tokens of a block (default: 16)")
    add("--no-prefix-cache", action="store_true", help="prompts that begin alike share nothing")
    add("--preemption", choices=("recompute", "swap"), default="recompute", help="when blocks end")
    about = "the same bits for a request, whatever runs beside it; slow without native code"
    add("--batch-invariant", action="store_true", help=about)
    parser.set_defaults(run=serve)


def _add_fetch(commands: Any, debug: argparse.ArgumentParser) -> None:
    about = "bring a model to this machine, once, and print its directory"
    example = "example:\n  spindle fetch smollm2"
    parser = commands.add_parser(
        "fetch", parents=[debug], help=about, description=about, epilog=example
    )
    parser.add_argument("name", metavar="NAME", help="smollm2, or the id of a model on the hub")
    parser.set_defaults(run=fetch)


def _add_doctor(commands: Any, debug: argparse.ArgumentParser) -> None:
    about = "what is here, what is missing, and what that costs"
    parser = commands.add_parser("doctor", parents=[debug], help=about, description=about)
    parser.add_argument("--json", action="store_true", help="the same as one object")
    parser.add_argument(
        "--build", action="store_true", help="compile what can be compiled here; it takes minutes"
    )
    parser.set_defaults(run=doctor)


def _add_bench(commands: Any, debug: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    about = "measure on this machine; each prints one table"
    parser = commands.add_parser("bench", help=about, description=about)
    benches = parser.add_subparsers(metavar="BENCH", required=True)
    for name, sentence in BENCHES.items():
        bench = benches.add_parser(name, parents=[debug], help=sentence, description=sentence)
        if name in argv:
            module = importlib.import_module(f"spindle.bench.{name}")
            module.add_arguments(bench)
            bench.set_defaults(run=module.run)


# The commands: each takes the parsed options and returns the exit status.

SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "min_tokens", "logprobs"),
    *("stop", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the options ask for. RequestError: names the one that cannot be."""
    from spindle import SamplingParams

    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    samples = getattr(args, "samples", 1)
    try:
        return SamplingParams(max_tokens=args.max_new_tokens, n=samples, **given)
    except RequestError as error:
        raise RequestError(_in_options(str(error))) from None


def speculation(args: argparse.Namespace) -> tuple[str | None, int]:
    """What drafts, and how many tokens a pass. RequestError: -k without it, or out of range.

    ModelNotFound: there is no such draft model.
    """
    from spindle import hub
    from spindle.decode.pace import check_k

    drafter = "ngram" if args.ngram else args.draft
    if args.k is not None and drafter is None:
        raise RequestError("-k: it counts drafts; expected --ngram or --draft MODEL with it")
    if drafter not in (None, "ngram", "int8"):
        hub.resolve(drafter)
    try:
        return drafter, 5 if args.k is None else check_k(args.k)
    except RequestError as error:
        raise RequestError(f"-{error}") from None


def drafted(engine: Engine, args: argparse.Namespace) -> Streams:
    """The engine, with the drafter that the options ask for."""
    from spindle.decode import speculative

    name, k = speculation(args)
    drafter = speculative.drafter_for(name, engine.model)
    return engine if drafter is None else speculative.Speculator(engine, drafter, k)


def _in_options(message: str) -> str:
    """A refusal of SamplingParams in the words of the command line."""
    names = {"n": "samples", "max_tokens": "max-new-tokens", "stop_token_ids": "stop-token-id"}

    def option(match: re.Match[str]) -> str:
        return f"--{names.get(match[1], match[1]).replace('_', '-')}{match[2]}"

    return re.sub(r"\b([a-z_]+)(=|: )(?=\S)", option, message, count=1).replace(
        "max_tokens=", "--max-new-tokens="
    )


def generate(args: argparse.Namespace) -> int:
    """Stream the continuation of a prompt to stdout, or print one JSON object."""
    prompts = read_prompts(args.prompt or [PROMPT])
    if hasattr(args, "logprobs") and not args.json:
        raise RequestError("--logprobs: they are part of the JSON object; expected --json with it")
    params = sampling_params(args)  # refused before anything is loaded
    speculation(args)
    if len(prompts) > 1:
        from spindle import together

        return together.generate(args, prompts, params)
    (prompt,) = prompts

    from spindle import Engine, Tokenizer, graphs, load_hf
    from spindle.decode.text import stream_texts
    from spindle.hub import resolve

    directory = resolve(args.model)
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode(prompt)
    model = load_hf(directory, args.device, args.dtype, args.quantize)
    engine = drafted(graphs.enable_if_free(Engine(model, args.max_seq_len)), args)
    shown: list[TextStream] = []
    try:
        for stream in stream_texts(engine, tokenizer, ids, params):
            if shown and not args.json:
                say("\n---\n")
            shown.append(stream)
            show_stream(stream, show=not args.json)
            if stream.finish_reason == "abort":
                break
    except KeyboardInterrupt:  # between two answers
        if not shown:
            raise
        shown[-1].close()
    if args.json:
        outputs = [as_object(one, tokenizer) | {"stats": one.stats.as_dict()} for one in shown]
        rest = outputs[0] if params.n == 1 else {"outputs": outputs}
        say(json.dumps({"prompt": prompt} | rest) + "\n")
    else:
        summary = "\n".join(one.stats.summary() for one in shown)
        end_of_text(shown[-1].text, None if args.quiet else summary)
    complete = len(shown) == params.n and shown[-1].finish_reason != "abort"
    return 0 if complete else INTERRUPTED


def as_object(answer: TextStream | Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    """One answer for JSON; a log-probability of minus infinity is null, which JSON can say."""
    result: dict[str, Any] = {"text": answer.text, "token_ids": answer.token_ids}
    if answer.logprobs is not None:
        result["logprobs"] = [
            _logprob(one.sampled, tokenizer) | {"top": [_logprob(t, tokenizer) for t in one.top]}
            for one in answer.logprobs
        ]
    return result | {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}


def _logprob(one: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.token_bytes(one.token_id).decode("utf-8", errors="replace")
    logprob = one.logprob if math.isfinite(one.logprob) else None
    return {"id": one.token_id, "text": text, "logprob": logprob, "rank": one.rank}


def show_stream(stream: TextStream, show: bool = True) -> None:
    """Run an answer to its end, and show it as it comes; Ctrl-C ends it after its token."""
    with _interrupts(stream.stats) as interrupted:
        for delta in stream:
            if show and delta:
                say(delta)
            if interrupted.is_set():
                break
    rest = stream.close()  # of an answer that has ended: nothing
    if show and rest:
        say(rest)


@contextmanager
def _interrupts(stats: Stats) -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that ids, text and stats agree; before a token, it ends the block.

    A second Ctrl-C raises KeyboardInterrupt wherever it finds us.
    """
    interrupted, previous = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(signum: int, frame: object) -> None:
        again = interrupted.is_set()
        interrupted.set()
        if again or stats.new_tokens == 0:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, previous)


def end_of_text(text: str, summary: str | None) -> None:
    """End the line at a terminal; elsewhere stdout gets the text alone, and stderr the newline."""
    open_line = not text.endswith("\n")
    if open_line and sys.stdout is not None and sys.stdout.isatty():
        say("\n")
        open_line = False
    if summary is not None:
        print("\n" * open_line + summary, file=sys.stderr)


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """The prompts, of which one may be stdin. RequestError: more than one."""
    if prompts.count("-") > 1:
        raise RequestError('two prompts are "-": stdin can be read once')
    return [read_prompt(prompt) for prompt in prompts]


def read_prompt(prompt: str) -> str:
    """The prompt itself, or for "-" all of stdin. RequestError: stdin is not UTF-8."""
    if prompt != "-":
        return prompt
    if is_rank():
        from spindle import parallel

        return parallel.current().text(_stdin)
    return _stdin()


def _stdin() -> str:
    if sys.stdin is None:
        raise RequestError("stdin is closed; expected the prompt there, since it was given as '-'")
    if sys.stdin.isatty():
        print("the prompt, then Ctrl-D on a line of its own:", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as cause:
        byte = cause.object[cause.start]
        raise RequestError(
            f"stdin: byte {byte:#04x} at offset {cause.start} is not UTF-8; expected text in UTF-8"
        ) from None


def chat(args: argparse.Namespace) -> int:
    """Talk until the end of the input."""
    from spindle.chat import converse

    return converse(args)


def batch(args: argparse.Namespace) -> int:
    """Answer a file of prompts; the status is 3 if all is done, but for lines that were refused."""
    from spindle.batch.command import run

    return REFUSED if run(args) else 0


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal says to stop. The port is taken before the model is loaded."""
    from spindle import LLM
    from spindle.server import Options, Server, bound

    options = Options(
        host=args.host,
        port=args.port,
        name=args.served_model_name or args.model,
        api_key=os.environ.get("SPINDLE_API_KEY") if args.api_key is None else args.api_key,
        allow_origins=args.allow_origin,
        max_body_bytes=args.max_body_bytes,
        max_prompts=args.max_prompts,
        max_prompt_tokens=args.max_prompt_tokens,
        max_n=args.max_n,
        max_queue=args.max_queue,
        grace_s=args.grace,
    )
    engine = _engine_options(args)
    with bound(options) as listener:
        server = Server(LLM(args.model, **engine), options, listener)
        if options.api_key is None and not server.on_loopback:
            words = f"whoever reaches {server.url} may use it: set SPINDLE_API_KEY to ask for a key"
            print(f"spindle: warning: {words}", file=sys.stderr)
        came = server.run_until_signal(lambda: say(f"serving {options.name} at {server.url}\n"))
    return INTERRUPTED if came == signal.SIGINT else 0


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `LLM` is made with."""
    speculate, k = speculation(args)
    names = [
        *("device", "dtype", "quantize", "max_seqs", "max_model_len"),
        *("num_blocks", "block_size", "preemption", "batch_invariant"),
    ]
    rows = max(512, args.max_seqs * (1 + (k if speculate else 0)))
    return {name: getattr(args, name) for name in names} | {
        "max_batch_tokens": rows if args.max_batch_tokens is None else args.max_batch_tokens,
        "prefix_cache": not args.no_prefix_cache,
        "speculate": speculate,
        "k": k,
    }


def fetch(args: argparse.Namespace) -> int:
    """Bring a model and print where it lies."""
    from spindle import hub

    say(f"{hub.fetch(args.name)}\n")
    return 0


def doctor(args: argparse.Namespace) -> int:
    """Print what is here and what is missing; or build what can be built, and say what came of it.

    The status is 1 if a compiler failed.
    """
    from spindle import doctor as examination

    checks, well = examination.build_all() if args.build else (examination.examine(), True)
    report = examination.as_json(checks) if args.json else examination.as_text(checks)
    say(report + "\n")
    return 0 if well else 1
