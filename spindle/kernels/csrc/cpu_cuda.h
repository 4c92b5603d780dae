// CUDA on one CPU thread: as much of the language as the kernels beside this file use, so that they
// can be run, and checked, where there is no GPU. It is for correctness; speed it has none.
//
// The idea: a CUDA thread becomes a fibre, a function with a stack of its own that can be left in
// the middle and gone on with later. One OS thread runs all fibres of a block, one at a time, each
// until it has to wait for others (a barrier, a shuffle) or returns. So nothing ever happens at the
// same time, and what comes of a race depends on who goes first. That is ours to choose: up, down,
// or a random order of a seed. Correct code gives the same in every order.
//
//   cpu_language.h  the words that need no emulator: keywords, dim3, float4, __half
//   this file       what a kernel sees of the emulator: barriers, shuffles, shared memory, launches
//   cpu_cuda.cpp    the emulator: fibres, and who goes next
//   cpu_checks.h    each access to memory looked at: addresses, bounds, races
//
// emulate.py puts the first two before a kernel's source, in which it rewrites what is no C++:
//   kernel<<<grid, block, bytes, stream>>>(args)  ->  emulator::launch(kernel, grid, ...)(args)
//   __shared__ float sums[32];                    ->  auto& sums = emulator::shared<float[32]>(...)
//   extern __shared__ float row[];                ->  auto* row = emulator::dynamic_shared<float>()
//
// Not emulated: what blocks see of each other's writes while both run, tensor cores, asynchronous
// copies, streams, and all that makes a GPU fast or slow.
#pragma once

#include "cpu_language.h"

namespace emulator {

// Where in the source a call stands. As a default argument it is evaluated at the call.
struct Site {
  const char* file;
  int line;
  static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Site& other) const {
    return line == other.line && std::strcmp(file, other.file) == 0;
  }
};

// What cpu_cuda.cpp does for a thread. `meet` waits for the lanes of a call, gives them a value and
// returns that of lane `source`. While `in_atomic` is set, an access is no race.
int own_lane();
void wait_for_block(Site site);
uint64_t meet(const char* call, unsigned lanes, uint64_t value, int source, Site site);
void* dynamic_memory();
void* new_static_memory(size_t bytes);
extern bool in_atomic;

struct Grid {
  dim3 grid, block;
  size_t shared_bytes;
  void (*body)(void*);  // what each thread runs: the kernel, with its arguments behind the pointer
  void* arguments;
  size_t argument_bytes;
};
void run_grid(const Grid& grid);
bool faulty();  // whether a fault was seen, and Python has not asked for it yet

}  // namespace emulator

namespace emulator {
namespace {  // nothing below is known to any other library

// A variable for each place where it is written: every [] {} in a source has a type of its own.
template <class T, class Place> T& shared(Place) {
  static void* memory = new_static_memory(sizeof(T));
  return *static_cast<T*>(memory);
}

template <class T> T* dynamic_shared() { return static_cast<T*>(dynamic_memory()); }

// launch(kernel, grid, block)(arguments) is kernel<<<grid, block>>>(arguments), done on return.
template <class... P>
auto launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes = 0,
            cudaStream_t = nullptr) {
  return [=](P... values) {
    auto call = [=] { kernel(values...); };
    const auto body = [](void* pointer) { (*static_cast<decltype(call)*>(pointer))(); };
    run_grid({grid, block, shared_bytes, body, &call, sizeof call});
  };
}

// Meet the lanes in one call: give them a value, and get that of lane `source`.
template <class T> T exchange(const char* call, unsigned lanes, T value, int source, Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle passes on 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = meet(call, lanes, bits, source, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The lane to read from: one beyond our part of the warp, `width` lanes, means our own.
inline int lane_or_own(int source, int width) {
  return source >= 0 && source / width == own_lane() / width ? source : own_lane();
}

}  // namespace
}  // namespace emulator

namespace {

using emulator::Site;

inline void __syncthreads(Site site = Site::here()) {
  emulator::wait_for_block(site);
}

inline void __syncwarp(unsigned lanes = 0xffffffff, Site site = Site::here()) {
  emulator::exchange("__syncwarp", lanes, 0, emulator::own_lane(), site);
}

template <class T>
T __shfl_sync(unsigned lanes, T value, int source, int width = 32, Site site = Site::here()) {
  const int first = emulator::own_lane() / width * width;
  return emulator::exchange("__shfl_sync", lanes, value, first + (source & (width - 1)), site);
}

template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask, int width = 32, Site site = Site::here()) {
  const int source = emulator::lane_or_own(emulator::own_lane() ^ mask, width);
  return emulator::exchange("__shfl_xor_sync", lanes, value, source, site);
}

template <class T>
T __shfl_down_sync(unsigned lanes, T value, int by, int width = 32, Site site = Site::here()) {
  const int source = emulator::lane_or_own(emulator::own_lane() + by, width);
  return emulator::exchange("__shfl_down_sync", lanes, value, source, site);
}

template <class T> T atomicAdd(T* to, T value) {  // nobody comes between: one thread runs at a time
  emulator::in_atomic = true;
  const T before = *to;
  *to = before + value;
  emulator::in_atomic = false;
  return before;
}

inline cudaError_t cudaGetLastError() {
  return emulator::faulty() ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace
