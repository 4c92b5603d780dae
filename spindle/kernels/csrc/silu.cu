// silu(gate) * up for gate_up [rows, 2 * width], gate first. twins.py has the specification:
// silu_mul (Shazeer 2020, SwiGLU).
//
// No element depends on another: a thread takes V of them, 16 bytes where the rows allow it.
// Along x the grid has a block a row, along y the pieces of a row.
#include "common.cuh"

constexpr unsigned SILU_THREADS = 256;

template <class T, int V>
__global__ void silu_mul_kernel(const T* gate_up, T* out, int64_t width) {
  const int64_t row = blockIdx.x;
  const int64_t i = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * V;
  if (i >= width) return;
  Pack<T, V> gate = load_pack<V>(gate_up + row * 2 * width + i);
  const Pack<T, V> up = load_pack<V>(gate_up + row * 2 * width + width + i);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const float g = to_float(gate.at[v]);
    const float silu = rounded<T>(g / (1.0f + expf(-g)));  // rounded here too, as the twin does it
    store(gate.at[v], silu * to_float(up.at[v]));
  }
  store_pack<V>(out + row * width + i, gate);
}

template <class T, int V>
void launch_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width,
                     cudaStream_t stream) {
  const int64_t packs = (width + V - 1) / V;
  const unsigned threads = threads_for(packs, SILU_THREADS);
  const dim3 grid(rows, (packs + threads - 1) / threads);
  silu_mul_kernel<T, V><<<grid, threads, 0, stream>>>(static_cast<const T*>(gate_up),
                                                      static_cast<T*>(out), width);
}

extern "C" int spindle_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width,
                                int64_t dtype, void* stream) {
  if (rows == 0) return cudaSuccess;
  return by_dtype(dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    const int64_t bytes = width * sizeof(T);
    const bool vectors = is_aligned(gate_up, bytes) && is_aligned(out, bytes);
    const auto launch = vectors ? launch_silu_mul<T, VECTOR_BYTES / sizeof(T)>
                                : launch_silu_mul<T, 1>;
    launch(gate_up, out, rows, width, static_cast<cudaStream_t>(stream));
    return cudaGetLastError();
  });
}
