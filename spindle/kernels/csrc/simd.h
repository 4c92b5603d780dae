// Vectors as wide as the processor's registers, in the compiler's own notation (gcc's and clang's).
// Of wider ones gcc makes single numbers.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float V __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef int32_t I __attribute__((vector_size(LANES * sizeof(int32_t))));

inline const V& at(const float* x) { return *reinterpret_cast<const V*>(x); }
inline V& at(float* x) { return *reinterpret_cast<V*>(x); }

// All lanes folded into one, half onto half: none waits for the one before.
template <typename T, typename Vector, typename Fold>
inline T folded(const Vector& lanes, Fold fold) {
  T x[LANES];
  std::memcpy(x, &lanes, sizeof x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = fold(x[i], x[i + half]);
  return x[0];
}

inline float total(const V& lanes) {
  return folded<float>(lanes, [](float a, float b) { return a + b; });
}

// e^x for x <= 0: 2^n times a polynomial on [-ln2/2, ln2/2]; relative error below 2e-7 (the
// coefficients are those of Cephes' expf, Moshier 1992). 0 where float32 has no normal number.
inline V exp_of(V x) {
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

}  // namespace
