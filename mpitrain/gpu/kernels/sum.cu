// Sums in a fixed order.

#include "common.cuh"

constexpr int kLevels = 24;  // of a tree of sums: more than log2 of the number of leaves

// out[i] = factor * the sum of rows[order[r], i], for rows ``stride`` apart; ``order`` is as in core.sum_tree.
KERNEL(sum_rows)(long long n, const T* rows, long long stride, const long long* order, int count, T factor, T* out) {
    const bool aligned = is_aligned<N>(rows) && stride % N == 0 && is_aligned<N>(out);
    each_pack<N>(n, aligned, [=](auto size, long long i) {
        auto total = load<size.value>(rows + order[0] * stride + i);
        if (order[count - 1] >= 0) {
            for (int r = 1; r < count; ++r)
                total = map_pack(Sum::of<T>, total, load<size.value>(rows + order[r] * stride + i));
        } else {
            decltype(total) left[kLevels];  // sums that wait for the one to their right
            int waiting = 0;
            for (int r = 1; r < count; ++r) {
                if (order[r] < 0) {
                    total = map_pack(Sum::of<T>, left[--waiting], total);
                } else {
                    left[waiting++] = total;
                    total = load<size.value>(rows + order[r] * stride + i);
                }
            }
        }
        store(out + i, map_pack([factor](T value) { return factor * value; }, total));
    });
}

// sums[j] = the sum of parts[:, j], times scale for the first; by one block.
KERNEL(add_parts)(const double* parts, int count, int width, double scale, double* sums) {
    for (int j = 0; j < width; ++j) {
        double total = 0;
        for (int i = threadIdx.x; i < count; i += blockDim.x) total += parts[i * (long long)width + j];
        total = reduce_block<Sum>(total);
        if (threadIdx.x == 0) sums[j] = j == 0 ? scale * total : total;
    }
}

// sums[j] = the sum of parts[:, j], by blocks of 8 rows of 32 threads: one block per 32 columns.
KERNEL(add_columns)(const double* parts, int count, int columns, T* sums) {
    __shared__ double lines[8][kWarp];
    const int column = blockIdx.x * kWarp + threadIdx.x;
    double total = 0;
    if (column < columns)
        for (int i = threadIdx.y; i < count; i += blockDim.y) total += parts[i * (long long)columns + column];
    lines[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
    total = 0;
    for (int line = 0; line < 8; ++line) total += lines[line][threadIdx.x];
    sums[column] = total;
}
