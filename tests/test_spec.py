"""Speculation, measured: the law by hand, turns on a hand-wound clock, what the command says."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import shapes
import torch
from clocks import HandClock
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spindle import cli
from spindle.bench import spec, spec_tables, spec_turns
from spindle.bench.spec import ASKED, PARAGRAPH, Asked, measure, prompts_of, tiny_model
from spindle.bench.spec_costs import DRAFTS, DraftTimes, PassTimes, predict
from spindle.bench.spec_turns import (
    Counting,
    Turn,
    alternate,
    figures,
    half_way,
    parting,
    same_tokens,
    take_turn,
)
from spindle.decode.drafters import Drafter, ModelDrafter, NgramDrafter
from spindle.decode.engine import Engine
from spindle.decode.pace import tokens_a_pass
from spindle.decode.params import SamplingParams
from spindle.decode.speculative import Speculator
from spindle.decode.stats import Speculation
from spindle.errors import RequestError
from spindle.kernels import emulate
from spindle.model.weights import random_model

pytestmark = pytest.mark.usefixtures("small_machine")

PROMPT = [5, 81, 17, 3, 5, 81, 17, 3]
GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=0)
ASKS_EIGHT = ["--tiny", "-k", "2", "8", "--turns", "2", "-n", "20"]


@pytest.fixture(scope="module")
def model():
    return random_model(shapes.llama())


# --- the law -------------------------------------------------------------------------------------


def dear(rows: int) -> float:
    """A tenth more for each row after the first."""
    return 1 + (rows - 1) / 10


def test_with_k_drafts_in_every_round_the_law_is_the_formula():
    """a = 1/2, k = 3: E = 1 + 1/2 + 1/4 + 1/8, at the price of v(4) = 1.3 and three drafts."""
    found = predict({3: 7}, 0.5, dear, 0.2)
    assert found.tokens_per_pass == 1.875
    assert found.speedup == pytest.approx(1.875 / (1.3 + 0.6))
    assert found.textbook == pytest.approx(1.875 / (1 + 0.6))


def test_rounds_without_drafts_cost_a_step_and_give_a_token():
    """A share s = 2/5 of rounds with drafts: (s E + 1 - s) / (s (v + k c) + 1 - s)."""
    found = predict({0: 3, 3: 2}, 0.5, dear, 0.2)
    assert found.tokens_per_pass == pytest.approx(0.4 * 1.875 + 0.6)
    assert found.speedup == pytest.approx((0.4 * 1.875 + 0.6) / (0.4 * 1.9 + 0.6))
    assert found.textbook == pytest.approx((0.4 * 1.875 + 0.6) / (0.4 * 1.6 + 0.6))


def test_the_end_of_an_answer_has_shorter_rounds():
    """Rounds of 3, 3, 1 and 0 drafts, by hand."""
    found = predict({3: 2, 1: 1, 0: 1}, 0.5, dear, 0.0)
    assert found.speedup == pytest.approx((2 * 1.875 + 1.5 + 1) / (2 * 1.3 + 1.1 + 1))


@pytest.mark.parametrize(("a", "tokens"), [(1.0, 5.0), (0.0, 1.0), (None, 1.0)])
def test_all_accepted_none_accepted_none_judged(a, tokens):
    assert predict({4: 2}, a, dear, 0.1).tokens_per_pass == tokens


@given(
    st.dictionaries(st.integers(0, 8), st.integers(1, 50), min_size=1),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_mixture_lies_between_its_rounds(rounds, a, c):
    """Neither faster than the best kind of round would be alone, nor slower than the worst."""
    alone = [tokens_a_pass(a, j) / (dear(j + 1) + j * c) for j in rounds]
    found = predict(rounds, a, dear, c)
    assert min(alone) - 1e-9 <= found.speedup <= max(alone) + 1e-9
    assert found.textbook >= found.speedup, "rows that cost something make it less"


# --- what a pass and a draft cost ----------------------------------------------------------------


class Metered(Engine):
    """A chunk of n rows takes 1 + n seconds on the clock, a step 10, a prompt 1000."""

    def __init__(self, model, clock: HandClock) -> None:
        super().__init__(model)
        self.clock, self.seen = clock, []

    def chunk(self, tokens: Tensor) -> Tensor:
        self.seen.append((tokens.shape[1], self.length))
        self.clock.now += 1 + tokens.shape[1]
        return super().chunk(tokens)


def test_passes_are_timed_there_and_back_at_one_length(model):
    clock = HandClock()
    engine = Metered(model, clock)
    times = PassTimes(engine, PROMPT, [4, 2], clock)
    assert engine.seen == [(1, 8), (2, 8), (4, 8)], "what is recorded is so before the first turn"
    engine.seen.clear()
    times.turn()
    times.turn()
    assert engine.seen == [(n, 8) for n in (1, 1, 2, 4, 1, 4, 2, 1)]
    assert engine.length == 8
    assert times.seconds == {1: [2, 2], 2: [3, 3], 4: [5, 5]}
    assert (times.one_row_s, times.v(1), times.v(2), times.v(4)) == (2, 1, 1.5, 2.5)


def test_a_slow_pass_among_three_is_of_no_account(model):
    clock = HandClock()
    times = PassTimes(Metered(model, clock), PROMPT, [2], clock)
    times.seconds |= {1: [2.0, 90.0, 2.0], 2: [3.0, 3.0, 80.0]}
    assert times.v(2) == 1.5


class Slow(Drafter):
    """Takes a second for each token that is new to it, and another one for each draft."""

    def __init__(self, clock: HandClock, seen: list) -> None:
        self.clock, self.seen, self.known = clock, seen, 0

    def begin(self):
        return Slow(self.clock, self.seen)

    def propose(self, ids, k):
        self.seen.append((len(ids), k))
        self.clock.now += len(ids) - self.known + k
        self.known = len(ids)
        return [1] * k


def test_drafts_are_timed_on_a_text_that_grows_by_one(model):
    clock, seen = HandClock(), []
    times = DraftTimes(Slow(clock, seen), Engine(model), PROMPT, GREEDY)
    times.turn(4, clock)
    times.turn(2, clock)
    assert seen == [(n, 4) for n in (5, 6, 7, 8)] + [(n, 2) for n in (5, 6, 7, 8)]
    assert times.seconds == {4: [5] * DRAFTS, 2: [3] * DRAFTS}, "without the 5 tokens at first"
    assert (times.draft_s(4), times.draft_s(2)) == (5 / 4, 3 / 2)


def test_a_draft_models_drafts_are_steps_of_its_own(model):
    """The first round takes in the text; then a round is k passes over one token."""
    draft = Metered(random_model(shapes.llama(num_hidden_layers=1)), clock := HandClock())
    DraftTimes(ModelDrafter(draft), Engine(model), PROMPT, GREEDY).turn(3, clock)
    first = [(1, 5), (1, 6)]  # its other draft is from the text's own pass
    assert draft.seen == first + [(1, n + j) for n in (5, 6, 7) for j in range(3)]


# --- turns ---------------------------------------------------------------------------------------


class Ticking(Counting):
    """A counting engine whose prompts take 1000 seconds, steps 2, and chunks of n rows 1 + n."""

    def __init__(self, model, clock: HandClock) -> None:
        super().__init__(model)
        self.clock = clock

    def prefill(self, ids, row=0):
        self.clock.now += 1000
        return super().prefill(ids, row)

    def step(self, tokens: Tensor) -> Tensor:
        self.clock.now += 2
        return super().step(tokens)

    def chunk(self, tokens: Tensor) -> Tensor:
        self.clock.now += 1 + tokens.shape[1]
        return super().chunk(tokens)


class Foresees(Drafter):
    """Knows the answer."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def propose(self, ids, k):
        return self.ids[len(ids) : len(ids) + k]


def test_a_plain_turn_is_timed_from_its_first_token(model):
    engine = Ticking(model, clock := HandClock())
    turn = take_turn(engine, engine, PROMPT, GREEDY, clock)
    assert len(turn.token_ids) == 12 and turn.tok_s == 1 / 2
    assert turn.speculation is None and turn.rounds == {}


def test_a_drafted_turn_counts_its_rounds(model):
    """12 tokens, all foreseen: 1, then 4 + 4, and the last 3 are a round of 2 - but k halves, to 1.

    After 1 + 4 + 4 there are 3 to come: room for 2 drafts, and k is 3 or 1: a round of 2 tokens,
    and one without drafts.
    """
    engine = Ticking(model, clock := HandClock())
    plain = take_turn(engine, engine, PROMPT, GREEDY, clock)
    drafter = Foresees([*PROMPT, *plain.token_ids])
    way = Speculator(engine, drafter, 3, adaptive_k=False)
    for _ in range(2):
        turn = take_turn(way, engine, PROMPT, GREEDY, clock)
        assert turn.token_ids == plain.token_ids
        assert turn.rounds == {3: 2, 1: 1, 0: 1}, "of this turn alone"
        assert turn.tok_s == 11 / (2 * 5 + 3 + 2)
    assert turn.speculation.passes == turn.rounds.total() == 4
    assert turn.speculation.proposed == sum(j * r for j, r in turn.rounds.items()) == 7


def test_an_answer_of_one_token_is_refused_in_words(model):
    engine = Ticking(model, clock := HandClock())
    first = take_turn(engine, engine, PROMPT, GREEDY, clock).token_ids[0]
    ends = SamplingParams(max_tokens=12, temperature=0, seed=0, stop_token_ids=[first])
    with pytest.raises(RequestError, match="ended an answer with its first token"):
        take_turn(engine, engine, PROMPT, ends, clock)


def test_who_was_second_begins_the_next_time():
    order = []

    def run(name):
        order.append(name)
        return name

    pairs = alternate(lambda: run("plain"), lambda: run("draft"), 3, lambda: order.append("|"))
    there, back = ["|", "plain", "draft"], ["|", "draft", "plain"]
    assert order == [*there, *back, *there]
    assert pairs == [("plain", "draft")] * 3


# --- what turns come to --------------------------------------------------------------------------


def turns(tok_s: list[float], rounds=None, **counts: float) -> list[Turn]:
    said = Speculation(**counts) if counts else None
    return [Turn([1, 2, 3], one, said, Counter(rounds or {})) for one in tok_s]


def test_figures_by_hand(model):
    """6 of 8 judged drafts accepted in 4 rounds, one of which had none."""
    way = Speculator(Counting(model), NgramDrafter(), 3, adaptive_k=False)
    counts = {"passes": 4, "tokens": 10, "proposed": 9, "judged": 8, "accepted": 6}
    plain = turns([10.0, 20.0, 10.0])
    drafted = turns([30.0, 20.0, 12.0], {3: 3, 0: 1}, **counts, draft_s=1.0, pass_s=3.0)
    passes = SimpleNamespace(one_row_s=0.5, v=dear, seconds={1: [], 4: []})
    drafts = SimpleNamespace(draft_s=lambda k: {3: 0.1}[k])
    pairs = list(zip(plain, drafted, strict=True))
    found = figures(way, pairs, PROMPT, GREEDY, passes, drafts)
    law = predict({3: 3, 0: 1}, 0.75, dear, 0.2)
    assert (found["k"], found["adaptive"], found["c"]) == (3, False, 0.2)
    assert (found["plain_tok_s"], found["speculative_tok_s"]) == (10, 20)
    assert found["speedup"] == 1.2, "of 3, 1 and 1.2, the middle one"
    assert (found["acceptance_rate"], found["tokens_per_pass"]) == (0.75, 2.5)
    assert (found["passes"], found["drafted_rows"], found["rounds"]) == (4, 9, {"0": 1, "3": 3})
    assert found["draft_share"] == 0.25 and found["v"] == {"1": 1.0, "4": 1.3}
    assert found["predicted_speedup"] == law.speedup
    assert found["textbook_speedup"] == law.textbook
    assert found["predicted_tokens_per_pass"] == law.tokens_per_pass
    assert found["every_round_speedup"] == pytest.approx((1 - 0.75**4) / 0.25 / (1.3 + 3 * 0.2))
    assert found["same_tokens"] is True and found["parting"] is None


def test_whether_tokens_are_the_same_is_asked_where_they_must_be(model):
    sampled = SamplingParams(max_tokens=3, temperature=0.9, seed=0)
    engine = Counting(model)
    draws = Speculator(engine, ModelDrafter(Engine(model)), 3)
    guesses = Speculator(engine, NgramDrafter(), 3)
    one, other = turns([1.0])[0], Turn([1, 2, 4], 1.0, None, Counter())
    for way, params in ((draws, GREEDY), (guesses, GREEDY), (guesses, sampled)):
        assert same_tokens(way, [(one, one), (one, one)], params) is True
        assert same_tokens(way, [(one, one), (one, other)], params) is False
    assert same_tokens(draws, [(one, other)], sampled) is None


def test_where_answers_part_and_how_near_the_two_tokens_are(model):
    engine = Engine(model)
    one, other = turns([1.0])[0], Turn([1, 2, 4], 1.0, None, Counter())
    shorter = Turn([1], 1.0, None, Counter())
    assert parting(engine, PROMPT, [(one, one)]) is None
    for ours, at in ((other, 2), (shorter, 1)):
        best = Engine(model).prefill([*PROMPT, *[1, 2][:at]])[0].sort(descending=True).values
        found = parting(engine, PROMPT, [(one, one), (one, ours)])
        assert found == {"at": at, "gap": pytest.approx(float(best[0] - best[1]))}


def test_costs_are_measured_in_the_middle_of_the_answer_or_where_there_is_room(model):
    """64 positions of the model, and of a draft model fewer."""
    way, answer = Speculator(Counting(model), NgramDrafter(), 3), list(range(10))
    assert half_way(way, PROMPT, answer, 4) == [*PROMPT, 0, 1, 2, 3, 4]
    assert len(half_way(way, PROMPT * 7, answer, 4)) == 60
    small = ModelDrafter(Engine(random_model(shapes.llama(max_position_embeddings=32))))
    assert len(half_way(Speculator(Counting(model), small, 3), PROMPT * 4, answer, 4)) == 28


# --- the texts -----------------------------------------------------------------------------------


def test_a_model_with_a_template_is_asked_and_another_one_goes_on():
    asked = SimpleNamespace(chat_template="{}", encode_chat=lambda messages: messages)
    assert prompts_of(asked, None) == {
        text: [{"role": "user", "content": words}] for text, words in ASKED.items()
    }
    begun = prompts_of(SimpleNamespace(chat_template=None, encode=lambda text: text), None)
    for words in (ASKED["quoting"], begun["quoting"]):
        assert PARAGRAPH in words
    assert begun["quoting"].rsplit("\n", 1)[1] == "The lighthouse at the"
    assert all(PARAGRAPH[:20] not in words for words in (ASKED["prose"], begun["prose"]))


def test_drawn_ids_come_three_times_or_once():
    ids = prompts_of(None, tiny_model().config)
    assert ids["quoting"] == ids["prose"][:32] * 3
    assert len(set(ids["prose"])) > 50


# --- the command ---------------------------------------------------------------------------------

KEYS = {"text", "drafter", "k", "plain_tok_s", "speculative_tok_s", "acceptance_rate"}
KEYS |= {"tokens_per_pass", "predicted_speedup", "same_tokens"}


@pytest.mark.parametrize(("given", "name"), [(["--ngram"], "ngram"), (["--draft", "int8"], "int8")])
def test_the_command_prints_what_it_writes(given, name, tmp_path: Path, capsys) -> None:
    file = tmp_path / "spec.json"
    assert cli.main(["bench", "spec", *ASKS_EIGHT, *given, "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(file.read_text())
    assert err == "", "a bar is for a terminal"
    assert max(map(len, out.splitlines())) < 100
    assert isinstance(rows, list) and all(set(row) >= KEYS for row in rows)
    places = [(row["text"], row["k"], row["adaptive"]) for row in rows]
    assert places == [
        (text, k, adaptive)
        for text in ("quoting", "prose")
        for k in (2, 8)
        for adaptive in (False, True)
    ]
    for row in rows:
        assert row["drafter"] == name and row["same_tokens"] is True
        assert row["passes"] == sum(row["rounds"].values())
        assert row["drafted_rows"] == sum(int(j) * r for j, r in row["rounds"].items())
        assert row["tokens_per_pass"] == pytest.approx(19 / row["passes"])
        rounds = {int(j): r for j, r in row["rounds"].items()}
        law = predict(rounds, row["acceptance_rate"], lambda n, v=row["v"]: v[str(n)], row["c"])
        assert row["predicted_speedup"] == pytest.approx(law.speedup)
        assert row["textbook_speedup"] == pytest.approx(law.textbook)
        assert row["v"]["1"] == 1 and min(row["v"].values()) > 0 and row["c"] > 0
        k = f"≤{row['k']}" if row["adaptive"] else str(row["k"])
        speeds = f"{row['plain_tok_s']:.1f} | {row['speculative_tok_s']:.1f}"
        assert f"| {row['text']} | {k} | {speeds} | {row['speedup']:.2f} | " in out
    assert out.endswith(f"{spec_tables._wrapped(spec_tables.verdict(rows))}\n")
    one = rows[0]
    assert one["read_gb_s"] > 0 and one["machine"]["threads"] == torch.get_num_threads()
    assert f"{one['date']}, reads" in out.replace("\n", " ")


def test_an_int8_form_of_random_weights_is_of_the_same_weights() -> None:
    """So it is nearly always right; nothing else of that shape would be."""
    rows = measure(Asked(None, "int8", (4,), 1, SamplingParams(max_tokens=20, temperature=0)))
    assert min(row["acceptance_rate"] for row in rows) > 0.7


def test_drawn_drafts_are_not_asked_for_the_same_tokens(capsys) -> None:
    options = ["--tiny", "--draft", "int8", "-k", "3", "--turns", "1", "-n", "8"]
    assert cli.main(["bench", "spec", *options, "--temperature", "0.9"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + 4 and all(line.endswith("| n/a |") for line in table[2:])


def test_two_bundled_models(capsys) -> None:
    """The draft model's tokens are the target's, and greedy ones change nothing."""
    options = ["tiny", "--draft", "tiny-draft", "-k", "2", "--turns", "1", "-n", "6"]
    assert cli.main(["bench", "spec", *options]) == 0
    out = capsys.readouterr().out
    assert "One stream, tiny, drafts by tiny-draft, greedy" in out
    assert out.count("| yes |") == 4


def test_costs_are_measured_before_each_turn(monkeypatch) -> None:
    """7 turns a row: as often passes of each number of rows, and drafts of the row's own k."""
    seen = []
    monkeypatch.setattr(
        spec_turns.PassTimes,
        "turn",
        lambda self, turn=PassTimes.turn: (seen.append("v"), turn(self)),
    )
    monkeypatch.setattr(
        spec_turns.DraftTimes,
        "turn",
        lambda self, k, clock, turn=DraftTimes.turn: (seen.append(k), turn(self, k, clock)),
    )
    measure(Asked(None, "ngram", (2, 3), 2, SamplingParams(max_tokens=4, temperature=0)))
    a_text = ["v", 2] * 4 + ["v", 3] * 4  # two turns, k fixed and adaptive
    assert seen == a_text * 2


def test_the_verdict_says_where_drafts_win_and_lose() -> None:
    def row(text, k, adaptive, speedup):
        return {"text": text, "k": k, "adaptive": adaptive, "speedup": speedup}

    rows = [row("quoting", 3, False, 1.5), row("quoting", 8, True, 2.25)]
    rows += [
        row("prose", 3, False, 0.99),
        row("prose", 8, False, 0.875),
        row("prose", 8, True, 1.1),
    ]
    assert spec_tables.verdict(rows) == (
        "Quoting: wins, 1.50 (k 3) to 2.25 times as fast (k ≤8). "
        "Prose: wins, 1.10 times as fast (k ≤8); loses, 12.5% slower (k 8); "
        "neither wins nor loses more than 2% (k 3)."
    )


def test_tokens_that_differ_are_said_to(monkeypatch, capsys) -> None:
    """A target that changes its mind: its chunks say another token than its steps."""
    chunk = Engine.chunk
    monkeypatch.setattr(Engine, "chunk", lambda self, tokens: chunk(self, tokens).roll(1, -1))
    assert cli.main(["bench", "spec", *ASKS_EIGHT, "--ngram"]) == 0
    out = capsys.readouterr().out
    assert out.count("| NO |") == 8
    assert "another token than plain decoding at 1, where the two" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ngram"], "no model: expected MODEL, or --tiny in its place"),
        (["tiny", "--tiny", "--ngram"], "tiny and --tiny: expected one of the two"),
        (["--tiny"], "nothing drafts: expected --draft SMALL, or --ngram"),
        (["--tiny", "--ngram", "--draft", "x"], "--draft x and --ngram: expected one of the two"),
        (["--tiny", "--ngram", "-k", "3", "0"], "-k 0: expected 1 to 32"),
        (["--tiny", "--ngram", "-k", "33"], "-k 33: expected 1 to 32"),
        (["--tiny", "--ngram", "-k", "3", "3"], "-k 3 3: expected each number once"),
        (["--tiny", "--ngram", "--turns", "0"], "--turns 0: expected 1 or more"),
        (["--tiny", "--ngram", "-n", "1"], "-n 1: expected 2 or more"),
        (["--tiny", "--ngram", "-n", "-1"], "-n -1: expected 2 or more"),
        (["--tiny", "--ngram", "--temperature", "-1"], "--temperature -1.0: expected a number"),
        (
            ["--tiny", "--ngram", "-n", "417"],
            "-n 417: the longer prompt and its answer are 513 tokens, and the model has 512 "
            "positions; expected -n 416 or less",
        ),
        (["no-such-model", "--ngram"], "no model 'no-such-model'"),
        (["--tiny", "--draft", "no-such-model"], "no model 'no-such-model'"),
        (["--tiny", "--ngram", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.js"),
        (["--tiny", "--ngram", "--json", "/"], "--json /: it is a directory"),
    ],
)
def test_the_command_refuses_before_it_measures(options, words, capsys, monkeypatch) -> None:
    monkeypatch.setattr(spec, "race", None)
    assert cli.main(["bench", "spec", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"spindle: error: {words}")


def test_a_draft_model_of_other_tokens_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(spec, "race", None)
    shutil.copytree(spec.hub.resolve("tiny-draft"), tmp_path / "draft")
    file = tmp_path / "draft" / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(data))
    params = SamplingParams(max_tokens=8, temperature=0)
    with pytest.raises(RequestError, match="the draft model's tokenizer is another one"):
        measure(Asked("tiny", str(tmp_path / "draft"), (3,), 1, params))


def test_a_draft_model_with_fewer_positions_is_refused(model, monkeypatch) -> None:
    """It would leave off drafting on the way. 96 + 8 tokens, and then a prompt that is too long."""
    monkeypatch.setattr(spec, "race", None)
    for positions, right in ((100, "-n 4 or less"), (64, "a model of more")):
        draft = random_model(shapes.llama(max_position_embeddings=positions))
        monkeypatch.setattr(spec, "drafter_of", lambda *given, d=draft: ModelDrafter(Engine(d)))
        with pytest.raises(RequestError) as error:
            measure(Asked(None, "x", (3,), 1, SamplingParams(max_tokens=8, temperature=0)))
        assert str(error.value) == (
            "-n 8: the longer prompt and its answer are 104 tokens, and the draft model has "
            f"{positions} positions; expected {right}"
        )


def test_the_emulators_times_are_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr(emulate, "enabled", lambda: True)
    assert cli.main(["bench", "spec", "--tiny", "--ngram"]) == 2
    assert "SPINDLE_EMULATE=1: the emulator's times say nothing" in capsys.readouterr().err
