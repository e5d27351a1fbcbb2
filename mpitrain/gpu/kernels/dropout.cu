// Dropout: the CUDA version of the kernel in core/ops/dropout.py, with bit-identical results.

#include "common.cuh"

typedef unsigned long long Bits;

constexpr Bits kGamma = 0x9E3779B97F4A7C15ull;  // 2**64 / golden ratio, SplitMix64's step

// The output function of SplitMix64: Steele, Lea and Flood, OOPSLA 2014, figure 16.
__device__ __forceinline__ Bits mix(Bits z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// y = x * scale for elements whose 32 random bits are below ``below``, else 0; a pack of a row at a time. The position
// is read from memory because it changes from step to step, while a captured step's arguments do not.
KERNEL(drop)(const T* x, T* y, long long rows, int columns, Bits seed, Bits layer, const Bits* position, Bits below,
             R scale) {
    const Bits stream = mix(mix(seed + kGamma) + layer + kGamma) + *position;
    const bool aligned = columns % N == 0 && is_aligned<N>(x) && is_aligned<N>(y);
    each_cell(rows, (columns + N - 1) / N, [=](long long row) {
        const Bits start = mix(stream + (Bits)row + kGamma);
        return [=](int pack) {
            whole_or_single<N>(pack * (long long)N, 0, columns, aligned, [=](auto size, long long column) {
                auto values = load<size.value>(x + row * columns + column);
                Bits state = start + (Bits)column * kGamma;
#pragma unroll
                for (int j = 0; j < size.value; ++j) {
                    state += kGamma;
                    values[j] = mix(state) >> 32 < below ? values[j] * scale : R(0);
                }
                store(y + row * columns + column, values);
            });
        };
    });
}
