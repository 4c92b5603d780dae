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
// int8_linear: the same over integers in -127..127, each output's with a scale of its own. They are
// widened to floats, exactly, as they are read: a quarter of the bytes, the same sums in the same
// order, and at the end one product with the scale.
//
// paged_attend: a query over the keys that it sees, block by block of its row's table. Scores,
// softmax and the weighted sum are taken in an order that the number of keys alone decides, so a
// query's result depends on nothing beside it. Keys and values are read where they lie, a block from
// end to end, and come out of memory once for all the query heads that share them.
//
// The other ops do little work, in torch by many small passes over the same row: here it is one.
// Each row is by itself, so its bits do not depend on the rows beside it either.
//
// spindle_run: a list of such calls, one after another, without Python between them.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int NR = 32;    // outputs in a panel
constexpr int KB = 512;   // inputs in a block: 64 kB of panel
constexpr int AHEAD = 8192;  // bytes of panel that are asked for before they are needed
#ifdef __AVX512F__
constexpr int MR = 12;    // rows at a time: 24 of 32 registers hold sums
#else
constexpr int MR = 3;     // 12 of 16 registers of half the width
#endif

typedef float Half __attribute__((vector_size(NR / 2 * sizeof(float)), aligned(sizeof(float))));

// Half a row of a panel as floats.
inline void widen(const float* w, Half& out) { out = *reinterpret_cast<const Half*>(w); }

inline void widen(const int8_t* w, Half& out) {
#if defined(__AVX512F__)  // what gcc does not make of the portable form below
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
  out = (Half)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(w + 8 * half));
    const __m256 floats = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    std::memcpy(reinterpret_cast<char*>(&out) + half * sizeof floats, &floats, sizeof floats);
  }
#else
  typedef int8_t Bytes __attribute__((vector_size(NR / 2), aligned(1)));
  typedef int16_t Shorts __attribute__((vector_size(NR)));
  typedef int32_t Ints __attribute__((vector_size(2 * NR)));
  const Shorts shorts = __builtin_convertvector(*reinterpret_cast<const Bytes*>(w), Shorts);
  out = __builtin_convertvector(__builtin_convertvector(shorts, Ints), Half);
#endif
}

// R rows of x [R, K] from column k on, times `depth` rows of a panel; added to y [R, N].
template <int R, typename W>
void tile(const float* x, const W* panel, float* y, int64_t K, int64_t N, int64_t depth, int width,
          const float* bias) {
  Half sum[R][2] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const W* at = panel + k * NR;
    const char* ahead = reinterpret_cast<const char*>(at) + AHEAD;
    for (size_t line = 0; line < NR * sizeof(W); line += 64)
      __builtin_prefetch(ahead + line);  // past the end it does nothing
    Half w[2];
    widen(at, w[0]);
    widen(at + NR / 2, w[1]);
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

// y[T, N] of a panel's outputs, times their scales, plus their biases.
void rescale(float* y, const float* scale, const float* bias, int64_t T, int64_t N, int width) {
  for (int64_t t = 0; t < T; ++t)
    for (int n = 0; n < width; ++n) y[t * N + n] = y[t * N + n] * scale[n] + bias[n];
}

template <typename W>
void multiply(const float* x, const W* panels, const float* scale, const float* bias, float* y,
              int64_t T, int64_t K, int64_t N, int threads) {
  const int64_t count = (N + NR - 1) / NR;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < count; ++p) {
    const int64_t n = p * NR;
    const int width = static_cast<int>(std::min<int64_t>(NR, N - n));
    const float* add = bias != nullptr ? bias + n : zeros;
    const float* start = scale != nullptr ? zeros : add;
    for (int64_t k = 0; k < K; k += KB) {
      const int64_t depth = std::min<int64_t>(KB, K - k);
      const auto go_over = [&](const auto* block) {
        for (int64_t t = 0; t < T; t += MR)
          tile_of<MR>(static_cast<int>(std::min<int64_t>(MR, T - t)), x + t * K + k, block,
                      y + t * N + n, K, N, depth, width, k == 0 ? start : nullptr);
      };
      const W* block = panels + (p * K + k) * NR;
      if (std::is_same_v<W, float> || T <= 2 * MR) {
        go_over(block);
      } else {  // once, not once for every MR rows
        float wide[KB * NR];
        for (int64_t i = 0; i < depth * NR; i += NR / 2)
          widen(block + i, *reinterpret_cast<Half*>(wide + i));
        go_over(static_cast<const float*>(wide));
      }
    }
    if (scale != nullptr) rescale(y + n, scale + n, add, T, N, width);
  }
}

template <typename W>
void to_panels(const W* w, W* panels, int64_t N, int64_t K, int threads) {
  const int64_t count = (N + NR - 1) / NR;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t p = 0; p < count; ++p)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t n = 0; n < NR; ++n)
        panels[(p * K + k) * NR + n] = p * NR + n < N ? w[(p * NR + n) * K + k] : W{};
}

}  // namespace

extern "C" void spindle_linear(const float* x, const float* panels, const float* bias, float* y,
                               int64_t T, int64_t K, int64_t N, int threads) {
  multiply(x, panels, nullptr, bias, y, T, K, N, threads);
}

extern "C" void spindle_int8_linear(const float* x, const int8_t* panels, const float* scale,
                                    const float* bias, float* y, int64_t T, int64_t K, int64_t N,
                                    int threads) {
  multiply(x, panels, scale, bias, y, T, K, N, threads);
}

// w [N, K] -> panels [N/32, K, 32], the last one filled up with zeros.
extern "C" void spindle_pack(const float* w, float* panels, int64_t N, int64_t K, int threads) {
  to_panels(w, panels, N, K, threads);
}

extern "C" void spindle_int8_pack(const int8_t* w, int8_t* panels, int64_t N, int64_t K,
                                  int threads) {
  to_panels(w, panels, N, K, threads);
}

namespace {

constexpr int LANES = 16;
constexpr int64_t NEAR = 32;  // positions of a sequence that attention takes at a time
constexpr int64_t ALONE = 1 << 15;  // numbers that one thread has done before a second is awake
typedef float V __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int32_t I __attribute__((vector_size(LANES * sizeof(int32_t))));

const V& at(const float* x) { return *reinterpret_cast<const V*>(x); }
V& at(float* x) { return *reinterpret_cast<V*>(x); }

// The sum of all lanes, half onto half: no lane waits for the one before.
float total(V lanes) {
  typedef float V8 __attribute__((vector_size(8 * sizeof(float))));
  typedef float V4 __attribute__((vector_size(4 * sizeof(float))));
  V8 eights[2];
  std::memcpy(eights, &lanes, sizeof eights);
  const V8 eight = eights[0] + eights[1];
  V4 fours[2];
  std::memcpy(fours, &eight, sizeof fours);
  const V4 four = fours[0] + fours[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

float sum_of(const float* x, int64_t n) {
  V sum = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sum += at(x + i);
  float result = total(sum);
  for (; i < n; ++i) result += x[i];
  return result;
}

float dot(const float* a, const float* b, int64_t n) {
  V sum = {};
  int64_t d = 0;
  for (; d + LANES <= n; d += LANES) sum += at(a + d) * at(b + d);
  float result = total(sum);
  for (; d < n; ++d) result += a[d] * b[d];
  return result;
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7 (the
// coefficients are those of Cephes' expf, Moshier 1992). 0 where float32 has no normal number.
V exp_of(V x) {
  const V low = V{} - 87.33654f, shifter = V{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds
  const V y = x < low ? low : x;
  const V n = (y * 1.44269504f + shifter) - shifter;
  const V r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const I exponent = (__builtin_convertvector(n, I) + 127) << 23;
  V power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < low ? V{} : p * power;
}

// scores [room], a multiple of 16 and filled up with -inf -> their softmax.
void softmax(float* scores, int64_t room) {
  V peaks = at(scores), sums = {};
  for (int64_t s = LANES; s < room; s += LANES)
    peaks = at(scores + s) > peaks ? at(scores + s) : peaks;
  float lanes[LANES];
  std::memcpy(lanes, &peaks, sizeof lanes);
  const float peak = *std::max_element(lanes, lanes + LANES);
  for (int64_t s = 0; s < room; s += LANES) {
    at(scores + s) = exp_of(at(scores + s) - peak);
    sums += at(scores + s);
  }
  const float sum = total(sums);
  for (int64_t s = 0; s < room; s += LANES) at(scores + s) /= sum;
}

// The same for W vectors of it, from sum and x on: W sums that do not wait for one another.
template <int W>
void add_weighted(const float* weights, const float* x, float* sum, int64_t count, int64_t stride) {
  V parts[W];
  std::memcpy(parts, sum, sizeof parts);
  for (int64_t s = 0; s < count; ++s)
    for (int w = 0; w < W; ++w) parts[w] += weights[s] * at(x + s * stride + w * LANES);
  std::memcpy(sum, parts, sizeof parts);
}

// sum [D] += weights [count] times x [count, D], the rows of x being `stride` floats apart.
void add_weighted(const float* weights, const float* x, float* sum, int64_t count, int64_t stride,
                  int64_t D) {
  int64_t d = 0;
  for (; d + 4 * LANES <= D; d += 4 * LANES)
    add_weighted<4>(weights, x + d, sum + d, count, stride);
  for (; d + LANES <= D; d += LANES) add_weighted<1>(weights, x + d, sum + d, count, stride);
  for (; d < D; ++d)
    for (int64_t s = 0; s < count; ++s) sum[d] += weights[s] * x[s * stride + d];
}

// A row's positions, block by block: calls visit(s, count, rows) for the `count` of them from s on,
// no more than all of its heads can go over while they are in the nearest cache. What comes next, in
// rows of `width` floats, is asked for meanwhile: a block lies anywhere.
template <typename Visit>
void each_block(const float* cache, const int64_t* table, int64_t S, int64_t P, int64_t stride,
                int64_t width, Visit visit) {
  const auto rows = [&](int64_t s) { return cache + (table[s / P] * P + s % P) * stride; };
  const int64_t most = std::min(P, NEAR);
  for (int64_t s = 0, next; s < S; s = next) {
    next = std::min(std::min(s + most, s - s % P + P), S);
    for (int64_t p = next; p < std::min(next + most, S) && p / P == next / P; ++p)
      for (int64_t d = 0; d < width; d += LANES)
        __builtin_prefetch(rows(next) + (p - next) * stride + d);
    visit(s, next - s, rows(s));
  }
}

}  // namespace

// q, out [T, H, D], C queries a row, those of q `apart` floats from one to the next; keys, values
// [N, P, Hk, D]; tables [T / C, B]; lengths [T / C].
extern "C" void spindle_paged_attend(const float* q, const float* keys, const float* values,
                                     const int64_t* tables, const int64_t* lengths, float* out,
                                     int64_t T, int64_t C, int64_t H, int64_t Hk, int64_t D,
                                     int64_t P, int64_t B, int64_t apart, float scale,
                                     int threads) {
  const int64_t G = H / Hk, stride = Hk * D;
  const int64_t span = T < 2 * threads ? 1 : Hk;  // key heads a task: few queries are divided so
  const int64_t heads = span * G;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < T * (Hk / span); ++task) {
    const int64_t t = task / (Hk / span), first = task % (Hk / span) * span, r = t / C;
    const int64_t S = lengths[r] - (C - 1 - t % C);  // the keys that it sees
    const float* query = q + t * apart + first * G * D;
    float* result = out + (t * H + first * G) * D;
    std::fill(result, result + heads * D, 0.0f);
    if (S < 1) continue;
    const int64_t room = (S + LANES - 1) / LANES * LANES;
    std::vector<float> scores(heads * room, -INFINITY);
    const auto blocks_of = [&](const float* cache, auto visit) {
      each_block(cache + first * D, tables + r * B, S, P, stride, span * D, visit);
    };
    blocks_of(keys, [&](int64_t s, int64_t count, const float* block) {
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t p = 0; p < count; ++p)
          scores[h * room + s + p] = dot(query + h * D, block + p * stride + h / G * D, D) * scale;
    });
    for (int64_t h = 0; h < heads; ++h) softmax(&scores[h * room], room);
    blocks_of(values, [&](int64_t s, int64_t count, const float* block) {
      for (int64_t h = 0; h < heads; ++h)
        add_weighted(&scores[h * room + s], block + h / G * D, result + h * D, count, stride, D);
    });
  }
}

// x, out [T, E]; weight [E]. Where there is a residual [T, E], x is added to it and it is normed.
extern "C" void spindle_rms_norm(const float* x, float* residual, const float* weight, float* out,
                                 int64_t T, int64_t E, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (T * E > ALONE)
  for (int64_t t = 0; t < T; ++t) {
    const float* row = x + t * E;
    if (residual != nullptr) {
      float* sum = residual + t * E;
      for (int64_t e = 0; e < E; ++e) sum[e] += row[e];
      row = sum;
    }
    const float scale = 1.0f / std::sqrt(dot(row, row, E) / E + eps);
    for (int64_t e = 0; e < E; ++e) out[t * E + e] = weight[e] * (row[e] * scale);
  }
}

// x, out [T, E]; weight, bias [E]. Where there is a residual [T, E], as above.
extern "C" void spindle_layer_norm(const float* x, float* residual, const float* weight,
                                   const float* bias, float* out, int64_t T, int64_t E, float eps,
                                   int threads) {
#pragma omp parallel for num_threads(threads) if (T * E > ALONE)
  for (int64_t t = 0; t < T; ++t) {
    const float* row = x + t * E;
    float* to = out + t * E;
    if (residual != nullptr) {
      float* sum = residual + t * E;
      for (int64_t e = 0; e < E; ++e) sum[e] += row[e];
      row = sum;
    }
    const float mean = sum_of(row, E) / E;
    for (int64_t e = 0; e < E; ++e) to[e] = row[e] - mean;
    const float scale = 1.0f / std::sqrt(dot(to, to, E) / E + eps);
    for (int64_t e = 0; e < E; ++e) to[e] = to[e] * scale * weight[e] + bias[e];
  }
}

namespace {

// One row's heads [heads, D], `stride` floats apart, by the angles of cos, sin [D/2].
void turn(float* x, const float* cos, const float* sin, int64_t heads, int64_t D, int64_t stride) {
  for (int64_t h = 0; h < heads; ++h) {
    float *a = x + h * stride, *b = a + D / 2;
    for (int64_t d = 0; d < D / 2; ++d) {
      const float before = a[d];
      a[d] = before * cos[d] - b[d] * sin[d];
      b[d] = b[d] * cos[d] + before * sin[d];
    }
  }
}

}  // namespace

// q [T, H, D], k [T, Hk, D], whose rows and heads may lie apart; cos, sin [T, D/2].
extern "C" void spindle_rope(float* q, float* k, const float* cos, const float* sin, int64_t T,
                             int64_t H, int64_t Hk, int64_t D, int64_t q_row, int64_t q_head,
                             int64_t k_row, int64_t k_head, int threads) {
#pragma omp parallel for num_threads(threads) if (T * (H + Hk) * D > ALONE)
  for (int64_t t = 0; t < T; ++t) {
    const float *c = cos + t * (D / 2), *s = sin + t * (D / 2);
    turn(q + t * q_row, c, s, H, D, q_head);
    turn(k + t * k_row, c, s, Hk, D, k_head);
  }
}

namespace {

// 1 / (1 + e^-x): the exponential of -|x| cannot overflow.
V sigmoid(V x) {
  const V e = exp_of(x < 0 ? x : -x);
  return (x < 0 ? e : V{} + 1.0f) / (1.0f + e);
}

V silu(V x) { return x * sigmoid(x); }

// x times the tanh form of the normal distribution function, as (1 + tanh z) / 2 = sigmoid(2 z).
V gelu_tanh(V x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

// to[n] = f(a[n], b[n]), sixteen at a time.
template <typename F>
void each(const float* a, const float* b, float* to, int64_t n, F f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) at(to + i) = f(at(a + i), at(b + i));
  if (i < n) {
    V last[2] = {};
    std::memcpy(&last[0], a + i, (n - i) * sizeof(float));
    std::memcpy(&last[1], b + i, (n - i) * sizeof(float));
    last[0] = f(last[0], last[1]);
    std::memcpy(to + i, &last[0], (n - i) * sizeof(float));
  }
}

}  // namespace

// gate_up [T, 2F], gate first; out [T, F].
extern "C" void spindle_silu_mul(const float* gate_up, float* out, int64_t T, int64_t F,
                                 int threads) {
#pragma omp parallel for num_threads(threads) if (T * F > ALONE)
  for (int64_t t = 0; t < T; ++t) {
    const float *gate = gate_up + t * 2 * F, *up = gate + F;
    each(gate, up, out + t * F, F, [](V g, V u) { return silu(g) * u; });
  }
}

// x, out [T, F].
extern "C" void spindle_gelu_tanh(const float* x, float* out, int64_t T, int64_t F, int threads) {
#pragma omp parallel for num_threads(threads) if (T * F > ALONE)
  for (int64_t t = 0; t < T; ++t) {
    const float* row = x + t * F;
    each(row, row, out + t * F, F, [](V a, V) { return gelu_tanh(a); });
  }
}

// Row t of rows [T, width], `apart` floats from the one before, into slot slots[t] of a cache
// [count, width]. Returns 1, and has written nothing, where there is no such slot.
extern "C" int spindle_write_kv(float* cache, const int64_t* slots, const float* rows, int64_t T,
                                int64_t count, int64_t width, int64_t apart, int) {
  for (int64_t t = 0; t < T; ++t)
    if (slots[t] < 0 || slots[t] >= count) return 1;
  for (int64_t t = 0; t < T; ++t)
    std::memcpy(cache + slots[t] * width, rows + t * apart, width * sizeof(float));
  return 0;
}

// out[0] = the sum of x[n], read from end to end as a panel is: no op of a model, but the measure of
// how fast they can be. (A plain sum does not ask ahead, and is a tenth slower.)
extern "C" void spindle_read(const float* x, float* out, int64_t n, int threads) {
  constexpr int64_t PART = 1 << 14;
  float sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
  for (int64_t start = 0; start < n; start += PART) {
    const int64_t end = std::min(n, start + PART);
    V lanes[4] = {};
    int64_t i = start;
    for (; i + 4 * LANES <= end; i += 4 * LANES)
      for (int lane = 0; lane < 4; ++lane) {
        __builtin_prefetch(reinterpret_cast<const char*>(x + i + lane * LANES) + AHEAD);
        lanes[lane] += at(x + i + lane * LANES);
      }
    sum += total(lanes[0] + lanes[1]) + total(lanes[2] + lanes[3]);
    for (; i < end; ++i) sum += x[i];
  }
  out[0] = sum;
}

namespace {

// An argument of an op from the word of 64 bits that it was written as.
template <typename T>
T argument(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_floating_point_v<T>) {
    double number;
    std::memcpy(&number, &word, sizeof number);
    return static_cast<T>(number);
  } else {
    return static_cast<T>(word);
  }
}

// Calls the op with a word for each of its parameters; 0 unless it says otherwise.
template <typename R, typename... P, size_t... N>
int apply(R (*op)(P...), const int64_t* words, std::index_sequence<N...>) {
  if constexpr (std::is_void_v<R>) {
    op(argument<P>(words[N])...);
    return 0;
  } else {
    return op(argument<P>(words[N])...);
  }
}

template <typename R, typename... P>
constexpr size_t arity(R (*)(P...)) {
  return sizeof...(P);
}

template <auto op>
int call(const int64_t* words) {
  return apply(op, words, std::make_index_sequence<arity(op)>{});
}

struct Entry {
  const char* name;
  int (*call)(const int64_t* words);
};

const Entry entries[] = {
    {"linear", call<spindle_linear>},
    {"int8_linear", call<spindle_int8_linear>},
    {"rms_norm", call<spindle_rms_norm>},
    {"layer_norm", call<spindle_layer_norm>},
    {"rope", call<spindle_rope>},
    {"silu_mul", call<spindle_silu_mul>},
    {"gelu_tanh", call<spindle_gelu_tanh>},
    {"write_kv", call<spindle_write_kv>},
    {"paged_attend", call<spindle_paged_attend>},
};

}  // namespace

// The number by which a program calls an op; -1 if it cannot.
extern "C" int64_t spindle_number(const char* name) {
  for (const Entry& entry : entries)
    if (std::strcmp(entry.name, name) == 0) return &entry - entries;
  return -1;
}

// Runs a program of `calls`, each written as the op's number, how many words follow, and these: its
// arguments, the last of which, the number of threads, is filled in here. `seconds` [calls] gets
// how long each took, if it is there. Returns 0, or n where the n-th call failed and was the last.
extern "C" int64_t spindle_run(int64_t* program, int64_t calls, int threads, double* seconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t n = 0; n < calls; ++n) {
    const int64_t number = program[0], words = program[1];
    program[1 + words] = threads;
    const Clock::time_point start = seconds != nullptr ? Clock::now() : Clock::time_point{};
    if (entries[number].call(program + 2) != 0) return n + 1;
    if (seconds != nullptr)
      seconds[n] = std::chrono::duration<double>(Clock::now() - start).count();
    program += 2 + words;
  }
  return 0;
}
