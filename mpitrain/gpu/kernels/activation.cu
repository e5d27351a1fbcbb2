// Element-wise activations, alone or fused with the bias that precedes them, and their gradients.
//
// A bias and its gradient have the type in which values are computed.

#include "common.cuh"

// In the order of ops/activation.py.
enum Activation { kNone, kRelu, kLeakyRelu, kGelu, kTanh, kSigmoid };

template <typename R>
__device__ __forceinline__ R normal_distribution(R x) {
    const R root = R(0.70710678118654752440);
    // erfc instead of 1 + erf, which would cancel in the left tail.
    return x < 0 ? R(0.5) * erfc(-x * root) : R(0.5) * (R(1) + erf(x * root));
}

template <typename R>
__device__ __forceinline__ R logistic(R x) {
    const R tail = exp(-fabs(x));  // the sign that cannot overflow
    return (x < 0 ? tail : R(1)) / (R(1) + tail);
}

template <typename R, int N>
__device__ __forceinline__ Pack<R, N> activated(const Pack<R, N>& z, int kind, R slope) {
    switch (kind) {  // comparisons are written such that NaN is preserved
        case kRelu: return map_pack([](R value) { return value <= 0 ? R(0) : value; }, z);
        case kLeakyRelu: return map_pack([slope](R value) { return value <= 0 ? slope * value : value; }, z);
        case kGelu: return map_pack([](R value) { return value * normal_distribution(value); }, z);
        case kTanh: return map_pack([](R value) { return tanh(value); }, z);
        case kSigmoid: return map_pack(logistic<R>, z);
        default: return z;
    }
}

// dy times the derivative, computed from the activation's output; for GELU from its input.
template <typename R, int N>
__device__ __forceinline__ Pack<R, N> sloped(const Pack<R, N>& kept, const Pack<R, N>& dy, int kind, R slope) {
    switch (kind) {
        case kRelu: return map_pack([](R y, R gradient) { return y <= 0 ? R(0) : gradient; }, kept, dy);
        case kLeakyRelu:
            return map_pack([slope](R y, R gradient) { return y <= 0 ? slope * gradient : gradient; }, kept, dy);
        case kGelu: {
            const R peak = R(0.39894228040143267794);
            auto derivative = [peak](R z, R gradient) {
                return gradient * (normal_distribution(z) + z * peak * exp(R(-0.5) * z * z));
            };
            return map_pack(derivative, kept, dy);
        }
        case kTanh: return map_pack([](R y, R gradient) { return gradient * (R(1) - y * y); }, kept, dy);
        case kSigmoid: return map_pack([](R y, R gradient) { return gradient * (y * (R(1) - y)); }, kept, dy);
        default: return dy;
    }
}

template <typename T>
__device__ void add(const T* a, const T* b, long long n, T* sum) {
    map(n, Sum::of<Real<T>>, sum, a, b);
}

// y = activation(x); x and y may be the same array.
template <typename T>
__device__ void activate(const T* x, int kind, Real<T> slope, long long n, T* y) {
    constexpr int N = kPack<T>;
    each_pack<N>(n, is_aligned<N>(x) && is_aligned<N>(y), [=](auto size, long long i) {
        store(y + i, activated(load<decltype(size)::value>(x + i), kind, slope));
    });
}

template <typename T>
__device__ void activate_backward(const T* kept, int kind, Real<T> slope, long long n, T* dy) {
    constexpr int N = kPack<T>;
    each_pack<N>(n, is_aligned<N>(kept) && is_aligned<N>(dy), [=](auto size, long long i) {
        constexpr int width = decltype(size)::value;
        store(dy + i, sloped(load<width>(kept + i), load<width>(dy + i), kind, slope));
    });
}

// y = activation(product + bias); if y is another array, product is set to product + bias.
template <typename T>
__device__ void add_bias(T* product, const Real<T>* bias, int kind, Real<T> slope, long long n, int columns, T* y) {
    constexpr int N = kPack<T>;
    const bool aligned = is_aligned<N>(product) && is_aligned<N>(y);
    const bool together = columns % N == 0 && is_aligned<N>(bias);
    each_pack<N>(n, aligned, [=](auto size, long long i) {
        constexpr int width = decltype(size)::value;  // NVRTC rejects size.value in nested functions
        const auto biases = around<width>(bias, column_of(i, columns), columns, together);
        const auto z = map_pack(Sum::of<Real<T>>, load<width>(product + i), biases);
        if (y != product) store(product + i, z);
        store(y + i, activated(z, kind, slope));
    });
}

// A thread handles N adjacent columns; a block has blockDim.x such threads side by side and handles blockDim.y rows at
// a time. The column sums of the new dy over this block's rows are written to parts[blockIdx.y], or to bias_grad if
// there is only one block of rows.
template <typename T>
__device__ void add_bias_backward(const T* kept, int kind, Real<T> slope, long long rows, int columns, T* dy,
                                  double* parts, Real<T>* bias_grad) {
    typedef Real<T> R;
    constexpr int N = kPack<T>;
    __shared__ Pack<double, N> sums[256];
    const int first = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    const bool together = columns % N == 0 && is_aligned<N>(dy) && is_aligned<N>(kept);
    Pack<double, N> total = {};
    if (first < columns) {
        for (long long row = blockIdx.y * (long long)blockDim.y + threadIdx.y; row < rows;
             row += gridDim.y * (long long)blockDim.y) {
            const long long i = row * columns + first;
            Pack<R, N> slopes = {}, values = {};
            if (together) {
                slopes = load<N>(dy + i);
                if (kind != kNone) values = load<N>(kept + i);
            } else {
#pragma unroll
                for (int j = 0; j < N; ++j) {
                    if (first + j >= columns) continue;
                    slopes[j] = dy[i + j];
                    if (kind != kNone) values[j] = kept[i + j];
                }
            }
            slopes = sloped(values, slopes, kind, slope);
            if (kind != kNone && together) {
                store(dy + i, slopes);
            } else if (kind != kNone) {
#pragma unroll
                for (int j = 0; j < N; ++j)
                    if (first + j < columns) dy[i + j] = slopes[j];
            }
#pragma unroll
            for (int j = 0; j < N; ++j) total[j] += slopes[j];
        }
    }
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    sums[thread] = total;
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half)
#pragma unroll
            for (int j = 0; j < N; ++j) sums[thread][j] += sums[thread + half * blockDim.x][j];
    }
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (first + j >= columns) continue;
        if (gridDim.y == 1) bias_grad[first + j] = sums[thread][j];
        else parts[blockIdx.y * (long long)columns + first + j] = sums[thread][j];
    }
}

#define INSTANCE(T)                                                                                              \
    KERNEL activate_##T(const T* x, int kind, Real<T> slope, long long n, T* y) {                                \
        activate(x, kind, slope, n, y);                                                                          \
    }                                                                                                            \
    KERNEL activate_backward_##T(const T* kept, int kind, Real<T> slope, long long n, T* dy) {                   \
        activate_backward(kept, kind, slope, n, dy);                                                             \
    }                                                                                                            \
    KERNEL add_##T(const T* a, const T* b, long long n, T* sum) { add(a, b, n, sum); }                           \
    KERNEL add_bias_##T(T* product, const Real<T>* bias, int kind, Real<T> slope, long long n, int columns,      \
                           T* y) {                                                                               \
        add_bias(product, bias, kind, slope, n, columns, y);                                                     \
    }                                                                                                            \
    KERNEL add_bias_backward_##T(const T* kept, int kind, Real<T> slope, long long rows, int columns, T* dy,     \
                                 double* parts, Real<T>* bias_grad) {                                            \
        add_bias_backward(kept, kind, slope, rows, columns, dy, parts, bias_grad);                               \
    }
FOR_STORED(INSTANCE)
