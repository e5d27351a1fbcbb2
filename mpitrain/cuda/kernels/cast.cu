// From the type of parameters to those of 16 bits, and back.

#include "common.cuh"

template <typename S, typename T>
__device__ void cast(long long n, const S* x, T* y) {
    constexpr int N = 8;
    const bool aligned = is_aligned<N>(x) && is_aligned<N>(y);
    each_pack<N>(n, aligned, [=](auto size, long long i) { store(y + i, load<decltype(size)::value>(x + i)); });
}

#define INSTANCE(S, T) \
    KERNEL cast_##S##_##T(long long n, const S* x, T* y) { cast(n, x, y); }
INSTANCE(float, Float16)
INSTANCE(float, Bfloat16)
INSTANCE(Float16, float)
INSTANCE(Bfloat16, float)
