// What the kernels share: element types, vectors of 16 bytes, sums over a warp and over a block.
//
// nvcc compiles this; so does g++, behind cpu_cuda.h, which has what the CUDA headers have.
#pragma once

#ifndef SPINDLE_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#endif

constexpr int WARP = 32;
constexpr unsigned WHOLE_WARP = 0xffffffff;
constexpr int VECTOR_BYTES = 16;  // the most that one thread loads at once

// ---- elements: stored in T, computed with in float ----------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

__device__ __forceinline__ void store(float& to, float x) { to = x; }
__device__ __forceinline__ void store(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }
__device__ __forceinline__ void store(__half& to, float x) { to = __float2half(x); }

// x as it would be after having been stored in T.
template <class T> __device__ __forceinline__ float rounded(float x) {
  T stored;
  store(stored, x);
  return to_float(stored);
}

// ---- V elements that lie side by side, loaded and stored by one instruction ---------------------

template <class T, int V> struct alignas(sizeof(T) * V) Pack { T at[V]; };

template <int V, class T> __device__ __forceinline__ Pack<T, V> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, V>*>(from);
}

template <int V, class T> __device__ __forceinline__ void store_pack(T* to, const Pack<T, V>& x) {
  *reinterpret_cast<Pack<T, V>*>(to) = x;
}

// Whether rows of `bytes` bytes from here on all start where a vector may start.
inline bool is_aligned(const void* start, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(start) % VECTOR_BYTES == 0 && bytes % VECTOR_BYTES == 0;
}

// ---- sums ---------------------------------------------------------------------------------------

// The sum over a warp, in each of its lanes. All 32 must be there.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int apart = WARP / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, apart);
  return x;
}

// The sum over a block, in each of its threads: a multiple of 32, in one dimension.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[WARP];  // one for each warp
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  x = warp_sum(x);
  if (lane == 0) sums[warp] = x;
  __syncthreads();  // all sums are there before anyone reads one
  x = lane < blockDim.x / WARP ? sums[lane] : 0.0f;
  __syncthreads();  // all have been read before a next call writes
  return warp_sum(x);
}

// ---- from the host ------------------------------------------------------------------------------

enum Dtype { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };  // as emulate.py counts them

// run(T{}) with the type that is meant; what it returns, a CUDA status.
template <class Run> int by_dtype(int64_t dtype, Run run) {
  if (dtype == FLOAT32) return run(float{});
  if (dtype == BFLOAT16) return run(__nv_bfloat16{});
  if (dtype == FLOAT16) return run(__half{});
  return cudaErrorInvalidValue;
}

// Threads for `count` pieces of work: whole warps, not more than `most`.
inline unsigned threads_for(int64_t count, unsigned most) {
  const int64_t whole = (count + WARP - 1) / WARP * WARP;
  return whole < most ? unsigned(whole) : most;
}
