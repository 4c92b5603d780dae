"""The same tasks through several engines: Ray Data, with one engine in each of its actors.

    driver: task -> queue -> a read task, which makes a block of each -> an actor -> driver: result

The driver keeps all that has to be remembered. It puts a task into the queue for each result that
comes out, so that no more are on their way than the engines have room for; a kill loses only those.
Each actor answers many blocks at once, a thread of Ray's waiting for each.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from spindle import hub
from spindle.batch.digest import settings_of
from spindle.batch.lines import RunWith, Task, ask, read_line
from spindle.batch.work import Desk, Ended, EngineOptions, engine
from spindle.errors import SpindleError, brief
from spindle.interrupts import held_back

if TYPE_CHECKING:
    import ray.data
    from ray.util.queue import Queue

FEW_LINES = "The minimum number of concurrent actors for 'MapBatches"  # as if that were a fault
STORE_BYTES = 256 * 2**20  # of a cluster of our own, for what is on its way
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent home
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # else it tells of its own doings, as errors
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray's next release does, without a warning
    "RAY_raylet_start_wait_time_s": "60",  # a busy machine is slow to start it
}


def answer_on_cluster(
    options: EngineOptions,
    model: str,
    made_with: RunWith | None,
    tasks: Iterator[Task],
    take: Callable[[Ended], object],
    replicas: int,
) -> None:
    """Answer all tasks with so many engines; each goes to `take` as it ends.

    model: its name. made_with: what all of them have to be, if there are results of one already.
    SpindleError: Ray is missing, does not start, has no room for them, or lost one.
    """
    options = replace(options, model=_absolute(options.model))
    with _connected():
        import ray
        from ray.util.queue import Queue

        resources = _resources(options, replicas)
        queue = Queue(actor_options={"num_cpus": 0})
        waiting = set[int]()

        def row(task: Task) -> tuple[int, bytes]:
            waiting.add(task.number)
            return task.number, task.raw

        rows = chain(map(row, tasks), [None])  # which ends the stream
        try:
            queue.put_nowait_batch(list(islice(rows, options.window * replicas)))
            for ended in _results(queue, (options, model, made_with), resources, replicas):
                if isinstance(ended, SpindleError):
                    raise ended
                with held_back():
                    if ended.number in waiting:  # Ray may do a task again, if it lost an actor
                        waiting.remove(ended.number)
                        take(ended)
                queue.put_nowait_batch(list(islice(rows, 1)))
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise SpindleError(f"--replicas {replicas}: {brief(last)}") from error
        if waiting:
            raise SpindleError(f"Ray lost {len(waiting)} lines; the same command goes on from here")


def _absolute(model: str) -> str:
    """A model's name, or the path of its directory as it is called from anywhere."""
    given = Path(os.path.expanduser(model))
    return str(given.absolute()) if hub.resolve(model) == given else model


@contextmanager
def _connected() -> Iterator[None]:
    """With the cluster that RAY_ADDRESS or this machine has, or one of our own on this machine."""
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    try:
        import ray
        import ray.data
    except ImportError:
        right = "expected --replicas 1, or `pip install 'spindle[cluster]'`"
        raise SpindleError(f"--replicas: Ray Data is not installed; {right}") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # its errors are raised too
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        with _no_stderr():  # where it tells that it tells no more
            try:
                ray.init("auto", **quiet)
            except ConnectionError:
                ray.init("local", _node_ip_address="127.0.0.1", **own, **quiet)
    except Exception as error:  # Ray has no narrower kind for it
        raise SpindleError(f"Ray did not start: {brief(error)}") from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", FEW_LINES)
            yield
    finally:
        ray.shutdown()


@contextmanager
def _no_stderr() -> Iterator[None]:
    """What is written to the process's stderr in the block goes nowhere, native code's too."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _resources(options: EngineOptions, replicas: int) -> dict[str, int]:
    """What each engine takes of the cluster. SpindleError: there is less than that for all."""
    import ray

    there = ray.cluster_resources()
    on_gpus = options.device != "cpu" and there.get("GPU", 0) > 0
    kind = "GPU" if on_gpus else "CPU"
    if there.get(kind, 0) < replicas:
        has = f"the cluster has {there.get(kind, 0):.0f} {kind}s, and an engine takes one"
        raise SpindleError(f"--replicas {replicas}: {has}; expected no more than that")
    return {"num_gpus": 1} if on_gpus else {"num_cpus": 1}


def _results(
    queue: Queue,
    of_engines: tuple[EngineOptions, str, RunWith | None],
    resources: Any,
    replicas: int,
) -> Iterator[Ended | SpindleError]:
    """What comes out of a stream of tasks that goes through the engines."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # byte: each row goes its way at once, and alone
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    room = of_engines[0].window
    pool = ray.data.ActorPoolStrategy(
        size=replicas,
        max_tasks_in_flight_per_actor=room,
        max_concurrent_calls_per_actor=room,
        enable_true_multi_threading=True,
    )
    stream = ray.data.read_datasource(_source(queue), override_num_blocks=1, num_cpus=0)
    answers = stream.map_batches(
        Replica,
        batch_size=None,
        compute=pool,
        fn_constructor_args=of_engines,
        **resources,
    )
    for rows in answers.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
        yield from map(pickle.loads, rows["ended"].to_pylist())


def _source(queue: Queue) -> ray.data.Datasource:
    """What the queue has until there is None in it, a block for each."""
    import pyarrow as pa
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask

    def read() -> Iterator[pa.Table]:
        while (row := queue.get()) is not None:
            yield pa.table({"number": [row[0]], "raw": [row[1]]})

    class Tasks(Datasource):
        def estimate_inmemory_data_size(self) -> None:
            """Nobody knows."""

        def get_read_tasks(self, *args: Any, **options: Any) -> list[ReadTask]:
            return [ReadTask(read, BlockMetadata(None, None, None, None))]

    return Tasks()


class Replica:
    """An engine in an actor: its own thread steps it, and those of Ray wait for their answers."""

    def __init__(self, options: EngineOptions, model: str, made_with: RunWith | None) -> None:
        self._error: SpindleError | None = None  # Ray would tell of one that is raised, at length
        try:
            llm = engine(options)
            run_with = RunWith(model, settings_of(llm, options))
            if words := run_with.unlike(made_with):
                raise SpindleError(f"OUT has results that were {words}")
            self._desk = Desk(llm, run_with)
        except SpindleError as error:
            self._error = SpindleError(f"an engine of {socket.gethostname()}: {error}")
        self._model = model
        self._added: SimpleQueue[tuple[Task, Future[Ended]]] = SimpleQueue()
        self._waiting: dict[int, Future[Ended]] = {}
        if self._error is None:
            threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, block: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """Answer a block's tasks, each a row of `number` and `raw`; or say what is wrong here."""
        if self._error is not None:
            return {"ended": [pickle.dumps(self._error)]}
        futures = list[Future[Ended]]()
        for number, raw in zip(block["number"], block["raw"], strict=True):
            line = read_line(raw)
            task = Task(int(number), raw, line["custom_id"], ask(line, self._model))
            futures.append(Future())
            self._added.put((task, futures[-1]))
        return {"ended": [pickle.dumps(future.result()) for future in futures]}

    def _run(self) -> None:
        try:
            while True:
                while not len(self._desk) or not self._added.empty():
                    self._add(*self._added.get())
                for ended in self._desk.step():
                    self._waiting.pop(ended.number).set_result(ended)
        except BaseException as error:  # whoever waits hears of it, and whoever comes
            for future in self._waiting.values():
                future.set_exception(error)
            while True:
                self._added.get()[1].set_exception(error)

    def _add(self, task: Task, future: Future[Ended]) -> None:
        refused = self._desk.add(task)
        if refused is None:
            self._waiting[task.number] = future
        else:
            future.set_result(refused)
