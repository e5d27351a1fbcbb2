// Dropout: the CUDA version of the kernel in nn/dropout.py, with bit-identical results.

#include "common.cuh"

typedef unsigned long long Bits;

constexpr Bits kGamma = 0x9E3779B97F4A7C15ull;  // 2**64 / golden ratio, SplitMix64's step

// The output function of SplitMix64: Steele, Lea and Flood, OOPSLA 2014, figure 16.
__device__ __forceinline__ Bits mix(Bits z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// y = x * scale for elements whose 32 random bits are below ``below``, else 0. The position is read from memory because
// it changes from step to step, while a captured step's arguments do not.
template <typename T>
__device__ void drop(const T* x, T* y, long long rows, int columns, Bits seed, Bits layer, const Bits* position,
                     Bits below, Real<T> scale) {
    const Bits stream = mix(mix(seed + kGamma) + layer + kGamma) + *position;
    each_cell(rows, columns, [=](long long row, int column) {
        const Bits start = mix(stream + (Bits)row + kGamma);
        const Bits bits = mix(start + (Bits)(column + 1) * kGamma) >> 32;
        const long long i = row * columns + column;
        y[i] = bits < below ? x[i] * scale : Real<T>(0);
    });
}

#define INSTANCE(T)                                                                                              \
    KERNEL drop_##T(const T* x, T* y, long long rows, int columns, Bits seed, Bits layer, const Bits* position,  \
                    Bits below, Real<T> scale) {                                                                 \
        drop(x, y, rows, columns, seed, layer, position, below, scale);                                          \
    }
FOR_STORED(INSTANCE)
