// Losses and their gradients: the CUDA version of the kernels in nn/loss.py.
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

template <typename T>
__device__ __forceinline__ T scaled(T scale, const double* factor) {
    return factor == nullptr ? scale : T(scale * *factor);
}

template <typename T>
struct Softmax {
    T largest, normalizer, loss;
};

// A team's row; every thread gets the result. The row is read twice, the second time from cache.
template <typename T>
__device__ Softmax<Real<T>> softmax_of(const T* row, int classes, long long label) {
    Softmax<Real<T>> result;
    Real<T> largest = row[0], normalizer = 0, nothing = 0;
    for (int j = threadIdx.x; j < classes; j += blockDim.x) largest = fmax(largest, Real<T>(row[j]));
    result.largest = reduce_team<Largest>(largest);
    for (int j = threadIdx.x; j < classes; j += blockDim.x) {
        normalizer += exp(Real<T>(row[j]) - result.largest);
        nothing += 0 * Real<T>(row[j]);
    }
    result.normalizer = reduce_team<Sum>(normalizer);
    nothing = reduce_team<Sum>(nothing);
    result.loss = log(result.normalizer) - (Real<T>(row[label]) - result.largest) + nothing;
    return result;
}

template <typename T>
__device__ void softmax_gradient(const T* outputs, const void* labels, int kind, long long rows, int classes,
                                 Real<T> weight, const double* factor, T* gradient, double* parts) {
    const Real<T> scale = scaled(weight, factor);
    double total = 0;
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const row = outputs + i * classes;
        T* const slopes = gradient + i * classes;
        const long long label = number<long long>(labels, kind, i);
        if (label < 0 || label >= classes) {
            for (int j = threadIdx.x; j < classes; j += blockDim.x) slopes[j] = Real<T>(nan(""));
            total += nan("");
            continue;
        }
        const Softmax<Real<T>> softmax = softmax_of(row, classes, label);
        const Real<T> share = scale / softmax.normalizer;
        for (int j = threadIdx.x; j < classes; j += blockDim.x) {
            const Real<T> slope = exp(Real<T>(row[j]) - softmax.largest) * share;
            slopes[j] = j == label ? slope - scale : slope;
        }
        total += softmax.loss;
    }
    leave(total, 0, 1, parts);
}

template <typename T>
__device__ void softmax_evaluate(const T* outputs, const void* labels, int kind, long long rows, int classes,
                                 double* parts) {
    double total = 0, right = 0;
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const row = outputs + i * classes;
        const long long label = number<long long>(labels, kind, i);
        if (label < 0 || label >= classes) {
            total += nan("");
            continue;
        }
        const Softmax<Real<T>> softmax = softmax_of(row, classes, label);
        int earlier = 0;  // ties: the first maximum is the prediction
        for (int j = threadIdx.x; j < label; j += blockDim.x) earlier += Real<T>(row[j]) == softmax.largest;
        earlier = reduce_team<Sum>(earlier);
        total += softmax.loss;
        right += !isnan(softmax.loss) && Real<T>(row[label]) == softmax.largest && earlier == 0;
    }
    leave(total, right, 2, parts);
}

template <typename T>
__device__ T sigmoid_loss(T z, T label) {
    if (!(label >= 0 && label <= 1)) return nan("");
    return fmax(z, T(0)) - z * label + log1p(exp(-fabs(z))) + 0 * z;
}

template <typename T>
__device__ void sigmoid_gradient(const T* outputs, const void* labels, int kind, long long n, Real<T> weight,
                                 const double* factor, T* gradient, double* parts) {
    const Real<T> share = scaled(weight, factor);
    double total = 0;
    for (long long i = thread_number(); i < n; i += thread_count()) {
        const Real<T> z = outputs[i], label = number<Real<T>>(labels, kind, i);
        const Real<T> tail = exp(-fabs(z));  // the sign that cannot overflow
        total += sigmoid_loss(z, label);
        gradient[i] = ((z >= 0 ? Real<T>(1) : tail) / (Real<T>(1) + tail) - label) * share;
    }
    total = reduce_block<Sum>(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

template <typename T>
__device__ void sigmoid_evaluate(const T* outputs, const void* labels, int kind, long long rows, int columns,
                                 double* parts) {
    double total = 0, right = 0;
    for (long long i = team_number(); i < rows; i += team_count()) {
        double loss = 0;
        int wrong = 0;
        for (int j = threadIdx.x; j < columns; j += blockDim.x) {
            const Real<T> z = outputs[i * columns + j], label = number<Real<T>>(labels, kind, i * columns + j);
            const Real<T> own = sigmoid_loss(z, label);
            loss += own;
            wrong += isnan(own) || (z > 0) != (label > Real<T>(0.5));
        }
        total += reduce_team<Sum>(loss);
        right += reduce_team<Sum>(wrong) == 0;
    }
    leave(total, right, 2, parts);
}

// Also computes the gradient, if requested.
template <typename T>
__device__ void square(const T* outputs, const void* labels, int kind, long long n, Real<T> weight,
                       const double* factor, T* gradient, double* parts) {
    const Real<T> slope = scaled(weight, factor);
    double total = 0;
    for (long long i = thread_number(); i < n; i += thread_count()) {
        const Real<T> output = outputs[i], difference = output - number<Real<T>>(labels, kind, i);
        total += difference * difference + 0 * output;
        if (gradient != nullptr) gradient[i] = slope * difference;
    }
    total = reduce_block<Sum>(total);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

#define INSTANCE(T)                                                                                              \
    KERNEL softmax_gradient_##T(const T* outputs, const void* labels, int kind, long long rows, int classes,     \
                                Real<T> weight, const double* factor, T* gradient, double* parts) {              \
        softmax_gradient(outputs, labels, kind, rows, classes, weight, factor, gradient, parts);                 \
    }                                                                                                            \
    KERNEL softmax_evaluate_##T(const T* outputs, const void* labels, int kind, long long rows, int classes,     \
                                double* parts) {                                                                 \
        softmax_evaluate(outputs, labels, kind, rows, classes, parts);                                           \
    }                                                                                                            \
    KERNEL sigmoid_gradient_##T(const T* outputs, const void* labels, int kind, long long n, Real<T> weight,     \
                                const double* factor, T* gradient, double* parts) {                              \
        sigmoid_gradient(outputs, labels, kind, n, weight, factor, gradient, parts);                             \
    }                                                                                                            \
    KERNEL sigmoid_evaluate_##T(const T* outputs, const void* labels, int kind, long long rows, int columns,     \
                                double* parts) {                                                                 \
        sigmoid_evaluate(outputs, labels, kind, rows, columns, parts);                                           \
    }                                                                                                            \
    KERNEL square_gradient_##T(const T* outputs, const void* labels, int kind, long long n, Real<T> weight,      \
                               const double* factor, T* gradient, double* parts) {                               \
        square(outputs, labels, kind, n, weight, factor, gradient, parts);                                       \
    }                                                                                                            \
    KERNEL square_evaluate_##T(const T* outputs, const void* labels, int kind, long long n, double* parts) {     \
        square<T>(outputs, labels, kind, n, 0, nullptr, nullptr, parts);                                         \
    }
FOR_STORED(INSTANCE)
