"""One text: plain and drafted decoding of it by turns, and what the turns come to."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from spindle.bench.spans import Clock
from spindle.bench.spec_costs import DraftTimes, PassTimes, predict
from spindle.decode import graphs
from spindle.decode.drafters import ModelDrafter
from spindle.decode.engine import Engine
from spindle.decode.params import SamplingParams
from spindle.decode.speculative import Speculator
from spindle.decode.stats import Speculation
from spindle.decode.stream import Streams
from spindle.errors import RequestError


class Counting(Engine):
    """An engine that notes how many tokens each chunk had; plain steps and prompts are none."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.chunks: list[int] = []

    def chunk(self, tokens: Tensor) -> Tensor:
        """As `Engine.chunk`."""
        self.chunks.append(tokens.shape[1])
        return super().chunk(tokens)


@dataclass(frozen=True)
class Turn:
    """One answer: its ids, the tokens a second after the first, and its rounds by their drafts."""

    token_ids: list[int]
    tok_s: float
    speculation: Speculation | None
    rounds: Counter[int]


def take_turn(
    streams: Streams, engine: Counting, prompt: Sequence[int], params: SamplingParams, clock: Clock
) -> Turn:
    """Have the streams of this engine answer. RequestError: an answer of one token has no pace."""
    engine.chunks.clear()
    stream = streams.stream_with(prompt, params)
    ids = [next(stream)]
    start = clock()
    ids += stream
    took_s = clock() - start
    if len(ids) < 2:
        raise RequestError(
            "the model ended an answer with its first token, and there is nothing to time after "
            "it; expected another --seed, --temperature or model"
        )
    rounds = Counter(tokens - 1 for tokens in engine.chunks)
    return Turn(ids, (len(ids) - 1) / took_s, stream.stats.speculation, rounds)


Pair = tuple[Turn, Turn]  # plain, drafted


def alternate(
    plain: Callable[[], Turn],
    drafted: Callable[[], Turn],
    turns: int,
    before: Callable[[], None] = lambda: None,
) -> list[Pair]:
    """So many turns of both; who was second begins the next time. `before` each of them."""
    pairs = []
    for n in range(turns):
        before()
        first, second = (plain, drafted) if n % 2 == 0 else (drafted, plain)
        one, other = first(), second()
        pairs.append((one, other) if n % 2 == 0 else (other, one))
    return pairs


def race(
    prompt: Sequence[int],
    ways: Sequence[Speculator],
    params: SamplingParams,
    turns: int,
    clock: Clock,
    before: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Turns of plain decoding against each of the ways, which share engine and drafter.

    A way is warmed up by a whole answer, so that everything is recorded that its turns will replay.
    Passes and drafts are timed before each turn. Returns the figures of each way, in their order.
    """
    engine, drafter = ways[0].engine, ways[0].drafter
    assert isinstance(engine, Counting)
    plain = partial(take_turn, engine, engine, prompt, params, clock)
    drafted = [partial(take_turn, way, engine, prompt, params, clock) for way in ways]
    answer = plain().token_ids
    seen = {drafts for turn in drafted for drafts in turn().rounds} | {way.k for way in ways}
    text = half_way(ways[0], prompt, answer, max(seen) + 1)
    beside = graphs.enable_if_free(Engine(engine.model, len(text) + max(seen) + 1))
    passes = PassTimes(beside, text, [drafts + 1 for drafts in seen], clock)
    drafts = DraftTimes(drafter, engine, text, params)

    def costs(k: int) -> None:
        before()
        passes.turn()
        drafts.turn(k, clock)

    pairs = [
        alternate(plain, turn, turns, partial(costs, way.k))
        for way, turn in zip(ways, drafted, strict=True)
    ]
    return [
        figures(way, its, prompt, params, passes, drafts)
        for way, its in zip(ways, pairs, strict=True)
    ]


def half_way(way: Speculator, prompt: Sequence[int], answer: Sequence[int], rows: int) -> list[int]:
    """Prompt and half of the answer: as long as a text is on average, if that leaves room for rows.

    Both models must have the positions.
    """
    models = [way.engine.model]
    models += [way.drafter.engine.model] if isinstance(way.drafter, ModelDrafter) else []
    room = min(model.config.max_positions for model in models) - rows
    return [*prompt, *answer[: len(answer) // 2]][:room]


def figures(
    way: Speculator,
    pairs: Sequence[Pair],
    prompt: Sequence[int],
    params: SamplingParams,
    passes: PassTimes,
    drafts: DraftTimes,
) -> dict[str, Any]:
    """What the turns of one way come to; medians, but for what is the same in each turn."""
    last, rounds = pairs[-1][1], pairs[-1][1].rounds
    counts = [drafted.speculation or Speculation() for _, drafted in pairs]
    a, c = counts[-1].acceptance_rate, drafts.draft_s(way.k) / passes.one_row_s
    law, every = predict(rounds, a, passes.v, c), predict({way.k: 1}, a, passes.v, c)
    return {
        "k": way.k,
        "adaptive": way.adaptive_k,
        "plain_tok_s": statistics.median(plain.tok_s for plain, _ in pairs),
        "speculative_tok_s": statistics.median(drafted.tok_s for _, drafted in pairs),
        "speedup": statistics.median(drafted.tok_s / plain.tok_s for plain, drafted in pairs),
        "acceptance_rate": a,
        "tokens_per_pass": counts[-1].tokens_per_pass,
        "predicted_tokens_per_pass": law.tokens_per_pass,
        "predicted_speedup": law.speedup,
        "textbook_speedup": law.textbook,
        "every_round_speedup": every.speedup,
        "same_tokens": same_tokens(way, pairs, params),
        "parting": parting(way.engine, prompt, pairs) if params.temperature == 0 else None,
        "new_tokens": len(last.token_ids),
        "passes": counts[-1].passes,
        "drafted_rows": counts[-1].proposed,
        "rounds": {str(j): rounds[j] for j in sorted(rounds)},
        "draft_share": statistics.median(one.draft_share or 0.0 for one in counts),
        "one_row_ms": passes.one_row_s * 1e3,
        "v": {str(n): passes.v(n) for n in passes.seconds},
        "c": c,
    }


def same_tokens(way: Speculator, pairs: Sequence[Pair], params: SamplingParams) -> bool | None:
    """Whether drafts changed no token; None where they may, and have the same distribution.

    They may where drafts are drawn: from a draft model, at a temperature above 0.
    """
    if isinstance(way.drafter, ModelDrafter) and params.temperature > 0:
        return None
    return all(plain.token_ids == drafted.token_ids for plain, drafted in pairs)


def parting(
    engine: Engine, prompt: Sequence[int], pairs: Sequence[Pair]
) -> dict[str, float] | None:
    """Where a drafted answer first has another token than the plain one, or ends; None: nowhere.

    `gap`: by how much the likeliest logit there is ahead of the next, from the prompt's pass. Where
    that is within rounding, either token is right.
    """
    for plain, drafted in pairs:
        ids, ours = plain.token_ids, drafted.token_ids
        if ids != ours:
            both = list(zip(ids, ours, strict=False))
            at = next((n for n, (one, other) in enumerate(both) if one != other), len(both))
            logits = engine.prefill([*prompt, *ids[:at]])  # [1, V]
            best, second = logits[0].float().topk(2).values.tolist()
            return {"at": at, "gap": best - second}
    return None
