// Batches from examples in GPU memory: the CUDA version of the kernel in data/loader.py.

#include "common.cuh"

// out[i] = factor * stored[indices[i]], converted; four values of a row at a time.
template <typename S, typename T>
__device__ void take(const S* stored, const long long* indices, long long count, int columns, T factor, T* out) {
    each_cell(count, (columns + 3) / 4, [=](long long row, int pack) {
        const S* const source = stored + indices[row] * columns;
        T* const target = out + row * columns;
        const bool aligned = is_aligned<4>(source) && is_aligned<4>(target);
        whole_or_single<4>(pack * 4LL, 0, columns, aligned, [=](auto size, long long i) {
            const auto values = load<size.value>(source + i);
            Pack<T, size.value> scaled;
#pragma unroll
            for (int j = 0; j < size.value; ++j) scaled[j] = factor * (T)values[j];
            store(target + i, scaled);
        });
    });
}

#define INSTANCE_OF(S, name, T)                                                                                  \
    KERNEL take_##name##_##T(const S* stored, const long long* indices, long long count, int columns, T factor,  \
                             T* out) {                                                                           \
        take(stored, indices, count, columns, factor, out);                                                      \
    }
#define INSTANCE(T)                                                                                              \
    INSTANCE_OF(signed char, int8, T)                                                                            \
    INSTANCE_OF(unsigned char, uint8, T)                                                                         \
    INSTANCE_OF(short, int16, T)                                                                                 \
    INSTANCE_OF(unsigned short, uint16, T)                                                                       \
    INSTANCE_OF(int, int32, T)                                                                                   \
    INSTANCE_OF(unsigned int, uint32, T)                                                                         \
    INSTANCE_OF(long long, int64, T)                                                                             \
    INSTANCE_OF(unsigned long long, uint64, T)                                                                   \
    INSTANCE_OF(float, float32, T)                                                                               \
    INSTANCE_OF(double, float64, T)
FOR_REALS(INSTANCE)
