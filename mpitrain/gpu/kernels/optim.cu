// Optimizer arithmetic: the CUDA version of optim/compiled.py, one pass over memory per step.
//
// The vector is split into chunks, and a block loops over the segments that overlap its chunk. Packs are aligned to
// multiples of their size from the vector's start, whatever the bounds of segments: accesses are 16 bytes wide
// everywhere except at the first and last values of a segment.

#include "common.cuh"

constexpr int kChunk = 2048;  // elements; the same value as in ops/updates.py

// segments: rows of (start, stop, trained), ascending.
struct Segments {
    const long long* bounds;
    int count;
    __device__ __forceinline__ long long start(int s) const { return bounds[3 * s]; }
    __device__ __forceinline__ long long stop(int s) const { return bounds[3 * s + 1]; }
    __device__ __forceinline__ bool is_trained(int s) const { return bounds[3 * s + 2] != 0; }

    // The first segment that ends after an element.
    __device__ __forceinline__ int after(long long element) const {
        int low = 0, high = count;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (stop(middle) > element) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

// f(chunk, segment, lo, hi) by all threads of a block, for every overlap of a chunk and a segment.
template <typename F>
__device__ __forceinline__ void each_part(const Segments& segments, long long size, F f) {
    for (long long chunk = blockIdx.x; chunk * kChunk < size; chunk += gridDim.x) {
        const long long first = chunk * kChunk, last = first + kChunk;
        for (int s = segments.after(first); s < segments.count && segments.start(s) < last; ++s)
            f(chunk, s, max(first, segments.start(s)), min(last, segments.stop(s)));
    }
}

// f(size, i) for the packs of [lo, hi), or their elements, by the threads of a block.
template <typename F>
__device__ __forceinline__ void each_pack_of(long long lo, long long hi, bool aligned, F f) {
    for (long long i = lo / N * N + threadIdx.x * N; i < hi; i += blockDim.x * N)
        whole_or_single<N>(i, lo, hi, aligned, f);
}

// Gradients: rows ``stride`` apart, added in a given order. The first element of a row is element ``origin``.
struct Rows {
    const T* first;
    long long stride;
    const long long* order;
    int count;
    long long origin;

    template <int N>
    __device__ __forceinline__ Pack<T, N> sum(long long i, T scale) const {
        const T* const place = first + (i - origin);
        Pack<T, N> total = load<N>(place + order[0] * stride);
#pragma unroll 1
        for (int r = 1; r < count; ++r) total = map_pack(Sum::of<T>, total, load<N>(place + order[r] * stride));
        return map_pack([scale](T value) { return scale * value; }, total);
    }

    __device__ __forceinline__ bool are_aligned() const {
        return is_aligned<N>(first - origin) && stride % N == 0;
    }
};

// A rule updates a parameter p and its slots by the gradient g. ``sources.text`` appends the rules of optim/rules.py,
// with a call of RULE for each. The constants are those that the rule's ``fused`` returns.
struct Constants {
    double c0, c1, c2, c3, c4, c5;
};

// The gradient itself, of which norms are taken.
struct Gradient {
    static constexpr int slots = 0;
    __device__ explicit Gradient(Constants) {}
    __device__ __forceinline__ T direction(T g, T, T, T&, T&) const { return g; }
};

// The vectors that a step changes; unused ones are null, which counts as aligned.
struct Vectors {
    T *params, *slot0, *slot1, *average;

    __device__ __forceinline__ bool are_aligned() const {
            return is_aligned<N>(params) && is_aligned<N>(slot0) && is_aligned<N>(slot1) && is_aligned<N>(average);
    }
};

// The decision of the step (see step.cu); a null pointer means no decision.
struct Decision {
    const double *is_go, *inverse_scale;
    __device__ __forceinline__ bool go() const { return is_go == nullptr || *is_go != 0; }
    __device__ __forceinline__ double factor() const { return inverse_scale == nullptr ? 1.0 : *inverse_scale; }
};

// A segment's factors for the gradient and for decay.
struct Factors {
    T scale, l2, keep;
};

template <int N, typename Rule>
__device__ __forceinline__ void train(const Rule& rule, const Factors& factors, const Rows& rows,
                                      const Vectors& to, T ema_weight, long long i) {
    Pack<T, N> params = load<N>(to.params + i), slot0{}, slot1{}, average{};
    if constexpr (Rule::slots > 0) slot0 = load<N>(to.slot0 + i);
    if constexpr (Rule::slots > 1) slot1 = load<N>(to.slot1 + i);
    if (to.average != nullptr) average = load<N>(to.average + i);
    Pack<T, N> gradient = rows.sum<N>(i, factors.scale);  // last, because with several rows it waits for memory
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (factors.l2 != 0) gradient[j] += factors.l2 * params[j];
        params[j] *= factors.keep;
        rule(params[j], gradient[j], slot0[j], slot1[j]);
        average[j] += ema_weight * (params[j] - average[j]);
    }
    store(to.params + i, params);
    if constexpr (Rule::slots > 0) store(to.slot0 + i, slot0);
    if constexpr (Rule::slots > 1) store(to.slot1 + i, slot1);
    if (to.average != nullptr) store(to.average + i, average);
}

// State is incremented, and its average is a copy. Frozen parameters have scale 0 and do not change.
template <int N>
__device__ __forceinline__ void add(T scale, const Rows& rows, const Vectors& to, long long i) {
    Pack<T, N> params = load<N>(to.params + i);
    if (scale != T(0)) params = map_pack(Sum::of<T>, params, rows.sum<N>(i, scale));
    store(to.params + i, params);
    if (to.average != nullptr) store(to.average + i, params);
}

template <typename Rule>
__device__ __forceinline__ void update_segments(Constants constants, const Segments& segments, const double* scales,
                                                const double* l2, const double* decay, double rate,
                                                const Rows& rows, long long size, const Vectors& to,
                                                double ema_weight, const Decision& decision) {
    if (!decision.go()) return;
    const Rule rule(constants);
    const double factor = decision.factor();
    const bool aligned = rows.are_aligned() && to.are_aligned();
    each_part(segments, size, [&](long long, int s, long long lo, long long hi) {
        const bool trained = segments.is_trained(s);
        const Factors factors{T(scales[s] * (trained ? factor : 1)), T(l2[s]), T(1 - rate * decay[s])};
        if (trained) {
            each_pack_of(lo, hi, aligned, [&](auto width, long long i) {
                train<width.value>(rule, factors, rows, to, T(ema_weight), i);
            });
        } else {
            each_pack_of(lo, hi, aligned, [&](auto width, long long i) {
                add<width.value>(factors.scale, rows, to, i);
            });
        }
    });
}

// Sums of squares of a segment's parameters and of its gradient.
struct Squares {
    double params, gradient;
};

template <int N, typename Rule>
__device__ __forceinline__ void measure(const Rule& rule, T decay, const Rows& rows, T* own,
                                        const Vectors& of, T scale, long long i, Squares& squares) {
    const Pack<T, N> params = load<N>(of.params + i);
    Pack<T, N> slot0{}, slot1{};
    if constexpr (Rule::slots > 0) slot0 = load<N>(of.slot0 + i);
    if constexpr (Rule::slots > 1) slot1 = load<N>(of.slot1 + i);
    Pack<T, N> gradient = rows.sum<N>(i, scale);
#pragma unroll
    for (int j = 0; j < N; ++j) {
        gradient[j] = rule.direction(gradient[j], params[j], decay, slot0[j], slot1[j]);
        squares.params += (double)params[j] * params[j];
        squares.gradient += (double)gradient[j] * gradient[j];
    }
    if constexpr (Rule::slots > 0) store(of.slot0 + i, slot0);
    if constexpr (Rule::slots > 1) store(of.slot1 + i, slot1);
    store(own + i, gradient);
}

// parts[chunk + s] is the sum over the overlap of chunk and segment s. No other overlap has the same index, because
// both only grow along the vector.
template <typename Rule>
__device__ __forceinline__ void measure_segments(Constants constants, const Segments& segments, const double* decay,
                                                 const Rows& rows, T* own, long long size, const Vectors& of,
                                                 Squares* parts, const Decision& decision) {
    if (!decision.go()) return;
    const Rule rule(constants);
    const T scale = T(decision.factor());
    const bool aligned = rows.are_aligned() && of.are_aligned() && is_aligned<N>(own);
    each_part(segments, size, [&](long long chunk, int s, long long lo, long long hi) {
        if (!segments.is_trained(s)) {
            each_pack_of(lo, hi, aligned, [&](auto width, long long i) {
                store(own + i, rows.sum<width.value>(i, T(1)));
            });
            return;
        }
        Squares total{0, 0};
        each_pack_of(lo, hi, aligned, [&](auto width, long long i) {
            measure<width.value>(rule, T(decay[s]), rows, own, of, scale, i, total);
        });
        total.params = reduce_block<Sum>(total.params);
        total.gradient = reduce_block<Sum>(total.gradient);
        if (threadIdx.x == 0) parts[chunk + s] = total;
    });
}

// sums[s]: the sums of the segment's parts, by one block; zeros for state, and for parameters unless ``param_norms``.
KERNEL(sum_segments)(const long long* bounds, int param_norms, const double* parts, double* sums) {
    const int s = blockIdx.x;
    const Segments segments{bounds, (int)gridDim.x};
    Squares total{0, 0};
    if (segments.is_trained(s)) {
        const long long first = segments.start(s) / kChunk, last = (segments.stop(s) + kChunk - 1) / kChunk;
        for (long long chunk = first + threadIdx.x; chunk < last; chunk += blockDim.x) {
            total.params += parts[2 * (chunk + s)];
            total.gradient += parts[2 * (chunk + s) + 1];
        }
    }
    total.params = reduce_block<Sum>(total.params);
    total.gradient = reduce_block<Sum>(total.gradient);
    if (threadIdx.x > 0) return;
    sums[2 * s] = param_norms ? total.params : 0;
    sums[2 * s + 1] = total.gradient;
}

#define UPDATE(name, Rule)                                                                                       \
    KERNEL_WITH(5, update_segments_##name)                                                                       \
    (double c0, double c1, double c2, double c3, double c4, double c5, const long long* segments, int count,     \
     const double* scales, const double* l2, const double* decay, double rate, const T* rows, long long stride,  \
     const long long* order, int row_count, long long origin, long long size, T* params, T* slot0, T* slot1,     \
     T* average, double ema_weight, const double* go, const double* factor) {                                    \
        update_segments<Rule>({c0, c1, c2, c3, c4, c5}, {segments, count}, scales, l2, decay, rate,              \
                              {rows, stride, order, row_count, origin}, size, {params, slot0, slot1, average},   \
                              ema_weight, {go, factor});                                                         \
    }

#define MEASURE(name, Rule)                                                                                      \
    KERNEL(measure_segments_##name)                                                                              \
    (double c0, double c1, double c2, double c3, double c4, double c5, const long long* segments, int count,     \
     const double* decay, const T* rows, long long stride, const long long* order, int row_count, T* own,        \
     long long size, T* params, T* slot0, T* slot1, double* parts, const double* go, const double* factor) {     \
        measure_segments<Rule>({c0, c1, c2, c3, c4, c5}, {segments, count}, decay,                               \
                               {rows, stride, order, row_count, 0}, own, size, {params, slot0, slot1, nullptr},  \
                               reinterpret_cast<Squares*>(parts), {go, factor});                                 \
    }
MEASURE(gradient, Gradient)

#define RULE(name, Rule) UPDATE(name, Rule) MEASURE(name, Rule)
