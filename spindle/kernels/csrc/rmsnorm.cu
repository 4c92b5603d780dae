// RMS norm of each row of x [rows, width], alone or after adding x to a residual. twins.py has the
// specification: rms_norm, add_rms_norm (Zhang and Sennrich 2019).
//
// One block a row. A thread takes V elements at a time, 16 bytes where the row allows it. The row
// comes out of memory once: between the sum of its squares and the scaling it waits in shared
// memory, where each thread finds what it put there itself, so no barrier is needed for it.
#include "common.cuh"

template <class T, int V>
__global__ void rms_norm_kernel(const T* x, T* residual, const T* weight, T* out, int64_t width,
                                float eps) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* row = reinterpret_cast<T*>(shared_bytes);  // [width]
  const int64_t start = blockIdx.x * width;
  const int first = threadIdx.x * V, step = blockDim.x * V;

  float squares = 0.0f;
  for (int64_t i = first; i < width; i += step) {
    Pack<T, V> values = load_pack<V>(x + start + i);
    if (residual != nullptr) {
      const Pack<T, V> before = load_pack<V>(residual + start + i);
#pragma unroll
      for (int v = 0; v < V; ++v)
        store(values.at[v], to_float(before.at[v]) + to_float(values.at[v]));
      store_pack<V>(residual + start + i, values);
    }
    store_pack<V>(row + i, values);
#pragma unroll
    for (int v = 0; v < V; ++v) squares += to_float(values.at[v]) * to_float(values.at[v]);
  }

  const float scale = rsqrtf(block_sum(squares) / width + eps);
  for (int64_t i = first; i < width; i += step) {
    Pack<T, V> values = load_pack<V>(row + i);
    const Pack<T, V> factors = load_pack<V>(weight + i);
#pragma unroll
    for (int v = 0; v < V; ++v) {  // rounded before the weight too, as the twin does it
      const float normed = rounded<T>(to_float(values.at[v]) * scale);
      store(values.at[v], normed * to_float(factors.at[v]));
    }
    store_pack<V>(out + start + i, values);
  }
}

template <class T, int V>
void launch_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows,
                     int64_t width, float eps, cudaStream_t stream) {
  const unsigned threads = threads_for((width + V - 1) / V, 1024);
  rms_norm_kernel<T, V><<<unsigned(rows), threads, width * sizeof(T), stream>>>(
      static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight),
      static_cast<T*>(out), width, eps);
}

constexpr int64_t MOST_ROW_BYTES = 47 << 10;  // of the 48 kB that a block has without asking

// residual [rows, width], or null for a plain norm; x is added to it in place. All are contiguous.
extern "C" int spindle_rms_norm(const void* x, void* residual, const void* weight, void* out,
                                int64_t rows, int64_t width, float eps, int64_t dtype,
                                void* stream) {
  if (rows == 0) return cudaSuccess;
  return by_dtype(dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    const int64_t bytes = width * sizeof(T);
    if (bytes > MOST_ROW_BYTES) return cudaErrorInvalidValue;
    const bool vectors = is_aligned(x, bytes) && is_aligned(residual, bytes) &&
                         is_aligned(weight, bytes) && is_aligned(out, bytes);
    const auto launch = vectors ? launch_rms_norm<T, VECTOR_BYTES / sizeof(T)>
                                : launch_rms_norm<T, 1>;
    launch(x, residual, weight, out, rows, width, eps, static_cast<cudaStream_t>(stream));
    return cudaGetLastError();
  });
}
