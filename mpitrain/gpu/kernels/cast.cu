// Conversion between float32 and 16-bit types, with or without transposition.

#include "common.cuh"

template <typename S, typename T>
__device__ void cast(long long n, const S* x, T* y) {
    constexpr int N = 8;
    const bool aligned = is_aligned<N>(x) && is_aligned<N>(y);
    each_pack<N>(n, aligned, [=](auto size, long long i) { store(y + i, load<decltype(size)::value>(x + i)); });
}

// y[j, i] = x[i, j], in tiles of 32 by 32 with blocks of 8 rows of 32 threads.
template <typename S, typename T>
__device__ void transpose(const S* x, int rows, int columns, T* y) {
    __shared__ Real<S> tile[kWarp][kWarp + 1];  // padded, so that a column is spread over all banks
    const int row = blockIdx.y * kWarp, column = blockIdx.x * kWarp + threadIdx.x;
    for (int i = threadIdx.y; i < kWarp; i += 8)
        if (row + i < rows && column < columns) tile[i][threadIdx.x] = x[(row + i) * (long long)columns + column];
    __syncthreads();
    const int turned = blockIdx.x * kWarp, along = row + threadIdx.x;
    for (int i = threadIdx.y; i < kWarp; i += 8)
        if (turned + i < columns && along < rows) y[(turned + i) * (long long)rows + along] = tile[threadIdx.x][i];
}

#define TRANSPOSE(S, T)                                                                                          \
    KERNEL transpose_##S##_##T(const S* x, int rows, int columns, T* y) { transpose(x, rows, columns, y); }
#define INSTANCE(S, T)                                                                                           \
    KERNEL cast_##S##_##T(long long n, const S* x, T* y) { cast(n, x, y); }                                      \
    TRANSPOSE(S, T)
TRANSPOSE(float, float)
INSTANCE(float, Float16)
INSTANCE(float, Bfloat16)
INSTANCE(Float16, float)
INSTANCE(Bfloat16, float)
