"""Tensor parallelism: several processes, the ranks, run one model together, each a part of it.

    torchrun --nproc-per-node 3 -m spindle generate -m smollm2 -p "The capital of France is"

    with parallel.init() as ranks:               # in a script that torchrun starts; alone: one rank
        outs = LLM("smollm2").generate(prompts)  # the same calls in every rank
        if ranks.rank == 0: print(...)

A rank of n is a model with 1/n of the heads and 1/n of the MLP, and so with 1/n of the cache
(`model.split` cuts the weights). What leaves attention and the MLP is a sum over all heads and all
of the MLP, so it is added up over the ranks, twice a layer; a rank has 1/n of the vocabulary, so
embeddings are added up as well, and logits put together (Shoeybi et al. 2019, Megatron-LM, section
3). All else is done by every rank alike: each schedules and samples for itself, from the same
logits, and comes to the same. What is not the same everywhere, a drawn seed or how much memory is
free, is rank 0's word. Before each pass the ranks compare what they are about to run, so that a
rank that has left the path ends with an error, and is not waited for.

torch has tensor parallelism of its own, DTensor and `parallelize_module`. It replaces parameters in
the layers of an `nn.Module`; ours are matrices packed for our own kernels, so what we take is
`torch.distributed`: gloo between CPUs, nccl between GPUs.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from spindle.config import ModelConfig
from spindle.errors import RequestError, SpindleError, brief, shown

FAREWELL_S = 10.0  # how long a rank that ends waits for rank 0, which may still have to say why
PASS, NUMBER, TEXT, END = range(4)  # what rank 0 tells the others
MESSAGE_BYTES = 3 * 8


class Traffic:
    """What a rank has given to collectives since `clear`: calls and payload bytes, by collective.

    The payload is the tensor that the rank puts in; `ring_bytes` says what then goes over the wire.
    A pass that a CUDA graph replays is not seen, and not counted.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()

    def note(self, collective: str, nbytes: int) -> None:
        """One more call."""
        self.calls[collective] += 1
        self.payload_bytes[collective] += nbytes

    def clear(self) -> None:
        """Count from 0 again."""
        self.calls.clear()
        self.payload_bytes.clear()


class Ranks:
    """The processes that run a model together, as one of them sees it: `rank` of `count`.

    here: how many of them this machine has. `traffic` counts what goes between them. Used as a
    context it is closed at the end. A collective raises SpindleError if a rank has gone or does
    something else; SystemExit if rank 0 has ended, with its exit status.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, here: int = 1, store: dist.Store | None = None
    ) -> None:
        self.rank, self.count, self.here, self._store = rank, count, here, store
        self.traffic = Traffic()
        self._broken_off = False  # by another rank, who may say why

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, SystemExit):
            self.close(error.code if isinstance(error.code, int) else int(error.code is not None))
        else:
            status = 130 if isinstance(error, KeyboardInterrupt) else 1
            self.close(status, str(error) or repr(error))

    # --- what the weights of a part do -----------------------------------------------------------

    def sum(self, x: Tensor) -> Tensor:
        """x of all ranks added up, in place; returns it.

        With three ranks or more the order of a sum depends on where in x it stands.
        """
        torch.ops.spindle.rank_sum_(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The columns x [R, V/n] of all ranks side by side -> [R, V]."""
        return torch.ops.spindle.rank_gather(x, self.count)

    def meet(self, ids: Tensor) -> None:
        """Before a pass over ids [T]: SpindleError if rank 0 is about to run something else.

        On a GPU, where to look at ids is to wait for them, their number is compared.
        """
        torch.ops.spindle.rank_meet(ids)

    # --- rank 0's word ---------------------------------------------------------------------------

    def number(self, mine: int) -> int:
        """Rank 0's number, of 64 bits."""
        return mine if self.count == 1 else self._message(NUMBER, mine)[1]

    def text(self, read: Callable[[], str]) -> str:
        """What rank 0 has read; nobody else reads."""
        if self.count == 1:
            return read()
        data = read().encode() if self.rank == 0 else b""
        held = torch.zeros(self._message(TEXT, len(data))[1], dtype=torch.uint8)
        if self.rank == 0:
            held.copy_(torch.tensor(list(data), dtype=torch.uint8))
        with self._collective("broadcast", held):
            dist.broadcast(held, 0)
        return bytes(held.tolist()).decode()

    def least(self, mine: int) -> int:
        """The least of the ranks' numbers."""
        if self.count == 1:
            return mine
        self._message(NUMBER, mine)
        held = torch.tensor(mine)
        with self._collective("all_reduce", held):
            dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    # --- the end ---------------------------------------------------------------------------------

    def close(self, status: int = 0, why: str = "") -> int:
        """Take part no more; returns rank 0's exit status, which is the status of all.

        status: this rank's own; why: what ended it, in words that rank 0 will say. A rank waits a
        little for rank 0 to end first: whoever has started them ends them all when one has failed.
        """
        global _current
        if self._store is None or _current is not self:
            return status
        if status == 0:
            try:
                self._message(END, 0)
                self.sum(torch.zeros(1))  # all have what was sent before the first one hangs up
            except (SpindleError, SystemExit) as error:
                why = str(error)
        _current = ALONE
        with suppress(RuntimeError):  # of a store that has gone
            if self.rank == 0:
                self._store.set("ended", str(status))
            elif why and not self._broken_off:  # of several the first one is said
                self._store.compare_set("fault", "", f"rank {self.rank} ended: {why}")
        dist.destroy_process_group()
        with suppress(RuntimeError):
            if self.rank > 0:
                self._store.wait(["ended"], timedelta(seconds=FAREWELL_S))
                return int(self._store.get("ended"))
        return status

    # --- the parts of the above ------------------------------------------------------------------

    def _message(self, kind: int, first: int, second: int = 0) -> list[int]:
        """Rank 0's message; SpindleError if this rank expected one of another kind."""
        mine = [kind, first, second]
        held = torch.tensor(mine)
        with self._collective("broadcast", held):
            dist.broadcast(held, 0)
        said = held.tolist()
        if said[0] != kind or (kind == PASS and said != mine):
            raise SpindleError(
                f"rank {self.rank} came to {_in_words(mine)}, and rank 0 to {_in_words(said)}; "
                "expected all ranks to be given the same requests, in the same order"
            )
        return said

    @contextmanager
    def _collective(self, name: str, payload: Tensor) -> Iterator[None]:
        """Counts a collective, and says in words what broke it off."""
        if self.count == 1:
            raise SpindleError(
                "the model is the part of one rank, and the ranks have ended; expected it to be "
                "used while they are there"
            )
        self.traffic.note(name, payload.nbytes)
        try:
            yield
        except RuntimeError as cause:
            raise self._lost(cause) from cause

    def _lost(self, cause: RuntimeError) -> BaseException:
        """Why a collective was broken off: some rank has hung up, and may have said why."""
        assert self._store is not None
        self._broken_off = True
        with suppress(RuntimeError):  # the store may have gone with it
            if self.rank > 0 and self._store.check(["ended"]):
                return SystemExit(int(self._store.get("ended")))
            if self._store.check(["fault"]):
                return SpindleError(self._store.get("fault").decode())
        said = re.sub(r"^\[.*?\] ", "", str(cause)).split(". ")[0]
        return SpindleError(
            f"one of the {self.count} ranks has gone, or answers no more ({brief(said)}); each has "
            "a part of the model, so the others cannot go on"
        )


ALONE = Ranks()
_current = ALONE


def current() -> Ranks:
    """The ranks that this process is one of; before `init` and after the end, itself alone."""
    return _current


def init(url: str = "env://", timeout_s: float = 300.0) -> Ranks:
    """Join the ranks; models that are loaded from now on are this rank's part of them.

    url: where they find each other, as `torch.distributed` has it; by default what torchrun has put
    into the environment, and a process that it has not started is alone. timeout_s: how long a rank
    is waited for, now and at every collective. On a machine with GPUs each rank has one of its own.
    RequestError: this process is one of several already, or the url or the environment is wrong.
    SpindleError: not all came.
    """
    global _current
    if url == "env://" and "WORLD_SIZE" not in os.environ:
        return ALONE
    if not dist.is_available():
        raise RequestError("init: this torch was built without torch.distributed")
    if _current is not ALONE or dist.is_initialized():
        raise RequestError("init: this process is one of several ranks already")
    here = _whole("LOCAL_WORLD_SIZE", 1)
    if torch.cuda.is_available():
        torch.cuda.set_device(_own_gpu())
    store, rank, count = _join(url, timedelta(seconds=timeout_s))
    if count > 1:
        _current = Ranks(rank, count, here, store)
    return _current


def _join(url: str, wait: timedelta) -> tuple[dist.Store, int, int]:
    """Meet the others; the store for words between them, this rank, and how many there are."""
    from torch.distributed.rendezvous import rendezvous  # which some builds do not have

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, count = next(rendezvous(url, timeout=wait))
        if count > 1:
            group = dist.PrefixStore("spindle/group", store)
            options = {"store": group, "rank": rank, "world_size": count, "timeout": wait}
            dist.init_process_group(backend, **options)
            # Nobody goes on, and perhaps ends, while others are still on their way to it.
            here = dist.PrefixStore("spindle/here", store)
            here.set(str(rank), "")
            here.wait([str(n) for n in range(count)], wait)
    except ValueError as cause:
        raise RequestError(
            f"init: {brief(cause)}; expected what torchrun gives a process"
        ) from None
    except RuntimeError as cause:
        if "://" not in url or "No rendezvous handler" in str(cause):
            raise RequestError(f"init: url={shown(url)}: {brief(cause)}") from None
        raise SpindleError(f"the ranks did not find each other at {url}: {brief(cause)}") from None
    return dist.PrefixStore("spindle/words", store), rank, count


def _own_gpu() -> int:
    """Which of this machine's GPUs is this rank's."""
    own, seen = _whole("LOCAL_RANK", 0), torch.cuda.device_count()
    if own >= seen:
        raise RequestError(
            f"init: this is rank {own} of its machine, counted from 0, and torch sees {seen} GPU; "
            "expected one for each, or CUDA_VISIBLE_DEVICES= for ranks on the CPU"
        )
    return own


def _whole(name: str, default: int) -> int:
    """A number of the environment."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise RequestError(f"{name}={shown(value)} in the environment: expected a whole number")
    return int(value)


def _in_words(message: list[int]) -> str:
    kind, first, second = message
    if kind == PASS:
        words = "1 token" if first == 1 else f"{first} tokens"
        return f"a pass over {words} (checksum {second:08x})"
    return {NUMBER: "a number of rank 0's", TEXT: "a text of rank 0's", END: "its end"}[kind]


# --- bytes over the wire -------------------------------------------------------------------------


def predicted_bytes(
    config: ModelConfig, rows: int, sampled_rows: int, ranks: int, itemsize: int = 4
) -> dict[str, int]:
    """Payload bytes that a rank gives to collectives in one pass, by collective.

    rows T go through the layers, of which sampled_rows R get logits, in numbers of `itemsize`
    bytes: T E of the embedding, 2 L T E of the layers, R V/n of the head, and the message before.
    A replayed step has as many rows as its bucket, both times.
    """
    numbers = rows * config.width  # T E
    return {
        "all_reduce": (1 + 2 * config.num_layers) * numbers * itemsize,
        "all_gather": sampled_rows * config.vocab_size // ranks * itemsize,
        "broadcast": MESSAGE_BYTES,
    }


def ring_bytes(payload_bytes: dict[str, int], ranks: int) -> int:
    """Bytes that a rank sends for these payloads when the ranks form a ring.

    An all-reduce passes 1/n of the payload on 2 (n - 1) times; in an all-gather everyone's payload
    goes around, n - 1 times (Patarasuk & Yuan 2009). A broadcast is passed on once.
    """
    times = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1, "broadcast": 1}
    return round(sum(times[name] * size for name, size in payload_bytes.items()))


# --- the collectives, as ops: a recorded step has them too, and replays them ---------------------


def _sum(x: Tensor) -> None:
    with _current._collective("all_reduce", x):
        dist.all_reduce(x)


def _gather(x: Tensor, count: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(count)]
    with _current._collective("all_gather", x):
        dist.all_gather(parts, x)
    return torch.cat(parts, dim=1)


def _meet(ids: Tensor) -> None:
    on_cpu = ids.device.type == "cpu"
    if on_cpu or not torch.cuda.is_current_stream_capturing():
        _current._message(PASS, len(ids), zlib.crc32(ids.numpy().tobytes()) if on_cpu else 0)


_library = Library("spindle", "FRAGMENT")  # the ops are gone when it is
_library.define("rank_sum_(Tensor(a!) x) -> ()")
_library.define("rank_gather(Tensor x, int count) -> Tensor")
_library.define("rank_meet(Tensor ids) -> ()")
for _place in ("CPU", "CUDA"):
    _library.impl("rank_sum_", _sum, _place)
    _library.impl("rank_gather", _gather, _place)
    _library.impl("rank_meet", _meet, _place)
