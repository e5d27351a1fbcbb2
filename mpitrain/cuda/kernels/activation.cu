// Functions of each element: the CUDA form of the kernels in nn/activation.py. Each reads and writes memory once.

#include "common.cuh"

// Compared with "not greater than zero" in mind: NaN is neither, and stays.
template <typename T>
__device__ void relu(long long n, const T* x, T* y) {
    map(n, [](T value) { return value <= 0 ? T(0) : value; }, y, x);
}

template <typename T>
__device__ void relu_backward(long long n, const T* y, T* dy) {
    map(n, [](T value, T gradient) { return value <= 0 ? T(0) : gradient; }, dy, y, dy);
}

template <typename T>
__device__ void leaky_relu(long long n, const T* x, const T* values, T slope, T* out) {
    map(n, [slope](T side, T value) { return side <= 0 ? slope * value : value; }, out, x, values);
}

template <typename T>
__device__ T normal_distribution(T x) {
    const T root = T(0.70710678118654752440);
    // erfc and not 1 + erf, which would cancel in the left tail.
    return x < 0 ? T(0.5) * erfc(-x * root) : T(0.5) * (T(1) + erf(x * root));
}

template <typename T>
__device__ void gelu(long long n, const T* x, T* phi, T* y) {
    const bool aligned = is_aligned<kPack<T>>(x) && is_aligned<kPack<T>>(phi) && is_aligned<kPack<T>>(y);
    each_pack<kPack<T>>(n, aligned, [=](auto size, long long i) {
        const auto values = load<size.value>(x + i);
        const auto shares = map_pack(normal_distribution<T>, values);
        store(phi + i, shares);
        store(y + i, map_pack([](T value, T share) { return value * share; }, values, shares));
    });
}

template <typename T>
__device__ void gelu_backward(long long n, const T* x, const T* phi, T* dy) {
    const T peak = T(0.39894228040143267794);
    auto derivative = [peak](T value, T share, T gradient) {
        return gradient * (share + value * peak * exp(T(-0.5) * value * value));
    };
    map(n, derivative, dy, x, phi, dy);
}

template <typename T>
__device__ void tanh_backward(long long n, const T* y, T* dy) {
    map(n, [](T value, T gradient) { return gradient * (T(1) - value * value); }, dy, y, dy);
}

// y holds exp(-abs(x)) and becomes the sigmoid of x.
template <typename T>
__device__ void sigmoid(long long n, const T* x, T* y) {
    map(n, [](T value, T tail) { return (value < 0 ? tail : T(1)) / (T(1) + tail); }, y, x, y);
}

template <typename T>
__device__ void sigmoid_backward(long long n, const T* y, T* dy) {
    map(n, [](T value, T gradient) { return gradient * (value * (T(1) - value)); }, dy, y, dy);
}

#define INSTANCE(T)                                                                                              \
    KERNEL relu_##T(long long n, const T* x, T* y) { relu(n, x, y); }                                            \
    KERNEL relu_backward_##T(long long n, const T* y, T* dy) { relu_backward(n, y, dy); }                        \
    KERNEL leaky_relu_##T(long long n, const T* x, const T* values, T slope, T* out) {                           \
        leaky_relu(n, x, values, slope, out);                                                                    \
    }                                                                                                            \
    KERNEL gelu_##T(long long n, const T* x, T* phi, T* y) { gelu(n, x, phi, y); }                               \
    KERNEL gelu_backward_##T(long long n, const T* x, const T* phi, T* dy) { gelu_backward(n, x, phi, dy); }     \
    KERNEL tanh_backward_##T(long long n, const T* y, T* dy) { tanh_backward(n, y, dy); }                        \
    KERNEL sigmoid_##T(long long n, const T* x, T* y) { sigmoid(n, x, y); }                                      \
    KERNEL sigmoid_backward_##T(long long n, const T* y, T* dy) { sigmoid_backward(n, y, dy); }
FOR_REALS(INSTANCE)
