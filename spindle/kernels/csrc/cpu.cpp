// Native CPU forms of the ops. Each has a twin in twins.py, which says what is computed.
//
// linear: y[T, N] = x[T, K] w[N, K]^T + bias[N], the weight lying in panels [N/32, K, 32].
//
// A panel holds 32 outputs' weights side by side for each k, so a step of one row reads it from end
// to end, as fast as memory gives it. More rows share what was read: MR rows of sums stay in
// registers while a block of the panel passes by once.
//
// Every sum is taken in one order, whatever T and whatever the number of threads: block by block of
// K, within a block k by k, then the blocks in turn. So a row has the same bits alone and in any
// batch. (Blocks also keep the rounding error near sqrt(K) rather than K, and the panel in cache.)

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int NR = 32;    // outputs in a panel
constexpr int KB = 512;   // inputs in a block: 64 kB of panel
constexpr int AHEAD = 64; // inputs that are asked for before they are needed: 8 kB of panel
#ifdef __AVX512F__
constexpr int MR = 12;    // rows at a time: 24 of 32 registers hold sums
#else
constexpr int MR = 3;     // 12 of 16 registers of half the width
#endif

typedef float Half __attribute__((vector_size(NR / 2 * sizeof(float)), aligned(sizeof(float))));

// R rows of x [R, K] from column k on, times `depth` rows of a panel; added to y [R, N].
template <int R>
void tile(const float* x, const float* panel, float* y, int64_t K, int64_t N, int64_t depth,
          int width, const float* bias) {
  Half sum[R][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const float* at = panel + k * NR;
    __builtin_prefetch(at + AHEAD * NR);  // two lines of 64 bytes; past the end it does nothing
    __builtin_prefetch(at + AHEAD * NR + NR / 2);
    const Half* w = reinterpret_cast<const Half*>(at);
    for (int r = 0; r < R; ++r) {
      sum[r][0] += x[r * K + k] * w[0];
      sum[r][1] += x[r * K + k] * w[1];
    }
  }
  for (int r = 0; r < R; ++r) {
    float out[NR];
    std::memcpy(out, sum[r], sizeof out);
    float* to = y + r * N;
    if (bias != nullptr)  // the first block: what was in y is of no account
      for (int n = 0; n < width; ++n) to[n] = bias[n] + out[n];
    else
      for (int n = 0; n < width; ++n) to[n] += out[n];
  }
}

// The tile for a number of rows known only now, 1 to R.
template <int R, typename... Args>
void tile_of(int rows, Args... args) {
  if constexpr (R > 0) {
    if (rows == R)
      tile<R>(args...);
    else
      tile_of<R - 1>(rows, args...);
  }
}

const float zeros[NR] = {};

}  // namespace

extern "C" void spindle_linear(const float* x, const float* panels, const float* bias, float* y,
                               int64_t T, int64_t K, int64_t N, int threads) {
  const int64_t count = (N + NR - 1) / NR;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < count; ++p) {
    const int64_t n = p * NR;
    const int width = static_cast<int>(std::min<int64_t>(NR, N - n));
    const float* start = bias != nullptr ? bias + n : zeros;
    for (int64_t k = 0; k < K; k += KB) {
      const float* block = panels + (p * K + k) * NR;
      for (int64_t t = 0; t < T; t += MR)
        tile_of<MR>(static_cast<int>(std::min<int64_t>(MR, T - t)), x + t * K + k, block,
                    y + t * N + n, K, N, std::min<int64_t>(KB, K - k), width,
                    k == 0 ? start : nullptr);
    }
  }
}

// w [N, K] -> panels [N/32, K, 32], the last one filled up with zeros.
extern "C" void spindle_pack(const float* w, float* panels, int64_t N, int64_t K, int threads) {
  const int64_t count = (N + NR - 1) / NR;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < count; ++p)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t n = 0; n < NR; ++n)
        panels[(p * K + k) * NR + n] = p * NR + n < N ? w[(p * NR + n) * K + k] : 0.0f;
}
