// Batches from examples in GPU memory: the CUDA version of the kernel in data/loader.py.

#include "common.cuh"

// out[i] = factor * stored[indices[i]], converted; four values of a row at a time. ``stored`` may have any ``kind``.
KERNEL(take)(const void* stored, int kind, const long long* indices, long long count, int columns, R factor, T* out) {
    with_type(stored, kind, [=](auto typed) {
        each_cell(count, (columns + 3) / 4, [=](long long row) {
            const auto source = typed + indices[row] * columns;
            T* const target = out + row * columns;
            const bool aligned = is_aligned<4>(source) && is_aligned<4>(target);
            return [=](int pack) {
                whole_or_single<4>(pack * 4LL, 0, columns, aligned, [=](auto size, long long i) {
                    const auto values = load<size.value>(source + i);
                    Pack<R, size.value> scaled;
#pragma unroll
                    for (int j = 0; j < size.value; ++j) scaled[j] = factor * (R)values[j];
                    store(target + i, scaled);
                });
            };
        });
    });
}
