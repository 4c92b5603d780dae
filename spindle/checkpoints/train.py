"""Train the bundled models, `tiny` and `tiny-draft`, on the documentation that Python carries.

    python -m spindle.checkpoints.train --out DIR

writes two directories that transformers and spindle load, each with a `card.json` of what was
measured. `tiny` learns the text; `tiny-draft` learns what `tiny` would say (distillation: Hinton,
Vinyals, Dean 2015), since a draft model is worth as much as its agreement with its target.
Float32 throughout: on a CPU without matrix units for bfloat16 that is the faster type, too.
"""

import argparse
import dataclasses
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from spindle.checkpoints import corpus
from spindle.checkpoints.network import GPT2, Shape

END = "<|endoftext|>"
WORKERS = 2  # a constant, whatever the machine: sums in another order are other weights


@dataclass(frozen=True)
class Recipe:
    """How one model is trained; a step is `rows` windows of `shape.context` tokens."""

    shape: Shape
    steps: int
    rows: int = 4
    peak_lr: float = 2e-3
    warmup_steps: int = 150
    decay_steps: int = 600
    weight_decay: float = 0.1
    eval_every: int = 400
    seed: int = 0


TINY = Recipe(
    Shape(width=192, layers=6, heads=6, dropout=0.15),
    steps=9000,
    warmup_steps=200,
    decay_steps=2000,
)
DRAFT = Recipe(Shape(width=128, layers=1, heads=4), steps=2400, peak_lr=3e-3)


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab` tokens; the only special one ends a document (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens, not {vocab}: too little text")
    return tokenizer


def to_stream(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """The ids of all texts in one row [N], with an end-of-text before, between and after them."""
    end = tokenizer.token_to_id(END)
    ids = [end]
    for encoding in tokenizer.encode_batch(texts):
        ids += [*encoding.ids, end]
    return torch.tensor(ids)


def cut(stream: Tensor, length: int, offset: int = 0) -> Tensor:
    """Windows [n, length + 1] that overlap by one id: the last target is the next one's first."""
    count = (len(stream) - offset - 1) // length
    starts = offset + length * torch.arange(count)[:, None]
    return stream[starts + torch.arange(length + 1)]


def batches(stream: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """Endless batches [rows, T + 1]; every epoch cuts elsewhere and shuffles anew."""
    generator = torch.Generator().manual_seed(recipe.seed)
    length = recipe.shape.context
    while True:
        offset = int(torch.randint(length, (), generator=generator))
        windows = cut(stream, length, offset)
        order = torch.randperm(len(windows), generator=generator)
        for start in range(0, len(order) - recipe.rows + 1, recipe.rows):
            yield windows[order[start : start + recipe.rows]]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a token; logits [B, T, V], targets [B, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Mean KL(target || ours) in nats a token; both [B, T, V]."""
    ours, targets = (F.log_softmax(x.flatten(0, 1), dim=-1) for x in (logits, target_logits))
    return F.kl_div(ours, targets, reduction="batchmean", log_target=True)


Noise = torch.Generator | None  # what dropout draws from; None where a network is judged
Loss = Callable[[GPT2, Tensor, Noise], Tensor]


def text_loss(network: GPT2, window: Tensor, noise: Noise = None) -> Tensor:
    """How badly the network foretells the text; window [B, T + 1]."""
    return cross_entropy(network(window[:, :-1], noise), window[:, 1:])


def imitation_loss(teacher: GPT2) -> Loss:
    """How badly a network foretells its teacher, as a loss over windows [B, T + 1]."""

    def loss(network: GPT2, window: Tensor, noise: Noise = None) -> Tensor:
        with torch.no_grad():
            taught = teacher(window[:, :-1])
        return divergence(network(window[:, :-1], noise), taught)

    return loss


@torch.no_grad()
def mean_loss(network: GPT2, loss: Loss, stream: Tensor) -> float:
    """The loss over a whole stream, one context window at a time."""
    windows = cut(stream, network.shape.context)
    total = sum(loss(network, window, None).item() * len(window) for window in windows.split(8))
    return total / len(windows)


@torch.no_grad()
def agreement(draft: GPT2, target: GPT2, stream: Tensor) -> float:
    """The share of a stream's positions at which both networks put the same token first."""
    windows = cut(stream, target.shape.context)[:, :-1]
    same = sum((draft(w).argmax(-1) == target(w).argmax(-1)).sum().item() for w in windows.split(8))
    return same / windows.numel()


def learning_rate(step: int, recipe: Recipe) -> float:
    """Warm-up, a plateau, then straight down to nearly nothing over the last `decay_steps`.

    Unlike a cosine, the plateau does not depend on how long the run will be, so that a longer run
    begins with the steps of a shorter one (Hägele et al. 2024).
    """
    warm = (step + 1) / recipe.warmup_steps
    left = (recipe.steps - step) / recipe.decay_steps
    return recipe.peak_lr * min(1.0, warm, left)


def make_optimizer(network: GPT2, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices, and leaves biases, norms and positions alone."""
    named = dict(network.named_parameters())
    free = [name for name, weight in named.items() if weight.ndim < 2 or "wpe" in name]
    groups: list[dict[str, Any]] = [
        {"params": [weight for name, weight in named.items() if name not in free]},
        {"params": [named[name] for name in free], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)


def set_gradients(
    network: GPT2, loss: Loss, batch: Tensor, noises: list[torch.Generator], workers: Executor
) -> float:
    """Set each weight's `.grad` to that of the mean loss over a batch; return that loss.

    Halves of the batch go to two workers that meet once a step. Two threads inside every operation
    would meet some hundred times a step, and wait each time on a machine that has other work.
    """
    weights = list(network.parameters())

    def share(rows: Tensor, noise: torch.Generator) -> tuple[float, tuple[Tensor, ...]]:
        value = loss(network, rows, noise)
        return value.item(), torch.autograd.grad(value, weights)

    values, gradients = zip(*workers.map(share, batch.chunk(WORKERS), noises), strict=True)
    for weight, *parts in zip(weights, *gradients, strict=True):
        weight.grad = sum(parts) / WORKERS
    return sum(values) / WORKERS


def fit(
    network: GPT2,
    loss: Loss,
    stream: Tensor,
    held_out: Tensor,
    recipe: Recipe,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Train in place; call `keep` whenever the loss on the held-out stream is the least so far."""
    optimizer, source = make_optimizer(network, recipe), batches(stream, recipe)
    tokens_per_step = recipe.rows * recipe.shape.context
    started, least = time.perf_counter(), math.inf
    workers = ThreadPoolExecutor(WORKERS)
    noises = [torch.Generator().manual_seed(recipe.seed + 1 + n) for n in range(WORKERS)]
    for step in tqdm(range(1, recipe.steps + 1), disable=None, unit="step"):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, recipe)
        value = set_gradients(network, loss, next(source), noises, workers)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if step % recipe.eval_every == 0 or step == recipe.steps:
            now, seconds = mean_loss(network, loss, held_out), time.perf_counter() - started
            tqdm.write(f"step {step}: loss {value:.3f}, held out {now:.3f}, {seconds:.0f} s")
            if now < least:
                least = now
                epochs = step * tokens_per_step / len(stream)
                keep({"step": step, "epochs": round(epochs, 2), "seconds": round(seconds)})


def hf_config(shape: Shape, end: int | None) -> dict[str, Any]:
    """config.json as `GPT2Config` writes it."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "vocab_size": shape.vocab,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": None,
        "n_ctx": shape.context,
        "n_positions": shape.context,
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float16",
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """tokenizer_config.json: tokenizer.json says everything but how long a text may be."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "clean_up_tokenization_spaces": False,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object as the indented JSON that people read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save(directory: Path, network: GPT2, tokenizer: Tokenizer, card: dict[str, Any]) -> None:
    """Write a Hugging Face checkpoint directory, weights in float16, and the card."""
    directory.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    weights = {name: weight.half().contiguous() for name, weight in network.state_dict().items()}
    (directory / "model.safetensors").write_bytes(to_bytes(weights, metadata={"format": "pt"}))
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "config.json", hf_config(network.shape, end))
    write_json(directory / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    write_json(directory / "tokenizer_config.json", tokenizer_config(network.shape.context))
    write_json(directory / "card.json", card)


def load(directory: Path) -> GPT2:
    """A network as `save` left it, in float32, for inference."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    sizes = [config[key] for key in ("n_embd", "n_layer", "n_head", "vocab_size", "n_ctx")]
    network = GPT2(Shape(*sizes))
    network.load_state_dict(load_file(directory / "model.safetensors"))
    return network.eval().requires_grad_(False)


def count_weights(network: GPT2) -> int:
    """The numbers in a network; tied ones count once."""
    return sum(weight.numel() for weight in network.parameters())


@dataclass(frozen=True)
class Data:
    """The text and its ids: what both models learn from and are judged by."""

    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor
    facts: dict[str, Any]


def prepare(texts: list[str], vocab: int) -> Data:
    """Split the texts, train the tokenizer on the training part, encode both."""
    kept, held_out = corpus.split(texts)
    tokenizer = train_tokenizer(kept, vocab)
    train, judge = to_stream(tokenizer, kept), to_stream(tokenizer, held_out)
    facts = {
        "source": "pydoc_data.topics; docstrings and long comments of the standard library",
        "sha256": corpus.sha256(texts),
        "python": platform.python_version(),
        "documents": {"train": len(kept), "held_out": len(held_out)},
        "characters": {"train": sum(map(len, kept)), "held_out": sum(map(len, held_out))},
        "tokens": {"train": len(train), "held_out": len(judge)},
    }
    return Data(tokenizer, train, judge, facts)


def make_card(network: GPT2, data: Data, recipe: Recipe, reached: dict[str, Any]) -> dict[str, Any]:
    """What the card says of any model; figures are of the weights before rounding."""
    sample = data.train[: len(data.held_out)]
    return {
        "weights": count_weights(network),
        "kept": "the step with the least held-out loss",
        **reached,
        "loss_nats_per_token": {
            "held_out": round(mean_loss(network, text_loss, data.held_out), 4),
            "train_sample": round(mean_loss(network, text_loss, sample), 4),
        },
        "recipe": dataclasses.asdict(recipe),
        "corpus": data.facts,
        "torch": torch.__version__,
        "threads": WORKERS,
    }


def train_tiny(directory: Path, data: Data, recipe: Recipe) -> None:
    """Train a model on the text; the directory holds the best of it at any time."""
    torch.manual_seed(recipe.seed)
    network = GPT2(recipe.shape)

    def keep(reached: dict[str, Any]) -> None:
        save(directory, network, data.tokenizer, make_card(network, data, recipe, reached))

    fit(network, text_loss, data.train, data.held_out, recipe, keep)


@torch.no_grad()
def inherit_embeddings(network: GPT2, teacher: GPT2) -> None:
    """Start from the teacher's tokens and positions, on the axes along which its tokens vary most.

    Changes `network`. The head being the embedding, this hands over much of what the teacher knows.
    """
    tokens, positions = teacher.transformer.wte.weight, teacher.transformer.wpe.weight
    axes = torch.linalg.svd(tokens, full_matrices=False).Vh[: network.shape.width]  # [E', E]
    network.transformer.wte.weight.copy_(tokens @ axes.T)  # [V, E']
    network.transformer.wpe.weight.copy_(positions @ axes.T)


def train_draft(directory: Path, target: Path, data: Data, recipe: Recipe) -> None:
    """Train a model to say what the one in `target` says; the directory holds the best of it."""
    torch.manual_seed(recipe.seed)
    teacher, network = load(target), GPT2(recipe.shape)
    inherit_embeddings(network, teacher)

    def keep(reached: dict[str, Any]) -> None:
        share = agreement(network, teacher, data.held_out)
        card = make_card(network, data, recipe, reached)
        card["greedy_agreement_with_tiny_held_out"] = round(share, 4)
        save(directory, network, data.tokenizer, card)

    fit(network, imitation_loss(teacher), data.train, data.held_out, recipe, keep)


def parse_arguments() -> argparse.Namespace:
    """The command line: where to, and for how many steps each model is trained."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/checkpoints"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=TINY.steps, help="of tiny; 0 keeps DIR/tiny")
    parser.add_argument("--draft-steps", type=int, default=DRAFT.steps, help="of tiny-draft")
    return parser.parse_args()


def main() -> None:
    """Train both models into the directory that the command line names."""
    args = parse_arguments()
    torch.set_num_threads(1)  # an operation; the workers are threads already
    data = prepare(corpus.documents(), TINY.shape.vocab)
    print(json.dumps(data.facts, indent=2), flush=True)
    tiny, draft = args.out / "tiny", args.out / "tiny-draft"
    if args.steps:
        train_tiny(tiny, data, dataclasses.replace(TINY, steps=args.steps))
    if args.draft_steps:
        train_draft(draft, tiny, data, dataclasses.replace(DRAFT, steps=args.draft_steps))


if __name__ == "__main__":
    main()
