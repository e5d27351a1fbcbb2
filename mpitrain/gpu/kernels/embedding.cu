// Row lookup: the CUDA version of the kernels in core/ops/embedding.py. Indices may have any ``kind``.

#include "common.cuh"

// The row of an index, or -1 if out of range.
__device__ __forceinline__ long long named_row(const void* indices, int kind, long long i, long long rows) {
    const double named = number<double>(indices, kind, i);
    return named >= 0 && named < rows ? (long long)named : -1;  // NaN fails every comparison
}

KERNEL(take_rows)(const R* weight, const void* indices, int kind, long long count, long long vocabulary, int features,
                  T* y) {
    each_cell(count, features, [=](long long i) {
        const long long row = named_row(indices, kind, i, vocabulary);
        return [=](int j) { y[i * features + j] = row < 0 ? R(nan("")) : weight[row * features + j]; };
    });
}

// The transposed lookup, as a gather: a warp scans all indices, 32 at a time, for those of its row, and adds their
// gradients in the order of the batch. Each lane handles four columns; the lanes of a warp have adjacent ones.
KERNEL(add_rows)(const T* dy, const void* indices, int kind, long long count, long long vocabulary, int features,
                 R* weight_grad) {
    constexpr int columns = 4;
    const int lane = threadIdx.x;
    for (long long row = team_number(); row < vocabulary; row += team_count()) {
        for (int first = blockIdx.y * kWarp * columns; first < features; first += gridDim.y * kWarp * columns) {
            R total[columns] = {};
            for (long long start = 0; start < count; start += kWarp) {
                const long long i = start + lane;
                const bool is_hit = i < count && named_row(indices, kind, i, vocabulary) == row;
                for (unsigned hits = __ballot_sync(kAllLanes, is_hit); hits != 0; hits &= hits - 1) {
                    const T* const line = dy + (start + __ffs(hits) - 1) * features;
#pragma unroll
                    for (int k = 0; k < columns; ++k) {
                        const int column = first + k * kWarp + lane;
                        if (column < features) total[k] += line[column];
                    }
                }
            }
#pragma unroll
            for (int k = 0; k < columns; ++k) {
                const int column = first + k * kWarp + lane;
                if (column < features) weight_grad[row * features + column] = total[k];
            }
        }
    }
}
