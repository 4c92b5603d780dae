// Rows of bytes, moved: new keys or values into their slots, and blocks of the pool onto others.
// twins.py has the specification: write_kv, copy_blocks.
//
// What the bytes mean does not matter, so there is one kernel for all element types: it moves
// units of 16 bytes where everything is a multiple of that, else of 8, 4, 2 or 1.
#include "common.cuh"

constexpr unsigned COPY_THREADS = 256;

// Row r of `count` rows, `from` stride `from_row` -> row index[r] of `to`; all counted in units.
template <class Unit>
__global__ void write_rows_kernel(Unit* to, const Unit* from, const int64_t* index, int64_t units,
                                  int64_t from_row) {
  const int64_t row = blockIdx.x;
  Unit* target = to + index[row] * units;
  const Unit* source = from + row * from_row;
  for (int64_t i = threadIdx.x; i < units; i += blockDim.x) target[i] = source[i];
}

// In each layer (grid y), block source[c] -> block target[c] (grid x). No target is also a source:
// the copies of a step are done in any order, at once.
template <class Unit>
__global__ void copy_blocks_kernel(Unit* cache, const int64_t* source, const int64_t* target,
                                   int64_t units, int64_t blocks) {
  Unit* layer = cache + blockIdx.y * blocks * units;
  const Unit* from = layer + source[blockIdx.x] * units;
  Unit* to = layer + target[blockIdx.x] * units;
  for (int64_t i = threadIdx.x; i < units; i += blockDim.x) to[i] = from[i];
}

// run(Unit{}) with the widest unit that divides all of `bytes`: addresses, rows, strides.
template <class Run> int by_unit(uint64_t bytes, Run run) {
  if (bytes % 16 == 0) return run(uint4{});
  if (bytes % 8 == 0) return run(uint64_t{});
  if (bytes % 4 == 0) return run(uint32_t{});
  if (bytes % 2 == 0) return run(uint16_t{});
  return run(uint8_t{});
}

// cache [slots, row_bytes]; slots [rows]; new [rows], each row whole, `new_stride_bytes` apart.
extern "C" int spindle_write_kv(void* cache, const void* slots, const void* new_rows, int64_t rows,
                                int64_t row_bytes, int64_t new_stride_bytes, void* stream) {
  if (rows == 0) return cudaSuccess;
  const uint64_t all = uint64_t(cache) | uint64_t(new_rows) | row_bytes | new_stride_bytes;
  return by_unit(all, [&](auto unit) -> int {
    using Unit = decltype(unit);
    const int64_t units = row_bytes / sizeof(Unit);
    const unsigned threads = threads_for(units, COPY_THREADS);
    write_rows_kernel<Unit><<<unsigned(rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Unit*>(cache), static_cast<const Unit*>(new_rows),
        static_cast<const int64_t*>(slots), units, new_stride_bytes / int64_t(sizeof(Unit)));
    return cudaGetLastError();
  });
}

// cache [layers, blocks, block_bytes], contiguous; source, target [copies].
extern "C" int spindle_copy_blocks(void* cache, const void* source, const void* target,
                                   int64_t copies, int64_t layers, int64_t blocks,
                                   int64_t block_bytes, void* stream) {
  if (copies == 0) return cudaSuccess;
  return by_unit(uint64_t(cache) | block_bytes, [&](auto unit) -> int {
    using Unit = decltype(unit);
    const int64_t units = block_bytes / sizeof(Unit);
    const dim3 grid(copies, layers);
    const unsigned threads = threads_for(units, COPY_THREADS);
    copy_blocks_kernel<Unit><<<grid, threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<Unit*>(cache), static_cast<const int64_t*>(source),
        static_cast<const int64_t*>(target), units, blocks);
    return cudaGetLastError();
  });
}
