"""Speculation: plain decoding against drafts that the target checks, by turns, and the prediction.

    quoting   the prompt asks for a paragraph of its own once more: much of the answer can be looked
              up in it
    prose     the prompt asks for a story

Of each text, drafter and number of drafts k: plain and drafted decoding of the same prompt, by the
same engine, take turns, and who begins does so too. Once with k drafts in every round, as far as
the drafter has any, which is what the prediction is about at its purest; once with k as the most,
and as many drafts as pay (`spindle.decode.pace`). An answer ends where the model ends it. What is
predicted, and how, is in spec_costs.py; there, passes and drafts are timed between the turns.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from dataclasses import dataclass
from datetime import date
from typing import Any

from tqdm import tqdm

from spindle import hub
from spindle.bench import machine, profile, report, spec_tables
from spindle.bench.spans import Clock
from spindle.bench.spec_turns import Counting, race
from spindle.config import ModelConfig
from spindle.decode import graphs
from spindle.decode.drafters import Drafter, ModelDrafter
from spindle.decode.engine import Engine
from spindle.decode.pace import MOST
from spindle.decode.params import SamplingParams
from spindle.decode.speculative import Speculator, drafter_for
from spindle.errors import RequestError
from spindle.model.layers import Model
from spindle.model.weights import load_hf, random_model
from spindle.tokenizer import Tokenizer

TINY = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 512}
TINY |= {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}

PARAGRAPH = (
    "The lighthouse at the end of the bay was built of grey stone that fishermen had carried "
    "across the ice in winter. Its lamp burned oil, then gas, and at last a single coil of wire no "
    "longer than a finger. Each keeper wrote the weather into a book with a blue cover: wind from "
    "the west, fog before noon, two boats in sight. When the last of them left, the shelf held "
    "forty such books, and nobody has moved them since."
)
ASKED = {  # of a model with a chat template
    "quoting": f"Repeat this paragraph word for word, and write nothing else.\n\n{PARAGRAPH}",
    "prose": "Write a short story about a watchmaker who is afraid of the sea.",
}
BEGUN = {  # of one that goes on with what it is given
    "quoting": f"{PARAGRAPH}\n\nThe same paragraph once more:\n\n{PARAGRAPH[:21]}",
    "prose": "Nobody in the village could say when the watchmaker had come, or why",
}


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench spec`."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="what to run")
    add("--tiny", action="store_true", help="random weights of a small shape, in place of MODEL")
    about = (
        "what drafts: a smaller model of the same tokenizer; int8: MODEL's own weights in 8 bits"
    )
    add("--draft", metavar="SMALL", help=about)
    add("--ngram", action="store_true", help="draft what followed the last time, in place of SMALL")
    about = "drafts a pass (default: 3 5 8)"
    add("-k", type=int, nargs="+", default=[3, 5, 8], metavar="K", help=about)
    add("--turns", type=int, default=7, metavar="N", help="turns of each (default: 7)")
    add("-n", "--new", type=int, default=128, metavar="N", help="tokens at most (default: 128)")
    about = "0 takes the likeliest token (default: 0)"
    add("--temperature", type=float, default=0.0, metavar="T", help=about)
    add("--seed", type=int, default=0, metavar="N", help="of what is sampled (default: 0)")
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a markdown table, and write the list of its rows if a file was named."""
    report.check_json(args.json)
    chosen = _one_model(args), _one_drafter(args)
    asked = Asked(*chosen, tuple(args.k), args.turns, _params(args))
    rows = measure(asked)
    report.publish(rows, spec_tables.as_markdown(rows), args.json)
    return 0


def _one_model(args: argparse.Namespace) -> str | None:
    if args.model is None and not args.tiny:
        raise RequestError("no model: expected MODEL, or --tiny in its place")
    if args.model is not None and args.tiny:
        raise RequestError(f"{args.model} and --tiny: expected one of the two")
    return args.model


def _one_drafter(args: argparse.Namespace) -> str:
    if args.draft is None and not args.ngram:
        raise RequestError("nothing drafts: expected --draft SMALL, or --ngram")
    if args.draft is not None and args.ngram:
        raise RequestError(f"--draft {args.draft} and --ngram: expected one of the two")
    return "ngram" if args.ngram else args.draft


def _params(args: argparse.Namespace) -> SamplingParams:
    _check_new(args.new)
    try:
        return SamplingParams(max_tokens=args.new, temperature=args.temperature, seed=args.seed)
    except RequestError as error:
        raise RequestError(f"--{error}".replace("=", " ", 1)) from None


def _check_new(new: int) -> None:
    if new < 2:
        raise RequestError(f"-n {new}: expected 2 or more (tokens; the first is not timed)")


# --- what is measured ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A model (None: random weights, TINY), what drafts, and how often. RequestError: cannot be."""

    model: str | None
    drafter: str
    ks: tuple[int, ...]
    turns: int
    params: SamplingParams

    def __post_init__(self) -> None:
        _check_new(self.new)
        for k in self.ks:
            if not 1 <= k <= MOST:
                raise RequestError(f"-k {k}: expected 1 to {MOST} drafts a pass")
        if len(set(self.ks)) < len(self.ks):
            raise RequestError(f"-k {' '.join(map(str, self.ks))}: expected each number once")
        if self.turns < 1:
            raise RequestError(f"--turns {self.turns}: expected 1 or more")

    @property
    def new(self) -> int:
        """Tokens of an answer, at most."""
        return self.params.max_tokens or 0


def measure(asked: Asked, clock: Clock = time.perf_counter) -> list[dict[str, Any]]:
    """A row for each text, k, and pace, with all that the command prints and where it was measured.

    RequestError and ModelNotFound before it begins, for what cannot be.
    """
    profile.check_not_emulated()
    directory = None if asked.model is None else hub.resolve(asked.model)
    tokenizer = None if directory is None else Tokenizer(directory)
    tiny = ModelConfig.from_dict(TINY)
    config = tiny if directory is None else ModelConfig.from_directory(directory)
    prompts = prompts_of(tokenizer, config)
    longest = max(map(len, prompts.values())) + asked.new
    check_room("the model", config, longest, asked.new)
    model = tiny_model() if directory is None else load_hf(directory)
    drafter = drafter_of(asked.drafter, model)
    if isinstance(drafter, ModelDrafter):
        check_room("the draft model", drafter.engine.model.config, longest, asked.new)
        drafter.engine.reserve(longest)
    engine = Counting(model, longest)
    engine.reserve(longest)
    graphs.enable_if_free(engine)
    return raced(asked, prompts, engine, drafter, clock)


def raced(
    asked: Asked, prompts: dict[str, list[int]], engine: Counting, drafter: Drafter, clock: Clock
) -> list[dict[str, Any]]:
    """Turns of each text, k and pace; before those of each, how fast memory is read."""
    paces = [(k, adaptive) for k in asked.ks for adaptive in (False, True)]
    ways = [Speculator(engine, drafter, k, adaptive) for k, adaptive in paces]
    params = asked.params.seeded()
    buffer, rates = machine.read_buffer(engine.model.device), list[float]()
    rows, count = list[dict[str, Any]](), itertools.count()
    with tqdm(total=len(prompts) * len(ways) * asked.turns, desc="turns", disable=None) as bar:

        def before() -> None:
            if next(count) % asked.turns == 0:
                rates.append(machine.read_bytes_per_s(buffer, 3))
            bar.update()

        for text, prompt in prompts.items():
            named = {"text": text, "drafter": asked.drafter}
            found = race(prompt, ways, params, asked.turns, clock, before)
            rows += [named | row | {"prompt_tokens": len(prompt)} for row in found]
    common = {
        "model": asked.model or "tiny, random weights",
        "turns": asked.turns,
        "temperature": params.temperature,
        "seed": params.seed,
        "read_gb_s": statistics.median(rates) / 1e9,
        "machine": machine.here(engine.model.device, engine.model.dtype),
        "date": date.today().isoformat(),
    }
    return [row | common for row in rows]


def check_room(whose: str, config: ModelConfig, longest: int, new: int) -> None:
    """RequestError: the longer text and its answer do not fit."""
    if longest > config.max_positions:
        room = new - (longest - config.max_positions)
        right = f"expected -n {room} or less" if room >= 2 else "expected a model of more"
        raise RequestError(
            f"-n {new}: the longer prompt and its answer are {longest} tokens, and {whose} has "
            f"{config.positions_in_words()}; {right}"
        )


def drafter_of(name: str, model: Model) -> Drafter:
    """The drafter of that name, also the 8-bit form of weights that are of no checkpoint."""
    if name == "int8" and model.directory is None:
        return ModelDrafter(graphs.enable_if_free(Engine(tiny_model("int8"))))
    drafter = drafter_for(name, model)
    assert drafter is not None, name
    return drafter


def tiny_model(quantize: str | None = None) -> Model:
    """Random weights: so small that what follows depends mostly on the last token.

    Then greedy text comes to run in circles, and there is something to draft.
    """
    return random_model(ModelConfig.from_dict(TINY), gain=0.5, quantize=quantize)


def prompts_of(tokenizer: Tokenizer | None, config: ModelConfig) -> dict[str, list[int]]:
    """Both texts as ids; without a tokenizer, drawn ids, which come three times or once."""
    if tokenizer is None:
        draw = random.Random(0)
        ids = [draw.randrange(config.vocab_size) for _ in range(64)]
        return {"quoting": ids[:32] * 3, "prose": ids}
    if tokenizer.chat_template is None:
        return {text: tokenizer.encode(begun) for text, begun in BEGUN.items()}
    return {
        text: tokenizer.encode_chat([{"role": "user", "content": asked}])
        for text, asked in ASKED.items()
    }
