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
// batch. (Blocks also keep what is read of a panel in the cache while further rows pass over it.)
//
// paged_attend: one query a row over that row's keys, found block by block through its table.
// Scores, softmax and the weighted sum are taken in the order of the positions, so a row's result
// depends on nothing beside it. Keys and values are read where they lie, once for all the query
// heads that share them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

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

namespace {

constexpr int LANES = 16;
typedef float V __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int32_t I __attribute__((vector_size(LANES * sizeof(int32_t))));

float dot(const float* a, const float* b, int64_t n) {
  V sum = {};
  int64_t d = 0;
  for (; d + LANES <= n; d += LANES)
    sum += *reinterpret_cast<const V*>(a + d) * *reinterpret_cast<const V*>(b + d);
  float total = 0.0f;
  for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
  for (; d < n; ++d) total += a[d] * b[d];
  return total;
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7 (the
// coefficients are those of Cephes' expf, Moshier 1992). Below -87 it is 0 but for 1e-38.
V exp_of(V x) {
  const V low = V{} - 87.0f, shifter = V{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds
  x = x < low ? low : x;
  const V n = (x * 1.44269504f + shifter) - shifter;
  const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
  V power;
  std::memcpy(&power, &exponent, sizeof power);
  return p * power;
}

// scores [S] -> e^(score - max); returns the sum. Room for a multiple of 16 is behind `scores`.
float softmax(float* scores, int64_t S) {
  const float peak = *std::max_element(scores, scores + S);
  float total = 0.0f;
  for (int64_t s = S; s % LANES != 0; ++s) scores[s] = peak - 1000.0f;  // adds nothing
  for (int64_t s = 0; s < S; s += LANES) {
    V* at = reinterpret_cast<V*>(scores + s);
    *at = exp_of(*at - peak);
    for (int64_t lane = 0; lane < std::min<int64_t>(LANES, S - s); ++lane) total += (*at)[lane];
  }
  return total;
}

}  // namespace

// q, out [R, H, D]; keys, values [N, P, Hk, D]; tables [R, B]; lengths [R], 1 or more.
extern "C" void spindle_paged_attend(const float* q, const float* keys, const float* values,
                                     const int64_t* tables, const int64_t* lengths, float* out,
                                     int64_t R, int64_t H, int64_t Hk, int64_t D, int64_t P,
                                     int64_t B, float scale, int threads) {
  const int64_t G = H / Hk;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < R * Hk; ++task) {
    const int64_t r = task / Hk, head = task % Hk, S = lengths[r];
    const int64_t room = (S + LANES - 1) / LANES * LANES;
    const auto at = [&](int64_t s) {
      return ((tables[r * B + s / P] * P + s % P) * Hk + head) * D;
    };
    std::vector<float> scores(G * room);
    const float* query = q + (r * H + head * G) * D;
    float* result = out + (r * H + head * G) * D;
    for (int64_t s = 0; s < S; ++s)
      for (int64_t g = 0; g < G; ++g)
        scores[g * room + s] = dot(query + g * D, keys + at(s), D) * scale;
    for (int64_t g = 0; g < G; ++g) {
      const float total = softmax(&scores[g * room], S);
      for (int64_t s = 0; s < S; ++s) scores[g * room + s] /= total;
    }
    std::fill(result, result + G * D, 0.0f);
    for (int64_t s = 0; s < S; ++s)
      for (int64_t g = 0; g < G; ++g)
        for (int64_t d = 0; d < D; ++d)
          result[g * D + d] += scores[g * room + s] * values[at(s) + d];
  }
}
