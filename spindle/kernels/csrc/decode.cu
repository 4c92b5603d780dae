// Attention of each row's last few queries over that row's keys, which lie in blocks of a pool.
// twins.py has the specification: paged_attend.
//
// A step has few queries and many keys, so the keys are what is divided: a block takes 256 of them,
// its split, and leaves a result of its own: the weighted mean of the values, and the logarithm of
// the sum of the exponentials that went into it (lse). A mean of all keys is a mean of such means,
// each with weight exp(lse): that is the merge (Dao et al. 2023, flash decoding; Milakov and
// Gimelshein 2018 for the sums).
//
// What a row's length is, is read here, on the device: a launch is the same for every length, so
// that a graph can replay it. There are splits for as many keys as a table has slots. Those beyond
// the row's length write an lse of -inf, which weighs nothing, and their means are never read.
//
// Keys and values come out of memory once for all that need them. The G = H / Hk query heads that
// share a KV head, times the C queries of the row, are its pairs; a block has up to M of them, its
// tile. No sum's order depends on M, on C, on the other rows or on the table: a query has the same
// bits in any company, and wherever its keys lie.
#include "common.cuh"

constexpr int SPLIT = 256;  // keys a block
constexpr int ATTEND_THREADS = 128;
constexpr int ATTEND_WARPS = ATTEND_THREADS / WARP;
constexpr int MOST_QUERIES = 16;  // a row

template <class T> struct Problem {
  const T *q, *keys, *values;        // [R * C, H, D]; [N, P, Hk, D] twice
  const int64_t *tables, *lengths;   // [R, B]; [R]
  T* out;                            // [R * C, H, D]
  float *means, *lse;                // [R * C, H, splits, D]; [R * C, H, splits]
  int R, C, H, Hk, P, B, splits;
  float scale;
};

// How a block's threads share the work on head size D.
template <class T, int D> struct Layout {
  static constexpr int V = VECTOR_BYTES / sizeof(T);       // elements of a key that a thread loads
  static constexpr int LANES = D / V % 4 == 0 ? 4 : 2;     // threads that share a key
  static constexpr int PACKS = D / V / LANES;              // loads that a key takes from each
  static constexpr int KEYS = 2;                           // that they have in hand at a time
  static constexpr int W = 4;                              // elements of a value that a thread sums
  static constexpr int COLUMNS = D / W;                    // threads that share a value: a group,
  static constexpr int GROUPS = ATTEND_THREADS / COLUMNS;  // which takes every GROUPS-th key
};

// Shared memory of a block. The sums take the room of what is done with by then.
template <class T, int D, int M> struct Room {
  int64_t slots[SPLIT];    // where the keys lie
  int sees[M];             // how many of these keys each pair sees
  float peaks[ATTEND_WARPS][M];   // the largest score, by warp
  float totals[Layout<T, D>::GROUPS][M];
  union {
    struct {
      alignas(VECTOR_BYTES) float q[M][D];  // scaled
      alignas(VECTOR_BYTES) float scores[SPLIT][M];  // then the weights
    };
    alignas(VECTOR_BYTES) float sums[Layout<T, D>::GROUPS][M][D];
  };
};

// Where the block is: its pairs are first .. first + count - 1 of the row's C * G, query by query.
struct Tile { int row, kv_head, first, count; };

template <int M, class T> __device__ __forceinline__ Tile own_tile(const Problem<T>& p) {
  const int first = blockIdx.x * M, pairs = p.C * (p.H / p.Hk);
  return {int(blockIdx.y) / p.Hk, int(blockIdx.y) % p.Hk, first, min(M, pairs - first)};
}

template <class T> __device__ __forceinline__ int query_of(const Problem<T>& p, int pair) {
  return pair / (p.H / p.Hk);
}

// How many keys a query of the row sees: the last one all, each before it one less.
template <class T>
__device__ __forceinline__ int64_t seen_by(const Problem<T>& p, int row, int query) {
  return p.lengths[row] - (p.C - 1 - query);
}

// A pair's place among all [R * C, H].
template <class T>
__device__ __forceinline__ int64_t place_of(const Problem<T>& p, const Tile& tile, int pair) {
  const int group = p.H / p.Hk;
  const int64_t token = int64_t(tile.row) * p.C + pair / group;
  return token * p.H + tile.kv_head * group + pair % group;
}

// ---- 1. what a block needs at hand --------------------------------------------------------------
// (Not unrolled, as in 5: the compiler would take a fifth longer, for the short part of the work.)

template <class T, int D, int M>
__device__ void prepare(Room<T, D, M>& room, const Problem<T>& p, const Tile& tile, int start,
                        int keys) {
  const int64_t* table = p.tables + int64_t(tile.row) * p.B;
#pragma unroll 1
  for (int key = threadIdx.x; key < keys; key += ATTEND_THREADS) {
    const int j = start + key;
    room.slots[key] = table[j / p.P] * p.P + j % p.P;
  }
  for (int m = threadIdx.x; m < M; m += ATTEND_THREADS) {
    const int64_t seen = m < tile.count ? seen_by(p, tile.row, query_of(p, tile.first + m)) : 0;
    room.sees[m] = int(max(min(seen - start, int64_t(SPLIT)), int64_t(0)));
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < M * D; i += ATTEND_THREADS) {
    const int m = i / D, d = i % D;
    room.q[m][d] = m < tile.count
        ? to_float(p.q[place_of(p, tile, tile.first + m) * D + d]) * p.scale : 0.0f;
  }
}

// ---- 2. scores ----------------------------------------------------------------------------------

// Add to sum[k][m] what V elements of each key, from `column` on, have in common with query m.
template <int KEYS, int D, int M, class T, int V>
__device__ __forceinline__ void add_products(float (&sum)[KEYS][M], const Pack<T, V> (&keys)[KEYS],
                                             const float (&q)[M][D], int column) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int v = 0; v < V; v += 4) {
      const Pack<float, 4> four = load_pack<4>(&q[m][column + v]);
#pragma unroll
      for (int k = 0; k < KEYS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[k][m] += four.at[i] * to_float(keys[k].at[v + i]);
    }
}

// The scores of a key, which its LANES threads have in parts. What a pair does not see: -inf.
template <int LANES, class T, int D, int M>
__device__ __forceinline__ void put_scores(Room<T, D, M>& room, float (&sum)[M], int key,
                                           int keys) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int apart = LANES / 2; apart > 0; apart /= 2)
      sum[m] += __shfl_xor_sync(WHOLE_WARP, sum[m], apart);
    if (key < keys && m % LANES == threadIdx.x % LANES)  // all have it: they take turns
      room.scores[key][m] = key < room.sees[m] ? sum[m] : -INFINITY;
  }
}

// LANES threads side by side read a key from end to end, 16 bytes each; a warp, several keys.
template <class T, int D, int M>
__device__ void score(Room<T, D, M>& room, const Problem<T>& p, int kv_head, int keys) {
  using Here = Layout<T, D>;
  constexpr int V = Here::V, KEYS = Here::KEYS, APART = ATTEND_THREADS / Here::LANES;
  const int lane = threadIdx.x % Here::LANES;
  for (int first = threadIdx.x / Here::LANES; first < SPLIT; first += KEYS * APART) {
    if (first / APART * APART >= keys) break;  // the same for all threads
    const T* from[KEYS];
#pragma unroll
    for (int k = 0; k < KEYS; ++k) {  // past the end the last key again: in shuffles all must meet
      const int key = min(first + k * APART, keys - 1);
      from[k] = p.keys + (room.slots[key] * p.Hk + kv_head) * D;
    }
    float sum[KEYS][M] = {};
#pragma unroll (M > 4 ? 2 : 4)  // loads under way at once: with many pairs there is enough to do
    for (int i = 0; i < Here::PACKS; ++i) {
      const int column = (i * Here::LANES + lane) * V;
      Pack<T, V> part[KEYS];
#pragma unroll
      for (int k = 0; k < KEYS; ++k) part[k] = load_pack<V>(from[k] + column);
      add_products(sum, part, room.q, column);
    }
#pragma unroll
    for (int k = 0; k < KEYS; ++k) put_scores<Here::LANES>(room, sum[k], first + k * APART, keys);
  }
}

// ---- 3. weights ---------------------------------------------------------------------------------

template <class T, int D, int M>
__device__ __forceinline__ float peak_of(const Room<T, D, M>& room, int m) {
  float peak = room.peaks[0][m];
#pragma unroll
  for (int warp = 1; warp < ATTEND_WARPS; ++warp) peak = fmaxf(peak, room.peaks[warp][m]);
  return peak;
}

// Scores -> exp(score - peak), in place: nothing overflows, and the largest weighs 1. A thread
// looks after one pair, so that neighbours read neighbours.
template <class T, int D, int M> __device__ void weigh(Room<T, D, M>& room, int keys) {
  const int m = threadIdx.x % M, first = threadIdx.x / M, step = ATTEND_THREADS / M;
  float peak = -INFINITY;
  for (int key = first; key < keys; key += step) peak = fmaxf(peak, room.scores[key][m]);
#pragma unroll
  for (int apart = M; apart < WARP; apart *= 2)
    peak = fmaxf(peak, __shfl_xor_sync(WHOLE_WARP, peak, apart));
  if (threadIdx.x % WARP < M) room.peaks[threadIdx.x / WARP][m] = peak;
  __syncthreads();  // the peaks of all warps are there
  peak = peak_of(room, m);
  if (peak == -INFINITY) peak = 0.0f;  // the pair sees none of these keys: -inf minus -inf is NaN
  for (int key = first; key < keys; key += step)
    room.scores[key][m] = expf(room.scores[key][m] - peak);
}

// ---- 4. values ----------------------------------------------------------------------------------

// The weighted sum of the values, and of the weights. COLUMNS threads side by side read a value
// from end to end; such a group takes every GROUPS-th key.
template <class T, int D, int M>
__device__ void add_values(Room<T, D, M>& room, const Problem<T>& p, int kv_head, int keys) {
  using Here = Layout<T, D>;
  constexpr int W = Here::W;
  const int group = threadIdx.x / Here::COLUMNS, column = threadIdx.x % Here::COLUMNS * W;
  float sum[M][W] = {}, total[M] = {};
  const int end = group < Here::GROUPS ? keys : 0;  // there may be threads left over
#pragma unroll 4
  for (int key = group; key < end; key += Here::GROUPS) {
    const Pack<T, W> value =
        load_pack<W>(p.values + (room.slots[key] * p.Hk + kv_head) * D + column);
#pragma unroll
    for (int m = 0; m < M; m += 4) {
      const Pack<float, 4> weights = load_pack<4>(&room.scores[key][m]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[m + i] += weights.at[i];
#pragma unroll
        for (int w = 0; w < W; ++w) sum[m + i][w] += weights.at[i] * to_float(value.at[w]);
      }
    }
  }
  __syncthreads();  // all have read the weights: the sums take their room
  if (group >= Here::GROUPS) return;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int w = 0; w < W; ++w) room.sums[group][m][column + w] = sum[m][w];
    if (column == 0) room.totals[group][m] = total[m];
  }
}

// ---- 5. the result ------------------------------------------------------------------------------

// The groups' sums, added up: a mean, and its lse. If there is one split in all, that is it.
template <class T, int D, int M>
__device__ void finish(const Room<T, D, M>& room, const Problem<T>& p, const Tile& tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < tile.count * D; i += ATTEND_THREADS) {
    const int m = i / D, d = i % D;
    float sum = 0.0f, total = 0.0f;
#pragma unroll
    for (int group = 0; group < Layout<T, D>::GROUPS; ++group) {
      sum += room.sums[group][m][d];
      total += room.totals[group][m];
    }
    const int64_t place = place_of(p, tile, tile.first + m);
    const int64_t part = place * p.splits + blockIdx.z;
    const float mean = room.sees[m] > 0 ? sum / total : 0.0f;
    if (p.splits == 1) {
      store(p.out[place * D + d], mean);
    } else {
      p.means[part * D + d] = mean;
      if (d == 0) p.lse[part] = peak_of(room, m) + logf(total);  // -inf if it sees none of them
    }
  }
}

// No pair of the tile sees a key of this split.
template <int D, class T> __device__ void finish_empty(const Problem<T>& p, const Tile& tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < tile.count * D; i += ATTEND_THREADS) {
    const int64_t place = place_of(p, tile, tile.first + i / D);
    if (p.splits == 1)
      store(p.out[place * D + i % D], 0.0f);
    else if (i % D == 0)
      p.lse[place * p.splits + blockIdx.z] = -INFINITY;
  }
}

// Grid: tile; row and KV head; split. (At least one block a multiprocessor: with no more said, the
// compiler keeps to few registers and puts the rest into memory.)
template <class T, int D, int M>
__global__ void __launch_bounds__(ATTEND_THREADS, 1) attend_kernel(Problem<T> p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Room<T, D, M>& room = *reinterpret_cast<Room<T, D, M>*>(shared_bytes);
  const Tile tile = own_tile<M>(p);
  const int start = blockIdx.z * SPLIT;
  const int64_t seen = seen_by(p, tile.row, query_of(p, tile.first + tile.count - 1));
  if (seen <= start) return finish_empty<D>(p, tile);  // the same for all threads

  const int keys = int(min(seen - start, int64_t(SPLIT)));
  prepare(room, p, tile, start, keys);
  __syncthreads();  // slots and queries are there
  score(room, p, tile.kv_head, keys);
  __syncthreads();  // so are the scores of all keys
  weigh(room, keys);
  __syncthreads();  // and the weights
  add_values(room, p, tile.kv_head, keys);
  __syncthreads();  // and the sums of all groups
  finish(room, p, tile);
}

// The mean of the splits' means, each with weight exp(lse), for each query head of each query.
// Relative to the largest lse, so that nothing overflows. Block: one pair; thread: one element.
template <class T> __global__ void merge_kernel(Problem<T> p) {
  const int64_t place = blockIdx.x, D = blockDim.x;
  const int64_t token = place / p.H;
  const float* lse = p.lse + place * p.splits;
  const float* means = p.means + place * p.splits * D;
  float peak = -INFINITY, sum = 0.0f, total = 0.0f;
  for (int split = 0; split < p.splits; ++split) peak = fmaxf(peak, lse[split]);
  for (int split = 0; split < p.splits; ++split) {
    if (lse[split] == -INFINITY) continue;  // nobody wrote its mean
    const float weight = expf(lse[split] - peak);
    sum += weight * means[split * D + threadIdx.x];
    total += weight;
  }
  const bool blind = seen_by(p, int(token / p.C), int(token % p.C)) < 1;
  store(p.out[place * D + threadIdx.x], blind ? 0.0f : sum / total);
}

// ---- from the host ------------------------------------------------------------------------------

template <int N> struct Constant { static constexpr int value = N; };

// run(Constant<D>{}) if there is a kernel for that head size.
template <class Run> int by_head_size(int64_t D, Run run) {
  if (D == 32) return run(Constant<32>{});
  if (D == 64) return run(Constant<64>{});
  if (D == 80) return run(Constant<80>{});
  if (D == 96) return run(Constant<96>{});
  if (D == 128) return run(Constant<128>{});
  return cudaErrorInvalidValue;
}

// run(Constant<M>{}) with the smallest tile that holds all pairs, or the largest.
template <class Run> int by_tile(int pairs, Run run) {
  if (pairs <= 4) return run(Constant<4>{});
  if (pairs <= 8) return run(Constant<8>{});
  return run(Constant<16>{});
}

template <class T, int D, int M> void launch_attend(const Problem<T>& p, cudaStream_t stream) {
  const int pairs = p.C * (p.H / p.Hk);
  const dim3 grid((pairs + M - 1) / M, p.R * p.Hk, p.splits);
  attend_kernel<T, D, M><<<grid, ATTEND_THREADS, sizeof(Room<T, D, M>), stream>>>(p);
  if (p.splits > 1) merge_kernel<T><<<unsigned(p.R * p.C * p.H), D, 0, stream>>>(p);
}

// q, out [R * C, H, D]; keys, values [N, P, Hk, D]; tables [R, B]; lengths [R]. All are contiguous,
// keys and values begin at a multiple of 16 bytes. If B * P slots are more than one split: means
// [R * C, H, splits, D] and lse [R * C, H, splits], float32, in which nothing need be.
extern "C" int spindle_paged_attend(const void* q, const void* keys, const void* values,
                                    const void* tables, const void* lengths, void* out,
                                    void* means, void* lse, int64_t R, int64_t C, int64_t H,
                                    int64_t Hk, int64_t D, int64_t P, int64_t B, float scale,
                                    int64_t dtype, void* stream) {
  if (R == 0) return cudaSuccess;
  const bool whole = is_aligned(keys, 0) && is_aligned(values, 0);
  if (!whole || C < 1 || C > MOST_QUERIES || Hk < 1 || H % Hk != 0) return cudaErrorInvalidValue;
  const int splits = int(max((B * P + SPLIT - 1) / SPLIT, int64_t(1)));
  if (R * Hk > 65535 || splits > 65535) return cudaErrorInvalidValue;  // a grid has no more
  if (splits > 1 && (means == nullptr || lse == nullptr)) return cudaErrorInvalidValue;
  return by_dtype(dtype, [&](auto zero) -> int {
    using T = decltype(zero);
    const Problem<T> p = {
        static_cast<const T*>(q), static_cast<const T*>(keys), static_cast<const T*>(values),
        static_cast<const int64_t*>(tables), static_cast<const int64_t*>(lengths),
        static_cast<T*>(out), static_cast<float*>(means), static_cast<float*>(lse),
        int(R), int(C), int(H), int(Hk), int(P), int(B), splits, scale};
    return by_head_size(D, [&](auto head) -> int {
      return by_tile(int(C * H / Hk), [&](auto tile) -> int {
        launch_attend<T, decltype(head)::value, decltype(tile)::value>(
            p, static_cast<cudaStream_t>(stream));
        return cudaGetLastError();
      });
    });
  });
}
