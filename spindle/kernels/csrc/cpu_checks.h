// What cpu_cuda.h cannot see: each access to memory. The compiler shows it to us.
//
// g++ can put a call before every load and store, and before every index into an array; this is how
// ThreadSanitizer and UndefinedBehaviorSanitizer get their word in. Their libraries are not linked:
// the functions that are called are these, and they know which thread of which block is running.
//
//   alignment   a GPU refuses a load of 16 bytes from an address that is no multiple of 16
//   bounds      an index beyond an array of known size reads a neighbour, in silence
//   memory      a kernel may touch the tensors that it was given, shared memory, and its own stack
//   races       two threads touch the same byte of shared memory, one of them writes it, and no
//               barrier of the block or, inside a warp, __syncwarp is between the two
//
// Races between blocks, and in global memory, are not looked for.
//
// This is the end of cpu_cuda.cpp. Kernels are compiled with such calls, the emulator without.
#pragma once

extern "C" {  // where this library lies in memory; the linker knows
extern char __ehdr_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));
}

namespace emulator {

struct Memory { const char* start; size_t bytes; };
Memory tensors[32];  // of this call
int num_tensors;
bool watch_races = true;

bool is_inside(const char* start, size_t size, const char* address, size_t bytes) {
  return address >= start && address + bytes <= start + size;
}

bool may_touch(const char* address, size_t bytes) {
  if (is_inside(stack_of(int(self - threads)), STACK_BYTES, address, bytes)) return true;
  for (int i = 0; i < num_tensors; ++i)
    if (is_inside(tensors[i].start, tensors[i].bytes, address, bytes)) return true;
  const char* arguments = static_cast<char*>(running->arguments);
  if (is_inside(arguments, running->argument_bytes, address, bytes)) return true;
  return is_inside(&__ehdr_start, &_end - &__ehdr_start, address, bytes);  // constants, ourselves
}

// Who touched a byte of shared memory last, when, and where in the machine code.
struct Touch { uint32_t barrier, clock; int thread; const char* code; };
struct Touches { Touch write, read, other_read; };  // of two readers, one is not the next writer
Touches of_dynamic[MOST_SHARED_BYTES], of_static[MOST_SHARED_BYTES];

Touches* touches_of(const char* address) {
  if (is_inside(dynamic_bytes, MOST_SHARED_BYTES, address, 1))
    return of_dynamic + (address - dynamic_bytes);
  if (is_inside(static_bytes, MOST_SHARED_BYTES, address, 1))
    return of_static + (address - static_bytes);
  return nullptr;
}

// Whether that happened before what this thread does now, on every GPU.
bool is_before(const Touch& touch) {
  const Thread& other = threads[touch.thread];
  if (touch.barrier != barriers || &other == self) return true;
  return warp_of(other) == warp_of(*self) && touch.clock <= self->clock[lane_of(other)];
}

// A place in the machine code, for emulate.py to turn into a line: its distance from our start.
unsigned long place(const char* code) { return code - &__ehdr_start - 1; }

void report_race(const Touch& first, const char* did, const char* code, bool writes) {
  fault("{%lx}: %s in %s %s shared memory that %s %s at {%lx}, and no barrier is between them",
        place(code), words("thread", threadIdx).text, words("block", blockIdx).text,
        writes ? "writes" : "reads", words("thread", threads[first.thread].index).text, did,
        place(first.code));
  give_up();
}

void check_races(Touches* byte, const char* code, bool writes) {
  if (!is_before(byte->write)) report_race(byte->write, "wrote", code, writes);
  if (writes && !is_before(byte->read)) report_race(byte->read, "read", code, writes);
  if (writes && !is_before(byte->other_read)) report_race(byte->other_read, "read", code, writes);
  const Touch now = {barriers, self->clock[lane_of(*self)], int(self - threads), code};
  (writes ? byte->write : is_before(byte->read) ? byte->read : byte->other_read) = now;
}

// The tensor that the address lies in or behind; failing that, the first.
const Memory& nearest_to(const char* address) {
  const Memory* nearest = tensors;
  for (Memory* one = tensors; one < tensors + num_tensors; ++one)
    if (one->start <= address && (nearest->start > address || one->start >= nearest->start))
      nearest = one;
  return *nearest;
}

void report_outside(const char* address, size_t bytes, const char* code, bool writes) {
  const bool dynamic = is_inside(dynamic_bytes, MOST_SHARED_BYTES, address, bytes);
  const Memory& memory = nearest_to(address);
  fault("{%lx}: %s in %s %s %zu bytes from byte %td on of %s, which has %zu", place(code),
        words("thread", threadIdx).text, words("block", blockIdx).text, writes ? "writes" : "reads",
        bytes, address - (dynamic ? dynamic_bytes : memory.start),
        dynamic ? "dynamic shared memory" : "a tensor", dynamic ? num_dynamic_bytes : memory.bytes);
  give_up();
}

void check_access(const char* address, size_t bytes, const char* code, bool writes) {
  if (!in_thread) return;
  const bool dynamic = is_inside(dynamic_bytes, MOST_SHARED_BYTES, address, bytes);
  if (dynamic ? !is_inside(dynamic_bytes, num_dynamic_bytes, address, bytes)
              : !may_touch(address, bytes))
    report_outside(address, bytes, code, writes);
  Touches* touches = watch_races && !in_atomic ? touches_of(address) : nullptr;
  for (size_t i = 0; touches != nullptr && i < bytes; ++i) check_races(touches + i, code, writes);
}

struct Checked { const char* file; uint32_t line, column; };

void report_checked(const void* at, const char* what, uint64_t which) {
  const Checked* where = static_cast<const Checked*>(at);
  fault("%s:%u: %s in %s: %s %#llx", where->file, where->line, words("thread", threadIdx).text,
        words("block", blockIdx).text, what, (unsigned long long)which);
  if (in_thread) give_up();
}

}  // namespace emulator

extern "C" {

// For Python: the tensors of the next call, and whether races are faults.
EXPORTED void spindle_set_memory(const char* const* starts, const int64_t* bytes, int count,
                                 int races) {
  using namespace emulator;
  num_tensors = min(count, int(sizeof tensors / sizeof tensors[0]));
  for (int i = 0; i < num_tensors; ++i) tensors[i] = {starts[i], size_t(bytes[i])};
  watch_races = races;
}

void __ubsan_handle_type_mismatch_v1(void* at, void* address) {
  emulator::report_checked(at, "misaligned address", uint64_t(address));
}
void __ubsan_handle_out_of_bounds(void* at, void* index) {
  emulator::report_checked(at, "beyond the array, index", uint64_t(index));
}

#define CODE static_cast<char*>(__builtin_return_address(0))
#define ON_ACCESS(bytes)                                                     \
  void __tsan_read##bytes(void* address) {                                   \
    emulator::check_access(static_cast<char*>(address), bytes, CODE, false); \
  }                                                                          \
  void __tsan_write##bytes(void* address) {                                  \
    emulator::check_access(static_cast<char*>(address), bytes, CODE, true);  \
  }
ON_ACCESS(1) ON_ACCESS(2) ON_ACCESS(4) ON_ACCESS(8) ON_ACCESS(16)
void __tsan_read_range(void* address, size_t bytes) {
  emulator::check_access(static_cast<char*>(address), bytes, CODE, false);
}
void __tsan_write_range(void* address, size_t bytes) {
  emulator::check_access(static_cast<char*>(address), bytes, CODE, true);
}
// Of use to those who keep a history of calls, which we do not.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"
