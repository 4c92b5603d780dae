"""Every turn of a kernel's threads in the emulator, kept: who ran, why it stopped, what was shared.

    turns = fibres.record(text, "run_norm", out, x, weight, 1, 8, 1e-5)

The emulator runs one thread at a time and lets it go on until it has to wait or returns
(csrc/cpu_cuda.h). Here its source has a log for as long as it takes to compile.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from spindle.kernels import emulate

STATES = ("ready", "at a barrier", "in a shuffle", "returned")  # as cpu_cuda.cpp counts them
MOST_TURNS, MOST_THREADS, MOST_WORDS = 4096, 1024, 256

RESUME = """void resume(Thread& thread) {
  self = &thread;
  threadIdx = thread.index;
  in_thread = true;
  switch_fibre(scheduler, thread.fibre);
"""
RESUMED = RESUME.replace("  switch", "  Turn* turn = begin_turn(thread);\n  switch")
LOG = """
struct Turn {
  int32_t block, thread, stopped, line, threads, words;
  char states[MOST_THREADS];
  float memory[MOST_WORDS];
};

extern "C" {
__attribute__((visibility("default"))) Turn spindle_turns[MOST_TURNS];
__attribute__((visibility("default"))) int64_t spindle_num_turns;
}

Turn* begin_turn(const Thread& thread) {
  if (spindle_num_turns++ >= MOST_TURNS) return nullptr;
  Turn* turn = spindle_turns + spindle_num_turns - 1;
  turn->block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  turn->thread = &thread - threads;
  turn->threads = num_threads;
  for (int i = 0; i < num_threads; ++i) turn->states[i] = threads[i].state;
  return turn;
}

void end_turn(Turn* turn, const Thread& thread) {
  if (turn == nullptr) return;
  turn->stopped = thread.state;
  turn->line = thread.site.line;
  const bool fixed = num_static_bytes > 0;
  const size_t bytes = min(fixed ? num_static_bytes : num_dynamic_bytes, sizeof turn->memory);
  turn->words = bytes / sizeof(float);
  std::memcpy(turn->memory, fixed ? static_bytes : dynamic_bytes, bytes);
}

"""
SIZES = f"constexpr int MOST_TURNS = {MOST_TURNS}, MOST_WORDS = {MOST_WORDS};"
LOGGED = f"{SIZES}{LOG}{RESUMED}  end_turn(turn, thread);\n"


class Turn(NamedTuple):
    """One thread's turn, from where it was gone on with to where it stopped.

    states: of every thread of its block while it runs, its own among them: STATES. stopped: what it
    is then, waiting in source line `line`. memory: shared memory after it, as float32; NaN where
    nobody has written.
    """

    block: int
    thread: int
    states: tuple[str, ...]
    stopped: str
    line: int
    memory: tuple[float, ...]


class _Turn(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("block", "thread", "stopped", "line")),
        ("threads", ctypes.c_int32),
        ("words", ctypes.c_int32),
        ("states", ctypes.c_char * MOST_THREADS),
        ("memory", ctypes.c_float * MOST_WORDS),
    )


def record(text: str, launcher: str, *arguments: emulate.Argument, file: str = "") -> list[Turn]:
    """Compile CUDA C++ as `emulate.library` does, call a launcher, and return all its turns.

    `emulate.thread_order` holds here too. Of shared memory the first 256 words are kept: those of
    `__shared__` variables, or failing them what the launch asked for. Changes what the kernel
    writes to. OSError, KernelFault: as `emulate.library` and `emulate.call`. ValueError: there were
    more turns than are kept.
    """
    with emulate.edited("cpu_cuda.cpp", RESUME, LOGGED):
        library = emulate.library(text, file or f"{launcher}.cu")
    count = ctypes.c_int64.in_dll(library, "spindle_num_turns")
    count.value = 0
    emulate.call(library, launcher, *arguments)
    if count.value > MOST_TURNS:
        raise ValueError(f"{count.value:,} turns; at most {MOST_TURNS:,} are kept")
    turns = (_Turn * MOST_TURNS).in_dll(library, "spindle_turns")
    return [_turn(turn) for turn in turns[: count.value]]


def _turn(turn: _Turn) -> Turn:
    states = ctypes.string_at(ctypes.addressof(turn) + _Turn.states.offset, turn.threads)
    return Turn(
        turn.block,
        turn.thread,
        tuple(STATES[state] for state in states),
        STATES[turn.stopped],
        turn.line,
        tuple(turn.memory[: turn.words]),
    )
