// Batches from examples in memory: the CUDA form of the kernel in data/loader.py.

#include "common.cuh"

// out[i] = factor * stored[numbers[i]], converted; four values of a row at a time.
template <typename S, typename T>
__device__ void take(const S* stored, const long long* numbers, long long count, int columns, T factor, T* out) {
    each_cell(count, (columns + 3) / 4, [=](long long row, int pack) {
        const Pack<S, 4> source = load<S, 4>(stored + numbers[row] * columns, pack * 4LL, 0, columns);
        Pack<T, 4> target;
#pragma unroll
        for (int j = 0; j < 4; ++j) target[j] = factor * (T)source[j];
        T* const line = out + row * columns;
        store(line, pack * 4LL, 0, columns, target);
    });
}

#define INSTANCE_OF(S, name, T)                                                                                  \
    KERNEL take_##name##_##T(const S* stored, const long long* numbers, long long count, int columns, T factor,  \
                             T* out) {                                                                           \
        take(stored, numbers, count, columns, factor, out);                                                      \
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
