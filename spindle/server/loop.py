"""EngineLoop: the one thread that steps an LLM, and how the event loop talks with it.

    event loop                          the engine's thread
    submit(prompts) --- orders --->     LLM.add
    cancel(reply)   --- orders --->     LLM.abort
                                        LLM.step, while there is work; else it sleeps
    reply.wait()    <--- wake-ups ---   reply.outputs, the newest of each request

A reply has the newest output of each of its requests, as a whole, and no queue of what came before:
a client that reads slowly finds more in it the next time, and costs no more memory. The event loop
is woken once a step at most, for all replies together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from spindle.decode.params import SamplingParams
from spindle.errors import RequestError, SpindleError
from spindle.serve.llm import LLM
from spindle.serve.outputs import RequestOutput
from spindle.server.metrics import Meter
from spindle.server.refusals import CLIENT_GONE, Refusal, broken, busy, unavailable

LOG = logging.getLogger(__name__)
MOST_FAILURES = 3  # steps that raise, one after another, before the engine counts as broken


class Reply:
    """What has become of some prompts that came together; `error` ends all of them.

    `outputs` has the newest of each, None before its first token.
    """

    def __init__(
        self, name: str, prompts: Sequence[list[int]], params: SamplingParams, arrival_s: float
    ) -> None:
        self.name, self.prompts, self.params, self.arrival_s = name, prompts, params, arrival_s
        self.outputs: list[RequestOutput | None] = [None] * len(prompts)
        self.error: SpindleError | None = None
        self._news = asyncio.Event()

    @property
    def answers(self) -> int:
        """How many sequences it may need at once."""
        return len(self.prompts) * self.params.samples

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        whole = all(output is not None and output.finished for output in self.outputs)
        return whole or self.error is not None

    async def wait(self) -> None:
        """Until there is more than at the last call, be it an error."""
        await self._news.wait()
        self._news.clear()

    def stir(self) -> None:
        """Wake who waits; on the event loop."""
        self._news.set()


class EngineLoop:
    """Owns an LLM from `start` to `stop`: no other thread is let in meanwhile.

    `stats` is what `LLM.stats` was after the last step. max_queue: answers that may wait beyond the
    LLM's max_seqs that may run. `trouble` says why it takes no requests any more; None: it does.
    Raises RequestError: the LLM has requests of somebody else, or no tokenizer.
    """

    def __init__(self, llm: LLM, meter: Meter, max_queue: int) -> None:
        if llm.has_unfinished:
            right = "expected one whose requests have all ended"
            raise RequestError(f"this LLM has unfinished requests of its own; {right}")
        if llm.tokenizer is None:
            raise RequestError("this LLM has no tokenizer; expected one, for answers are text")
        self._llm, self._meter = llm, meter
        self.most = llm.scheduler.max_seqs + max_queue
        self.stats = llm.stats
        meter.stands(self.stats)
        self.trouble: str | None = None
        self.idle = threading.Event()  # nothing is unfinished, and `stats` says so
        self.idle.set()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.RLock()  # of the next three
        self._unfinished: set[Reply] = set()
        self._answers = 0  # that they may need at once
        self._stirred: set[Reply] = set()  # whom the event loop is to wake
        self._owners: dict[str, tuple[Reply, int]] = {}  # request id -> whose, which of its prompts
        self._failures, self._stopping = 0, False
        self._thread = threading.Thread(target=self._run, name="spindle-engine", daemon=True)

    # --- the event loop's side ------------------------------------------------------------------

    def start(self) -> None:
        """Begin, in a thread of its own; call it on the event loop that will talk with it."""
        self._events = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Abort what is unfinished, and wait for the thread to end; the step that runs is done."""
        self._orders.put(self._stop)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def check_room(self, answers: int) -> None:
        """Raises Refusal: so many more may not wait, or none at all: see `trouble`."""
        with self._lock:
            if self.trouble is not None:
                raise unavailable(self.trouble)
            if self._answers + answers > self.most:
                raise busy(
                    f"{self._answers} answers are on their way, of {self.most} that may be: no "
                    f"room for {answers} more; try again later"
                )

    def submit(self, reply: Reply) -> None:
        """Queue all prompts of a reply, or end it with an error. Raises as `check_room` does."""
        with self._lock:
            self.check_room(reply.answers)
            self._answers += reply.answers
            self._unfinished.add(reply)
            self.idle.clear()
        self._orders.put(partial(self._add, reply))

    def cancel(self, reply: Reply) -> None:
        """Nobody waits for it any more: give back what it holds, before the next step."""
        if not reply.is_over:
            gone = Refusal(CLIENT_GONE, "the client has gone away")
            self._orders.put(partial(self._fail, gone, reply))

    def refuse(self, trouble: str) -> None:
        """Take no requests from now on; those that are there go on."""
        with self._lock:
            self.trouble = self.trouble or trouble

    def abort_all(self) -> None:
        """End what is unfinished, with `trouble` for an error."""
        self._orders.put(self._fail_all)

    def _wake(self) -> None:
        with self._lock:
            stirred, self._stirred = self._stirred, set()
        for reply in stirred:
            reply.stir()

    # --- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._llm.one_thread:
                while not self._stopping:
                    self._obey()
                    if self._llm.has_unfinished:
                        self._step()
                    self._publish()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            LOG.exception("the engine has ended")
            self.refuse(f"the engine has ended: {type(error).__name__}: {error}")
        finally:
            self._stop()
            self.idle.set()  # if it is not so, `trouble` says why

    def _obey(self) -> None:
        """Do what was ordered; where there is no work, wait for an order."""
        if not self._llm.has_unfinished:
            self._orders.get()()
        for _ in range(self._orders.qsize()):
            self._orders.get()()

    def _stop(self) -> None:
        self.refuse("the server has stopped")
        self._stopping = True
        self._fail_all()

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except Exception as error:
            self._fail_running(error)
            return
        self._failures = 0
        self._meter.note(outputs, time.perf_counter())
        for output in outputs:
            if output.request_id in self._owners:  # else it failed with others of its reply
                reply, position = self._owners[output.request_id]
                reply.outputs[position] = output
                if output.finished:
                    del self._owners[output.request_id]
                self._tell(reply)

    def _publish(self) -> None:
        self.stats = self._llm.stats
        self._meter.stands(self.stats)
        with self._lock:
            if not self._unfinished:
                self.idle.set()

    def _add(self, reply: Reply) -> None:
        """Queue all of a reply's prompts in the LLM; if one is refused, none."""
        if reply.is_over:  # everybody's was, before this order was read
            return
        count = len(reply.prompts)
        names = [f"{reply.name}-{position}" for position in range(count)]
        try:
            self._llm.add_all(reply.prompts, [reply.params] * count, names)
        except Exception as error:
            self._fail(_told(error, "a request could not be added"), reply)
            return
        for position, name in enumerate(names):
            self._owners[name] = reply, position
            self._meter.arrived(name, reply.arrival_s)

    def _fail(self, error: SpindleError, *replies: Reply) -> None:
        """End replies with an error, if they have not ended: all hear of it, then all give back."""
        failed = [reply for reply in replies if not reply.is_over]
        for reply in failed:
            reply.error = error
            self._tell(reply)
        for name in [name for name, (reply, _) in self._owners.items() if reply in failed]:
            del self._owners[name]
            output = self._llm.abort(name)
            if output is not None:  # else it has ended, and the next step says so
                self._meter.ended(output)

    def _fail_running(self, error: Exception) -> None:
        """A step raised: whoever was in it has an error, and the others go on.

        It is raised again where nobody was in it, or where it is one of several in a row.
        """
        self._failures += 1
        ran = {one.request.id for one in self._llm.scheduler.running} & set(self._owners)
        if not ran or self._failures >= MOST_FAILURES:
            raise error
        failed = {self._owners[name][0] for name in ran}
        self._fail(_told(error, "a step has failed"), *failed)

    def _fail_all(self) -> None:
        error = unavailable(self.trouble or "the server has ended it")
        with self._lock:
            unfinished = list(self._unfinished)
        self._fail(error, *unfinished)

    def _tell(self, reply: Reply) -> None:
        """Let the event loop know, which may know already that there is news."""
        with self._lock:
            if reply.is_over and reply in self._unfinished:
                self._unfinished.remove(reply)
                self._answers -= reply.answers
            known, self._stirred = bool(self._stirred), self._stirred | {reply}
        if not known:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                self._events.call_soon_threadsafe(self._wake)


def _told(error: Exception, what: str) -> SpindleError:
    """What clients hear of an error: of a fault of ours its kind, and the log has the rest."""
    if isinstance(error, SpindleError):
        return error
    LOG.error("%s", what, exc_info=error)
    return broken(f"the engine failed ({type(error).__name__}); the server's log says where")
