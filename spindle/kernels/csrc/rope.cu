// Rotary angles, in place, on q [T, H, D] and k [T, Hk, D] at once. twins.py has the specification:
// rope (Su et al. 2021).
//
// One block a token. A thread takes pairs (i, i + D/2) of one head after another, reads both halves
// and only then writes both: nobody else touches them, so in place needs no barrier.
#include "common.cuh"

template <class T>
__device__ __forceinline__ void turn(T* head, int i, int half, float cos, float sin) {
  const float a = to_float(head[i]), b = to_float(head[i + half]);
  store(head[i], a * cos - b * sin);
  store(head[i + half], b * cos + a * sin);
}

// The strides say how many elements lie between tokens, and between heads.
template <class T>
__global__ void rope_kernel(T* q, T* k, const float* cos, const float* sin, int H, int Hk, int half,
                            int64_t q_token, int64_t q_head, int64_t k_token, int64_t k_head) {
  const int64_t token = blockIdx.x;
  for (int pair = threadIdx.x; pair < (H + Hk) * half; pair += blockDim.x) {
    const int head = pair / half, i = pair % half;
    T* start = head < H ? q + token * q_token + head * q_head
                        : k + token * k_token + (head - H) * k_head;
    turn(start, i, half, cos[token * half + i], sin[token * half + i]);
  }
}

// cos, sin [T, D/2] are float32 and contiguous, whatever q and k are.
extern "C" int spindle_rope(void* q, void* k, const void* cos, const void* sin, int64_t tokens,
                            int64_t H, int64_t Hk, int64_t D, int64_t q_token, int64_t q_head,
                            int64_t k_token, int64_t k_head, int64_t dtype, void* stream) {
  if (tokens == 0) return cudaSuccess;
  return by_dtype(dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    const unsigned threads = threads_for((H + Hk) * D / 2, 512);
    rope_kernel<T><<<unsigned(tokens), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<T*>(q), static_cast<T*>(k), static_cast<const float*>(cos),
        static_cast<const float*>(sin), int(H), int(Hk), int(D / 2), q_token, q_head, k_token,
        k_head);
    return cudaGetLastError();
  });
}
