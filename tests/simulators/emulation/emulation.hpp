// Functions and variables of CUDA for a C++20 compiler, which includes this file before each source of kernels.
//
// Threads of a block are fibers: each runs until a barrier, a shuffle or a ballot, where it waits for the other
// threads. The checks are listed in emulation.cpp.

#pragma once

#include <math.h>

#include <bit>
#include <string>
#include <type_traits>
#include <utility>

#define __global__ __attribute__((noinline))  // the marker by which kernels.py finds kernels
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define EMULATED
#define TEXT_OF(text) #text
#define NAME_OF(type) TEXT_OF(type)

struct Place {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};

namespace emulation {

extern Place block_index, thread_index, block_size, grid_size;  // of the thread that is running

// Waits until all threads of the block are at the barrier of this line.
void wait_for_block(int line);

// Fails if the bytes are in a shared array.
void check_global(const void* place, std::size_t size);

// Stores 64 bits for the other lanes of the warp, waits until all lanes have done so, and returns all lanes' bits.
const unsigned long long* exchange(unsigned mask, unsigned long long bits, int line);

int lane();

template <typename T>
unsigned long long bits_of(T value) {
    if constexpr (sizeof(T) == 8) return std::bit_cast<unsigned long long>(value);
    else return std::bit_cast<unsigned>(value);
}

template <typename T>
T from_bits(unsigned long long bits) {
    if constexpr (sizeof(T) == 8) return std::bit_cast<T>(bits);
    else return std::bit_cast<T>((unsigned)bits);
}

using Call = void (*)(void** arguments);

struct Kernel {
    Kernel(const char* name, std::string parameters, Call call);
};

// NumPy's name of a parameter's type, with a star before it for a pointer.
template <typename T>
std::string type_name() {
    if constexpr (std::is_pointer_v<T>) return "*" + type_name<std::remove_const_t<std::remove_pointer_t<T>>>();
    else if constexpr (std::is_void_v<T>) return "any";
    else if constexpr (std::is_class_v<T>) return NAME_OF(STORED);
    else {
        const std::string kind = std::is_floating_point_v<T> ? "float" : std::is_signed_v<T> ? "int" : "uint";
        return kind + std::to_string(8 * sizeof(T));
    }
}

template <typename... T>
std::string type_names(void (*)(T...)) {
    return ((type_name<T>() + " ") + ...);
}

template <typename... T, std::size_t... I>
void call_with(void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<T*>(arguments[I])...);
}

template <typename... T>
void call_with(void (*kernel)(T...), void** arguments) {
    call_with(kernel, arguments, std::index_sequence_for<T...>());
}

template <auto kernel>
void call(void** arguments) {
    call_with(kernel, arguments);
}

}  // namespace emulation

#define blockIdx emulation::block_index
#define threadIdx emulation::thread_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size

inline void __syncthreads(int line = __builtin_LINE()) { emulation::wait_for_block(line); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int apart, int line = __builtin_LINE()) {
    const unsigned long long* const words = emulation::exchange(mask, emulation::bits_of(value), line);
    return emulation::from_bits<T>(words[emulation::lane() ^ apart]);
}

inline unsigned __ballot_sync(unsigned mask, bool vote, int line = __builtin_LINE()) {
    const unsigned long long* const votes = emulation::exchange(mask, vote, line);
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= (votes[lane] != 0 ? 1u : 0u) << lane;
    return all;
}

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float from_float16(unsigned short bits) { return std::bit_cast<_Float16>(bits); }
inline unsigned short to_float16(float value) { return std::bit_cast<unsigned short>((_Float16)value); }

template <typename T>
void __stwb(T* place, T value) {
    emulation::check_global(place, sizeof(T));
    *place = value;
}

inline int __ffs(int word) { return __builtin_ffs(word); }

template <typename T>
T max(T a, T b) { return a < b ? b : a; }
template <typename T>
T min(T a, T b) { return b < a ? b : a; }
using std::isnan;
