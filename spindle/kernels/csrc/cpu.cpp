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
// paged_attend: a query over the keys that it sees, which lie in the blocks of its row's table.
// They are divided into parts of 128 positions. Each part is a task, with a result of its own: the
// weighted mean of the values, and the logarithm of the sum of the exponentials that went into it
// (lse). A mean of all is a mean of such means, each with weight exp(lse): that is the merge (Dao
// et al. 2023, flash decoding). Scores, softmax and weighted sum of a part are taken in an order
// that the number of keys alone decides, and so are the parts: a query's result depends on nothing
// beside it, on no number of threads, and not on where its keys lie. Keys and values come out of
// memory once for all the query heads that share them, 16 positions while the next 16 are on their
// way.
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
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace {

constexpr int NR = 32;    // outputs in a panel
constexpr int KB = 512;   // inputs in a block: 64 kB of panel
constexpr int AHEAD = 8192;  // bytes of panel that are asked for before they are needed
#ifdef __AVX512F__
constexpr int MR = 12;    // rows at a time: 24 of 32 registers hold sums
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int MR = 3;     // 12 of 16 registers of half the width, or 24 of 32 of a quarter of it
#else
constexpr int MR = 1;     // 8 of 16 registers of a quarter of it
#endif

// So many of a panel's weights as floats.
inline void widen(const float* w, V& out) { out = at(w); }

inline void widen(const int8_t* w, V& out) {
#if defined(__AVX512F__)  // what gcc does not make of the portable form below
  out = (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)w)));
#elif defined(__AVX2__)
  out = (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)w)));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
  typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
  const Shorts shorts = __builtin_convertvector(*reinterpret_cast<const Bytes*>(w), Shorts);
  out = __builtin_convertvector(__builtin_convertvector(shorts, I), V);
#endif
}

// R rows of x [R, K] from column k on, times `depth` rows of a panel; added to y [R, N].
template <int R, typename W>
void tile(const float* x, const W* panel, float* y, int64_t K, int64_t N, int64_t depth, int width,
          const float* bias) {
  constexpr int VECTORS = NR / LANES;
  V sum[R][VECTORS] = {};
  for (int64_t k = 0; k < depth; ++k) {
    const W* row = panel + k * NR;
    const char* ahead = reinterpret_cast<const char*>(row) + AHEAD;
    for (size_t line = 0; line < NR * sizeof(W); line += 64)
      __builtin_prefetch(ahead + line);  // past the end it does nothing
    V w[VECTORS];
    for (int v = 0; v < VECTORS; ++v) widen(row + v * LANES, w[v]);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += x[r * K + k] * w[v];
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
        for (int64_t i = 0; i < depth * NR; i += LANES) widen(block + i, at(wide + i));
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

constexpr int64_t ALONE = 1 << 15;  // numbers that one thread has done before a second is awake

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

// scores [room], a multiple of 16 and filled up with -inf -> their softmax. Returns the logarithm
// of the sum of their exponentials. If all are -inf, that is -inf too, and the softmax NaN.
float softmax(float* scores, int64_t room) {
  V peaks = at(scores), sums = {};
  for (int64_t s = LANES; s < room; s += LANES)
    peaks = at(scores + s) > peaks ? at(scores + s) : peaks;
  float lanes[LANES];
  std::memcpy(lanes, &peaks, sizeof lanes);
  const float lowest = std::numeric_limits<float>::lowest();  // -inf minus -inf would be NaN
  const float peak = std::max(*std::max_element(lanes, lanes + LANES), lowest);
  for (int64_t s = 0; s < room; s += LANES) {
    at(scores + s) = exp_of(at(scores + s) - peak);
    sums += at(scores + s);
  }
  const float sum = total(sums), inverse = 1.0f / sum;
  for (int64_t s = 0; s < room; s += LANES) at(scores + s) *= inverse;
  return peak + std::log(sum);
}

constexpr int64_t TILE = 16;    // positions of a sequence at a time: those ahead are asked for
constexpr int64_t PART = 128;   // positions in a task, a multiple of that
constexpr int64_t REACH = 256;  // floats of a position that a task reads, unless a head has more
constexpr int HEADS = 4;        // query heads at a time, with sums in registers
typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float))));
constexpr auto lanes = std::make_integer_sequence<int, LANES>{};

// Lane i of a sum of pairs adds up this lane of a and b side by side, and the next.
constexpr int pick(int i) { return i / 4 * 4 + i % 2 * 2 + i % 4 / 2 * LANES; }

// In each four lanes: a's two sums of neighbours, then b's.
template <int... i>
V pairs(V a, V b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, pick(i)...) + __builtin_shufflevector(a, b, pick(i) + 1 ...);
#else
  const I even = {pick(i)...}, odd = {pick(i) + 1 ...};
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
#endif
}

// The sum of the lanes of each: one tree for four vectors.
Four totals(V a, V b, V c, V d) {
  const V sums = pairs(pairs(a, b, lanes), pairs(c, d, lanes), lanes);
  Four fours[LANES / 4];
  std::memcpy(fours, &sums, sizeof fours);
  for (int n = LANES / 8; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) fours[i] += fours[i + n];
  return fours[0];
}

// visit(0), ..., visit(N - 1), each number a constant: arrays that it indexes stay in registers, in
// a function that is by itself (noinline).
template <int N, typename Visit>
void unrolled(Visit visit) {
  if constexpr (N > 0) {
    unrolled<N - 1>(visit);
    visit(std::integral_constant<int, N - 1>{});
  }
}

// scores [R, 16], whose rows are PART apart = scale times q [R, D] times 16 keys: D floats of each
// row from `from` on. The rows that come 16 later are asked for meanwhile: they may lie anywhere.
template <int R>
__attribute__((noinline)) void score(const float* q, const float* const* rows, int64_t from,
                                     int64_t D, float scale, float* scores) {
  for (int s = 0; s < TILE; s += 4) {
    const float *key[4], *ahead[4];
    V sum[R][4];
    unrolled<4>([&](auto i) {
      key[i] = rows[s + i] + from;
      ahead[i] = rows[s + i + TILE] + from;
      unrolled<R>([&](auto r) { sum[r][i] = V{}; });
    });
    int64_t d = 0;
    for (; d + LANES <= D; d += LANES)
      unrolled<4>([&](auto i) {
        __builtin_prefetch(ahead[i] + d);
        unrolled<R>([&](auto r) { sum[r][i] += at(q + r * D + d) * at(key[i] + d); });
      });
    unrolled<R>([&](auto r) {
      const Four products = totals(sum[r][0], sum[r][1], sum[r][2], sum[r][3]) * scale;
      std::memcpy(scores + r * PART + s, &products, sizeof products);
    });
    for (; d < D; ++d)
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < 4; ++i) scores[r * PART + s + i] += q[r * D + d] * key[i][d] * scale;
  }
}

// W registers of what is below, from `from` and from sum on.
template <int R, int W>
__attribute__((noinline)) void add_weighted(const float* weights, const float* const* rows,
                                            int64_t from, int64_t count, int64_t D, float* sum) {
  V sums[R][W];
  const auto each = [&](auto visit) {
    unrolled<R>([&](auto r) { unrolled<W>([&](auto w) { visit(r, w); }); });
  };
  each([&](auto r, auto w) { sums[r][w] = at(sum + r * D + w * LANES); });
  for (int64_t s = 0; s < count; ++s) {
    const float *value = rows[s] + from, *ahead = rows[s + TILE] + from;
    unrolled<W>([&](auto w) { __builtin_prefetch(ahead + w * LANES); });
    each([&](auto r, auto w) { sums[r][w] += weights[r * PART + s] * at(value + w * LANES); });
  }
  each([&](auto r, auto w) { at(sum + r * D + w * LANES) = sums[r][w]; });
}

// sum [R, D] += weights [R, count], whose rows are PART apart, times `count` values: D floats of
// each row from `from` on. Those that come 16 later are asked for.
template <int R>
void add_weighted(const float* weights, const float* const* rows, int64_t from, int64_t count,
                  int64_t D, float* sum) {
  int64_t d = 0;
  for (; d + 4 * LANES <= D; d += 4 * LANES)
    add_weighted<R, 4>(weights, rows, from + d, count, D, sum + d);
  for (; d + LANES <= D; d += LANES)
    add_weighted<R, 1>(weights, rows, from + d, count, D, sum + d);
  for (; d < D; ++d)
    for (int r = 0; r < R; ++r)
      for (int64_t s = 0; s < count; ++s)
        sum[r * D + d] += weights[r * PART + s] * rows[s][from + d];
}

// visit(R) with a number known only now, 1 to MOST, as a constant.
template <int MOST, typename Visit>
void as_constant(int64_t number, Visit visit) {
  if constexpr (MOST > 0) {
    if (number == MOST)
      visit(std::integral_constant<int, MOST>{});
    else
      as_constant<MOST - 1>(number, visit);
  }
}

// The query heads of `count` key heads, G of each, as many at a time as can share what is loaded:
// visit(first, R).
template <typename Visit>
void each_heads(int64_t count, int64_t G, Visit visit) {
  for (int64_t k = 0; k < count; ++k)
    for (int64_t g = 0; g < G; g += HEADS)
      as_constant<HEADS>(std::min<int64_t>(HEADS, G - g), [&](auto R) { visit(k * G + g, R); });
}

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

struct Task {
  int64_t t, part, k;  // query, part of the positions that it sees, first key head
};

// A call of paged_attend, and the means of the parts.
struct Attention {
  const float *q, *keys, *values;
  const int64_t *tables, *lengths;
  float* out;
  int64_t T, C, H, Hk, D, P, B, apart;
  float scale;
  int64_t G = H / Hk, span = std::max<int64_t>(1, std::min(Hk, REACH / D));  // key heads a task
  std::vector<int64_t> begin = std::vector<int64_t>(T + 1);  // where a query's parts begin
  std::unique_ptr<float[]> means = nullptr, lses = nullptr;  // [parts, H, D], [parts, H]

  int64_t seen(int64_t t) const { return lengths[t / C] - (C - 1 - t % C); }
  int64_t parts(int64_t t) const { return begin[t + 1] - begin[t]; }

  // All that there is to do. Queries of a row follow one another: what one reads, the next one has
  // in the cache.
  std::vector<Task> tasks() {
    for (int64_t t = 0; t < T; ++t)
      begin[t + 1] = begin[t] + round_up(std::max<int64_t>(seen(t), 0), PART) / PART;
    means.reset(new float[begin[T] * H * D]);
    lses.reset(new float[begin[T] * H]);
    std::vector<Task> all;
    for (int64_t r = 0; r < T; r += C)
      for (int64_t part = 0; part < parts(r + C - 1); ++part)
        for (int64_t k = 0; k < Hk; k += span)
          for (int64_t t = r; t < r + C; ++t)
            if (part < parts(t)) all.push_back({t, part, k});
    return all;
  }

  // Where the task's keys lie, then its values; each filled up to `room` with the last one again,
  // and 16 more, to be asked for.
  void find(const Task& task, int64_t count, int64_t room, const float** rows) const {
    const int64_t* table = tables + task.t / C * B;
    int64_t block = task.part * PART / P, slot = task.part * PART % P;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t place = ((table[block] * P + slot) * Hk + task.k) * D;
      rows[s] = keys + place;
      rows[room + s] = values + place;
      if (++slot == P) ++block, slot = 0;
    }
    std::fill(rows + count, rows + room, rows[count - 1]);
    std::fill(rows + room + count, rows + 2 * room + TILE, rows[room + count - 1]);
  }

  // A task: the weighted mean of the part's values, and the lse of its scores, for each head. Where
  // there is no other part, that mean is the result.
  void attend(const Task& task) const {
    const int64_t count = std::min(PART, seen(task.t) - task.part * PART);
    const int64_t room = round_up(count, TILE), heads = std::min(span, Hk - task.k);
    const int64_t first = (begin[task.t] + task.part) * H + task.k * G;
    const float* query = q + task.t * apart + task.k * G * D;
    float* mean = parts(task.t) == 1 ? out + (task.t * H + task.k * G) * D : &means[first * D];
    const float* rows[2 * PART + TILE];
    find(task, count, room, rows);
    const std::unique_ptr<float[]> scores(new float[heads * G * PART]);
    for (int64_t s = 0; s < count; s += TILE)
      each_heads(heads, G, [&](int64_t h, auto R) {
        score<R()>(query + h * D, rows + s, h / G * D, D, scale, &scores[h * PART + s]);
      });
    for (int64_t h = 0; h < heads * G; ++h) {
      std::fill(&scores[h * PART + count], &scores[h * PART + room], -INFINITY);
      lses[first + h] = softmax(&scores[h * PART], room);
    }
    std::fill(mean, mean + heads * G * D, 0.0f);
    for (int64_t s = 0; s < count; s += TILE)
      each_heads(heads, G, [&](int64_t h, auto R) {
        add_weighted<R()>(&scores[h * PART + s], rows + room + s, h / G * D,
                          std::min<int64_t>(TILE, count - s), D, mean + h * D);
      });
  }

  // The mean of a query head's parts, each with weight exp(lse). There are none, or several.
  void merge(int64_t t, int64_t h) const {
    std::vector<float> weights(round_up(parts(t), TILE), -INFINITY);
    std::vector<const float*> rows(parts(t) + TILE, out);
    for (int64_t part = 0; part < parts(t); ++part) {
      const int64_t place = (begin[t] + part) * H + h;
      float* mean = &means[place * D];
      if (lses[place] == -INFINITY) std::fill(mean, mean + D, 0.0f);  // a mean of nothing
      weights[part] = lses[place];
      rows[part] = mean;
    }
    float* result = out + (t * H + h) * D;
    std::fill(result, result + D, 0.0f);
    if (parts(t) == 0) return;
    softmax(weights.data(), weights.size());
    add_weighted<1>(weights.data(), rows.data(), 0, parts(t), D, result);
  }
};

}  // namespace

// q, out [T, H, D], C queries a row, those of q `apart` floats from one to the next; keys, values
// [N, P, Hk, D]; tables [T / C, B]; lengths [T / C].
extern "C" void spindle_paged_attend(const float* q, const float* keys, const float* values,
                                     const int64_t* tables, const int64_t* lengths, float* out,
                                     int64_t T, int64_t C, int64_t H, int64_t Hk, int64_t D,
                                     int64_t P, int64_t B, int64_t apart, float scale,
                                     int threads) {
  Attention call{q, keys, values, tables, lengths, out, T, C, H, Hk, D, P, B, apart, scale};
  const std::vector<Task> tasks = call.tasks();
  const int64_t count = tasks.size();
#pragma omp parallel num_threads(threads) if (count > 1)
  {
#pragma omp for schedule(dynamic)
    for (int64_t n = 0; n < count; ++n) call.attend(tasks[n]);
#pragma omp for
    for (int64_t n = 0; n < T * H; ++n)
      if (call.parts(n / H) != 1) call.merge(n / H, n % H);
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

// Numbers in a vector: a row that is summed by vectors has other last bits where it is another.
extern "C" int64_t spindle_lanes() { return LANES; }

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
