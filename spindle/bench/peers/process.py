"""An engine in a process of its own: a line of JSON in, a line of JSON out.

    {"load": {...}}                     -> {"reply": {"version": text}}
    {"run": [[prompt ids, new], ...]}   -> {"reply": {"ids", "first_s", "seconds", "peak_bytes"}}
    {"top2": ids}                       -> {"reply": {"gap": number}}, ours alone
    whatever cannot be                  -> {"error": words}

A process ends when its input does, or its parent. Ctrl-C at a terminal is the parent's, who then
ends them all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from spindle.errors import SpindleError

LAST_LINES = 2  # of what a process wrote to stderr before it ended


class EngineProcess:
    """A running engine; a context manager, since whoever starts a process ends it."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._stderr = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=env,
            start_new_session=True,  # Ctrl-C does not reach it
        )

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing; more than once does no harm."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # a line that it had not read when it ended
                pass

    def ask(self, **message: Any) -> dict[str, Any]:
        """One message, one reply. SpindleError: in its words why not, or that it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._ended() from None
        for line in self._process.stdout:
            answer = _object(line)
            if "error" in answer:
                raise SpindleError(answer["error"])
            if "reply" in answer:
                reply: dict[str, Any] = answer["reply"]
                return reply
        raise self._ended()

    def _ended(self) -> SpindleError:
        """Why it ended, as far as it said: the status, and the last that it wrote to stderr."""
        status = self._process.wait()
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()][-LAST_LINES:]
        return SpindleError(f"its process ended ({how}): {' / '.join(said) or 'it said nothing'}")

    def reset_peak(self) -> bool:
        """Let the peak of resident memory begin anew, where the system can (Linux: proc(5))."""
        try:
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """The peak of resident memory since `reset_peak`, which has to have said True."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise SpindleError(f"/proc/{self.pid}/status has no VmHWM")


def _object(line: bytes) -> dict[str, Any]:
    """The object in a line; an empty one where a library has printed something else."""
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
