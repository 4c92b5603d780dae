"""Weights in 8 bits beside weights in float32: bytes, logits, how well a text is foretold, a text.

The text is documentation that every Python carries, of which `tiny` has not seen the documents that
are taken here (checkpoints/corpus.py); what other models have seen nobody knows. It is cut into
windows, and each token but a window's first is foretold from those before it in the window.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spindle import hub
from spindle.bench import report
from spindle.checkpoints import corpus
from spindle.decode.engine import Engine
from spindle.errors import RequestError
from spindle.kernels import Weight
from spindle.kvcache.contiguous import ContiguousKV
from spindle.kvcache.index import StepIndex
from spindle.model.layers import Model
from spindle.model.weights import load_hf
from spindle.tokenizer import Tokenizer

FORMS = {"float32": None, "int8": "int8"}
WINDOW = 512  # tokens
PROMPTS = (
    "The capital of France is",
    "A list is a sequence of items, and a tuple is",
    "def area(width, height):\n    return",
)
NEW = 24  # tokens of the greedy answer to the first prompt


# --- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `spindle bench quantize`."""
    parser.add_argument("-m", "--model", default="tiny", help="what to run (default: tiny)")
    about = "of the text to foretell, in windows of 512 (default: 8192)"
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help=about)
    report.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print a markdown table, and write JSON if a file was named."""
    report.check_json(args.json)
    result = measure(args.model, args.tokens)
    report.publish(result, as_markdown(result), args.json)
    return 0


def measure(name: str = "tiny", tokens: int = 8192) -> dict[str, Any]:
    """Both forms of one model, on the CPU in float32. RequestError for a text that is too short."""
    if tokens < 2:
        raise RequestError(f"--tokens {tokens}: expected 2 or more")
    directory = hub.resolve(name)
    tokenizer = Tokenizer(directory)
    models = {form: load_hf(directory, "cpu", "float32", FORMS[form]) for form in FORMS}
    windows = cut(stream(tokenizer, models["float32"], tokens), models["float32"])
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    found = {form: _of(model, tokenizer, windows) for form, model in models.items()}
    return {
        "settings": {"model": name, "tokens": sum(len(ids) - 1 for ids in windows)},
        "torch": torch.__version__,
        "forms": found,
        "logits": differences(models["float32"], models["int8"], prompts),
    }


def _of(model: Model, tokenizer: Tokenizer, windows: list[Tensor]) -> dict[str, Any]:
    nats = nats_per_token(model, windows)
    prompt = tokenizer.encode(PROMPTS[0])
    answer, _ = Engine(model, len(prompt) + NEW).generate(prompt, NEW, temperature=0)
    sizes = {"linear_bytes": linear_bytes(model), "model_bytes": model_bytes(model)}
    return sizes | {
        "nats_per_token": nats,
        "perplexity": math.exp(nats),
        "text": tokenizer.decode(answer),
    }


# --- what is measured ----------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, model: Model, tokens: int) -> list[int]:
    """The first ids of the held-out documents, with an end of text before and between them."""
    _, texts = corpus.split(corpus.documents())
    end, ids = sorted(model.config.eos_ids)[:1], list[int]()
    for text in texts:
        ids += [*end, *tokenizer.encode(text)]
        if len(ids) > tokens:
            break
    return ids[: tokens + 1]


def cut(ids: list[int], model: Model) -> list[Tensor]:
    """Windows that overlap by one id: the last that is foretold is the first of the next."""
    length = min(WINDOW, model.config.max_positions)
    starts = range(0, len(ids) - 1, length)
    return [torch.tensor(ids[start : start + length + 1]) for start in starts]


def logits_of(model: Model, ids: Tensor) -> Tensor:
    """The logits after each of ids [T] -> [T, V], from one pass."""
    kv = ContiguousKV(model.config, model.dtype, model.device)
    return model.logits(model(ids, kv.view(StepIndex.of([(0, 0, len(ids))]))))


def nats_per_token(model: Model, windows: list[Tensor]) -> float:
    """The mean surprise at a token, -ln p, over windows [T + 1]."""
    surprises = [
        F.cross_entropy(logits_of(model, ids[:-1]), ids[1:], reduction="none") for ids in windows
    ]
    return torch.cat(surprises).double().mean().item()


def differences(exact: Model, other: Model, prompts: list[list[int]]) -> dict[str, float]:
    """The logits after each token of the prompts, of one model against the other's."""
    pairs = [[logits_of(m, torch.tensor(ids)) for m in (exact, other)] for ids in prompts]
    right, ours = (torch.cat(logits).double() for logits in zip(*pairs, strict=True))  # [T, V]
    return {
        "positions": len(right),
        "largest_difference": (ours - right).abs().max().item(),
        "rms_difference": (ours - right).square().mean().sqrt().item(),
        "standard_deviation": (right - right.mean(1, keepdim=True)).square().mean().sqrt().item(),
        "same_first": int((ours.argmax(1) == right.argmax(1)).sum()),
    }


def linear_bytes(model: Any) -> int:
    """Bytes of the linear layers and the head: the weights that a step reads as a whole."""
    of_layers = [x for layer in model.layers for x in vars(layer).values()]
    return sum(_bytes(_held(x)) for x in [*of_layers, model.head] if isinstance(x, Weight))


def model_bytes(model: Any) -> int:
    """Bytes of all tensors that a model holds; one that is in two places counts once."""
    return _bytes(_held(model))


def _held(part: Any) -> list[Tensor]:
    """The tensors of a part of a model, however deep."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, Weight):
        return part.parts
    inside = part if isinstance(part, list) else getattr(part, "__dict__", {}).values()
    return [x for one in inside for x in _held(one)]


def _bytes(tensors: list[Tensor]) -> int:
    once = {id(x): x.numel() * x.element_size() for x in tensors}  # oneDNN's have no `nbytes`
    return sum(once.values())


# --- what is printed -----------------------------------------------------------------------------


def as_markdown(result: dict[str, Any]) -> str:
    """A table of both forms, what their logits are apart, and their answers."""
    settings, forms = result["settings"], result["forms"]
    rows = [
        [
            form,
            f"{one['linear_bytes'] / 1e6:.1f}",
            f"{one['model_bytes'] / 1e6:.1f}",
            f"{one['nats_per_token']:.4f}",
            f"{one['perplexity']:.3f}",
        ]
        for form, one in forms.items()
    ]
    columns = ["weights", "linear layers, MB", "all, MB", "nats a token", "perplexity"]
    parts = [
        f"{settings['model']}, {settings['tokens']} held-out tokens, torch {result['torch']}",
        report.table(columns, rows),
        _apart(result["logits"]),
        f"Greedy after {PROMPTS[0]!r}:",
        "\n".join(f"- {form}: {one['text']!r}" for form, one in forms.items()),
    ]
    return "\n\n".join(parts)


def _apart(logits: dict[str, float]) -> str:
    """How far int8's logits are off, in a sentence or two."""
    return (
        f"Logits after each of the {logits['positions']} tokens of {len(PROMPTS)} prompts: those "
        f"of int8 are off by {logits['rms_difference']:.4f} (rms), by "
        f"{logits['largest_difference']:.3f} at most, and their standard deviation is "
        f"{logits['standard_deviation']:.2f}. The likeliest token is the same after "
        f"{logits['same_first']}."
    )
