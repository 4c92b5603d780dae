// The words of CUDA C++ that g++ does not know: keywords, dim3, vectors, 16-bit floats, functions.
// What a thread does with others (barriers, shuffles, launches) is in cpu_cuda.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern dim3 gridDim, blockDim, blockIdx, threadIdx;  // set anew whenever a fibre is gone on with
constexpr int warpSize = 32;

namespace {  // nothing below is known to any other library

// Alignment is part of a vector's type: a GPU refuses to load one from an address between two.
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// bfloat16 is the upper half of a float.
inline float __bfloat162float(__nv_bfloat16 x) { return float_of(uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float value) {
  if (std::isnan(value)) return {0x7fff};
  const uint32_t bits = bits_of(value);
  const uint32_t to_even = 0x7fff + (bits >> 16 & 1);  // half a step, less if the rest is even
  return {uint16_t((bits + to_even) >> 16)};
}

// fp16: 1 bit of sign, 5 of exponent (15 too large), 10 of fraction; a float has 1, 8 (127), 23.
inline float __half2float(__half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | rest << 13);  // infinite, or NaN
  // As a float, exponent and fraction in place, it is 2^112 too small. Subnormals come out right.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}
inline __half __float2half(float value) {
  const uint16_t sign = bits_of(value) >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (std::isnan(value)) return {0x7fff};
  if (size >= 65520.0f) return {uint16_t(sign | 0x7c00)};  // nearer to 2^16 than to the last, 65504
  if (size < 0x1p-14f) return {uint16_t(sign | uint16_t(std::nearbyint(size * 0x1p24f)))};
  const uint32_t bits = bits_of(size) - (112u << 23);  // the exponent, counted as fp16 does
  return {uint16_t(sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13)};
}

#define rsqrtf(x) (1.0f / std::sqrt(x))  // a newer C library may have one of its own
#define __expf(x) expf(x)
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T __ldg(const T* from) { return *from; }

typedef void* cudaStream_t;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

}  // namespace
