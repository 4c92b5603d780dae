"""The exactness matrix: each cell on a schedule or two, the judges themselves, and the page.

`tests/matrix/run.py` goes on for as long as one likes; here the seed is fixed.
"""

import functools
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from matrix import judges, models, page, table
from matrix.claims import CLAIMS, COLUMNS, NOT_APPLICABLE, NOT_PROVEN, SMOLLM2
from matrix.judges import Tally
from matrix.rows import ALL_ROWS, BY_NAME, is_int8
from matrix.table import Findings
from matrix.traffic import by_lot

from spindle import SamplingParams

SEED = 0
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
    assert found.failures((row, column)) == []
    tally = found.cells[row, column]
    assert tally.schedules and tally.touched and tally.tokens


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
    subject, judge = llama(dtype), table.JUDGES[column]
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


def test_the_law_is_a_law_and_another_temperature_is_noticed():
    """4,000 answers of the right one pass; at a temperature of 0.8 for 1.0 they do not."""
    right, rng = judges.law(llama(size="small"), "temperature 1"), random.Random(0)
    assert sum(right.values()) == pytest.approx(1)
    assert len(right) == 4**judges.LENGTH
    other = {ids: p**1.25 for ids, p in right.items()}
    for law, passes in ((right, True), (other, False)):
        drawn = Counter(rng.choices(list(law), law.values(), k=4000))
        assert (judges.chance(drawn, right) > judges.CHANCE) == passes
    assert judges.chance(Counter({(9, 9, 9, 9): 1}), right) == 0


def test_a_distribution_is_as_it_is_defined():
    logits = [0.0, 3.0, 1.0, 2.0]
    p = judges.distribution(logits, 1.0)
    assert p == pytest.approx(torch.tensor(logits).softmax(0).tolist(), abs=1e-6)
    assert judges.distribution(logits, 1.0, top_k=2) == pytest.approx(
        [0, 0.7311, 0, 0.2689], abs=1e-4
    )
    assert judges.distribution(logits, 1.0, top_p=0.7) == pytest.approx(
        [0, 0.7311, 0, 0.2689], abs=1e-4
    )
    assert judges.distribution(logits, 1.0, top_p=0.6) == [0, 1, 0, 0]


def test_in_the_column_law_an_engine_that_draws_otherwise_fails():
    """All answers drawn by one seed, as if the position alone decided."""
    found, subject = Findings(), llama(size="small")
    found.counts["mixed steps", subject, "temperature 1"].update([(0, 1, 2, 3)] * 160)
    found.counts = {table.Law(*key): seen for key, seen in found.counts.items()}
    found.judge_laws()
    assert "chance would do this" in found.failures(("mixed steps", "law"))[0]


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


def test_a_cell_whose_feature_did_not_happen_fails():
    found = Findings()
    found.cells["swap", "alone"] = Tally(schedules=3)
    assert found.failures(("swap", "alone")) == ["it happened to none in 3 schedules"]


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
    assert printed.startswith("seed 3\n") and "● 2 / " in printed and "0 failures" in printed


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
