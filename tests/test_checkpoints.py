"""The bundled models: what their cards claim, recomputed from the files with transformers."""

import dataclasses
import json
import math
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from spindle.checkpoints import corpus, train
from spindle.checkpoints.network import GPT2, Dropout, Shape

HERE = Path(train.__file__).parent
NAMES = ("tiny", "tiny-draft")
each_model = pytest.mark.parametrize("name", NAMES)


def read(name: str, file: str) -> dict[str, Any]:
    return json.loads((HERE / name / file).read_text(encoding="utf-8"))


@cache
def tensors(name: str) -> dict[str, Tensor]:
    with safe_open(HERE / name / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


@cache
def hf_model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(HERE / name, dtype=torch.float32).eval()


@cache
def documents() -> list[str]:
    return corpus.documents()


@cache
def held_out_windows() -> Tensor:
    """Eight windows of 256 ids, spread over the held-out documents of the running Python."""
    _, held_out = corpus.split(documents())
    tokenizer = Tokenizer.from_file(str(HERE / "tiny" / "tokenizer.json"))
    windows = train.cut(train.to_stream(tokenizer, held_out), 256)
    return windows[:: len(windows) // 8][:8]


# What lies in the two directories


def test_sizes() -> None:
    count = {name: sum(weight.numel() for weight in tensors(name).values()) for name in NAMES}
    assert count["tiny"] <= 4_000_000
    assert count["tiny-draft"] <= 1_000_000
    assert sum(f.stat().st_size for name in NAMES for f in (HERE / name).iterdir()) <= 10_000_000


@each_model
def test_weights_are_finite_halves_that_vary(name: str) -> None:
    for key, weight in tensors(name).items():
        assert weight.dtype == torch.float16, key
        assert weight.isfinite().all(), key
        assert weight.float().std() > 0, key


@each_model
def test_config_describes_the_tensors(name: str) -> None:
    config, weights = read(name, "config.json"), tensors(name)
    width, context = config["n_embd"], config["n_positions"]
    assert (config["model_type"], config["architectures"]) == ("gpt2", ["GPT2LMHeadModel"])
    assert config["activation_function"] == "gelu_new"
    assert config["layer_norm_epsilon"] == 1e-5
    assert config["tie_word_embeddings"] is True
    assert context == config["n_ctx"] == 512
    assert config["n_head"] % 2 == 0
    assert width % config["n_head"] == 0
    assert weights["transformer.wte.weight"].shape == (4096, width)
    assert weights["transformer.wpe.weight"].shape == (context, width)
    assert weights["transformer.h.0.attn.c_attn.weight"].shape == (width, 3 * width)
    assert len(weights) == 4 + 12 * config["n_layer"]
    shape = Shape(width, config["n_layer"], config["n_head"])
    assert config == train.hf_config(shape, config["eos_token_id"])


def test_the_draft_is_one_narrower_layer() -> None:
    tiny, draft = read("tiny", "config.json"), read("tiny-draft", "config.json")
    assert draft["n_layer"] == 1
    assert draft["n_embd"] < tiny["n_embd"]


def test_one_tokenizer_of_4096_tokens_in_both() -> None:
    files = [HERE / name / "tokenizer.json" for name in NAMES]
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = Tokenizer.from_file(str(files[0]))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 4096
    assert sorted(tokenizer.get_vocab().values()) == list(range(4096))
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    assert special == ["<|endoftext|>"]
    end = tokenizer.token_to_id("<|endoftext|>")
    for name in NAMES:
        config, generation = read(name, "config.json"), read(name, "generation_config.json")
        assert end == config["bos_token_id"] == config["eos_token_id"]
        assert end == generation["bos_token_id"] == generation["eos_token_id"]


@pytest.mark.parametrize(
    "text", ["", " a  b\n\n\tc ", "naïve — 😀 \x00\x7f", "def f(x):\n    pass"]
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    from transformers import AutoTokenizer

    ours, theirs = (
        Tokenizer.from_file(str(HERE / "tiny" / "tokenizer.json")),
        AutoTokenizer.from_pretrained(HERE / "tiny"),
    )
    ids = ours.encode(text).ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text


# What the cards say


@each_model
def test_card_agrees_with_the_files(name: str) -> None:
    card, config = read(name, "card.json"), read(name, "config.json")
    shape = card["recipe"]["shape"]
    assert card["weights"] == sum(weight.numel() for weight in tensors(name).values())
    assert (shape["width"], shape["layers"], shape["heads"]) == (
        config["n_embd"],
        config["n_layer"],
        config["n_head"],
    )
    assert len(bytes.fromhex(card["corpus"]["sha256"])) == 32
    assert card["step"] <= card["recipe"]["steps"]
    assert card["corpus"] == read("tiny", "card.json")["corpus"]
    tokens = card["corpus"]["tokens"]
    assert 0.02 < tokens["held_out"] / (tokens["train"] + tokens["held_out"]) < 0.10


def hf_logits(name: str, windows: Tensor) -> Tensor:
    with torch.no_grad():
        return hf_model(name)(windows[:, :-1]).logits


@each_model
def test_held_out_loss_is_near_the_cards(name: str) -> None:
    """Other windows, and on another Python other text; a model of nothing would say 8.3 nats."""
    windows = held_out_windows()
    loss = train.cross_entropy(hf_logits(name, windows), windows[:, 1:]).item()
    assert abs(loss - read(name, "card.json")["loss_nats_per_token"]["held_out"]) < 0.5


def test_draft_agrees_with_tiny_about_as_often_as_its_card_says() -> None:
    windows = held_out_windows()
    tiny, draft = (hf_logits(name, windows).argmax(-1) for name in NAMES)
    share = (tiny == draft).float().mean().item()
    claimed = read("tiny-draft", "card.json")["greedy_agreement_with_tiny_held_out"]
    assert claimed >= 0.5
    assert abs(share - claimed) < 0.08


@each_model
def test_logits_are_those_of_transformers(name: str) -> None:
    ids = held_out_windows()[:2]
    with torch.no_grad():
        ours = train.load(HERE / name)(ids[:, :-1])
    torch.testing.assert_close(ours, hf_logits(name, ids), atol=1e-3, rtol=0)


def test_text_loss_is_that_of_transformers() -> None:
    ids = held_out_windows()[:2]
    with torch.no_grad():
        ours = train.text_loss(train.load(HERE / "tiny"), ids)
        theirs = hf_model("tiny")(ids, labels=ids).loss
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# The script

SHAPE = Shape(width=32, layers=2, heads=2, vocab=280, context=16, dropout=0.1)
SMALL = train.Recipe(SHAPE, steps=12, rows=2)
TEXTS = [f"Return the {word} of x, or None if x has no {word}.\n" * 9 for word in "abcdefghijklmn"]


def train_small(out: Path) -> dict[str, bytes]:
    """Train both models for a few steps; all files but the cards, whose seconds differ."""
    recipe = dataclasses.replace(SMALL, eval_every=6, warmup_steps=2, decay_steps=4)
    data = train.prepare(TEXTS, recipe.shape.vocab)
    train.train_tiny(out / "tiny", data, recipe)
    draft = dataclasses.replace(recipe, shape=dataclasses.replace(recipe.shape, layers=1))
    train.train_draft(out / "tiny-draft", out / "tiny", data, draft)
    files = sorted(file for file in out.rglob("*") if file.is_file() and file.name != "card.json")
    return {file.relative_to(out).as_posix(): file.read_bytes() for file in files}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (train_small(tmp_path / run) for run in ("first", "second"))
    assert len(first) == 10
    assert first == second


def test_training_learns_and_the_card_says_how_much(tmp_path: Path) -> None:
    train_small(tmp_path)
    for name in NAMES:
        card = json.loads((tmp_path / name / "card.json").read_text(encoding="utf-8"))
        assert card["loss_nats_per_token"]["held_out"] < math.log(280) - 0.1
        assert card["seconds"] >= 0
    assert 0 <= card["greedy_agreement_with_tiny_held_out"] <= 1


def test_loaded_network_is_the_saved_one_in_halves(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network, tokenizer = GPT2(SMALL.shape), train.train_tokenizer(TEXTS, 280)
    train.save(tmp_path, network, tokenizer, {})
    again = train.load(tmp_path)
    for (name, ours), (_, theirs) in zip(
        network.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(ours.half().float(), theirs), name


def test_a_tokenizer_needs_enough_text() -> None:
    with pytest.raises(ValueError, match="too little text"):
        train.train_tokenizer(["ab"], 4096)


def test_stream_ends_every_document_and_begins_with_an_end() -> None:
    tokenizer = train.train_tokenizer(TEXTS, 280)
    text = tokenizer.decode(train.to_stream(tokenizer, ["a b", "c"]).tolist(), False)
    assert text == "<|endoftext|>a b<|endoftext|>c<|endoftext|>"


def test_windows_cover_the_stream_and_overlap_by_one() -> None:
    windows = train.cut(torch.arange(33), 8)
    assert windows.shape == (4, 9)
    assert torch.equal(windows[:, :-1].flatten(), torch.arange(32))
    assert torch.equal(windows[:, 1:].flatten(), torch.arange(1, 33))


def test_every_epoch_sees_each_window_once() -> None:
    recipe = dataclasses.replace(SMALL, rows=3)
    source = train.batches(torch.arange(16 * 9 + 16), recipe)
    firsts = torch.cat([next(source)[:, 0] for _ in range(3)])
    assert len(set(firsts.tolist())) == 9
    assert len(set((firsts % 16).tolist())) == 1
    torch.manual_seed(4)  # batches have a generator of their own
    again = train.batches(torch.arange(16 * 9 + 16), recipe)
    assert torch.equal(firsts, torch.cat([next(again)[:, 0] for _ in range(3)]))


def test_two_workers_find_the_gradient_of_the_whole_batch() -> None:
    torch.manual_seed(2)
    shape = dataclasses.replace(SHAPE, dropout=0.0)
    network, batch = GPT2(shape).double(), torch.randint(280, (4, 17))
    noises = [torch.Generator(), torch.Generator()]
    with ThreadPoolExecutor(2) as workers:
        value = train.set_gradients(network, train.text_loss, batch, noises, workers)
    loss = train.text_loss(network, batch)
    whole = torch.autograd.grad(loss, list(network.parameters()))
    assert value == pytest.approx(loss.item(), abs=1e-12)
    for weight, gradient in zip(network.parameters(), whole, strict=True):
        torch.testing.assert_close(weight.grad, gradient, atol=1e-12, rtol=0)


def test_dropout_is_for_training_and_drops_the_share_that_it_says() -> None:
    torch.manual_seed(6)
    network, ids = GPT2(SHAPE), torch.randint(280, (1, 16))
    noise = torch.Generator().manual_seed(1)
    assert torch.equal(network(ids), network(ids))
    first, second = network(ids, noise), network(ids, noise)
    assert not torch.equal(first, second)
    assert torch.equal(first, network(ids, noise.manual_seed(1)))
    dropped = Dropout(0.25)(torch.ones(100_000), noise)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.unique().tolist() == pytest.approx([0.0, 1 / 0.75])


def test_imitation_is_over_when_the_teacher_is_met() -> None:
    torch.manual_seed(3)
    teacher, other, batch = GPT2(SMALL.shape), GPT2(SMALL.shape), torch.randint(280, (2, 17))
    loss = train.imitation_loss(teacher)
    assert loss(teacher, batch).item() == pytest.approx(0, abs=1e-6)
    assert loss(other, batch).item() > 1e-3
    assert train.agreement(teacher, teacher, batch.flatten()) == 1
    assert train.agreement(other, teacher, batch.flatten()) < 1


def test_inherited_embeddings_keep_the_angles_between_tokens() -> None:
    teacher, same, narrow = (
        GPT2(dataclasses.replace(SMALL.shape, width=width)) for width in (32, 32, 16)
    )
    train.inherit_embeddings(same, teacher)
    train.inherit_embeddings(narrow, teacher)
    full, rotated, cut = (n.transformer.wte.weight for n in (teacher, same, narrow))
    torch.testing.assert_close(rotated @ rotated.T, full @ full.T, atol=1e-5, rtol=0)
    values = torch.linalg.svdvals(full)
    torch.testing.assert_close(torch.linalg.svdvals(cut), values[:16])


def test_learning_rate_warms_up_and_comes_down() -> None:
    recipe = dataclasses.replace(SMALL, steps=100, warmup_steps=10, decay_steps=20, peak_lr=1.0)
    rates = [train.learning_rate(step, recipe) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10:81] == [1.0] * 71
    assert rates[80:] == pytest.approx([0.05 * n for n in range(20, 0, -1)])


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short = dataclasses.replace(SMALL, steps=100, warmup_steps=10, decay_steps=20)
    long = dataclasses.replace(short, steps=500)
    for step in range(80):
        assert train.learning_rate(step, short) == train.learning_rate(step, long)


# The corpus


def test_corpus_is_the_one_on_the_card() -> None:
    texts, card = documents(), read("tiny", "card.json")["corpus"]
    assert all(texts)
    assert any(text.startswith('The "assert" statement') for text in texts)
    assert sum(map(len, texts)) == pytest.approx(sum(card["characters"].values()), rel=0.5)
    if platform.python_version() == card["python"]:
        assert corpus.sha256(texts) == card["sha256"]


def test_split_keeps_every_document_once() -> None:
    texts = [str(number) for number in range(100)]
    kept, held_out = corpus.split(texts)
    assert len(held_out) == 5
    assert sorted(kept + held_out) == sorted(texts)
    assert (kept, held_out) == corpus.split(texts)


def test_hash_sees_the_borders_of_documents() -> None:
    assert corpus.sha256(["ab", "c"]) != corpus.sha256(["a", "bc"])


SOURCE = '''
"""A module that does nothing but carry a docstring."""
# if x:
#     y = 1
# return y

def f():
    """short"""
    # This comment explains something at length, over the three lines that it takes
    # for a comment to count as prose, with words and spaces and hardly anything else,
    # and it ends, as sentences do, with a full stop, after two hundred characters.
    return 1
'''


def test_docstrings_and_prose_are_taken_and_labels_and_code_are_not(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SOURCE)
    first, second = corpus.passages(tmp_path / "m.py")
    assert first == "A module that does nothing but carry a docstring."
    assert second.startswith("This comment explains something at length, over the three lines")
    assert second.endswith(
        "\nand it ends, as sentences do, with a full stop, after two hundred characters."
    )
