"""`spindle batch`: what it writes is what the engine gives, however often it was stopped."""

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz import batch_kills
from hypothesis import given
from hypothesis import strategies as st

from spindle import LLM, SamplingParams, Tokenizer, cli, hub, load_hf, openai_form
from spindle.batch import command, digest, lines, results, work
from spindle.batch.digest import checkpoint_digest, settings_of
from spindle.batch.ledger import Ledger
from spindle.batch.lines import Refused, RunWith
from spindle.batch.results import Results
from spindle.errors import SpindleError
from spindle.kernels import native
from spindle.openai_form import completion_request
from spindle.serve.passes import kernels_of

TINY = ("-m", "tiny", "--max-seqs", "4")
RUN_WITH = RunWith("tiny", "checkpoint=0f, device=cpu")
FIELDS = {*openai_form.COMPLETION_FIELDS, "method", "url", "body", "custom_id"}


def line(custom_id: str, prompt: Any = "A list is", **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 5} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


LINES = [
    line("greedy", temperature=0),
    line("drawn"),
    line("seeded", seed=7, top_k=50),
    line("two", n=2),
    line("prompts", ["A tuple", "A set is"], logprobs=1),
    line("ids", [5, 6, 7], temperature=0.5, user="somebody"),
    line("é 😀", "é", stop="e"),
    line("stops", stop_token_ids=[11], min_tokens=2),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", LINES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def write(path: Path, entries: list[Any]) -> Path:
    texts = (one if isinstance(one, str) else json.dumps(one) for one in entries)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def batch(source: Path, out: Path, *options: object, model: tuple[str, ...] = TINY) -> int:
    return cli.main(["batch", str(source), str(out), *model, *map(str, options)])


def answers(out: Path) -> dict[str, Any]:
    return batch_kills.answered(out)


def one_error(capsys: pytest.CaptureFixture[str]) -> str:
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and stderr.startswith("spindle: error: ") and stderr.count("\n") == 1
    return stderr.removeprefix("spindle: error: ").strip()


# What is written.


def test_each_line_has_the_answer_of_the_engine_by_itself(source, out, capsys):
    assert batch(source, out) == 0
    found, llm = answers(out), LLM("tiny", batch_invariant=True)
    assert found.keys() == {one["custom_id"] for one in LINES}
    for one in LINES:
        asked, result = completion_request(one["body"]), found[one["custom_id"]]
        texts = []
        for index, prompt in enumerate(asked.prompt_ids(llm)):
            seed = {"seed": work.seed_of(one["custom_id"], index)}
            params = SamplingParams(**(seed | params_of(one["body"])))
            texts += [it.text for it in llm.generate(prompt, params)[0].outputs]
        body = result["response"]["body"]
        assert [choice["text"] for choice in body["choices"]] == texts
        assert result["error"] is None and result["response"]["status_code"] == 200
        assert body["model"] == "tiny" and body["object"] == "text_completion"
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    unused, summary = stderr.splitlines()
    assert unused == "without effect here: user"
    assert summary.startswith("8 lines answered, 0 before, 0 refused · ")


def params_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in body if name not in ("prompt", "user")}


def test_ids_are_all_different_and_say_of_what_they_are(source, out):
    assert batch(source, out, "-q") == 0
    found = answers(out)
    assert len({result["id"] for result in found.values()}) == len(LINES)
    options = work.EngineOptions("tiny", max_seqs=4)
    run_with = RunWith("tiny", settings_of(work.engine(options), options))
    for entry in LINES:
        result = found[entry["custom_id"]]
        assert result["id"] == run_with.result_id(json.dumps(entry).encode())
        body = result["response"]["body"]
        assert body["id"].removeprefix("cmpl-") in result["id"]
        assert body["system_fingerprint"] == run_with.settings


def test_without_a_seed_a_line_draws_by_its_custom_id(tmp_path, out):
    source = write(tmp_path / "in.jsonl", [line(f"{n}", temperature=1.5) for n in range(6)])
    assert batch(source, out, "-q") == 0
    texts = {one["response"]["body"]["choices"][0]["text"] for one in answers(out).values()}
    assert len(texts) > 1
    assert work.seed_of("a", 0) != work.seed_of("a", 1) != work.seed_of("b", 0)
    assert all(0 <= work.seed_of(f"{n}", 0) < 2**63 for n in range(100))


def test_what_stands_around_a_line_is_no_part_of_it(tmp_path, out, source):
    assert batch(source, out, "-q") == 0
    spaced = "\ufeff" + "\r\n\r\n".join(f"  {json.dumps(one)}\t" for one in LINES)  # no last one
    (tmp_path / "spaced.jsonl").write_text(spaced, newline="")
    assert batch(tmp_path / "spaced.jsonl", other := tmp_path / "other.jsonl", "-q") == 0
    assert answers(other) == answers(out)


def test_the_name_of_the_model_is_what_bodies_call_it(tmp_path, out, capsys):
    source = write(tmp_path / "in.jsonl", [line("a", model="gpt"), line("b", model="tiny")])
    assert batch(source, out, "-q", "--served-model-name", "gpt") == 3
    assert [one["response"]["body"]["model"] for one in answers(out).values()] == ["gpt"]
    right = "expected 'gpt', which runs here (--served-model-name names it otherwise)"
    assert capsys.readouterr().err == f"{source}: line 2: model='tiny': {right}\n"


# Lines that cannot be run.

BAD = [
    ("not json", None, "not JSON"),
    ('{"custom_id": "x"', None, "not JSON"),
    ("[1]", None, "a list; expected a JSON object"),
    ({"method": "POST"}, None, "custom_id=None: expected a text, not empty"),
    (line(""), None, "custom_id='': expected a text"),
    ('{"custom_id": "\\ud800"}', None, "custom_id='\\ud800': expected a text"),
    (line("x") | {"custom_id": 5}, None, "custom_id=5: expected a text"),
    (line("x") | {"extra": 1}, "x", "'extra': an unknown field"),
    (line("x") | {"method": "GET"}, "x", "method='GET': expected 'POST'"),
    (line("x") | {"url": "/v1/embeddings"}, "x", "url='/v1/embeddings': expected /v1/completions"),
    (line("x") | {"url": ["/v1/completions"]}, "x", "url=['/v1/completions']: expected"),
    (line("x") | {"body": "A list"}, "x", "body='A list': expected an object"),
    (line("x", temperature=-1), "x", "temperature=-1: expected"),
    (line("x", heat=1), "x", "heat: an unknown field"),
    (line("x", stream=True), "x", "stream=true: a file has no streams"),
    (line("x", tools=[{}]), "x", "tools=[{}]: not offered here"),
    (line("x", [5] * 600), "x", "the prompt has 600 tokens; at most 512 fit"),
    (line("x", ["a"] * 1025), "x", "prompt: 1025 prompts; expected at most 1024 in a line"),
    (line("x", [5, 4096]), "x", "token id 4096 at position 1"),
    (line("x", ["a", ""]), "x", "the prompt has no tokens"),
    (line("x", ["a", "b"], n=5), "x", "n=5"),
    (line("x", stop_token_ids=[4096]), "x", "stop_token_ids: token id 4096"),
    (line("greedy"), "greedy", "custom_id 'greedy': line 1 has it"),
    (line("x") | {"url": "/v1/chat/completions", "body": {"messages": []}}, "x", "there are none"),
]


def test_bad_lines_are_told_with_their_numbers_and_the_others_answered(tmp_path, out, capsys):
    named = [json.dumps(entry).replace('"x"', f'"x{n}"') for n, (entry, _, _) in enumerate(BAD)]
    texts = [entry if isinstance(entry, str) else named[n] for n, (entry, _, _) in enumerate(BAD)]
    entries = [LINES[0], *texts, LINES[1]]
    source, errors = write(tmp_path / "in.jsonl", entries), tmp_path / "errors.jsonl"
    assert batch(source, out, "--quiet", "--errors", errors) == 3
    assert answers(out).keys() == {"greedy", "drawn"}
    told = sorted(capsys.readouterr().err.splitlines(), key=lambda one: int(one.split()[2][:-1]))
    written = sorted(map(json.loads, errors.read_text().splitlines()), key=lambda one: one["line"])
    for number, (bad, said, error) in enumerate(zip(BAD, told, written, strict=True), 2):
        _, custom_id, words = bad
        assert said.startswith(f"{source}: line {number}: ") and words in said
        wanted = f"x{number - 2}" if custom_id == "x" else custom_id
        assert (error["line"], error["custom_id"]) == (number, wanted)
        answer = error["response"]
        assert answer["status_code"] == 400 and words in answer["body"]["error"]["message"]
        field = words.partition("=")[0].partition(":")[0]
        assert answer["body"]["error"]["param"] == field or field not in FIELDS


def test_a_mended_line_is_the_only_one_that_is_run_again(tmp_path, out, capsys):
    bad = line("x", temperature=-1)
    source = write(tmp_path / "in.jsonl", [*LINES, bad])
    assert batch(source, out, "--errors", errors := tmp_path / "errors.jsonl") == 3
    before = out.read_bytes()
    write(source, [*LINES, line("x", temperature=0), line("more")])
    capsys.readouterr()
    assert batch(source, out, "--errors", errors) == 0
    assert capsys.readouterr().err.startswith("2 lines answered, 8 before, 0 refused")
    assert out.read_bytes().startswith(before) and len(answers(out)) == 10
    assert errors.read_text() == ""


def test_a_line_of_any_length_costs_no_more_than_the_longest_that_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 300)
    long = json.dumps(line("long", "x" * 3000))
    source = write(tmp_path / "in.jsonl", [long, LINES[0], json.dumps(LINES[1]) + " " * 200])
    refused: list[Refused] = []
    todo = list(lines.tasks(source, "tiny", Ledger(), refused.append))
    assert [one.custom_id for one in todo] == ["greedy", "drawn"]
    assert [(one.number, str(one.error)) for one in refused] == [
        (1, "longer than 300 bytes; expected a shorter line")
    ]
    assert max(len(raw) for _, raw in lines.numbered(source)) <= 301


def test_a_line_of_which_the_model_makes_nothing_is_refused_and_the_others_go_on():
    model = load_hf("tiny")
    llm = LLM(model, tokenizer=Tokenizer("tiny"), graphs=False)  # what is replayed stays what it is
    desk, broken = work.Desk(llm, RUN_WITH), model.logits
    good, bad = (lines.Task(n, b"", f"{n}", completion_request({"prompt": "a"})) for n in (1, 2))
    assert desk.add(bad) is None
    model.logits = lambda hidden: broken(hidden) * float("nan")  # type: ignore[method-assign]
    (ended,) = desk.step()
    assert isinstance(ended, Refused) and ended.status_code == 500
    assert str(ended.error).startswith("logits that are no distribution")
    model.logits = broken  # type: ignore[method-assign]
    assert desk.add(good) is None and len(desk) == 1
    while len(desk):
        (*_, ended) = desk.step() or [ended]
    assert isinstance(ended, work.Answer) and ended.number == 1


def test_a_line_whose_last_prompt_is_refused_leaves_none_behind():
    llm = LLM("tiny", num_blocks=4)
    desk = work.Desk(llm, RUN_WITH)
    asked = completion_request({"prompt": [[5], [5] * 60], "max_tokens": 30})
    refused = desk.add(lines.Task(1, b"", "a", asked))
    assert refused is not None and "blocks" in str(refused.error)
    llm.step()
    assert not llm.has_unfinished and len(desk) == 0 and llm.stats["waiting"] == 0


# Stopped, and gone on.


@pytest.mark.parametrize("part", [0, 1, 20, -1, -30, None])
def test_wherever_the_file_was_cut_it_goes_on_to_the_same(source, tmp_path, out, part):
    """After the third line there is `part` of the fourth, or all of it without its newline."""
    whole = tmp_path / "whole.jsonl"
    assert batch(source, whole, "-q") == 0
    three, fourth = whole.read_bytes().splitlines(keepends=True)[:3], b""
    if part != 0:
        fourth = whole.read_bytes().splitlines()[3][:part]
    out.write_bytes(b"".join(three) + fourth)
    assert batch(source, out, "-q") == 0
    assert out.read_bytes().startswith(b"".join(three))
    assert answers(out) == answers(whole)
    before = out.read_bytes()
    assert batch(source, out, "-q") == 0
    assert out.read_bytes() == before


@given(st.data())
def test_what_is_read_is_what_was_written_up_to_the_last_newline(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "out.jsonl"
    ids = data.draw(st.lists(st.text(min_size=1), max_size=4))
    with Results(path) as file:
        for n, custom_id in enumerate(ids):
            body = {"model": "tiny", "system_fingerprint": RUN_WITH.settings}
            result = {"id": f"batch_req_{n}", "custom_id": custom_id, "response": {"body": body}}
            file.append(result)
    written = path.read_bytes()
    cut = data.draw(st.integers(0, len(written)))
    path.write_bytes(written[:cut])
    with Results(path) as file:
        found = list(file.read())
        assert file.made_with == (RUN_WITH if found else None)
        assert path.read_bytes() == written[:cut]
        file.repair()
    assert found == [(custom_id, f"batch_req_{n}") for n, custom_id in enumerate(ids)][: len(found)]
    assert path.read_bytes() == b"".join(written.splitlines(keepends=True)[: len(found)])
    assert written[len(path.read_bytes()) : cut].count(b"\n") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has threads")
def test_killed_four_times_the_joined_output_is_that_of_one_run():
    program = [sys.executable, str(Path(batch_kills.__file__))]
    options = ["--lines", "200", "--kills", "4", "--seed", "1"]
    run = subprocess.run([*program, *options], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "200 lines, 4 kills, " in run.stdout and "all lines equal" in run.stdout


def test_ctrl_c_keeps_what_is_finished(source, tmp_path, out, ctrl_c, monkeypatch, capsys):
    assert batch(source, whole := tmp_path / "whole.jsonl", "-q") == 0
    append = Results.append

    def interrupted(self: Results, result: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        append(self, result)

    monkeypatch.setattr(Results, "append", interrupted)
    capsys.readouterr()
    assert batch(source, out) == 130
    assert "lines answered, 0 before, 0 refused" in capsys.readouterr().err
    monkeypatch.undo()
    kept = answers(out)
    assert 1 <= len(kept) < len(LINES) and out.read_bytes().endswith(b"\n")
    assert batch(source, out, "-q") == 0
    assert answers(out) == answers(whole) and kept.items() <= answers(out).items()


def test_a_full_disk_is_one_line_and_leaves_whole_lines(source, out, tmp_path, monkeypatch, capsys):
    """The third write is cut short, and then nothing fits."""
    calls, real = [], os.write

    def full(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data if len(calls) < 3 else data[:50])

    monkeypatch.setattr(results.os, "write", full)
    assert batch(source, out, "-q") == 2
    monkeypatch.undo()
    kept = "what is written is whole, and the same command goes on from there"
    assert one_error(capsys) == f"{out}: No space left on device; {kept}"
    assert len(answers(out)) == 2 and out.read_bytes().endswith(b"\n")
    assert batch(source, out, "-q") == 0 and len(answers(out)) == len(LINES)


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit on files here")
def test_a_limit_on_files_is_named_as_what_it_is(out):
    """As `ulimit -f` sets it; what fitted is cut off again."""
    resource = pytest.importorskip("resource")
    result = lines.result("batch_req_0", "a", 200, {"model": "m", "system_fingerprint": "s"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Results(out) as file:
        file.append(result)
        whole = out.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, before[1]))
        try:
            with pytest.raises(SpindleError, match=r"jsonl: File too large; what is written is"):
                file.append(result)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert out.read_bytes() == whole


def test_a_write_that_stops_half_way_goes_on(out, monkeypatch):
    result = lines.result("batch_req_0", "a", 200, {"model": "m", "system_fingerprint": "s"})
    real = os.write
    monkeypatch.setattr(results.os, "write", lambda file, data: real(file, data[:50]))
    with Results(out) as file:
        file.append(result)
    assert json.loads(out.read_text()) == result


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit on files here")
def test_an_error_of_the_system_is_one_line(source, out, monkeypatch, capsys):
    def broken(file: int, data: bytes) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(results.os, "write", broken)
    assert batch(source, out, "-q") == 2
    assert one_error(capsys).startswith(f"{out}: Input/output error; what is written is whole")


# Refused before anything changes.


def spoil_a_line(text: str) -> str:
    return text.replace('"custom_id": "two"', '"custom_id": "tree"')


OTHERS: dict[str, tuple[Callable[[str], str], str]] = {
    "another line": (spoil_a_line, "the result of 'tree' is of no line of "),
    "foreign": (lambda text: text + '{"a": 1}\n', "line 9 is no result (begins otherwise)"),
    "foreign, torn": (lambda text: text + "{}", "line 9 is no result (begins otherwise)"),
    "empty line": (lambda text: text + "\n", "line 9 is no result (begins otherwise)"),
    "damaged": (lambda text: text.replace('"error": null', '"error"'), "is no result (JSON"),
    "twice": (lambda text: text + text.splitlines(True)[0], "is there twice"),
    "no id": (lambda text: text.replace('"custom_id"', '"custom"'), "(KeyError: 'custom_id')"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_is_not_of_these_lines_is_left_alone(source, out, capsys, name):
    assert batch(source, out, "-q") == 0
    spoil, words = OTHERS[name]
    out.write_text(spoil(out.read_text()))
    before = out.read_bytes()
    assert batch(source, out, "-q") == 2
    assert words in one_error(capsys) and out.read_bytes() == before


VECTORS = r" \((\d+ lanes|[\w ]+) of \w+\)"  # of a CPU, behind whose kernels they are
OTHER_OPTIONS: list[tuple[tuple[object, ...], str, str]] = [
    (("--max-model-len", 32), "max_model_len=512", "max_model_len=32"),
    (("--no-batch-invariant",), "batch_invariant=True", "batch_invariant=False"),
    (("--quantize", "int8"), "quantize=None", "quantize=int8"),
    (("--served-model-name", "other"), "model=tiny", "model=other"),
    (
        ("--dtype", "float64"),
        "kernels=native, dtype=float32, batch_invariant=True",
        "kernels=torch, dtype=float64, batch_invariant=False",
    ),
]


@pytest.mark.skipif(
    not native.available(), reason="what is the default without native code differs"
)
@pytest.mark.parametrize(("options", "was", "now"), OTHER_OPTIONS, ids=lambda it: it[0])
def test_results_of_other_options_are_not_gone_on_with(source, out, capsys, options, was, now):
    """Neither with more lines, nor if nothing is left to do; what differs is named."""
    assert batch(source, out, "-q") == 0
    before = out.read_bytes()
    words = f"its results were made with {was}, and here it is {now}; expected the same, or"
    assert batch(source, out, "-q", *options) == 2
    assert re.sub(VECTORS, "", one_error(capsys)) == f"{out}: {words} a new file"
    write(source, [*LINES, line("more")])
    assert batch(source, out, "-q", *options) == 2
    assert out.read_bytes() == before


def test_results_of_another_model_are_not_gone_on_with(source, out, capsys):
    assert batch(source, out, "-q") == 0
    before = out.read_bytes()
    other = ("--served-model-name", "tiny", "-m", "tiny-draft")
    assert batch(source, out, "-q", *other) == 2
    assert re.search(r"made with checkpoint=\w+, and here it is checkpoint=\w+;", one_error(capsys))
    assert out.read_bytes() == before


def test_what_was_said_outright_is_what_it_would_have_been_anyway(source, out):
    """The settings are those that have turned out, not those that were given."""
    assert batch(source, out, "-q") == 0
    before = out.read_bytes()
    invariant = "--batch-invariant" if native.available() else "--no-batch-invariant"
    said = (invariant, "--device", "cpu", "--dtype", "float32", "--max-model-len", "512")
    assert batch(source, out, "-q", *said) == 0
    assert out.read_bytes() == before


@pytest.mark.skipif(not native.available(), reason="there is no other code than torch's")
def test_another_device_or_other_code_is_noticed(source, out, monkeypatch, capsys):
    """As if a compiler, a GPU or wider vectors had gone, or come, meanwhile."""
    assert batch(source, out, "-q") == 0
    before = out.read_bytes()
    monkeypatch.setattr(native, "available", lambda: False)
    assert batch(source, out, "-q") == 2
    words = "made with kernels=native, batch_invariant=True"
    assert words in re.sub(VECTORS, "", one_error(capsys))
    monkeypatch.undo()
    here = native.lanes()
    monkeypatch.setattr(native, "lanes", lambda: here // 2)
    assert batch(source, out, "-q") == 2
    was, now = (f"kernels=native ({n} lanes of {platform.machine()})" for n in (here, here // 2))
    assert f"made with {was}, and here it is {now};" in one_error(capsys)
    monkeypatch.undo()
    monkeypatch.setattr(digest, "_device", lambda device: "NVIDIA H200")
    assert batch(source, out, "-q") == 2
    assert "made with device=cpu, and here it is device=NVIDIA H200;" in one_error(capsys)
    assert out.read_bytes() == before


def test_torchs_vectors_are_told_apart(monkeypatch):
    model = load_hf(hub.resolve("tiny"), dtype="float64")
    here = torch.backends.cpu.get_cpu_capability()
    assert kernels_of(model) == f"torch ({here} of {platform.machine()})"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert kernels_of(model) == f"torch (another of {platform.machine()})"


def test_engines_that_differ_do_not_write_into_one_file(out):
    """As two machines of a cluster may: the first result decides."""

    def result(custom_id: str, settings: str) -> dict[str, Any]:
        body = {"model": "tiny", "system_fingerprint": settings, "created": 0}
        return lines.result("batch_req_0", custom_id, 200, body)

    with Results(out) as file:
        file.append(result("a", "device=cpu, kernels=native"))
        with pytest.raises(
            SpindleError, match="with kernels=native, and here it is kernels=torch;"
        ):
            file.append(result("b", "device=cpu, kernels=torch"))
        file.append(result("c", "device=cpu, kernels=native"))
    assert answers(out).keys() == {"a", "c"}


def test_what_changes_no_token_may_change(source, out):
    write(source, LINES[:4])
    assert batch(source, out, "-q") == 0
    write(source, LINES)
    other = ("--max-seqs", "2", "--num-blocks", "40", "--device", "cpu")
    assert batch(source, out, "-q", *other, model=("-m", str(hub.resolve("tiny")))) == 2  # a name
    name = ("--served-model-name", "tiny")
    assert batch(source, out, "-q", *other, *name, model=("-m", str(hub.resolve("tiny")))) == 0
    assert len(answers(out)) == len(LINES)


def test_the_digest_is_that_of_the_weights_wherever_they_lie(tmp_path):
    copy = shutil.copytree(hub.resolve("tiny"), tmp_path / "copy")
    before = checkpoint_digest(hub.resolve("tiny"))
    assert checkpoint_digest(copy) == before
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    assert checkpoint_digest(copy) != before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_no_answer_is_lost_because_stderr_is_full(source, out):
    source.write_text(f"nonsense\n{source.read_text()}")
    program = [sys.executable, "-m", "spindle", "batch", source, out, *TINY]
    with open("/dev/full", "w") as full:
        assert subprocess.run(program, stderr=full).returncode == 3
    assert len(answers(out)) == len(LINES)


def test_the_digest_is_that_of_every_byte(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(40 * 2**20)
    before = checkpoint_digest(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(20 * 2**20)
        file.write(b"\x01")
    assert checkpoint_digest(tmp_path) != before


def test_of_two_at_once_the_second_is_refused(source, out, capsys):
    with Results(out):
        assert batch(source, out, "-q") == 2
        assert one_error(capsys) == (
            f"{out}: another process is writing to it; expected to be alone with it"
        )
    with out.open("rb") as file:  # and the lock is a lock for others
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(SpindleError, match="another process is writing to it"):
            Results(out)
    assert out.read_bytes() == b""


@pytest.mark.parametrize(
    "names, words",
    [
        (("in", "in"), "two of them are the same file"),
        (("in", "link"), "two of them are the same file"),
        (("in", "hard"), "two of them are the same file"),
        (("in", "out", "in"), "two of them are the same file"),
        (("in", "new", "new"), "two of them are the same file"),
        (("in", "new", "hard"), "two of them are the same file"),
        (("in", "out", "hard out"), "two of them are the same file"),
        (("-", "out"), "-: a kill would lose what a pipe holds; expected a file"),
        (("in", "-"), "-: a kill would lose"),
        (("none", "out"), "there is no such file; expected a file of lines to answer"),
        (("folder", "out"), "it is a directory; expected a file of lines"),
        (("pipe", "out"), "it is no file, but a pipe or a device"),
        (("in", "folder"), "it is a directory; expected a file, or none yet"),
        (("in", "pipe"), "it is no file, but a pipe or a device; expected a file, or none yet"),
        (("in", "none/out"), "there is no directory"),
        (("in", "out", "folder"), "it is a directory"),
        (("x" * 300, "out"), "File name too long; expected a file of lines"),
        (("in", "x" * 300), "it cannot be opened (File name too long)"),
    ],
    ids=str,
)
def test_files_that_cannot_be_are_refused(tmp_path, monkeypatch, capsys, names, words):
    monkeypatch.chdir(tmp_path)
    write(Path("in"), LINES)
    Path("out").write_text("")
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("in")
    os.link("in", "hard")
    os.link("out", "hard out")
    before = {path.name: path.lstat() for path in tmp_path.iterdir()}
    source, out, *errors = names
    option = ("--errors", *errors) if errors else ()
    assert batch(Path(source), Path(out), *option) == 2
    assert words in one_error(capsys)
    after = {path.name: path.lstat() for path in tmp_path.iterdir()}
    assert [s[:8] for s in before.values()] == [after[name][:8] for name in before]
    assert after.keys() == before.keys()


@pytest.mark.parametrize(
    "options, words",
    [
        (("-m", "no-such"), "no-such"),
        (("--max-seqs", "0"), "--max-seqs=0: expected a whole number of 1 or more"),
        (("--num-blocks", "-1"), "--num-blocks=-1: expected a whole number"),
        (("--replicas", "0"), "--replicas=0: expected a whole number of 1 or more"),
        (("--served-model-name", "\udcff"), "is called '\\udcff': expected printable characters"),
        (("-m", "a\nb"), "is called 'a\\nb': expected printable characters"),
    ],
)
def test_options_that_cannot_be_are_refused(source, out, capsys, options, words):
    assert batch(source, out, *options) == 2
    assert words in one_error(capsys) and not out.exists()


def test_a_file_that_cannot_be_read_any_more_is_one_line(source, out, monkeypatch, capsys):
    """It has gone since it was looked at; or the disk is broken."""
    monkeypatch.setattr(command, "read_results", lambda *files: source.unlink() or 0)
    assert batch(source, out, "-q") == 2
    assert one_error(capsys) == f"{source}: No such file or directory"
    if Path("/proc/self/mem").exists():
        with Results(Path("/proc/self/mem")) as file, pytest.raises(SpindleError, match="output"):
            list(file.read())


def test_no_disk_for_the_ledger_is_one_line(source, out, monkeypatch, capsys):
    def full(self: Ledger, custom_id: str, number: int) -> tuple[int, bool]:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Ledger, "first_line", full)
    assert batch(source, out, "-q") == 2
    assert one_error(capsys).startswith("the table of custom_ids: database or disk is full; TMPDIR")


# Constant memory.


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Yes:
    """An engine that answers each request in the second step after it was added."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.added, self.longest = llm, dict[str, list[int]](), 0
        self.tokenizer, self.model, self.max_model_len = llm.tokenizer, llm.model, llm.max_model_len

    def add_all(
        self, prompts: list[list[int]], params: list[SamplingParams], names: list[str]
    ) -> None:
        self.added |= dict(zip(names, prompts, strict=True))
        self.longest = max(self.longest, len(self.added))

    def step(self) -> Iterator[Any]:
        from spindle.serve.outputs import Completion, Metrics, RequestOutput

        metrics = Metrics(0.0, None, None, None, None, 0, 0)
        for name, prompt in [self.added.popitem() for _ in range(min(3, len(self.added)))]:
            answer = Completion(0, "yes", [5], None, None, "stop", None)
            yield RequestOutput(name, prompt, [answer], True, 0, metrics)


def test_memory_does_not_grow_with_the_file(tmp_path):
    """Ten times the lines, of which half are done already: a peak that is higher by 20 bytes each.

    SQLite's memory is not counted here: it has a bound of its own.
    """
    yes = Yes(LLM("tiny"))

    def run(count: int, most: int | None) -> None:
        source, out = tmp_path / f"{count}.jsonl", tmp_path / f"{count}.out"
        with Results(out) as file, closing(Ledger()) as ledger:
            command.read_results(file, ledger, source)
            todo = islice(lines.tasks(source, "tiny", ledger, print), most)
            work.answer_here(yes, RUN_WITH, todo, lambda ended: file.append(ended.result), 8)  # type: ignore

    peaks = {}
    for count in (20, 100, 1000):
        write(tmp_path / f"{count}.jsonl", [line(f"{n}", "a" * 100) for n in range(count)])
        run(count, count // 2)
        peaks[count] = peak_bytes(lambda count=count: run(count, None))
        assert len(answers(tmp_path / f"{count}.out")) == count
    assert peaks[1000] - peaks[100] < 900 * 20, peaks
    assert yes.longest == 8


# Several engines.


def test_several_engines_need_ray(source, out, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert batch(source, out, "--replicas", "2", "-q") == 2
    words = "Ray Data is not installed; expected --replicas 1, or `pip install 'spindle[cluster]'`"
    assert one_error(capsys) == f"--replicas: {words}"
    assert batch(source, out, "--replicas", "1", "-q") == 0


def on_cluster(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """By two engines, in a process of its own, as Ray keeps threads."""
    program = [sys.executable, "-m", "spindle", "batch", source, out, *TINY, "--replicas", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        run = subprocess.run(program, capture_output=True, text=True, timeout=240, env=environment)
        if "Ray did not start" not in run.stderr:
            return run
    pytest.skip("Ray did not start, which happens where the machine is very busy")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_fewer_lines_than_engines_are_no_fault(source, out):
    run = on_cluster(write(source, LINES[:1]), out)
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr.startswith("1 lines answered, 0 before, 0 refused · ")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_two_engines_of_a_cluster_give_what_one_gives(source, tmp_path, out):
    """It goes on where one engine was stopped."""
    entries = [*LINES, *(line(f"more {n}", temperature=n / 4) for n in range(12)), "bad"]
    write(source, entries)
    whole = tmp_path / "whole.jsonl"
    assert batch(source, whole, "-q") == 3  # for its last line
    out.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:3]) + b'{"id": ')
    run = on_cluster(source, out)
    bad, unused, summary = run.stderr.splitlines()
    assert (run.returncode, run.stdout) == (3, "")
    assert bad.startswith(f"{source}: line 21: not JSON") and unused.endswith(" user")
    assert summary.startswith("17 lines answered, 3 before, 1 refused · ")
    assert answers(out) == answers(whole)
