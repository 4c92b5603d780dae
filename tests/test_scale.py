"""Scale: the stand-in loops do the work that they say, and the command says what it found."""

import json
from pathlib import Path

import pytest

from spindle import cli
from spindle.bench import scale
from spindle.bench.scale import LONGEST, LOOPS, PROMPT, Cost, LLMLoop, SchedulerLoop, drain, steady


@pytest.mark.parametrize("name", LOOPS)
def test_the_queue_keeps_its_length(name: str) -> None:
    loop = LOOPS[name](4, 50)
    assert loop.waiting == 54, "those that will run at once, too"
    for _ in range(100):
        ended = loop.step()
        loop.add(ended)
        assert loop.waiting == 50 + ended, "who comes is admitted in the next step"


def test_both_loops_do_the_same_work() -> None:
    """The LLM's scheduler plans what the bare one does; rows and tokens are counted, not timed."""
    loops = [kind(4, 20) for kind in (SchedulerLoop, LLMLoop)]
    counted = [(c.rows, c.new, c.added, c.steps) for c in (steady(loop, 60) for loop in loops)]
    assert counted[0] == counted[1]
    rows, new, added, steps = counted[0]
    assert steps == 60 and new == 4 * 60, "four run, and each gains a token a step"
    admitted = 24 + added - loops[0].waiting
    assert rows == new + (PROMPT - 1) * admitted


def test_answers_are_of_all_lengths_and_prompts_differ() -> None:
    lengths = [scale.params_of(order).max_tokens for order in range(LONGEST)]
    assert sorted(lengths) == list(range(1, LONGEST + 1))
    prompts = {tuple(scale.prompt_of(order)) for order in range(2000)}
    assert len(prompts) == 2000 and {len(prompt) for prompt in prompts} == {PROMPT}
    assert {token for prompt in prompts for token in prompt} == set(range(16))


def test_draining_takes_every_request_to_its_end() -> None:
    """One seat: as many steps as tokens."""
    tokens = sum(scale.params_of(order).max_tokens or 0 for order in range(1, 41))
    assert drain(40, 1)["steps"] == tokens
    assert drain(40, 8)["steps"] < tokens / 6


def test_a_cost_is_divided_by_what_it_was_for() -> None:
    cost = Cost(schedule_s=3e-6, commit_s=1e-6, add_s=5e-6, rows=4, new=2, added=5)
    assert cost.us() == pytest.approx(
        {
            "schedule_us_a_row": 0.75,
            "commit_us_a_row": 0.25,
            "us_a_row": 1.0,
            "us_a_new_token": 2.0,
            "us_an_add": 1.0,
        }
    )


def test_the_command_prints_what_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scale.json"
    options = ["--only", "queue", "--waiting", "8", "64", "--seqs", "4", "--steps", "40"]
    options += ["--repeat", "2"]
    assert cli.main(["bench", "scale", *options, "--json", str(file)]) == 0
    text, written = capsys.readouterr().out, json.loads(file.read_text())
    for name in LOOPS:
        costs = written[name]
        assert list(costs) == ["8", "64"]
        flat = costs["64"]["us_a_row"] / costs["8"]["us_a_row"]
        assert written["flat"][name] == pytest.approx(flat)
        assert f"Longest queue / shortest, a row: {flat:.2f}." in text
    assert min(written["scheduler"]["8"].values()) > 0
    assert f"| 64 | {written['scheduler']['64']['schedule_us_a_row']:.2f} | " in text
    assert written["drained"]["requests"] == 64
    assert "64 requests from first to last: " in text


def test_the_queue_and_the_model_are_of_one_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scale.json"
    options = ["--only", "queue", "memory", "--waiting", "8", "--seqs", "4", "--steps", "31"]
    options += ["--repeat", "1", "--tokens", "20", "40", "--json", str(file)]
    assert cli.main(["bench", "scale", *options]) == 0
    text, written = capsys.readouterr().out, json.loads(file.read_text())
    assert "| waiting, scheduler | " in text and "Memory against tokens held" in text
    assert {"scheduler", "llm", "flat", "drained", "memory", "settings"} == set(written)
    settings = written["settings"]
    assert (settings["waiting"], settings["tokens"], settings["model"]) == ([8], [20, 40], "tiny")


def test_without_the_queue_nothing_is_said_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scale", "--only", "memory", "--tokens", "20"]) == 0
    assert "waiting" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seqs", "0"], "--seqs 0: expected 1 or more"),
        (["--steps", "30"], "--steps 30: expected 31 or more"),
        (["--repeat", "0"], "--repeat 0: expected 1 or more"),
        (["--waiting", "63"], "--waiting 63: expected numbers that rise, from --seqs 64 on"),
        (["--waiting", "100", "99"], "--waiting 100 99: expected numbers that rise"),
        (["--waiting", "100", "100"], "--waiting 100 100: expected numbers that rise"),
        (["--only", "decode", "cache"], "--only 'cache': expected some of queue, decode, batch, "),
        (
            ["--only", "queue", "--plot", "x.png"],
            "--plot x.png: nothing to draw; expected some of ",
        ),
        (["--plot", "x.gif"], "--plot x.gif: expected a name that ends in"),
        (["-m", "no-such-model"], "no model 'no-such-model'"),
        (["--new", "65"], "--new 65: expected 2 to 64"),
        (
            ["--contexts", "64", "513"],
            "--contexts 64 513: expected numbers that rise, from 2 to 512",
        ),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no"),
    ],
)
def test_the_command_refuses_before_it_measures(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "scale", *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"spindle: error: {words}")
