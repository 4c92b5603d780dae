"""The emulated kernels under the compilers' own sanitizers: a second opinion on cpu_checks.h.

A program of its own without Python: the sources and a main that launches them, on the emulator
without its checks. AddressSanitizer looks at each address, ThreadSanitizer at who knew what of
whom, for which it is told where fibres change, and where they meet.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spindle.kernels import build, emulate

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or build.compiler() is None, reason="no C++ compiler, or no Linux"
)

# Rows of 3, 40 and all keys, and `past` more, in blocks of 16: 9 heads on 3 in fp32, head
# size 32, two queries a row, one split and two. Then three rows of a norm. Each in three orders.
MAIN = """
#line 1 "main.cpp"
#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" void spindle_set_order(int order, uint64_t seed);
extern "C" const char* spindle_take_report();

int attend(int64_t B, int64_t past) {
  const int64_t R = 3, C = 2, H = 9, Hk = 3, D = 32, P = 16, splits = (B * P + 255) / 256;
  std::vector<float> q(R * C * H * D, 0.5f), keys(R * B * P * Hk * D, 0.25f), out(q.size());
  std::vector<float> values(keys), means(R * C * H * splits * D), lse(R * C * H * splits);
  std::vector<int64_t> tables(R * B), lengths = {3, 40, B * P + past};
  for (int64_t i = 0; i < R * B; ++i) tables[i] = R * B - 1 - i;
  const int status = spindle_paged_attend(q.data(), keys.data(), values.data(), tables.data(),
      lengths.data(), out.data(), means.data(), lse.data(), R, C, H, Hk, D, P, B, 0.1f, 0, nullptr);
  for (float x : out)
    if (!(std::fabs(x - 0.25f) < 1e-5f)) return 1;
  return status;
}

int norm() {
  std::vector<float> x(3 * 1000, 2.0f), weight(1000, 1.0f), out(x.size());
  const int status = spindle_rms_norm(x.data(), nullptr, weight.data(), out.data(), 3, 1000, 0.0f,
                                      0, nullptr);
  for (float y : out)
    if (!(std::fabs(y - 1.0f) < 1e-5f)) return 1;
  return status;
}

int main(int, char** arguments) {
  int failed = 0;
  for (int order = 0; order < 3; ++order) {
    spindle_set_order(order, 1);
    failed += attend(3, std::atoi(arguments[1])) + attend(19, 0) + norm();
  }
  std::printf("failed: %d %s\\n", failed, spindle_take_report());
}
"""

# What ThreadSanitizer has to be told: what to put in the place of a piece of cpu_cuda.cpp. A switch
# of fibres does not make what one did known to the other; a meeting does, by a token of its own.
PRELUDE = """
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
char of_barrier[1 << 16], of_warp[32][1 << 14], begun, finished;
"""
RELEASED_AND_ACQUIRED = "  __tsan_release(token);\n  {};\n  __tsan_acquire(token);"
TOLD = {
    "struct Fibre { void* stack_end; };": "struct Fibre { void *stack_end, *tsan; };",
    "{ spindle_switch(&leave": "{ __tsan_switch_to_fiber(enter.tsan, 1); spindle_switch(&leave",
    "  fibre.stack_end = end;": """  fibre.stack_end = end;
  if (fibre.tsan == nullptr) fibre.tsan = __tsan_create_fiber(0);""",
    "  uint32_t clock[warpSize];": "  uint32_t clock[warpSize], meetings;",
    '{ wait(AT_BARRIER, "__syncthreads", site); }': "{\n"
    "  char* token = of_barrier + barriers % sizeof of_barrier;\n"
    + RELEASED_AND_ACQUIRED.format('wait(AT_BARRIER, "__syncthreads", site)')
    + "\n}",
    "  wait(AT_SHUFFLE, call, site);": (
        "  char* meetings = of_warp[(self - threads) / 32];\n"
        "  char* token = meetings + self->meetings++ % sizeof *of_warp;\n"
        + RELEASED_AND_ACQUIRED.format("wait(AT_SHUFFLE, call, site)")
    ),
    "  running->body(running->arguments);": """  __tsan_acquire(&begun);
  running->body(running->arguments);""",
    "  self->state = RETURNED;": "  self->state = RETURNED;\n  __tsan_release(&finished);",
    "  poison_shared();": "  poison_shared();\n  __tsan_release(&begun);",
    "  if (!faulty()) report_stuck();": """  __tsan_acquire(&finished);
  if (!faulty()) report_stuck();""",
    "  running = &one;": "  running = &one;\n  scheduler.tsan = __tsan_get_current_fiber();",
}
# The emulator's own variable behind a __shared__ one is set by whoever comes first.
SHARED = "template <class T, class Place> T& shared(Place)"
NOT_LOOKED_AT = SHARED.replace("> T&", '> __attribute__((no_sanitize("thread"))) T&')


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def compiled(folder: Path, sanitizer: str, changes: dict[str, str]) -> Path:
    """The program, from the sources with these changes; fp32 and head size 32 alone."""
    sources = emulate.source("decode.cu"), emulate.source("rmsnorm.cu")
    text = emulate.unit(sources[0] + replaced(sources[1], '#include "common.cuh"', ""), "decode.cu")
    machine = emulate._inlined("cpu_language.h", "cpu_cuda.h", "cpu_cuda.cpp")
    other_types = r"  if \(dtype == (BFLOAT16|FLOAT16)\) .*\n|  if \(D == (64|80|96|128)\) .*\n"
    text = re.sub(other_types, "", text)
    if sanitizer == "thread":
        text = replaced(text, SHARED, NOT_LOOKED_AT)
        machine = PRELUDE + machine
        for old, new in TOLD.items():
            machine = replaced(machine, old, new)
    for old, new in changes.items():
        text = replaced(text, old, new)
    (folder / "machine.cpp").write_text(machine)
    (folder / "kernels.cpp").write_text(text + MAIN)
    command = [build.compiler(), *emulate.FLAGS, "-O1", "-g1"]
    subprocess.run(
        [*command, "-c", "machine.cpp", "-o", "machine.o"], cwd=folder, check=True, timeout=120
    )
    flags = ["-DSPINDLE_EMULATED", f"-fsanitize={sanitizer}", "kernels.cpp", "machine.o"]
    subprocess.run([*command, *flags, "-o", "program"], cwd=folder, check=True, timeout=120)
    return folder / "program"


def run(program: Path, past: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(past)], capture_output=True, text=True, timeout=120)


def works(sanitizer: str, folder: Path) -> None:
    """Skip, loudly, where the compiler has no such library, or it does not run."""
    (folder / "empty.cpp").write_text("int main() {}")
    command = [build.compiler(), f"-fsanitize={sanitizer}", "empty.cpp", "-o", "empty"]
    made = subprocess.run(command, cwd=folder, capture_output=True).returncode == 0
    if not made or subprocess.run([folder / "empty"], capture_output=True).returncode:
        pytest.skip(f"NO {sanitizer.upper()} SANITIZER HERE: the kernels do not run under it")


@pytest.fixture(scope="module", params=["address", "thread"])
def sanitized(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    works(request.param, folder)
    return compiled(folder, request.param, {})


def test_the_kernels_are_clean(sanitized):
    """In every order; and their results are right."""
    done = run(sanitized)
    assert (done.returncode, done.stdout, done.stderr) == (0, "failed: 0 \n", "")


def test_address_sanitizer_reports_a_length_one_past_the_table(tmp_path):
    works("address", tmp_path)
    done = run(compiled(tmp_path, "address", {}), past=1)
    line = line_of("table[j / p.P]")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr
    assert re.search(rf"READ of size 8 .*\n    #0 .* prepare<.*decode\.cu:{line}\n", done.stderr)


RACES = {  # a barrier, and whose lines are without it: who writes, who reads
    "  __syncthreads();  // all have read the weights: the sums take their room\n": (
        "room.sums[group][m][column + w] = sum[m][w]",
        "load_pack<4>(&room.scores[key][m])",
    ),
    "  __syncthreads();  // and the sums of all groups\n": (
        "room.sums[group][m][column + w] = sum[m][w]",
        "sum += room.sums[group][m][d]",
    ),
}


@pytest.mark.parametrize("barrier", RACES, ids=["weights read", "sums"])
def test_thread_sanitizer_reports_a_missing_barrier_with_both_lines(barrier, tmp_path):
    works("thread", tmp_path)
    done = run(compiled(tmp_path, "thread", {barrier: "\n"}))
    assert done.returncode != 0 and "WARNING: ThreadSanitizer: data race" in done.stderr
    writes, reads = (rf"decode\.cu:{line_of(code)}\b" for code in RACES[barrier])
    races = done.stderr.split("WARNING: ")
    assert any(re.search(writes, race) and re.search(reads, race) for race in races)


def line_of(code: str) -> int:
    text = emulate.source("decode.cu")
    assert text.count(code) == 1, code
    return text[: text.index(code)].count("\n") + 1
