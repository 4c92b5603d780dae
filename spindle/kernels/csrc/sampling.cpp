// A token for each row of logits, on a CPU. Plain torch, in decode/sampling.py, says which one;
// here the same ids come about in fewer steps, or it is said of a row that we cannot tell.
//
// A row is read once for its largest logit: of a greedy one that is all. Of a sampled one the peak
// of each block of 64 tokens, its largest there, is kept; then scaled logits and weights are made,
// in blocks that can have any weight alone. At least K tokens are not below the K-th largest of the
// peaks, so all that top-k leaves is in the blocks whose peaks are not below it.
// What top-k and top-p leave are the likeliest tokens up to some last one: a line is drawn with
// enough of them above it, one with too few, and the last one is selected of what is between.
// Nothing is sorted.
//
// Our exponentials are not torch's to the last bit. A share of ours and one of plain torch
// differ by no more than 2^-22 of it for e^x here, 2^-23 for torch's (a unit in the last place),
// and 2^-24 for the division by the sum there: 0.44 * 2^-20. So does a sum of shares, for to add
// V of them in double, in any order, is off by V * 2^-53 of it at most. What is compared is one
// such sum and a part of another, neither more than the whole. So where they are further apart
// than 2^-20 of the whole, plain torch decides as we do; else we cannot tell. Which token is the
// likelier one does not depend on exponentials: the scaled logits decide, whose bits are
// torch's. (e^x below 2^-126 is 0 here, and tiny there. It could be drawn at u = 0 alone, and
// there we cannot tell.)
//
// With torch's own weights less is open: for top-p the order of two sums, V * 2^-53 of the whole
// for each here and there, and some roundings after them; for u the division, 2^-24 of each sum.
//
// Each row is by itself: what it gives does not depend on the rows beside it.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int64_t WIDE = 2048;      // a block where nobody asks for the peaks
constexpr float NOTHING = -88.0f;   // scaled logits below it have no weight
constexpr int64_t LIKELY = 256;     // a nucleus is looked for in as many tokens at first
constexpr int64_t FEW = 512;        // as many, at most, are selected from
constexpr int64_t ALONE = 1 << 18;  // as many logits one thread has read before a second is awake
constexpr int64_t READS = 4;        // of a greedy row, that are as long as to sample one
// How near to each other, in parts of the whole, two numbers are that decide nothing:
constexpr double SLACK = 0x1p-20;              // our weights
constexpr double SLACK_OF_SUMS = 0x1p-50;      // torch's, for each token of a row
constexpr double SLACK_OF_DIVISION = 0x1p-22;  // torch's, where plain torch divides them by a sum
constexpr int64_t BROKEN = -1, UNSETTLED = -2;  // no token, and one that plain torch has to tell

typedef V F;  // V is the size of a vocabulary here

// 16 numbers of x [n] from i on; past its end there are others.
inline F load(const float* x, int64_t i, int64_t n, float past) {
  if (i + LANES <= n) return *reinterpret_cast<const F*>(x + i);
  F last = F{} + past;
  if (i < n) std::memcpy(&last, x + i, (n - i) * sizeof(float));
  return last;
}

inline float largest(const F& lanes) {
  return folded<float>(lanes, [](float a, float b) { return a > b ? a : b; });
}

// A sum in double of many vectors of floats, each lane by itself: two registers of doubles.
struct Mass {
  typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float))));
  typedef double Wide __attribute__((vector_size(LANES / 2 * sizeof(double))));
  Wide lanes[2] = {};

  void add(const F& x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof halves);
    lanes[0] += __builtin_convertvector(halves[0], Wide);
    lanes[1] += __builtin_convertvector(halves[1], Wide);
  }

  double total() const { return folded<double>(lanes, std::plus<double>()); }
};

inline bool any(const I& lanes) { return folded<int32_t>(lanes, std::bit_or<int32_t>()) != 0; }

// --- the largest logit ---------------------------------------------------------------------------

inline int64_t blocks_of(int64_t V, int64_t size = BLOCK) { return (V + size - 1) / size; }

struct Peak {
  float logit;
  int64_t token;  // the first that has it; BROKEN if the row is no distribution
};

// Of a row of logits [V]; peaks [V / size] become the largest of each block of that size.
Peak peak_of(const float* logits, int64_t V, float* peaks, int64_t size) {
  I bad = {};  // where a number is NaN or +inf
  for (int64_t v = 0; v < V; v += size) {
    F most = F{} - INFINITY;
    for (int64_t i = v; i < std::min(v + size, V); i += LANES) {
      const F x = load(logits, i, V, -INFINITY);
      bad |= ~(x <= FLT_MAX);
      most = x > most ? x : most;
    }
    peaks[v / size] = largest(most);
  }
  const float* block = std::max_element(peaks, peaks + blocks_of(V, size));
  if (any(bad) || *block == -INFINITY) return {*block, BROKEN};
  return {*block, std::find(logits + (block - peaks) * size, logits + V, *block) - logits};
}

// --- a sampled row -------------------------------------------------------------------------------

// How many tokens there are in some part of a row, and how much they weigh.
struct Part {
  int64_t count = 0;
  double mass = 0;
};

struct Token {
  float x, weight;  // x is its scaled logit
  int64_t id;

  // Of equals the lower id is likelier.
  bool likelier(const Token& other) const {
    return x > other.x || (x == other.x && id < other.id);
  }
};

class Row {
 public:
  bool settled = true;  // whether plain torch decides all that is decided here in the same way

  // logits [V], their largest, and that of each block [V / 64].
  Row(const float* logits, const float* peaks, int64_t V, float peak, float temperature)
      : logits(logits), peaks(peaks), V(V), peak(peak), temperature(temperature) {}

  // The documented order: temperature, then min-p, then top-k, then top-p; of those the token at u.
  // `given` [V]: what torch makes of temperature and min-p, or null.
  int64_t drawn(const float* given, int64_t top_k, float top_p, float min_p, double u) {
    const float line = top_k < V ? line_of(top_k) : NOTHING;
    weigh(line, min_p, given);
    slack = given != nullptr ? V * SLACK_OF_SUMS : SLACK;
    if (top_k < V)
      cut_after(last_of(line, [&](const Part& part) { return part.count >= top_k; }));
    if (top_p < 1) {
      const double whole = above(NOTHING).mass;
      const auto enough = [&](const Part& part) { return !less(part.mass, top_p * whole, whole); };
      cut_after(last_of(line_of(LIKELY), enough));
    }
    slack = given != nullptr ? SLACK_OF_DIVISION : SLACK;
    return inverse_cdf(u);
  }

 private:
  const float *logits, *peaks;
  const int64_t V;
  const float peak, temperature;
  double slack = SLACK;
  std::vector<int64_t> blocks;  // those that may have weight; of others nothing is kept
  std::unique_ptr<float[]> x{new float[blocks_of(V) * BLOCK]};  // scaled logits, -inf past V
  std::unique_ptr<float[]> weights{new float[blocks_of(V) * BLOCK]};

  bool less(double mass, double goal, double whole) {
    settled &= std::fabs(mass - goal) > slack * whole;
    return mass < goal;
  }

  // At most 0: the largest first becomes 0, so that no temperature can overflow.
  template <typename T>
  T scaled(T logit) const {
    return (logit - peak) / temperature;
  }

  // A scaled logit that K tokens or more are not below, or all that have weight.
  float line_of(int64_t K) const {
    if (K >= blocks_of(V)) return NOTHING;
    std::vector<float> ranked(peaks, peaks + blocks_of(V));
    std::nth_element(ranked.begin(), ranked.begin() + K - 1, ranked.end(), std::greater<float>());
    return std::max(scaled(ranked[K - 1]), NOTHING);
  }

  // Calls visit(i) for every 16th token of the blocks with some that are not below a line.
  template <typename Visit>
  void each_vector(float line, Visit visit) const {
    for (const int64_t block : blocks)
      if (scaled(peaks[block]) >= line)
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) visit(i);
  }

  F& at(const std::unique_ptr<float[]>& numbers, int64_t i) const {
    return *reinterpret_cast<F*>(&numbers[i]);
  }

  // Temperature and min-p, for the blocks with tokens that are not below a line.
  void weigh(float line, float min_p, const float* given) {
    for (int64_t block = 0; block < blocks_of(V); ++block)
      if (scaled(peaks[block]) >= line) blocks.push_back(block);
    const float near = static_cast<float>(SLACK) * min_p;
    I unclear = {};  // where a weight is too near to min_p
    each_vector(line, [&](int64_t i) {
      const F lanes = at(x, i) = scaled(load(logits, i, V, -INFINITY));
      if (given != nullptr) {
        at(weights, i) = load(given, i, V, 0);
        return;
      }
      const F weight = exp_of(lanes), gap = weight - min_p;
      unclear |= (lanes < 0) & (gap < near) & (gap > -near);  // e^0 is 1 to everybody
      at(weights, i) = weight >= min_p ? weight : F{};
    });
    settled &= !any(unclear);
  }

  // The tokens that are not below a line.
  Part above(float line) const {
    I count = {};
    Mass mass;
    each_vector(line, [&](int64_t i) {
      const I inside = at(x, i) >= line;
      count -= inside;
      mass.add(inside ? at(weights, i) : F{});
    });
    return {folded<int32_t>(count, std::plus<int32_t>()), mass.total()};
  }

  // The tokens below one line that are not below another, by id.
  std::vector<Token> between(float low, float high) const {
    std::vector<Token> tokens;
    each_vector(low, [&](int64_t i) {
      if (!any(at(x, i) >= low)) return;
      for (int64_t id = i; id < i + LANES; ++id)
        if (x[id] >= low && x[id] < high) tokens.push_back({x[id], weights[id], id});
    });
    return tokens;
  }

  // The token that makes the likeliest ones enough; `guess` is a line to look at first.
  template <typename Enough>
  Token last_of(float guess, Enough enough) const {
    float low = 0, high = 1;  // enough tokens are not below `low`, too few not below `high`
    Part all = above(low), over;
    for (const float line : {guess, NOTHING})
      if (!enough(all)) {
        high = low, over = all;
        low = line, all = above(line);
      }
    if (!enough(all)) return {-INFINITY, 0, V};  // all that has weight
    while (low < 0 && all.count - over.count > FEW) {
      const float middle = (low + high) / 2;
      if (middle <= low || middle >= high) break;  // what is left is equal, as at 0 it is
      const Part part = above(middle);
      if (enough(part))
        low = middle, all = part;
      else
        high = middle, over = part;
    }
    std::vector<Token> tokens = between(low, high);
    return tokens[selected(tokens, over, enough)];
  }

  // Which one is the last, as in quickselect; likelier ones come to lie before it.
  template <typename Enough>
  static size_t selected(std::vector<Token>& tokens, Part before, Enough enough) {
    const auto begin = tokens.begin();
    size_t low = 0, high = tokens.size();  // the first `low` are too few, the first `high` enough
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      std::nth_element(begin + low, begin + middle, begin + high,
                       [](const Token& a, const Token& b) { return a.likelier(b); });
      Part part = before;
      part.count += middle - low;
      for (size_t n = low; n < middle; ++n) part.mass += tokens[n].weight;
      if (enough(part))
        high = middle;
      else
        low = middle, before = part;
    }
    return low;
  }

  // Tokens that are less likely than the last one lose their weight.
  void cut_after(const Token& last) {
    I first;
    for (int lane = 0; lane < LANES; ++lane) first[lane] = lane;
    each_vector(-INFINITY, [&](int64_t i) {
      const I id = first + static_cast<int32_t>(i);
      const F lanes = at(x, i);
      const I equal = (lanes == last.x) & (id <= static_cast<int32_t>(last.id));
      at(weights, i) = (lanes > last.x) | equal ? at(weights, i) : F{};
    });
  }

  // The first token that brings the mass, by id, above u times the whole: its block first.
  int64_t inverse_cdf(double u) {
    std::vector<double> masses;
    for (const int64_t block : blocks) {
      Mass mass;
      for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES)
        mass.add(at(weights, i));
      masses.push_back(mass.total());
    }
    const double whole = std::accumulate(masses.begin(), masses.end(), 0.0), goal = u * whole;
    double sum = 0;
    size_t n = 0;
    for (; n + 1 < blocks.size() && sum + masses[n] < goal; ++n) sum += masses[n];
    int64_t id = blocks[n] * BLOCK;
    const int64_t end = id + BLOCK;
    for (; less(sum, goal, whole) && id < end; ++id) sum += weights[id];
    return id - 1;
  }
};

}  // namespace

// logits [R, V] as adjusted; raw [R, V] as they were, or null if they are the same; given [R,
// V], torch's weights, or null; temperature, top_k, top_p, min_p, u [R], u being null if all
// rows are greedy. tokens [R] come out: -1 for a row that is no distribution, -2 for one that
// plain torch has to tell; how many those are is returned.
extern "C" int64_t spindle_sample(const float* logits, const float* raw, const float* given,
                                  const float* temperature, const int64_t* top_k,
                                  const float* top_p, const float* min_p, const double* u,
                                  int64_t* tokens, int64_t R, int64_t V, int threads) {
  int64_t unsettled = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : unsettled) \
    if (R * V * (u == nullptr ? 1 : READS) > ALONE)
  for (int64_t r = 0; r < R; ++r) {
    const bool greedy = u == nullptr || temperature[r] == 0;
    std::vector<float> peaks(blocks_of(V));
    const bool sound = raw == nullptr || peak_of(raw + r * V, V, peaks.data(), WIDE).token != BROKEN;
    const Peak peak = peak_of(logits + r * V, V, peaks.data(), greedy ? WIDE : BLOCK);
    tokens[r] = sound ? peak.token : BROKEN;
    if (tokens[r] == BROKEN || greedy) continue;
    Row row(logits + r * V, peaks.data(), V, peak.logit, temperature[r]);
    const float* weights = given == nullptr ? nullptr : given + r * V;
    const int64_t token = row.drawn(weights, top_k[r], top_p[r], min_p[r], u[r]);
    tokens[r] = row.settled ? token : UNSETTLED;
    unsettled += !row.settled;
  }
  return unsettled;
}

// The weights e^x that tokens have in `spindle_sample`, for x [n] of at most 0.
extern "C" void spindle_weights(const float* x, float* weights, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) {
    const F lanes = exp_of(load(x, i, n, 0));
    std::memcpy(weights + i, &lanes, std::min<int64_t>(LANES, n - i) * sizeof(float));
  }
}

namespace {

// SplitMix64's finaliser (Steele et al. 2014, with the constants of Stafford's variant 13).
uint64_t mix(uint64_t h) {
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9;
  h = (h ^ (h >> 27)) * 0x94d049bb133111eb;
  return h ^ (h >> 31);
}

}  // namespace

// Uniform numbers u [R] in [0, 1), of a counter hash of four numbers each.
extern "C" void spindle_uniform(const uint64_t* seed, const uint64_t* sample,
                                const uint64_t* position, double* u, int64_t R, uint64_t purpose) {
  const uint64_t golden = 0x9e3779b97f4a7c15;
  for (int64_t r = 0; r < R; ++r) {
    uint64_t h = mix(seed[r] + golden);
    for (const uint64_t value : {sample[r], position[r], purpose}) h = mix(h + value * golden + 1);
    u[r] = static_cast<double>(h >> 11) * 0x1p-53;
  }
}
