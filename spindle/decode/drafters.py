"""Drafters: what guesses the next tokens of a sequence, for the target to look at in one pass.

A guess may be as wrong as it likes: the target keeps only what it would have said itself
(`speculative`). A good one is cheap, and often right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spindle.decode.engine import Engine
from spindle.decode.params import check_count
from spindle.decode.sampling import DRAFT, SamplingRows, adjust, draw, inverse_cdf, probabilities
from spindle.errors import RequestError, shown
from spindle.model.layers import Model, layer_weights
from spindle.model.split import ranks_of
from spindle.tokenizer import Tokenizer, check_ids


class Draft(NamedTuple):
    """Ids that may follow, and what they were drawn from."""

    ids: Tensor  # [k] int64, on the target's device
    probs: Tensor | None = None  # [k, V] of the target's V; None: nothing was drawn, it is a guess

    def behind(self) -> Draft:
        """The same for the k + 1 rows of a pass: the last one has no draft, -1, and no mass."""
        probs = None if self.probs is None else F.pad(self.probs, (0, 0, 0, 1))
        return Draft(F.pad(self.ids, (0, 1), value=-1), probs)

    @staticmethod
    def together(drafts: Iterable[Draft]) -> Draft:
        """Several that were drawn, one behind the other; there is one at least."""
        ids, probs = zip(*drafts, strict=True)
        return Draft(torch.cat(ids), torch.cat(probs))


class Drafter:
    """Guesses what follows in a sequence. To make one of your own, define `propose`."""

    only_reads = False  # whether `propose` is known to leave its ids alone

    def propose(self, ids: Sequence[int], k: int) -> Sequence[int]:
        """Up to k ids that may follow these, the prompt among them; none: no guess.

        From call to call `ids` grow at the end, and are the same before it.
        """
        raise NotImplementedError

    def begin(self) -> Drafter:
        """A drafter of the kind for a new sequence: another one, if it keeps anything."""
        return self

    def cost(self, target: Model) -> float:
        """What a guessed id costs, in passes of the target over one row."""
        return 0.0

    def check(self, target: Model) -> None:
        """RequestError if its ids are not the target's."""

    def draft(self, ids: Sequence[int], k: int, rows: SamplingRows, target: Model) -> Draft:
        """The same as tensors. rows: how this sequence's next id is sampled, [1]; it may change.

        RequestError: something among them is no id of the target's.
        """
        return Draft(
            torch.tensor(self.guesses(ids, k, target), dtype=torch.int64).to(target.device)
        )

    def guesses(self, ids: Sequence[int], k: int, target: Model) -> list[int]:
        """What was proposed, k at most. RequestError: something is no id of the target's."""
        given = ids if self.only_reads else list(ids)  # which are the answer itself
        try:
            return check_ids(self.propose(given, k), target.config.vocab_size)[:k]
        except RequestError as error:
            raise RequestError(f"{type(self).__name__}: proposed {error}") from None


class NgramDrafter(Drafter):
    """What followed the last time that the sequence ended like this.

    longest, shortest: how many tokens must be the same, the most that are first. Where they stood
    last counts (Saxena 2023, prompt lookup decoding). Prompt and answer are searched alike. A guess
    that reaches the end of the sequence goes on with itself, as a copy of overlapping text does, so
    there are k of them or none. Each token is indexed once, when it arrives: what a guess costs
    does not depend on how many came before.
    """

    only_reads = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.shortest = check_count("shortest", shortest)
        words = f"shortest={shown(self.shortest)}"
        self.longest = check_count("longest", longest, self.shortest, words)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram: where what follows it stands
        self._indexed = 0  # ids whose n-grams before them are in there

    def begin(self) -> NgramDrafter:
        """One with an empty index."""
        return NgramDrafter(self.longest, self.shortest)

    def propose(self, ids: Sequence[int], k: int) -> list[int]:
        """What stands after the last place of the longest n-gram that the ids end with."""
        self._index(ids)
        for n in range(min(self.longest, len(ids)), self.shortest - 1, -1):
            at = self._after.get(tuple(ids[-n:]))
            if at is not None:
                found = list(ids[at : at + k])
                while len(found) < k:  # the match lies across the end
                    found += found[: k - len(found)]
                return found
        return []

    def _index(self, ids: Sequence[int]) -> None:
        """Note what each id follows, of those that have come since."""
        for at in range(max(self._indexed, self.shortest), len(ids)):
            for n in range(self.shortest, min(self.longest, at) + 1):
                self._after[tuple(ids[at - n : at])] = at
        self._indexed = len(ids)


class WatchedDrafter(Drafter):
    """Another drafter, of which it is kept what it guessed, and where: for one stream at a time."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.guessed: list[tuple[int, list[int]]] = []  # how many ids there were, and what followed

    def begin(self) -> WatchedDrafter:
        """Start over, with the other's beginning."""
        self.drafter = self.drafter.begin()
        self.guessed.clear()
        return self

    def cost(self, target: Model) -> float:
        """The other's."""
        return self.drafter.cost(target)

    def check(self, target: Model) -> None:
        """As the other does."""
        self.drafter.check(target)

    def draft(self, ids: Sequence[int], k: int, rows: SamplingRows, target: Model) -> Draft:
        """What the other drafts; noted."""
        draft = self.drafter.draft(ids, k, rows, target)
        self.guessed.append((len(ids), draft.ids.tolist()))
        return draft

    def rounds(self, ids: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """(drafts, ids gained) of each pass from the first drafts on, to the end of a whole answer.

        ids: prompt and answer. What was gained are the accepted drafts and a token of the target's;
        of a pass without drafts that alone. An answer that ends among them cuts the last one short.
        """
        rounds, at = list[tuple[list[int], list[int]]](), None
        for start, drafts in [*self.guessed, (len(ids), [])]:
            rounds += [([], [token]) for token in ids[at:start] if at is not None]
            kept = 0
            while kept < len(drafts) and ids[start + kept : start + kept + 1] == [drafts[kept]]:
                kept += 1
            at = start + kept + 1
            if start < len(ids):
                rounds.append((drafts, list(ids[start:at])))
        return rounds


class ModelDrafter(Drafter):
    """A smaller model, over an engine of its own, which no one else may use meanwhile.

    It samples as the target does, from a distribution that the same parameters have shaped, with
    numbers of its own. At temperature 0 it gives its likeliest token, and nothing was drawn.
    RequestError: that is no engine.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise RequestError(f"engine={shown(engine)}: expected an Engine over the draft model")
        self.engine = engine
        self._at, self._drafts = 0, list[Tensor]()  # the last drafts, and where they begin

    def begin(self) -> ModelDrafter:
        """Start over: the engine has one sequence."""
        self.engine.rewind(0)
        self._at, self._drafts = 0, []
        return self

    def cost(self, target: Model) -> float:
        """The share of the whole target's bytes that the draft model's weights have."""
        whole = ranks_of(target) * pass_bytes(target)
        return pass_bytes(self.engine.model) / whole

    def check(self, target: Model) -> None:
        """RequestError: the tokenizers differ, where both are known."""
        check_same_tokens(self.engine.model, target)

    def draft(self, ids: Sequence[int], k: int, rows: SamplingRows, target: Model) -> Draft:
        """k ids, each drawn from what the draft model says after those before it.

        No ids where it has no more positions. An id that it does not have is taken for its id 0.
        """
        self._take_back(ids)
        if k == 0 or len(ids) + k - 1 > self.engine.max_seq_len:
            return nothing(target)
        logits, V = self._catch_up(ids), target.config.vocab_size
        position = torch.tensor([len(ids)], device=logits.device)
        drawn, probs = list[Tensor](), list[Tensor]()
        for n in range(k):
            if n > 0:
                rows.append(drawn[-1])
                logits = self.engine.chunk(drawn[-1][None])[0]
            ids_drawn, p = drawn_from(aligned(logits, V), rows, position + n)
            drawn.append(ids_drawn)
            probs += [] if p is None else [p]
        self._at, self._drafts = len(ids), drawn
        q = torch.cat(probs).to(target.device) if probs else None
        return Draft(torch.cat(drawn).to(target.device), q)

    def _take_back(self, ids: Sequence[int]) -> None:
        """Forget the last drafts, but those that stand in the ids now; however long ago it was.

        The last id has not been stored in any case: what follows it is wanted.
        """
        agreed, since = 0, ids[self._at :]
        for draft in self._drafts:
            if agreed == len(since) or int(draft) != since[agreed]:
                break
            agreed += 1
        self.engine.rewind(min(self.engine.length, self._at + agreed, len(ids) - 1))

    def _catch_up(self, ids: Sequence[int]) -> Tensor:
        """Store what is missing of the ids; returns the logits [1, V] that follow."""
        engine, V = self.engine, self.engine.model.config.vocab_size
        more = [known(i, V) for i in ids[engine.length :]]
        if len(more) > 2:  # rarely: not worth a graph for every number of them
            return engine.extend(more)
        tokens = torch.tensor([more], dtype=torch.int64, device=engine.model.device)
        return engine.chunk(tokens)[:, -1]


def drawn_from(
    logits: Tensor, rows: SamplingRows, position: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Ids [R] drawn from draft logits [R, V], and what they were drawn from; greedy: nothing."""
    if rows.greedy:
        return adjust(logits, rows).argmax(dim=-1), None
    p = probabilities(logits, rows)
    first = torch.zeros_like(p)
    first[:, 0] = 1.0
    p = p.where(p.sum(dim=-1, keepdim=True).isfinite(), first)  # what is no distribution says id 0
    return inverse_cdf(p, draw(rows, position, DRAFT)), p


def known(token: int, vocab_size: int) -> int:
    """The token, or 0 where a draft model of so many ids does not have it: a guess may be wrong."""
    return token if token < vocab_size else 0


def nothing(target: Model) -> Draft:
    """A draft of no ids."""
    return Draft(torch.empty(0, dtype=torch.int64, device=target.device))


def aligned(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [R, V'] over as many ids as the target has: models pad one vocabulary differently."""
    missing = vocab_size - logits.shape[-1]
    return F.pad(logits, (0, missing), value=-torch.inf)  # negative: the rest is cut off


def pass_bytes(model: Model) -> int:
    """Bytes of the matrices that a pass reads: of its layers and its head. A rank has its part."""
    return sum(weight.nbytes for weight in [*layer_weights(model), model.head])


def check_same_tokens(draft: Model, target: Model) -> None:
    """RequestError if the two were loaded with tokenizers that differ; padding is no difference."""
    here, there = draft.directory, target.directory
    if here is None or there is None or here == there:
        return
    if not Tokenizer(here).same_tokens(Tokenizer(there)):
        raise RequestError(
            f"the draft model's tokenizer is another one than the target's: {here} and {there}; "
            "expected two models of one vocabulary"
        )
