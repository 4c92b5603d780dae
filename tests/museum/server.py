"""Faults of a server: who calls, who hangs up, and who hears of it."""

from museum.fault import Fault

FAULTS = [
    Fault(
        name="nobody-hears-a-hang-up",
        words="Nobody hears a hang-up",
        file="server/loop.py",
        before="if not reply.is_over:",
        after="if False:",
        seen="Users close the browser and the GPU goes on. In the evening it is full of answers "
        "that nobody reads.",
        why="The server writes to its clients and does not read from them, and writing does not "
        "say that somebody has left.",
        tests=("test_server.py::test_a_client_that_hangs_up_holds_nothing",),
        report="https://github.com/oobabooga/textgen/issues/4521",
        chapter="A",
        breaks="def deaf(",
        inside="EngineLoop.cancel",
    ),
    Fault(
        name="not-before-the-first-token",
        file="server/loop.py",
        before="self._orders.put(partial(self._fail, gone, reply))",
        after="self._orders.put(partial(self._fail, gone, reply) if any(reply.outputs) else "
        "partial(self.cancel, reply))",
        seen="Under load, when people have had enough and leave the queue, it becomes no faster.",
        why="Who waits in the queue is not looked at until there is a token to write. So those who "
        "have left get a seat and a pass over their prompt first.",
        tests=("test_server.py::test_a_client_that_hangs_up_while_it_waits_is_not_run",),
        report="https://github.com/vllm-project/vllm/pull/7111",
        chapter="A",
        breaks="def late(",
        inside="EngineLoop.cancel",
    ),
    Fault(
        name="one-leaves-and-all-are-cut-off",
        file="server/loop.py",
        before="self._orders.put(partial(self._fail, gone, reply))",
        after="self._orders.put(partial(self._fail, gone, *self._unfinished))",
        seen="Somebody's browser gives up waiting, and everybody's answer breaks off.",
        why="The news that a client has gone ends more than that client's request.",
        tests=("test_server.py::test_a_client_that_hangs_up_while_it_waits_is_not_run",),
        report="https://github.com/sgl-project/sglang/issues/39216",
        kin="the whole process died of it",
        chapter="A",
        breaks="def everybody(",
        inside="EngineLoop.cancel",
    ),
]
