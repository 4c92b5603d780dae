"""The exactness matrix: each cell on a schedule or two, the judges themselves, and the page.

`tests/matrix/run.py` goes on for as long as one likes. Here a seed is good for a day, so that other
schedules are drawn tomorrow; `SPINDLE_MATRIX_SEED` brings one back.
"""

import functools
import math
import os
import random
import re
from dataclasses import replace
from datetime import date

import pytest
import torch
from matrix import digest, judges, law, models, page, table
from matrix.claims import CLAIMS, COLUMNS, NOT_APPLICABLE, NOT_PROVEN, SMOLLM2
from matrix.definitions import Draw, off_the_draw, uniform
from matrix.judges import Tally
from matrix.law import Drawn, Evidence
from matrix.rows import ALL_ROWS, BY_NAME, is_int8
from matrix.streams import serve_one_by_one
from matrix.table import Findings
from matrix.traffic import Asked, by_lot

from spindle import SamplingParams
from spindle.decode import sampling

SEED = int(os.environ.get("SPINDLE_MATRIX_SEED", f"{date.today():%Y%m%d}"))
AGAIN = f"SPINDLE_MATRIX_SEED={SEED} brings it back"
CELLS = [cell for cell, claim in CLAIMS.items() if claim.is_tested]


@functools.cache
def findings(row: str) -> Findings:
    """Each row is run once, for all of its cells."""
    return table.run([row], SEED)


# --- every cell ----------------------------------------------------------------------------------


def marked(row: str, column: str) -> object:
    marks = [pytest.mark.smollm2] if row == SMOLLM2 else []
    return pytest.param(row, column, marks=marks, id=f"{row}-{column}")


@pytest.mark.parametrize(("row", "column"), [marked(*cell) for cell in CELLS])
def test_a_cell_that_is_claimed_holds(row, column):
    """Its answers are what they have to be, and its feature happened to some of the requests."""
    if why := table.missing(row):
        pytest.skip(why)
    found = findings(row)
    assert found.failures((row, column)) == [], AGAIN
    tally = found.cells[row, column]
    assert tally.schedules and tally.touched and tally.tokens, AGAIN


def test_no_cell_is_left_without_a_claim_or_a_reason():
    assert set(CLAIMS) == {(row.name, column) for row in ALL_ROWS for column in COLUMNS}
    for claim in CLAIMS.values():
        assert claim.status in table.SYMBOLS
        assert claim.words or claim.status not in (NOT_APPLICABLE, NOT_PROVEN)


# --- the judges ----------------------------------------------------------------------------------


def llama(dtype=torch.float64, int8=False, size="large"):
    return models.subject("llama", size, 0, dtype, int8)


def judged(subject, judge, change=lambda served: served, row="mixed steps"):
    rng, tally = random.Random(1), Tally()
    asked = by_lot(rng, subject, 6, 10, beams=row == "beam")
    judge(subject, change(BY_NAME[row].serve(rng, subject, asked)), set(), tally)
    return tally.failures


def with_another_id(served):
    """Each answer, with another last id."""
    for output in served.outputs:
        for answer in output.outputs:
            answer.token_ids[-1] = (answer.token_ids[-1] + 1) % 24
    return served


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("column", COLUMNS[:3])
def test_one_wrong_id_is_noticed_in_every_request_that_a_column_looks_at(column, dtype):
    """In float32 no model's two likeliest logits are so close that any id would pass."""
    subject, judge = llama(dtype), table.JUDGES[column]  # each looks at three of six
    assert judged(subject, judge) == []
    wrong = judged(subject, judge, with_another_id)
    assert len({re.search(r"request \d", words)[0] for words in wrong}) == 3


@pytest.mark.parametrize("column", COLUMNS[:2])
def test_a_wrong_beam_is_noticed(column):
    judge = table.JUDGES[column]
    assert judged(llama(), judge, row="beam") == []
    assert any("beams" in words for words in judged(llama(), judge, with_another_id, "beam"))


def test_a_logprob_that_is_off_by_a_billionth_is_noticed():
    def nudged(served):
        for output in served.outputs:
            for answer in output.outputs:
                for entry in answer.logprobs or ():
                    object.__setattr__(entry.sampled, "logprob", entry.sampled.logprob + 2e-9)
        return served

    assert any("logprobs" in w for w in judged(llama(), judges.against_plain, nudged))


def test_an_answer_that_stops_too_soon_is_noticed():
    def cut(served):
        for output in served.outputs:
            for answer in output.outputs:
                del answer.token_ids[-1]
                if answer.logprobs:
                    del answer.logprobs[-1]
        return served

    for subject in (llama(), llama(torch.float32)):
        assert len(judged(subject, judges.against_transformers, cut)) >= 3


def test_float32_is_much_closer_to_float64_than_what_is_let_pass():
    """NEAR is a hundred times what rounding does to a logit here, at least."""
    for family in models.FAMILIES:
        subject = models.subject(family, "large", 0, torch.float32)
        ids = [random.Random(0).randrange(24) for _ in range(40)]
        narrow = judges.plain_logits(replace(subject, plain=subject.ours), ids)
        wide = judges.plain_logits(subject, ids)
        assert (narrow - wide).abs().max() < judges.NEAR / 100
        assert wide.std() >= 1


# --- the law -------------------------------------------------------------------------------------


def texts(ways, count, seed=0):
    """`count` answers that were drawn by some ways: their ids by lot, and logits that are flat."""
    rng = random.Random(seed)
    draws = []
    for n in range(count):
        params = SamplingParams(seed=n, max_tokens=8, **rng.choice(ways))
        prompt, ids = [rng.randrange(24) for _ in range(5)], [rng.randrange(24) for _ in range(8)]
        draws += [Draw(params, prompt, ids[:at], 0) for at in range(8)]
    generator = torch.Generator().manual_seed(seed)
    return draws, torch.randn(len(draws), 24, generator=generator, dtype=torch.float64)


def drawn_from(p, draws, logits, draft_logits=None, seed=0):
    """What a row's evidence is where each token is drawn from its p [N, V]."""
    generator, evidence = torch.Generator().manual_seed(1000 + seed), Evidence()
    tokens = torch.multinomial(p, 1, generator=generator)[:, 0].tolist()
    draws = [replace(draw, token=token) for draw, token in zip(draws, tokens, strict=True)]
    impossible = evidence.weigh(Drawn(draws, logits, (), draft_logits), random.Random(seed))
    return evidence, impossible


def law_of(draws, logits, draft_logits=None):
    return Drawn(draws, logits, (), draft_logits)


LAW_COUNT = BY_NAME["draft model"].law_count * table.ROUNDS  # answers of a row's smallest round


@functools.cache
def smallest_round():
    """Draws, logits and draft logits, as many as a row with a draft model has there."""
    draws, logits = texts(judges.WAYS, LAW_COUNT)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).double()
    return draws, logits, logits + noise


@functools.cache
def faulty():
    return law_of(*smallest_round()).faulty()


def test_a_right_law_passes():
    evidence, impossible = drawn_from(law_of(*smallest_round()).p, *smallest_round())
    assert impossible == [] and min(evidence.chances().values()) > 1e-3


@pytest.mark.parametrize("fault", [*law.FAULTS, *law.DRAFT_FAULTS])
def test_a_law_with_a_fault_is_noticed_in_the_smallest_round(fault):
    """And named: what is cut is then a token that cannot be drawn."""
    evidence, impossible = drawn_from(faulty()[fault], *smallest_round())
    assert impossible or evidence.chances()[f"as with {fault}"] < law.CHANCE
    assert "ignored" not in fault or "penalty" in fault or impossible


def test_a_bias_that_nobody_has_thought_of_is_noticed_by_its_points():
    """Every fifth token is drawn as if all were equally likely."""
    draws, logits = texts(judges.WAYS[:1], LAW_COUNT)
    p = law_of(draws, logits).p
    evidence, _ = drawn_from(0.8 * p + 0.2 / 24, draws, logits)
    assert evidence.chances()["points by rank"] < law.CHANCE
    evidence, _ = drawn_from(p, draws, logits)
    assert evidence.chances()["points by rank"] > 1e-3


def test_how_often_a_right_law_is_denied_is_bounded():
    """Of 60 right samples no more than a tenth are as unlikely as one in ten, by what is said."""
    draws, logits = texts(judges.WAYS, 5)
    p = law_of(draws, logits).p
    seen = [drawn_from(p, draws, logits, seed=n)[0].chances() for n in range(60)]
    for what in ("points by rank", "points by id"):
        assert sum(chances[what] < 0.1 for chances in seen) <= 6
    odds = [p for chances in seen for name, p in chances.items() if name.startswith("as with")]
    assert len(odds) == 60 and sum(p < 0.1 for p in odds) <= 6


def test_what_a_run_would_see_is_what_it_sees_on_average():
    """The nats of a fault are the mean of its log odds where it is there."""
    draws, logits = texts(judges.WAYS[:1], 60)
    wrong = law_of(draws, logits).faulty()["temperature x 0.85"]
    seen = [drawn_from(wrong, draws, logits, seed=n)[0] for n in range(12)]
    mean = sum(one.odds["temperature x 0.85"] for one in seen) / len(seen)
    assert mean == pytest.approx(seen[0].nats["temperature x 0.85"], rel=0.15)


def test_points_are_as_far_from_uniform_as_they_are():
    assert law.distance([0.1, 0.5, 0.6]) == pytest.approx(0.4)
    assert law.bound([0.5] * 100) == pytest.approx(2 * math.exp(-50))
    assert law.bound([]) == 1.0


def test_in_the_column_law_an_engine_that_draws_otherwise_fails():
    """All answers drawn by one seed, as if the position alone decided."""
    found, subject, row = Findings(), llama(size="flat"), BY_NAME["mixed steps"]
    asked = [Asked(0, (1, 2), SamplingParams(seed=7, max_tokens=8)) for _ in range(40)]
    served = row.serve(random.Random(0), subject, asked)
    table.weigh(row, random.Random(0), subject, served, found, "")
    found.judge_laws(0)
    assert "chance would do this" in found.failures(("mixed steps", "law"))[0]


# --- the definitions -----------------------------------------------------------------------------


def rows_of(logits, before=(), eos=(), **params):
    """What a token is drawn from, after the prompt [0] and some ids."""
    draw = Draw(SamplingParams(seed=0, **params), [0], list(before), 0)
    drawn = Drawn([draw], torch.tensor([logits], dtype=torch.float64), eos)
    return drawn.p[0].tolist()


def test_a_distribution_is_as_it_is_defined():
    logits = [0.0, 3.0, 1.0, 2.0]
    whole = torch.tensor(logits).softmax(0).tolist()
    assert rows_of(logits) == pytest.approx(whole, abs=1e-6)
    two = [0, 0.7311, 0, 0.2689]
    for cut in (dict(top_k=2), dict(top_p=0.7), dict(min_p=0.3)):
        assert rows_of(logits, **cut) == pytest.approx(two, abs=1e-4)
    assert rows_of(logits, top_p=0.6) == rows_of(logits, min_p=0.4) == [0, 1, 0, 0]
    halved = torch.tensor([0.0, 1.5, 0.5, 1.0]).softmax(0).tolist()
    assert rows_of(logits, temperature=2) == pytest.approx(halved, abs=1e-6)


def test_penalties_and_min_tokens_are_as_they_are_defined():
    """Repetition counts the prompt, too; frequency counts how often, presence whether."""
    logits, said = [2.0, 1.0, -1.0, 1.0], [1, 1, 2]
    for params, right in (
        (dict(repetition_penalty=2), [1.0, 0.5, -2.0, 1.0]),
        (dict(frequency_penalty=0.5), [2.0, 0.0, -1.5, 1.0]),
        (dict(presence_penalty=0.5), [2.0, 0.5, -1.5, 1.0]),
    ):
        p = torch.tensor(right, dtype=torch.float64).softmax(0).tolist()
        assert rows_of(logits, said, **params) == pytest.approx(p)
    held = dict(min_tokens=4, stop_token_ids=[0])
    assert rows_of(logits, said, eos=[3], **held)[0::3] == [0, 0]
    assert rows_of(logits, said, eos=[3], ignore_eos=True, **held)[3] > 0
    assert min(rows_of(logits, [*said, 1], eos=[3], **held)) > 0


def test_the_number_of_a_token_is_the_packages():
    """Two readings of one definition."""
    rng = random.Random(0)
    for _ in range(100):
        four = [rng.getrandbits(63), rng.randrange(128), rng.randrange(10**6), rng.randrange(3)]
        its = sampling.uniform(*(torch.tensor([value]) for value in four[:3]), four[3])
        assert uniform(*four) == float(its)


def test_a_number_lies_in_the_stretch_of_its_token_and_of_no_other():
    draws = [Draw(SamplingParams(seed=1), [0], [], token) for token in range(4)]
    p = torch.tensor([[0.25, 0.25, 0.0, 0.5]] * 4, dtype=torch.float64)
    off, u = off_the_draw(p, draws).tolist(), draws[0].u
    assert sum(x <= 0 for x in off) == 1 and off[2] == math.inf
    assert [x <= 0 for x in off] == [u < 0.25, 0.25 <= u < 0.5, False, u >= 0.5]


# --- the features --------------------------------------------------------------------------------

WITHOUT = [row for row in ALL_ROWS if row.name not in ("beam", SMOLLM2)]


@pytest.mark.parametrize("row", WITHOUT, ids=lambda row: row.name)
def test_where_the_feature_is_off_its_counter_says_so(row):
    """So a cell whose feature did not happen cannot pass: one request at a time, in plain steps."""
    subject = models.subject("llama", "large", 0, torch.float64, False)
    params = SamplingParams(max_tokens=4, temperature=0)
    asked = by_lot(random.Random(0), subject, 4, 4)
    asked = [replace(one, at=20 * n, params=params) for n, one in enumerate(asked)]
    off = replace(BY_NAME["int8"], int8=False)
    assert row.touched(off.serve(random.Random(0), subject, asked)) == set()
    if row.serves is serve_one_by_one and row.name != "one stream":
        off = BY_NAME["one stream"]
        assert row.touched(off.serve(random.Random(0), subject, asked)) == set()


def test_a_cell_whose_feature_did_not_happen_fails():
    found = Findings()
    found.cells["swap", "drawn"] = Tally(schedules=3)
    assert found.failures(("swap", "drawn")) == ["it happened to none in 3 schedules"]


def test_int8_is_what_it_says():
    """And not the same as without: answers of the two are different ones."""
    whole, ours = llama(), llama(int8=True)
    assert is_int8(ours) and not is_int8(whole)
    ids = list(range(20))
    assert (judges.plain_logits(ours, ids) - judges.plain_logits(whole, ids)).abs().max() > 1e-3


# --- the command and the page --------------------------------------------------------------------


def test_the_same_seed_makes_the_same_requests():
    subject = llama()
    first, again, other = (
        by_lot(random.Random(n), subject, 6, 10, (1, 2), True) for n in (1, 1, 2)
    )
    assert first == again != other


def test_the_command_prints_the_seed_and_its_counts(capsys):
    assert table.main(["--only", "beam", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("seed 3, code ") and "● 2 / " in printed and "0 failures" in printed


def test_a_failure_is_printed_with_its_seed_and_is_the_exit_status(capsys, monkeypatch):
    def wrong(subject, served, touched, tally):
        tally.touched += 1
        tally.expect(False, "request 0: wrong")

    monkeypatch.setitem(table.JUDGES, "plain path", wrong)
    assert table.main(["--only", "beam", "--seed", "5"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED beam, plain path: seed 5, llama: request 0: wrong" in printed
    assert "2 failures" in printed


def test_a_page_is_written_of_all_rows_only(capsys):
    with pytest.raises(SystemExit):
        table.main(["--only", "swap", "--write"])
    assert "--write needs all rows" in capsys.readouterr().err


def test_the_page_of_the_book_says_what_is_claimed():
    """A claim that was changed since has to be proven again: `make matrix`, with `--write`."""
    assert page.PAGE.read_text(encoding="utf-8") == page.render()
    kept = page.read()["cells"]
    assert {(row, column) for row in kept for column in kept[row]} == set(CELLS)
    assert all(cell["touched"] > 0 for its in kept.values() for cell in its.values())


def test_a_digest_changes_with_what_is_run_and_with_no_word(tmp_path):
    room = tmp_path / "spindle" / "serve"
    room.mkdir(parents=True)

    def digest_of(python, c=""):
        (room / "a.py").write_text(python)
        (room / "a.cpp").write_text(c)
        return digest.digests(["serve"], root=tmp_path)

    first = digest_of('def f(x):\n    """Words."""\n    return x  # why\n', 'f("//");  // why\n')
    words = digest_of('def f(x):\n    """Others,\n\n    more."""\n\n    return x\n', 'f("//");\n')
    assert first == words
    assert digest_of("def f(x):\n    return -x\n", 'f("//");') != first
    assert digest_of("def f(x):\n    return x\n", 'f("/*");') != first


def test_a_record_says_whether_code_has_changed_since():
    kept = digest.digests(["kvcache"], "tests/matrix")
    assert digest.since(kept) == "No code has changed since."
    changed = digest.since(kept | {"kvcache": "x"})
    assert changed == "Code has changed since, in *kvcache*: the run has to be made again."
