// The emulator: fibres, threads and who of them goes next. What it is for is told in cpu_cuda.h.
//
//   1. a fibre            stacks, and how to switch between them
//   2. a thread           what it waits for; faults, told in words
//   3. shared memory      NaN before each block
//   4. what threads call  a barrier, a meeting of lanes
//   5. a block, a grid    who goes next, who may go on
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>

#include "cpu_cuda.h"

dim3 gridDim, blockDim, blockIdx, threadIdx;

// ---- 1. a fibre ---------------------------------------------------------------------------------

#if defined(__x86_64__) && defined(__linux__) && !defined(SPINDLE_UCONTEXT)

// Whoever calls a function expects six registers and the stack pointer to come back unchanged, and
// no others. So a fibre that calls this one is kept whole by its stack and where the stack ends.
extern "C" __attribute__((visibility("hidden"))) void spindle_switch(void** leave, void* enter);
asm(R"(
    .text
spindle_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)    # leave: here we go on when somebody comes back
    movq %rsi, %rsp      # enter: from here on it is the other's stack
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret                  # to wherever that one had called spindle_switch
)");

namespace emulator {

constexpr size_t STACK_BYTES = 64 << 10;

struct Fibre { void* stack_end; };

void switch_fibre(Fibre& leave, Fibre& enter) { spindle_switch(&leave.stack_end, enter.stack_end); }

// A stack that looks as if `entry` had been about to start when it was left.
void prepare(Fibre& fibre, char* stack, void (*entry)()) {
  void** end = reinterpret_cast<void**>(stack + STACK_BYTES);
  *--end = nullptr;  // where entry would return to; it never does
  *--end = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--end = nullptr;
  fibre.stack_end = end;
}

}  // namespace emulator

#else  // the same by the C library: slower, as each switch also asks the system for its signals

#include <ucontext.h>

namespace emulator {

constexpr size_t STACK_BYTES = 64 << 10;

struct Fibre { ucontext_t context; };

void switch_fibre(Fibre& leave, Fibre& enter) { swapcontext(&leave.context, &enter.context); }

void prepare(Fibre& fibre, char* stack, void (*entry)()) {
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = stack;
  fibre.context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&fibre.context, entry, 0);
}

}  // namespace emulator

#endif

namespace emulator {

// ---- 2. a thread --------------------------------------------------------------------------------

constexpr unsigned MOST_THREADS = 1024;  // a block, as on a GPU
enum State { READY, AT_BARRIER, AT_SHUFFLE, RETURNED };

struct Thread {
  Fibre fibre;
  dim3 index;
  State state;
  // While it waits: in which call, at which line; in a shuffle also for which lanes of its warp,
  // whose value it is to get, and what it gives.
  const char* call;
  Site site;
  unsigned lanes;
  int source;
  uint64_t given, got;
  // Of each lane of its warp: up to when this thread knows what that one did.
  uint32_t clock[warpSize];
};

Thread threads[MOST_THREADS];
int num_threads;    // in the block that runs
Thread* self;       // the one that runs
Fibre scheduler;    // the one that chooses, on the stack of whoever launched the grid
uint32_t barriers;  // that were passed, in all blocks so far

char report[1024];  // the first fault since it was last asked for; empty if there was none

bool faulty() { return report[0] != '\0'; }

__attribute__((format(printf, 1, 2))) void fault(const char* format, ...) {
  if (faulty()) return;
  va_list values;
  va_start(values, format);
  std::vsnprintf(report, sizeof report, format, values);
  va_end(values);
}

// For a fault inside a thread: the grid ends here, and no fibre of it is gone on with.
[[noreturn]] void give_up() {
  switch_fibre(self->fibre, scheduler);
  __builtin_unreachable();
}

struct Text { char text[256]; };

Text words(const char* what, dim3 index) {
  Text out;
  std::snprintf(out.text, sizeof out, "%s (%u, %u, %u)", what, index.x, index.y, index.z);
  return out;
}

// "(3, 0, 0) waits in __syncthreads() at rmsnorm.cu:41"
Text words(const Thread& thread) {
  Text out;
  const dim3 at = thread.index;
  if (thread.state == RETURNED)
    std::snprintf(out.text, sizeof out, "(%u, %u, %u) has returned", at.x, at.y, at.z);
  else
    std::snprintf(out.text, sizeof out, "(%u, %u, %u) waits in %s() at %s:%d", at.x, at.y, at.z,
                  thread.call, thread.site.file, thread.site.line);
  return out;
}

bool in_thread, in_atomic;  // whose code is running, for cpu_checks.h

void wait(State state, const char* call, Site site) {
  self->state = state;
  self->call = call;
  self->site = site;
  switch_fibre(self->fibre, scheduler);
}

// ---- 3. shared memory ---------------------------------------------------------------------------

// What a block finds in shared memory is whatever was there. Here it is NaN, in every float type,
// so that a value that nobody wrote is seen.
constexpr int POISON = 0xff;
constexpr size_t MOST_SHARED_BYTES = 48 << 10;  // a block, unless more is asked for

alignas(128) char dynamic_bytes[MOST_SHARED_BYTES];
alignas(128) char static_bytes[MOST_SHARED_BYTES];
size_t num_dynamic_bytes, num_static_bytes;

void poison_shared() {
  std::memset(dynamic_bytes, POISON, sizeof dynamic_bytes);
  std::memset(static_bytes, POISON, sizeof static_bytes);
}

void* dynamic_memory() { return dynamic_bytes; }

// Room for one more __shared__ variable; a library has few, so each keeps its own for good.
void* new_static_memory(size_t bytes) {
  char* start = static_bytes + num_static_bytes;
  num_static_bytes += (bytes + 15) / 16 * 16;
  if (num_static_bytes <= MOST_SHARED_BYTES) return start;
  fault("the __shared__ variables of this source have more than 48 kB");
  give_up();
}

// ---- 4. what threads call -----------------------------------------------------------------------

bool exists(const Thread* thread) { return thread < threads + num_threads; }
int lane_of(const Thread& thread) { return int(&thread - threads) % warpSize; }
Thread* warp_of(const Thread& thread) { return threads + (&thread - threads) / 32 * 32; }
bool names(unsigned lanes, int lane) { return lanes >> lane & 1; }

int own_lane() { return lane_of(*self); }

void wait_for_block(Site site) { wait(AT_BARRIER, "__syncthreads", site); }

uint64_t meet(const char* call, unsigned lanes, uint64_t value, int source, Site site) {
  if (!names(lanes, own_lane()) || !names(lanes, source)) {
    fault("%s:%d: %s in %s calls %s() for the lanes 0x%08x, %s", site.file, site.line,
          words("thread", self->index).text, words("block", blockIdx).text, call, lanes,
          names(lanes, source) ? "but is none of them" : "but reads from another");
    give_up();
  }
  self->given = value;
  self->lanes = lanes;
  self->source = source;
  wait(AT_SHUFFLE, call, site);
  return self->got;
}

// ---- 5. a block, a grid -------------------------------------------------------------------------

// In which order threads, warps and blocks are gone on with, where several could be.
enum Order { UP, DOWN, RANDOM };
int order = UP;
uint64_t random_state = 1;

uint64_t random_below(uint64_t limit) {  // an LCG; its upper bits are the good ones (Knuth, 3.3.4)
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (random_state >> 33) % limit;
}

// 0 .. count-1 in the order that is set; a random one is drawn anew each time (Fisher and Yates).
void arrange(unsigned* turns, unsigned count) {
  for (unsigned i = 0; i < count; ++i) turns[i] = order == DOWN ? count - 1 - i : i;
  if (order != RANDOM) return;
  for (unsigned i = count; i > 1; --i) {
    unsigned& other = turns[random_below(i)];
    const unsigned last = turns[i - 1];
    turns[i - 1] = other;
    other = last;
  }
}

void resume(Thread& thread) {
  self = &thread;
  threadIdx = thread.index;
  in_thread = true;
  switch_fibre(scheduler, thread.fibre);
  in_thread = false;
}

// Whether all the lanes that this one waits for wait in the same call; a fault if they cannot.
bool is_met(const Thread& thread) {
  Thread* warp = warp_of(thread);
  for (int lane = 0; lane < warpSize; ++lane) {
    const Thread& other = warp[lane];
    if (!names(thread.lanes, lane)) continue;
    if (!exists(&other) || other.state == RETURNED) {
      fault("%s:%d: %s() in %s: %s waits for lane %d, which %s", thread.site.file,
            thread.site.line, thread.call, words("block", blockIdx).text,
            words("thread", thread.index).text, lane,
            exists(&other) ? "has returned" : "the block does not have");
      return false;
    }
    const bool here = other.state == AT_SHUFFLE && other.site == thread.site;
    if (!here || other.lanes != thread.lanes) return false;
  }
  return true;
}

// What one of these lanes did so far, all of them know (vector clocks: Fidge 1988, Mattern 1989).
void join_clocks(Thread* warp, unsigned lanes) {
  uint32_t joined[warpSize] = {};
  for (int lane = 0; lane < warpSize; ++lane)
    for (int i = 0; i < warpSize && names(lanes, lane); ++i)
      joined[i] = max(joined[i], warp[lane].clock[i]);
  for (int lane = 0; lane < warpSize; ++lane) {
    if (!names(lanes, lane)) continue;
    std::memcpy(warp[lane].clock, joined, sizeof joined);
    ++warp[lane].clock[lane];
  }
}

// Let the lanes go on that have met, each with the value that it asked for; whether any has.
bool release_lanes(Thread* warp) {
  for (Thread* one = warp; one < warp + warpSize && exists(one); ++one) {
    if (one->state != AT_SHUFFLE || !is_met(*one)) continue;
    const unsigned lanes = one->lanes;
    for (int lane = 0; lane < warpSize; ++lane)
      if (names(lanes, lane)) warp[lane].got = warp[warp[lane].source].given;
    for (int lane = 0; lane < warpSize; ++lane)
      if (names(lanes, lane)) warp[lane].state = READY;
    // Of a shuffle CUDA says that it orders no memory: it hands a value over, and no more.
    if (std::strcmp(one->call, "__syncwarp") == 0) join_clocks(warp, lanes);
    return true;
  }
  return false;
}

// One warp for as long as it can, so that it gets as far ahead of the others as a GPU allows.
void run_warp(Thread* warp) {
  unsigned turns[warpSize];
  const int lanes = min(warpSize, int(threads + num_threads - warp));
  do {
    arrange(turns, lanes);
    for (int i = 0; i < lanes; ++i)
      if (!faulty() && warp[turns[i]].state == READY) resume(warp[turns[i]]);
  } while (!faulty() && release_lanes(warp));
}

// Whether every thread waits at the same barrier: then all go on.
bool release_block() {
  for (Thread* one = threads; exists(one); ++one)
    if (one->state != AT_BARRIER || !(one->site == threads->site)) return false;
  for (Thread* one = threads; exists(one); ++one) one->state = READY;
  ++barriers;
  return true;
}

// Nobody can go on, and not all have returned: name one who waits, and one whom it waits for.
void report_stuck() {
  const Thread* waiting = threads;
  while (exists(waiting) && waiting->state == RETURNED) ++waiting;
  if (!exists(waiting)) return;
  int here = 0;
  const Thread* missing = nullptr;
  for (const Thread* one = threads; exists(one); ++one) {
    const bool with = one->state != RETURNED && one->site == waiting->site;
    here += with;
    if (!with && missing == nullptr) missing = one;
  }
  fault("%s:%d: %s() in %s is reached by %d of %d threads, %s among them; %s%s",
        waiting->site.file, waiting->site.line, waiting->call, words("block", blockIdx).text, here,
        num_threads, words("thread", waiting->index).text, missing ? "thread " : "",
        missing ? words(*missing).text : "they do not wait for the same lanes");
}

const Grid* running;

void thread_main() {
  running->body(running->arguments);
  self->state = RETURNED;
  switch_fibre(self->fibre, scheduler);
}

char* stack_of(int thread) {  // a page of it takes memory only when it is first used
  static char* stacks = static_cast<char*>(mmap(nullptr, MOST_THREADS * STACK_BYTES,
      PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  return stacks + thread * STACK_BYTES;
}

void run_block() {
  unsigned turns[MOST_THREADS / warpSize];
  const int warps = (num_threads + warpSize - 1) / warpSize;
  poison_shared();
  ++barriers;
  for (int i = 0; i < num_threads; ++i) {
    const unsigned x = i % blockDim.x, rows = i / blockDim.x;
    threads[i].index = dim3(x, rows % blockDim.y, rows / blockDim.y);
    threads[i].state = READY;
    std::memset(threads[i].clock, 0, sizeof threads[i].clock);
    threads[i].clock[i % warpSize] = 1;
    prepare(threads[i].fibre, stack_of(i), thread_main);
  }
  do {
    arrange(turns, warps);
    for (int i = 0; i < warps && !faulty(); ++i) run_warp(threads + turns[i] * warpSize);
  } while (!faulty() && release_block());
  if (!faulty()) report_stuck();
}

// What a GPU refuses to start.
bool can_start(dim3 grid, dim3 block, size_t shared_bytes) {
  const uint64_t count = uint64_t(block.x) * block.y * block.z;
  if (count == 0 || count > MOST_THREADS || block.z > 64)
    fault("a block of %u x %u x %u threads: it may have 1 to 1024, and 64 along z", block.x,
          block.y, block.z);
  if (uint64_t(grid.x) * grid.y * grid.z == 0 || grid.x > 0x7fffffff || max(grid.y, grid.z) > 65535)
    fault("a grid of %u x %u x %u blocks: none may be 0, and y and z are at most 65535", grid.x,
          grid.y, grid.z);
  if (shared_bytes > MOST_SHARED_BYTES)
    fault("%zu bytes of shared memory: a block has %zu", shared_bytes, MOST_SHARED_BYTES);
  return !faulty();
}

void run_grid(const Grid& one) {
  if (faulty() || !can_start(one.grid, one.block, one.shared_bytes)) return;
  running = &one;
  gridDim = one.grid;
  blockDim = one.block;
  num_threads = blockDim.x * blockDim.y * blockDim.z;
  num_dynamic_bytes = one.shared_bytes;
  const unsigned blocks = gridDim.x * gridDim.y * gridDim.z;
  unsigned* turns = new unsigned[blocks];
  arrange(turns, blocks);
  for (unsigned i = 0; i < blocks && !faulty(); ++i) {
    const unsigned rows = turns[i] / gridDim.x;
    blockIdx = dim3(turns[i] % gridDim.x, rows % gridDim.y, rows / gridDim.y);
    run_block();
  }
  delete[] turns;
}

}  // namespace emulator

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// For Python: the order of the launches to come, UP, DOWN or RANDOM, and its seed.
EXPORTED void spindle_set_order(int order, uint64_t seed) {
  emulator::order = order;
  emulator::random_state = seed;
}

// For Python: the fault in words, and with that it is told; empty if there was none.
EXPORTED const char* spindle_take_report() {
  static char taken[sizeof emulator::report];
  std::memcpy(taken, emulator::report, sizeof taken);
  emulator::report[0] = '\0';
  return taken;
}

}  // extern "C"

#include "cpu_checks.h"
