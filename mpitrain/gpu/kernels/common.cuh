// Shared code of the kernels: packs of values, loops over arrays, and sums in an order that does not depend on timing.
//
// Blocks have 256 threads, in a line or as rows of 32 (a warp). Grids are bounded, so threads loop.

#define KERNEL extern "C" __global__ void __launch_bounds__(256, 3)
#define FOR_REALS(INSTANCE) INSTANCE(float) INSTANCE(double)
#define FOR_STORED(INSTANCE) FOR_REALS(INSTANCE) INSTANCE(Float16) INSTANCE(Bfloat16)

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

// An explicit 16-byte access: nvcc 13.5 compiles some assignments of packs to one store per value.
template <typename T, int N>
__device__ __forceinline__ void store(T* place, const Pack<Real<T>, N>& pack) {
    if constexpr (N == 1) {
        *place = pack[0];
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

// out[i] = f(in[i]...); out may be one of the inputs, since a thread reads its values before it writes them.
template <typename T, typename F, typename... Inputs>
__device__ __forceinline__ void map(long long n, F f, T* out, const Inputs*... in) {
    const bool aligned = (is_aligned<kPack<T>>(out) && ... && is_aligned<kPack<T>>(in));
    each_pack<kPack<T>>(n, aligned, [=](auto size, long long i) {
        store(out + i, map_pack(f, load<size.value>(in + i)...));
    });
}

// values[column], values[column + 1], ..., wrapping around after the last; in one load if no pack wraps around, as
// indicated by ``together``.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> around(const T* values, int column, int columns, bool together) {
    if (together) return load<N>(values + column);
    Pack<T, N> pack;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        pack[j] = values[column];
        column = column + 1 == columns ? 0 : column + 1;
    }
    return pack;
}

// i % columns; a 64-bit division takes several times as long as a 32-bit one.
__device__ __forceinline__ int column_of(long long i, int columns) {
    return i < 1LL << 32 ? (int)((unsigned)i % (unsigned)columns) : (int)(i % columns);
}

// f(row, column) for a whole matrix, by rows of 32 threads: the lanes of a warp have adjacent columns.
template <typename F>
__device__ __forceinline__ void each_cell(long long rows, int columns, F f) {
    const int down = gridDim.x * blockDim.y, across = gridDim.y * blockDim.x;
    for (long long row = blockIdx.x * (long long)blockDim.y + threadIdx.y; row < rows; row += down)
        for (long long column = blockIdx.y * blockDim.x + threadIdx.x; column < columns; column += across)
            f(row, (int)column);
}

// The i-th element of an array of any numeric type; ``kind`` is the type's index in ops/grid.py's list.
template <typename T>
__device__ __forceinline__ T number(const void* values, int kind, long long i) {
    switch (kind) {
        case 0: return (T) static_cast<const signed char*>(values)[i];
        case 1: return (T) static_cast<const unsigned char*>(values)[i];
        case 2: return (T) static_cast<const short*>(values)[i];
        case 3: return (T) static_cast<const unsigned short*>(values)[i];
        case 4: return (T) static_cast<const int*>(values)[i];
        case 5: return (T) static_cast<const unsigned int*>(values)[i];
        case 6: return (T) static_cast<const long long*>(values)[i];
        case 7: return (T) static_cast<const unsigned long long*>(values)[i];
        case 8: return (T) static_cast<const float*>(values)[i];
        default: return (T) static_cast<const double*>(values)[i];
    }
}

struct Sum {
    template <typename T>
    static __device__ __forceinline__ T of(T a, T b) { return a + b; }
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
