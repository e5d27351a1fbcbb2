// Shared code of the kernels: packs of values, loops over arrays, and sums in an order that does not depend on timing.
//
// Blocks have 256 threads, in a line or as rows of 32 (a warp). Grids are bounded, so threads loop.
//
// A source is compiled for one type of stored values at a time: float, double, Float16 or Bfloat16. At its end this
// header defines T, this type; R, the type in which such values are computed; and N, the values of a 16-byte access.

// KERNEL_WITH(blocks, name) limits registers such that a multiprocessor runs at least this many blocks at once, or
// three if values are double. With these limits no kernel spills; bench/gpu_kernels.py shows the figures.
#define KERNEL(name) KERNEL_WITH(4, name)
#define KERNEL_WITH(blocks, name) KERNEL_OF(blocks, name, STORED)
#define KERNEL_OF(blocks, name, type) KERNEL_NAMED(blocks, name, type)
#define KERNEL_NAMED(blocks, name, type) \
    extern "C" __global__ void __launch_bounds__(256, sizeof(T) == 8 ? 3 : blocks) name##_##type

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ long long thread_number() { return blockIdx.x * (long long)blockDim.x + threadIdx.x; }
__device__ __forceinline__ long long thread_count() { return gridDim.x * (long long)blockDim.x; }

// Conversions to 16 bits round to nearest, ties to even; NaN stays NaN. They are written out because NVRTC finds no
// headers; tests have their own version.
#ifndef EMULATED
__device__ __forceinline__ float from_float16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ unsigned short to_float16(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ __forceinline__ float from_bfloat16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ __forceinline__ unsigned short to_bfloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else
    const unsigned bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    const unsigned rounded = (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16;
    return (unsigned short)(sign | (magnitude > 0x7f800000u ? 0x7fc0u : rounded));
#endif
}

// 16-bit storage types of activations. Arithmetic is in float.
struct Float16 {
    unsigned short bits;
    Float16() = default;
    __device__ __forceinline__ Float16(float value) : bits(to_float16(value)) {}
    __device__ __forceinline__ operator float() const { return from_float16(bits); }
};

struct Bfloat16 {
    unsigned short bits;
    Bfloat16() = default;
    __device__ __forceinline__ Bfloat16(float value) : bits(to_bfloat16(value)) {}
    __device__ __forceinline__ operator float() const { return from_bfloat16(bits); }
};

// The type in which values stored as T are computed; also the type of parameters and their gradients.
template <typename T>
struct Computed {
    typedef T type;
};
template <>
struct Computed<Float16> {
    typedef float type;
};
template <>
struct Computed<Bfloat16> {
    typedef float type;
};
template <typename T>
using Real = typename Computed<T>::type;

// N adjacent values that one instruction loads or stores.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
    T values[N];
    __device__ __forceinline__ T& operator[](int j) { return values[j]; }
    __device__ __forceinline__ const T& operator[](int j) const { return values[j]; }
};

template <int N>
struct Size {
    static constexpr int value = N;
};

template <typename T>
constexpr int kPack = 16 / sizeof(T);

template <int N, typename T>
__device__ __forceinline__ bool is_aligned(const T* place) {
    return reinterpret_cast<unsigned long long>(place) % (N * sizeof(T)) == 0;
}

template <int N, typename T>
__device__ __forceinline__ Pack<Real<T>, N> load(const T* place) {
    if constexpr (sizeof(Real<T>) == sizeof(T)) {
        return *reinterpret_cast<const Pack<T, N>*>(place);
    } else {
        const Pack<T, N> stored = *reinterpret_cast<const Pack<T, N>*>(place);
        Pack<Real<T>, N> values;
#pragma unroll
        for (int j = 0; j < N; ++j) values[j] = stored[j];
        return values;
    }
}

// Two values stored together, the first in the lower bits.
template <typename T>
__device__ __forceinline__ unsigned two(float first, float second) {
    return T(first).bits | (unsigned)T(second).bits << 16;
}

// Stores 16 bytes, or 8, explicitly, because nvcc 13.5 compiles some assignments of packs to one store per value. Not for
// shared memory: __stwb writes to global memory only.
template <typename T, int N>
__device__ __forceinline__ void store(T* place, const Pack<Real<T>, N>& pack) {
    if constexpr (N == 1) {
        *place = pack[0];
    } else if constexpr (sizeof(T) == 2 && N == 4) {
        __stwb(reinterpret_cast<uint2*>(place), uint2{two<T>(pack[0], pack[1]), two<T>(pack[2], pack[3])});
    } else if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int j = 0; j < N; j += 8)
            __stwb(reinterpret_cast<uint4*>(place + j),
                   uint4{two<T>(pack[j], pack[j + 1]), two<T>(pack[j + 2], pack[j + 3]),
                         two<T>(pack[j + 4], pack[j + 5]), two<T>(pack[j + 6], pack[j + 7])});
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int j = 0; j < N; j += 4)
            __stwb(reinterpret_cast<float4*>(place + j), float4{pack[j], pack[j + 1], pack[j + 2], pack[j + 3]});
    } else {
#pragma unroll
        for (int j = 0; j < N; j += 2) __stwb(reinterpret_cast<double2*>(place + j), double2{pack[j], pack[j + 1]});
    }
}

// Loads a pack from an address that need not be aligned.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> collect(const T* place) {
    Pack<T, N> pack;
#pragma unroll
    for (int j = 0; j < N; ++j) pack[j] = place[j];
    return pack;
}

// Calls f(Size<N>(), i) if the whole pack may be accessed at once, else f(Size<1>(), ...) for its values in [lo, hi).
// In the first case all loads follow each other without a branch that would stall them.
template <int N, typename F>
__device__ __forceinline__ void whole_or_single(long long i, long long lo, long long hi, bool aligned, F f) {
    if (aligned && lo <= i && i + N <= hi) {
        f(Size<N>(), i);
        return;
    }
#pragma unroll 1
    for (int j = 0; j < N; ++j)
        if (lo <= i + j && i + j < hi) f(Size<1>(), i + j);
}

// The same for all of [0, n), by a line of threads.
template <int N, typename F>
__device__ __forceinline__ void each_pack(long long n, bool aligned, F f) {
    for (long long i = thread_number() * N; i < n; i += thread_count() * N) whole_or_single<N>(i, 0, n, aligned, f);
}

template <typename F, typename T, int N, typename... Packs>
__device__ __forceinline__ Pack<T, N> map_pack(F f, const Pack<T, N>& first, const Packs&... others) {
    Pack<T, N> result;
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = f(first[j], others[j]...);
    return result;
}

// f(row)(column) for a whole matrix, by rows of 32 threads: the lanes of a warp have adjacent columns.
template <typename F>
__device__ __forceinline__ void each_cell(long long rows, int columns, F f) {
    const int down = gridDim.x * blockDim.y, across = gridDim.y * blockDim.x;
    for (long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y; row < rows; row += down) {
        const auto of_column = f(row);
        for (long long column = blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += across)
            of_column((int)column);
    }
}

// f(size, column)(i) for all packs of a matrix, where i is the index of a pack's first element: a thread has the same
// columns in every row. Packs have N values if rows consist of packs and are aligned, else 1. A block has blockDim.x
// threads side by side.
template <int N, typename F>
__device__ __forceinline__ void each_column(long long rows, int columns, bool aligned, F f) {
    const auto walk = [=](auto size) {
        const int across = gridDim.x * blockDim.x * size.value;
        const long long down = gridDim.y * (long long)blockDim.y;
        for (int column = (blockIdx.x * blockDim.x + threadIdx.x) * size.value; column < columns; column += across) {
            const auto of_row = f(size, column);
#pragma unroll 1
            for (long long row = blockIdx.y * (long long)blockDim.y + threadIdx.y; row < rows; row += down)
                of_row(row * columns + column);
        }
    };
    if (aligned && columns % N == 0) walk(Size<N>());
    else walk(Size<1>());
}

// f(values), with values as an array of its type; ``kind`` is the type's index in ops/grid.py's list.
template <typename F>
__device__ __forceinline__ void with_type(const void* values, int kind, F f) {
    switch (kind) {
        case 0: return f(static_cast<const signed char*>(values));
        case 1: return f(static_cast<const unsigned char*>(values));
        case 2: return f(static_cast<const short*>(values));
        case 3: return f(static_cast<const unsigned short*>(values));
        case 4: return f(static_cast<const int*>(values));
        case 5: return f(static_cast<const unsigned int*>(values));
        case 6: return f(static_cast<const long long*>(values));
        case 7: return f(static_cast<const unsigned long long*>(values));
        case 8: return f(static_cast<const float*>(values));
        default: return f(static_cast<const double*>(values));
    }
}

// The i-th element of an array of any numeric type.
template <typename T>
__device__ __forceinline__ T number(const void* values, int kind, long long i) {
    T found;
    with_type(values, kind, [&](auto typed) { found = (T)typed[i]; });
    return found;
}

struct Sum {
    template <typename T>
    static __device__ __forceinline__ T of(T a, T b) { return a + b; }
};

struct Product {
    template <typename T>
    static __device__ __forceinline__ T of(T a, T b) { return a * b; }
};

struct Largest {
    template <typename T>
    static __device__ __forceinline__ T of(T a, T b) { return fmax(a, b); }  // if one is NaN, the other one
};

// All 32 lanes must call it; all get the result.
template <typename Operation, typename T>
__device__ __forceinline__ T reduce_warp(T value) {
#pragma unroll
    for (int apart = kWarp / 2; apart > 0; apart /= 2)
        value = Operation::of(value, __shfl_xor_sync(kAllLanes, value, apart));
    return value;
}

// All threads of the block must call it; all get the result.
template <typename Operation, typename T>
__device__ __forceinline__ T reduce_block(T value) {
    __shared__ T parts[kWarp];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / kWarp;
    value = reduce_warp<Operation>(value);
    __syncthreads();  // an earlier sum may still be in use
    if (thread % kWarp == 0) parts[thread / kWarp] = value;
    __syncthreads();
    value = parts[0];
    for (int warp = 1; warp < warps; ++warp) value = Operation::of(value, parts[warp]);
    return value;
}

// Threads with the same threadIdx.y are a team that handles one row: a warp, or the whole block.
template <typename Operation, typename T>
__device__ __forceinline__ T reduce_team(T value) {
    return blockDim.x == kWarp ? reduce_warp<Operation>(value) : reduce_block<Operation>(value);
}

__device__ __forceinline__ long long team_number() { return blockIdx.x * (long long)blockDim.y + threadIdx.y; }
__device__ __forceinline__ long long team_count() { return gridDim.x * (long long)blockDim.y; }

// f(size, column) for all packs of a team's row. Packs have N values if rows consist of packs and are aligned, else 1.
template <int N, typename F>
__device__ __forceinline__ void each_pack_of_row(int columns, bool aligned, F f) {
    if (aligned && columns % N == 0) {
        for (int j = threadIdx.x * N; j < columns; j += blockDim.x * N) f(Size<N>(), j);
    } else {
        for (int j = threadIdx.x; j < columns; j += blockDim.x) f(Size<1>(), j);
    }
}

template <int M, int W, typename F, typename Write>
__device__ __forceinline__ void sum_packs(long long rows, int columns, F terms, Write write) {
    __shared__ Pack<double, M> sums[W][256];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, across = gridDim.x * blockDim.x * M;
    for (int start = blockIdx.x * blockDim.x * M; start < columns; start += across) {
        const int column = start + threadIdx.x * M;
        Pack<double, M> totals[W] = {};
        if (column < columns) {
            const auto add_terms = terms(Size<M>(), column);
#pragma unroll 1
            for (long long row = blockIdx.y * (long long)blockDim.y + threadIdx.y; row < rows;
                 row += gridDim.y * (long long)blockDim.y)
                add_terms(row * columns + column, totals);
        }
#pragma unroll
        for (int w = 0; w < W; ++w) sums[w][thread] = totals[w];
        for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
            __syncthreads();
            if (threadIdx.y >= half) continue;
#pragma unroll
            for (int w = 0; w < W; ++w) {
#pragma unroll
                for (int j = 0; j < M; ++j) sums[w][thread][j] += sums[w][thread + half * blockDim.x][j];
            }
        }
        if (threadIdx.y == 0 && column < columns) {
#pragma unroll
            for (int w = 0; w < W; ++w) {
#pragma unroll
                for (int j = 0; j < M; ++j) write(w, column + j, sums[w][thread][j]);
            }
        }
        __syncthreads();  // sums is used again
    }
}

// W sums of each column over this block's rows, with threads, rows and packs as for each_column.
// terms(size, column)(i, totals) adds the terms of a pack to totals[0], ... totals[W - 1], and write(w, column, sum) is
// called with the results. All threads of the block must call it.
template <int N, int W, typename F, typename Write>
__device__ __forceinline__ void sum_columns(long long rows, int columns, bool aligned, F terms, Write write) {
    if (aligned && columns % N == 0) sum_packs<N, W>(rows, columns, terms, write);
    else sum_packs<1, W>(rows, columns, terms, write);
}

typedef STORED T;
typedef Real<T> R;
constexpr int N = kPack<T>;
