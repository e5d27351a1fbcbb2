// Narrower types for products on tensor cores.

#include "common.cuh"

// The upper half of a float, rounded to the nearest, of two to the even one; NaN stays NaN, what is too large is infinite.
__device__ __forceinline__ unsigned short bfloat16(float value) {
    const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    const unsigned rounded = (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16;
    return (unsigned short)(sign | (magnitude > 0x7f800000u ? 0x7fc0u : rounded));
}

KERNEL to_bfloat16(long long n, const float* x, unsigned short* y) {
    constexpr int kFloats = kPack<float>;
    const bool aligned = is_aligned<kFloats>(x) && is_aligned<kFloats>(y);
    each_pack<kFloats>(n, aligned, [=](auto size, long long i) {
        const auto values = load<size.value>(x + i);
        Pack<unsigned short, size.value> halves;
#pragma unroll
        for (int j = 0; j < size.value; ++j) halves[j] = bfloat16(values[j]);
        *reinterpret_cast<Pack<unsigned short, size.value>*>(y + i) = halves;
    });
}
