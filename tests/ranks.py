"""`python tests/ranks.py RANK COUNT DIRECTORY` is one of several ranks, and writes what it saw.

test_parallel.py starts two and three of them, once each, with all warnings errors.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spindle import LLM, Engine, SamplingParams, cli, graphs, load_hf, parallel
from spindle.config import ModelConfig
from spindle.errors import SpindleError
from spindle.kernels import native
from spindle.model import weights
from spindle.model.layers import Model
from spindle.model.weights import RandomSource, wishes

# 6 KV heads, 96 columns and 102 ids: 2 and 3 ranks divide them all.
GPT2 = dict(model_type="gpt2", vocab_size=102, n_positions=64, n_embd=48, n_layer=2, n_head=6)
GPT2 |= dict(n_inner=96, tie_word_embeddings=True)
LLAMA = dict(model_type="llama", vocab_size=102, max_position_embeddings=64, hidden_size=48)
LLAMA |= dict(intermediate_size=96, num_hidden_layers=2, num_attention_heads=12, head_dim=8)
LLAMA |= dict(num_key_value_heads=6, rms_norm_eps=1e-5)
BIASED = dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
RAW = {
    "gpt2": GPT2,
    "llama": LLAMA | BIASED,  # biases where sums are taken, too
    "qwen2": LLAMA | dict(model_type="qwen2"),
    "qwen3": LLAMA | dict(model_type="qwen3"),
}
FAMILIES = {2: list(RAW), 3: ["gpt2", "llama"]}  # of so many ranks: their tests take seconds
PROMPT = [5, 17, 99, 3, 64, 23, 8, 41, 12]
PROMPTS = [PROMPT, [*PROMPT, 77, 30], PROMPT[:6], [90, 2, 50, 11, 7]]
DRAWN = dict(temperature=0.9, seed=5, logprobs=2, max_tokens=10)
PARAMS = [
    SamplingParams(**DRAWN),
    SamplingParams(**DRAWN, n=2),
    SamplingParams(temperature=0, max_tokens=12),
]
PARAMS += [SamplingParams(**DRAWN | dict(seed=9, frequency_penalty=0.5))]
TOKENS_A_BLOCK, BLOCKS = 4, 12  # too few for all requests at once


def write(directory: Path, raw: dict[str, Any], shards: int = 1) -> Path:
    """A checkpoint of random float64 weights, in one file or in several with their index."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_dict(raw)
    source = RandomSource(config, 0, torch.float64, torch.device("cpu"), 2.0)
    prefix = weights.FAMILIES[config.model_type].prefix
    names = ["model.safetensors"] if shards == 1 else [f"{n}.safetensors" for n in range(shards)]
    files: list[dict[str, Tensor]] = [{} for _ in names]
    for n, (name, shape) in enumerate(wishes(config).shapes.items()):
        head = name == "lm_head.weight"
        if not (head and config.tie_embeddings):
            files[n % shards][name if head else prefix + name] = source(name, *shape)
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, directory / name)
    if shards > 1:
        where = {t: name for name, tensors in zip(names, files, strict=True) for t in tensors}
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": where}))
    return directory


# --- what one process does, and each of several --------------------------------------------------


def answers(model: Model) -> dict[str, Any]:
    """What a model says, under prefix hits, forks, and both kinds of preemption."""
    found: dict[str, Any] = {"logits": Engine(model).prefill(PROMPT)[0].tolist()}
    for preemption in ("recompute", "swap"):
        llm = LLM(
            model,
            block_size=TOKENS_A_BLOCK,
            num_blocks=BLOCKS,
            max_batch_tokens=32,
            preemption=preemption,
            trace=1000,
        )
        outputs = llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS[:2], PARAMS[:2])
        given = [one for output in outputs for one in output.outputs]
        found[preemption] = {
            "tokens": [one.token_ids for one in given],
            "logprobs": [t.sampled.logprob for one in given for t in one.logprobs or ()],
            "preemptions": sum(output.metrics.preemptions for output in outputs),
            "cached_tokens": sum(output.metrics.cached_tokens for output in outputs),
            "held": llm.stats["blocks_held"],
            "copied": sum(len(plan.copies) for plan in llm.trace),
            "swapped": sum(len(plan.swap_out) for plan in llm.trace),
        }
        found["kv_bytes"] = [llm._kv.nbytes(), llm._kv._host_keys.nbytes]
    return found


def invariant(model: Model) -> list[list[float]]:
    """Log-probabilities of a batch, and of each of its requests by itself."""
    llm = LLM(model, batch_invariant=True, num_blocks=64, prefix_cache=False)
    params = SamplingParams(**DRAWN | dict(max_tokens=3))
    batch = llm.generate(PROMPTS, params)
    solo = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    return [
        [t.sampled.logprob for one in outputs for t in one.outputs[0].logprobs or ()]
        for outputs in (batch, solo)
    ]


def speculated(root: Path) -> list[list[int]]:
    """Tokens of tiny, the likeliest and drawn, with a draft model whose heads nobody divides.

    How many are drafted depends on what a draft costs beside the whole model, not beside a part.
    """
    room = {"dtype": "float64", "max_seqs": 2, "num_blocks": 64}
    found = []
    for draft, params in (
        (root / "odd", SamplingParams(temperature=0, max_tokens=12)),
        ("tiny-draft", SamplingParams(temperature=1, seed=3, max_tokens=40)),
    ):
        llm = LLM("tiny", speculate=draft, k=3, **room)
        found.append(llm.generate("A list is", params)[0].outputs[0].token_ids)
        assert llm.stats["proposed"] > 0
    return found


def replayed(ranks: parallel.Ranks) -> dict[str, Any]:
    """With and without recorded steps, and the bytes of one of those: of a bucket of 4 rows."""
    model, params = load_hf("tiny", dtype="float32"), SamplingParams(temperature=0, max_tokens=6)
    told = [PROMPT, PROMPT[:5], PROMPT[:7]]
    plain = LLM(model, graphs=False, max_seqs=4, num_blocks=64).generate(told, params)
    llm = LLM(model, max_seqs=4, num_blocks=64)
    for prompt in told:
        llm.add(prompt, params)
    done, counted = {}, {}
    while llm.has_unfinished:
        ranks.traffic.clear()
        done |= {output.request_id: output for output in llm.step() if output.finished}
        counted = dict(ranks.traffic.payload_bytes)
    assert llm.stats["replayed"] == 5
    texts = [[o.outputs[0].token_ids for o in outs] for outs in (plain, done.values())]
    engine = graphs.enable_if_free(Engine(model))
    one = [e.generate(PROMPT, 6, temperature=0)[0] for e in (engine, Engine(model))]
    return {"plain": [*texts[0], one[1]], "replayed": [*texts[1], one[0]], "bytes": counted}


def counted(model: Model, ranks: parallel.Ranks) -> list[dict[str, int]]:
    """Bytes of a prompt's pass, and of a step after it."""
    engine, found = Engine(model), []
    tokens = None
    for work in (lambda: engine.begin([PROMPT], SamplingParams(temperature=0, seed=1)), None):
        ranks.traffic.clear()
        tokens = engine.step(tokens) if work is None else work()
        found.append(dict(ranks.traffic.payload_bytes))
    return found


# --- one of several ------------------------------------------------------------------------------

ONE_OF: Callable[[str], parallel.Ranks]  # joins the ranks of a session


def work(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ONE_OF("work") as ranks:
        for name in FAMILIES[ranks.count]:
            model = load_hf(root / name, dtype="float64")
            found[name] = answers(model) | {"counted": counted(model, ranks)}
        found["number"] = ranks.number(10 + ranks.rank)
        found["least"] = ranks.least(7 - ranks.rank)
        found["text"] = ranks.text(lambda: f"é of {ranks.rank}")
        found["seed"] = SamplingParams().seeded().seed
        found["blocks"] = LLM(load_hf(root / "gpt2"), max_model_len=32).stats["blocks_total"]
        if ranks.count == 3:
            found["invariant"] = invariant(load_hf(root / "llama", dtype="float32"))
        if ranks.count == 2:
            found["speculated"] = speculated(root)
            found["replayed"] = replayed(ranks) if native.available() else None
    found["after the end"] = error_of(lambda: Engine(model).prefill(PROMPT))
    return found


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except (SpindleError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def endings(root: Path, rank: int) -> dict[str, Any]:
    """What a rank is told when another one leaves the path, ends early, or asks for more."""

    def apart(session: str, *works: Callable[[Engine], object]) -> str:
        def run() -> None:
            with ONE_OF(session):
                works[min(rank, 1)](Engine(load_hf(root / "gpt2", dtype="float64")))

        return error_of(run)

    def leave(engine: Engine) -> None:
        raise SystemExit(7)

    def goes_on(engine: Engine) -> None:
        engine.prefill(PROMPT)

    return {
        "other ids": apart("ids", goes_on, lambda engine: engine.prefill([*PROMPT[:-1], 1])),
        "other length": apart("length", goes_on, lambda engine: engine.prefill(PROMPT[1:])),
        "leaves early": apart("early", leave, goes_on),
        "stops early": apart("stops", goes_on, lambda engine: None),
        "goes on alone": apart("alone", lambda engine: None, goes_on),
        "draws a seed": apart("seed", goes_on, lambda engine: SamplingParams().seeded()),
    }


def commands(root: Path, rank: int) -> dict[str, Any]:
    """Status, stdout and stderr of `spindle` commands that several ranks run."""
    greedy = ("--temperature", "0", "-n", "6", "-q")
    nowhere = "tiny" if rank == 0 else str(root / "nowhere")
    return {
        "generate": command("generate", "-p", "A list is", *greedy),
        "two": command("generate", "-p", "A list is", "-p", "A tuple", *greedy),
        "drawn": command("generate", "-p", "A list is", "-n", "6", "--json"),
        "stdin": command("generate", "-p", "-", *greedy, stdin=b"A list is"),
        "not utf-8": command("generate", "-p", "-", *greedy, stdin=b"A list \xff"),
        "odd": command("generate", "-m", str(root / "odd"), "-p", "A list is"),
        "int8": command("generate", "-p", "A list is", "--quantize", "int8"),
        "usage": command("generate", "--no-such-option"),
        "chat": command("chat", "-m", "tiny"),
        "ctrl-c": command("generate", *greedy[:2], "-n", "300", "--ignore-eos", out=CtrlC()),
        "one rank fails": command("generate", "-m", nowhere, "-p", "A list is", *greedy),
    }


class CtrlC(io.StringIO):
    """A terminal at which somebody has read enough after three tokens."""

    def write(self, text: str) -> int:
        if self.getvalue().count(" ") < 3 <= (self.getvalue() + text).count(" "):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def command(*argv: str, stdin: bytes = b"", out: io.StringIO | None = None) -> tuple[int, str, str]:
    """A command in this process, which has been started as torchrun would."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    number = command.__dict__["count"] = command.__dict__.get("count", 0) + 1
    init, parallel.init = parallel.init, lambda: ONE_OF(f"command-{number}")  # type: ignore[assignment]
    with redirect_stdout(out or io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            status = cli.main(argv)
        finally:
            parallel.init = init
    return status, out.getvalue(), err.getvalue()


def killed(root: Path, rank: int) -> dict[str, Any]:
    """The last rank is killed in a pass; the seconds until the others know, and what they say."""
    with ONE_OF("killed") as ranks:
        engine = Engine(load_hf(root / "gpt2", dtype="float64"))
        engine.prefill(PROMPT)
        if rank == ranks.count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        said = error_of(lambda: engine.prefill(PROMPT))
    return {"seconds": time.monotonic() - start, "said": said}


def main(rank: int, count: int, root: Path) -> None:
    global ONE_OF
    init = parallel.init

    def join(session: str) -> parallel.Ranks:
        url = f"file://{root}/meet-{count}-{session}?rank={rank}&world_size={count}"
        return init(url, timeout_s=120)

    ONE_OF = join
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    found = work(root)
    if count == 2:
        found["endings"], found["commands"] = endings(root, rank), commands(root, rank)
    report = root / f"rank-{rank}-of-{count}.json"
    report.write_text(json.dumps(found))
    found["killed"] = killed(root, rank)
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    sys.exit()
