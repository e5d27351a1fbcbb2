// Conversion between float and 16-bit types, with or without transposition.

#include "common.cuh"

template <typename From, typename To>
__device__ __forceinline__ void cast(long long n, const From* x, To* y) {
    constexpr int M = 8;
    each_pack<M>(n, is_aligned<M>(x) && is_aligned<M>(y), [=](auto size, long long i) {
        store(y + i, load<decltype(size)::value>(x + i));
    });
}

// y[j, i] = x[i, j], in tiles of 32 by 32 with blocks of 8 rows of 32 threads.
template <typename From, typename To>
__device__ __forceinline__ void transpose(const From* x, int rows, int columns, To* y) {
    __shared__ float tile[kWarp][kWarp + 1];  // padded, so that a column is spread over all banks
    const int row = blockIdx.y * kWarp, column = blockIdx.x * kWarp + threadIdx.x;
    for (int i = threadIdx.y; i < kWarp; i += 8)
        if (row + i < rows && column < columns) tile[i][threadIdx.x] = x[(row + i) * (long long)columns + column];
    __syncthreads();
    const int turned = blockIdx.x * kWarp, along = row + threadIdx.x;
    for (int i = threadIdx.y; i < kWarp; i += 8)
        if (turned + i < columns && along < rows) y[(turned + i) * (long long)rows + along] = tile[threadIdx.x][i];
}

KERNEL(cast_from_float)(long long n, const float* x, T* y) { cast(n, x, y); }

KERNEL(cast_to_float)(long long n, const T* x, float* y) { cast(n, x, y); }

KERNEL(transpose_from_float)(const float* x, int rows, int columns, T* y) { transpose(x, rows, columns, y); }

KERNEL(transpose_to_float)(const T* x, int rows, int columns, float* y) { transpose(x, rows, columns, y); }
