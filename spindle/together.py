"""`spindle generate` with several prompts: all of them at once, through one LLM."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from spindle import cli
from spindle.decode.stats import Speculation
from spindle.errors import RequestError
from spindle.interrupts import held_back

if TYPE_CHECKING:
    from spindle.decode.params import SamplingParams
    from spindle.serve.llm import LLM
    from spindle.serve.outputs import RequestOutput


def generate(args: argparse.Namespace, prompts: Sequence[str], params: SamplingParams) -> int:
    """Answer all prompts, and print the answers in the order of the prompts, once all are there.

    Ctrl-C ends them where they are: what there is of each is printed.
    """
    from spindle.serve.llm import LLM

    seqs = max(32, params.samples)  # LLM's own default, or room for one prompt's answers
    speculate, k = cli.speculation(args)
    rows = seqs * max(16, 1 + k)
    options = {"max_seqs": seqs, "max_batch_tokens": rows, "max_model_len": args.max_seq_len}
    options |= {"speculate": speculate, "k": k}
    where = {"device": args.device, "dtype": args.dtype, "quantize": args.quantize}
    llm = LLM(args.model, **where, **options)
    start = time.perf_counter()
    outputs = _run(llm, _add(llm, prompts, params))
    seconds = time.perf_counter() - start
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if args.json:
            cli.say(json.dumps(_as_object(prompt, output, llm)) + "\n")
        else:
            texts = [one.text for one in output.outputs]
            cli.say("\n---\n" * (number > 0) + "\n---\n".join(texts))
    if not args.json:
        cli.end_of_text(outputs[-1].outputs[-1].text, None)
    if not args.quiet and not args.json:
        print(_summary(outputs, seconds), file=sys.stderr)
    return _status(outputs)


def _status(outputs: Sequence[RequestOutput]) -> int:
    """The exit status; who ended with an error is named on stderr."""
    reasons = [{one.finish_reason for one in output.outputs} for output in outputs]
    broken = [str(number) for number, its in enumerate(reasons, 1) if "error" in its]
    if broken:
        cli.complain(
            f"prompt {', '.join(broken)} of {len(outputs)}: logits that are no distribution (NaN, "
            "+inf, or all -inf, or nothing that min_tokens allows); the weights or the dtype are "
            "at fault, or min_tokens is too large"
        )
        return cli.USER_FAULT
    return cli.INTERRUPTED if any("abort" in its for its in reasons) else 0


def _add(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> list[str]:
    names = []
    for number, prompt in enumerate(prompts, 1):
        try:
            names.append(llm.add(prompt, params))
        except RequestError as error:
            raise RequestError(f"prompt {number} of {len(prompts)}: {error}") from None
    return names


def _run(llm: LLM, names: list[str]) -> list[RequestOutput]:
    """Step until all have ended, or until Ctrl-C; a bar at a terminal."""
    done: dict[str, RequestOutput] = {}
    try:
        with tqdm(total=len(names), disable=None, unit="prompt") as bar:
            while llm.has_unfinished:
                with held_back():  # what a step gave is noted, or it was not done
                    ended = {o.request_id: o for o in llm.step() if o.finished}
                    done |= ended
                bar.update(len(ended))
    except KeyboardInterrupt:
        print(file=sys.stderr)
    for name in names:
        aborted = llm.abort(name)
        if aborted is not None:
            done[name] = aborted
    return [done[name] for name in names]


def _as_object(prompt: str, output: RequestOutput, llm: LLM) -> dict[str, Any]:
    assert llm.tokenizer is not None
    answers = [cli.as_object(one, llm.tokenizer) for one in output.outputs]
    rest = answers[0] if len(answers) == 1 else {"outputs": answers}
    return {"prompt": prompt, **rest, "seed": output.seed, "stats": _stats(output)}


def _stats(output: RequestOutput) -> dict[str, Any]:
    """When things happened, in milliseconds after the prompt came in."""
    m = output.metrics
    times = {"scheduled": m.scheduled, "ttft": m.first_token, "last": m.last_token}
    since = {
        f"{name}_ms": None if at is None else (at - m.arrival) * 1e3 for name, at in times.items()
    }
    drafts = {} if m.speculation is None else {"speculation": m.speculation.as_dict()}
    return since | {"preemptions": m.preemptions, "cached_tokens": m.cached_tokens} | drafts


def _summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    new = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    asked = sum(len(output.prompt_ids) for output in outputs)
    speculation = Speculation.total(output.metrics.speculation for output in outputs)
    drafts = "" if speculation is None else f" · {speculation.summary()}"
    return (
        f"{new} tokens after {len(outputs)} prompts of {asked} · "
        f"{seconds:.2f} s · {new / seconds:.1f} tok/s{drafts}"
    )
