// Losses and their gradients: the CUDA version of the kernels in core/ops/losses.py.
//
// Every block writes the sums over its rows to ``parts``; add_parts, in sum.cu, adds them. Labels may have any
// ``kind``. A non-finite output makes the loss NaN: it is multiplied by zero, which gives NaN, and added. Gradients,
// but not losses, are multiplied by the value at ``factor``, unless it is null.

#include "common.cuh"

// Lane 0 of each team adds its sums to parts[block]: the loss, and if there is room the number of correct predictions.
__device__ __forceinline__ void leave(double loss, double right, int width, double* parts) {
    const bool counts = threadIdx.x == 0;
    loss = reduce_block<Sum>(counts ? loss : 0.0);
    right = reduce_block<Sum>(counts ? right : 0.0);
    if (threadIdx.x > 0 || threadIdx.y > 0) return;
    parts[blockIdx.x * width] = loss;
    if (width == 2) parts[blockIdx.x * width + 1] = right;
}

__device__ __forceinline__ R scaled(R scale, const double* factor) {
    return factor == nullptr ? scale : R(scale * *factor);
}

struct Softmax {
    R largest, normalizer, loss;
};

// A team's row; every thread gets the result. The row is read once: a thread scales its sum whenever it finds a larger
// value (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
__device__ __forceinline__ Softmax softmax_of(const T* row, int classes, bool aligned, long long label) {
    constexpr R smallest = sizeof(R) == 8 ? -1.7976931348623157e308 : -3.4028234663852886e38;  // finite
    Softmax result;
    R largest = smallest, normalizer = 0, nothing = 0;
    each_pack_of_row<N>(classes, aligned, [&](auto size, int j) {
        constexpr int width = decltype(size)::value;
        const auto values = load<width>(row + j);
        R larger = largest;
#pragma unroll
        for (int k = 0; k < width; ++k) larger = fmax(larger, values[k]);
        if (larger > largest) normalizer *= exp(largest - larger);
        largest = larger;
#pragma unroll
        for (int k = 0; k < width; ++k) {
            normalizer += exp(values[k] - largest);
            nothing += 0 * values[k];
        }
    });
    result.largest = reduce_team<Largest>(largest);
    result.normalizer = reduce_team<Sum>(normalizer * exp(largest - result.largest));
    nothing = reduce_team<Sum>(nothing);
    result.loss = log(result.normalizer) - (R(row[label]) - result.largest) + nothing;
    return result;
}

KERNEL(softmax_gradient)(const T* outputs, const void* labels, int kind, long long rows, int classes, R weight,
                         const double* factor, T* gradient, double* parts) {
    const R scale = scaled(weight, factor);
    const bool aligned = is_aligned<N>(outputs) && is_aligned<N>(gradient);
    double total = 0;
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const row = outputs + i * classes;
        T* const slopes = gradient + i * classes;
        const long long label = number<long long>(labels, kind, i);
        if (label < 0 || label >= classes) {
            for (int j = threadIdx.x; j < classes; j += blockDim.x) slopes[j] = R(nan(""));
            total += nan("");
            continue;
        }
        const Softmax softmax = softmax_of(row, classes, aligned, label);
        const R share = scale / softmax.normalizer;
        each_pack_of_row<N>(classes, aligned, [&](auto size, int j) {
            constexpr int width = decltype(size)::value;
            auto pack = load<width>(row + j);
#pragma unroll
            for (int k = 0; k < width; ++k) {
                const R slope = exp(pack[k] - softmax.largest) * share;
                pack[k] = j + k == label ? slope - scale : slope;
            }
            store(slopes + j, pack);
        });
        total += softmax.loss;
    }
    leave(total, 0, 1, parts);
}

KERNEL(softmax_evaluate)(const T* outputs, const void* labels, int kind, long long rows, int classes, double* parts) {
    double total = 0, right = 0;
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const row = outputs + i * classes;
        const long long label = number<long long>(labels, kind, i);
        if (label < 0 || label >= classes) {
            total += nan("");
            continue;
        }
        const Softmax softmax = softmax_of(row, classes, is_aligned<N>(outputs), label);
        int earlier = 0;  // ties: the first maximum is the prediction
        if (R(row[label]) == softmax.largest)
            for (int j = threadIdx.x; j < label; j += blockDim.x) earlier += R(row[j]) == softmax.largest;
        earlier = reduce_team<Sum>(earlier);
        total += softmax.loss;
        right += !isnan(softmax.loss) && R(row[label]) == softmax.largest && earlier == 0;
    }
    leave(total, right, 2, parts);
}

__device__ __forceinline__ R sigmoid_loss(R z, R label) {
    if (!(label >= 0 && label <= 1)) return nan("");
    return fmax(z, R(0)) - z * label + log1p(exp(-fabs(z))) + 0 * z;
}

KERNEL(sigmoid_gradient)(const T* outputs, const void* labels, int kind, long long n, R weight, const double* factor,
                         T* gradient, double* parts) {
    const R share = scaled(weight, factor);
    double total = 0;
    for (long long i = thread_number(); i < n; i += thread_count()) {
        const R z = outputs[i], label = number<R>(labels, kind, i);
        const R tail = exp(-fabs(z));  // at most 1: cannot overflow
        total += sigmoid_loss(z, label);
        gradient[i] = ((z >= 0 ? R(1) : tail) / (R(1) + tail) - label) * share;
    }
    total = reduce_block<Sum>(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

KERNEL(sigmoid_evaluate)(const T* outputs, const void* labels, int kind, long long rows, int columns, double* parts) {
    double total = 0, right = 0;
    for (long long i = team_number(); i < rows; i += team_count()) {
        double loss = 0;
        int wrong = 0;
        for (int j = threadIdx.x; j < columns; j += blockDim.x) {
            const R z = outputs[i * columns + j], label = number<R>(labels, kind, i * columns + j);
            const R own = sigmoid_loss(z, label);
            loss += own;
            wrong += isnan(own) || (z > 0) != (label > R(0.5));
        }
        total += reduce_team<Sum>(loss);
        right += reduce_team<Sum>(wrong) == 0;
    }
    leave(total, right, 2, parts);
}

// Also computes the gradient, if requested.
__device__ __forceinline__ void square(const T* outputs, const void* labels, int kind, long long n, R weight,
                                       const double* factor, T* gradient, double* parts) {
    const R slope = scaled(weight, factor);
    double total = 0;
    for (long long i = thread_number(); i < n; i += thread_count()) {
        const R output = outputs[i], difference = output - number<R>(labels, kind, i);
        total += difference * difference + 0 * output;
        if (gradient != nullptr) gradient[i] = slope * difference;
    }
    total = reduce_block<Sum>(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

KERNEL(square_gradient)(const T* outputs, const void* labels, int kind, long long n, R weight, const double* factor,
                        T* gradient, double* parts) {
    square(outputs, labels, kind, n, weight, factor, gradient, parts);
}

KERNEL(square_evaluate)(const T* outputs, const void* labels, int kind, long long n, double* parts) {
    square(outputs, labels, kind, n, 0, nullptr, nullptr, parts);
}
