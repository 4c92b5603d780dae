"""What every test stands on: quiet, offline, derandomised; and what is left out is said.

`smollm2` tests need the checkpoint: without it they are skipped, listed with a count; with CI set
they fail instead. `cuda` tests need a GPU. `network` and `slow` run when asked: `-m network`.
"""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

ON_REQUEST = ("network", "slow")

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports transformers or huggingface_hub: no network, no bars, no advice."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "network" not in config.option.markexpr:
        os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.option.markexpr
    left_out = {mark for mark in ON_REQUEST if mark not in asked}
    dropped = [item for item in items if any(item.get_closest_marker(m) for m in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Raised from here, all skips of one reason are one line of the summary, with their count."""
    if item.get_closest_marker("smollm2"):
        need_smollm2()
    if item.get_closest_marker("cuda"):
        need_cuda()


def need_smollm2() -> None:
    from spindle import hub

    if hub.is_cached("smollm2"):
        return
    if os.environ.get("CI"):
        pytest.fail(
            "CI is set, and smollm2 is not in the cache: run `spindle fetch smollm2`", False
        )
    pytest.skip("smollm2 is not in the cache; `spindle fetch smollm2` brings it")


def need_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.fixture(scope="session")
def tiny_models() -> dict:
    """Random float64 models, one a family: 3 layers, 97 tokens, 64 positions; Llama's has GQA."""
    import shapes
    import torch

    from spindle.model.weights import random_model

    configs = {"gpt2": shapes.gpt2(), "llama": shapes.llama()}
    return {name: random_model(config, dtype=torch.float64) for name, config in configs.items()}


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module compiles all that it tests, and leaves nothing in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=[("up", 0), ("down", 0), ("random", 1), ("random", 2)], ids=str)
def in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """The emulator's threads in each of these orders."""
    from spindle.kernels import emulate

    with emulate.thread_order(*request.param):
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Torch with two threads for one test, whatever OMP_NUM_THREADS says."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose speeds are measured at once; figures are closed afterwards."""
    import matplotlib.pyplot as plt

    from spindle.bench import machine, profile

    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    monkeypatch.setattr(profile, "MATRICES", (16, 32))
    yield
    plt.close("all")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own answer to a SIGINT, which a job in the background has not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
