// Element-wise activations, alone or fused with the bias that precedes them, and their gradients.
//
// A bias and its gradient have the type in which values are computed.

#include "common.cuh"

// erfc instead of 1 + erf, which would cancel in the left tail; in both tails, so that a warp takes one path.
__device__ __forceinline__ R normal_distribution(R x) { return R(0.5) * erfc(x * R(-0.70710678118654752440)); }

__device__ __forceinline__ R logistic(R x) {
    const R tail = exp(-fabs(x));  // at most 1: cannot overflow
    return (x < 0 ? tail : R(1)) / (R(1) + tail);
}

template <int M>
__device__ __forceinline__ Pack<R, M> activated(const Pack<R, M>& z, int kind, R slope) {
    switch (kind) {  // comparisons are written such that NaN is preserved
        case kRelu: return map_pack([](R value) { return value <= 0 ? R(0) : value; }, z);
        case kLeakyRelu: return map_pack([slope](R value) { return value <= 0 ? slope * value : value; }, z);
        case kGelu: return map_pack([](R value) { return value * normal_distribution(value); }, z);
        case kTanh: return map_pack([](R value) { return tanh(value); }, z);
        case kSigmoid: return map_pack(logistic, z);
        default: return z;
    }
}

// dy times the derivative, computed from the activation's output; for GELU from its input.
template <int M>
__device__ __forceinline__ Pack<R, M> sloped(const Pack<R, M>& kept, const Pack<R, M>& dy, int kind, R slope) {
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

KERNEL(add)(const T* a, const T* b, long long n, T* sum) {
    const bool aligned = is_aligned<N>(a) && is_aligned<N>(b) && is_aligned<N>(sum);
    each_pack<N>(n, aligned, [=](auto size, long long i) {
        store(sum + i, map_pack(Sum::of<R>, load<size.value>(a + i), load<size.value>(b + i)));
    });
}

// y = activation(x); x and y may be the same array.
KERNEL_WITH(6, activate)(const T* x, int kind, R slope, long long n, T* y) {
    each_pack<N>(n, is_aligned<N>(x) && is_aligned<N>(y), [=](auto size, long long i) {
        store(y + i, activated(load<size.value>(x + i), kind, slope));
    });
}

KERNEL_WITH(6, activate_backward)(const T* kept, int kind, R slope, long long n, T* dy) {
    each_pack<N>(n, is_aligned<N>(kept) && is_aligned<N>(dy), [=](auto size, long long i) {
        store(dy + i, sloped(load<size.value>(kept + i), load<size.value>(dy + i), kind, slope));
    });
}

// y = activation(product + bias); if y is another array, product is set to product + bias.
KERNEL_WITH(5, add_bias)(T* product, const R* bias, int kind, R slope, long long rows, int columns, T* y) {
    each_column<N>(rows, columns, is_aligned<N>(product) && is_aligned<N>(y), [=](auto size, int column) {
        constexpr int width = decltype(size)::value;  // NVRTC rejects size.value in nested functions
        const auto biases = collect<width>(bias + column);
        return [=](long long i) {
            const auto z = map_pack(Sum::of<R>, load<width>(product + i), biases);
            if (y != product) store(product + i, z);
            store(y + i, activated(z, kind, slope));
        };
    });
}

// The column sums of the new dy over a block's rows are written to parts[blockIdx.y], or to bias_grad if there is only
// one block of rows.
KERNEL(add_bias_backward)(const T* kept, int kind, R slope, long long rows, int columns, T* dy, double* parts,
                          R* bias_grad) {
    const bool aligned = is_aligned<N>(dy) && is_aligned<N>(kept);
    auto gradient_at = [=](auto size, int) {
        constexpr int width = decltype(size)::value;
        return [=](long long i, Pack<double, width>* totals) {
            auto slopes = load<width>(dy + i);
            if (kind != kNone) {
                slopes = sloped(load<width>(kept + i), slopes, kind, slope);
                store(dy + i, slopes);
            }
#pragma unroll
            for (int j = 0; j < width; ++j) totals[0][j] += slopes[j];
        };
    };
    sum_columns<N, 1>(rows, columns, aligned, gradient_at, [=](int, int column, double sum) {
        if (gridDim.y == 1) bias_grad[column] = sum;
        else parts[blockIdx.y * (long long)columns + column] = sum;
    });
}
