// Normalization: the CUDA version of core/ops/normalization.py, which explains the two numbers of a center.
//
// Sums over rows are computed in tiles of 32 columns, whose blocks share the rows; add_columns, in sum.cu, adds the
// blocks' results. Moments are computed in the same tiles, and merged by merge_moments. Sums over a row are computed by
// a team.

#include "common.cuh"

// parts[blockIdx.y] = sums over this block's rows of the two values of terms(element, column), for each column.
template <typename F>
__device__ void sum_columns(long long rows, int columns, double* parts, F terms) {
    __shared__ double2 lines[8][kWarp];
    const int column = blockIdx.x * kWarp + threadIdx.x;
    double2 total = {0, 0};
    if (column < columns) {
        for (long long row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const double2 more = terms(row * columns + column, column);
            total.x += more.x;
            total.y += more.y;
        }
    }
    lines[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y > 0 || column >= columns) return;
    total = {0, 0};
    for (int line = 0; line < 8; ++line) {
        total.x += lines[line][threadIdx.x].x;
        total.y += lines[line][threadIdx.x].y;
    }
    parts[blockIdx.y * 2LL * columns + column] = total.x;
    parts[(blockIdx.y * 2LL + 1) * columns + column] = total.y;
}

// Number and mean of some values, and the sum of their squared deviations from the mean.
struct Moments {
    double count, mean, squares;
};

// The moments of the values of both; see core/ops/normalization.py.
__device__ __forceinline__ Moments merged(Moments a, Moments b) {
    if (b.count == 0) return a;
    const double count = a.count + b.count, share = b.count / count, apart = b.mean - a.mean;
    return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * (a.count * share)};
}

// Merges the moments of the block's eight lines; only the threads of the first line get the result.
__device__ __forceinline__ Moments merged_lines(Moments own) {
    __shared__ Moments lines[8][kWarp];
    lines[threadIdx.y][threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.y > 0) return own;
    for (int line = 1; line < 8; ++line) own = merged(own, lines[line][threadIdx.x]);
    return own;
}

// parts[blockIdx.y] = the moments of this block's rows for each column, relative to the first row of all: all counts,
// then all means, then all squares. A thread centers eight values at a time on their own mean.
template <typename T>
__device__ void moments(const T* x, long long rows, int columns, double* parts) {
    constexpr int group = 8;
    const int column = blockIdx.x * kWarp + threadIdx.x;
    const long long apart = gridDim.y * 8LL;
    Moments total = {0, 0, 0};
    if (column < columns) {
        const double first = Real<T>(x[column]);
        long long row = blockIdx.y * 8LL + threadIdx.y;
        for (; row + (group - 1) * apart < rows; row += group * apart) {
            double values[group], sum = 0, squares = 0;
#pragma unroll
            for (int k = 0; k < group; ++k) {
                values[k] = Real<T>(x[(row + k * apart) * columns + column]) - first;
                sum += values[k];
            }
            const double mean = sum / group;
#pragma unroll
            for (int k = 0; k < group; ++k) squares += (values[k] - mean) * (values[k] - mean);
            total = merged(total, {group, mean, squares});
        }
        for (; row < rows; row += apart)
            total = merged(total, {1, Real<T>(x[row * columns + column]) - first, 0});
    }
    total = merged_lines(total);
    if (threadIdx.y > 0 || column >= columns) return;
    double* const part = parts + blockIdx.y * 3LL * columns + column;
    part[0] = total.count;
    part[columns] = total.mean;
    part[2LL * columns] = total.squares;
}

// Merges the blocks' parts. result: the first row, the mean minus the first row, and the biased variance.
template <typename T>
__device__ void merge_moments(const T* x, const double* parts, int count, int columns, double* result) {
    const int column = blockIdx.x * kWarp + threadIdx.x;
    Moments total = {0, 0, 0};
    if (column < columns) {
        for (int i = threadIdx.y; i < count; i += blockDim.y) {
            const double* const part = parts + i * 3LL * columns + column;
            total = merged(total, {part[0], part[columns], part[2LL * columns]});
        }
    }
    total = merged_lines(total);
    if (threadIdx.y > 0 || column >= columns) return;
    result[column] = Real<T>(x[column]);
    result[columns + column] = total.mean;
    result[2LL * columns + column] = total.squares / total.count;
}

template <typename T>
__device__ void gradient_sums(const T* x, const Real<T>* center, const Real<T>* inverse, const T* dy, long long rows,
                              int columns, double* parts) {
    sum_columns(rows, columns, parts, [=](long long i, int j) -> double2 {
        const Real<T> slope = dy[i], value = x[i];
        return {(double)slope, (double)(slope * (value - center[j] - center[columns + j]) * inverse[j])};
    });
}

template <typename T>
__device__ void layer_gradient_sums(const T* normal, const T* dy, long long rows, int columns, double* parts) {
    sum_columns(rows, columns, parts, [=](long long i, int) -> double2 {
        const Real<T> slope = dy[i], value = normal[i];
        return {(double)slope, (double)(slope * value)};
    });
}

template <typename T>
__device__ void normalize(const T* x, const Real<T>* center, const Real<T>* inverse, const Real<T>* scale,
                          const Real<T>* shift, long long n, int columns, T* y) {
    typedef Real<T> R;
    constexpr int N = kPack<T>;
    const bool aligned = is_aligned<N>(x) && is_aligned<N>(y);
    const bool together = columns % N == 0 && is_aligned<N>(center) && is_aligned<N>(inverse) &&
                          is_aligned<N>(scale) && is_aligned<N>(shift);
    auto normal = [](R value, R center, R rest, R inverse, R scale, R shift) {
        return (value - center - rest) * inverse * scale + shift;
    };
    each_pack<N>(n, aligned, [=](auto size, long long i) {
        constexpr int width = decltype(size)::value;  // NVRTC rejects size.value in nested functions
        const int column = column_of(i, columns);
        auto of = [=](const R* values) { return around<width>(values, column, columns, together); };
        store(y + i, map_pack(normal, load<width>(x + i), of(center), of(center + columns), of(inverse), of(scale),
                               of(shift)));
    });
}

// means: of dy, then of dy times the normalized x; float64, one per column.
template <typename T>
__device__ void normalize_backward(const T* x, const Real<T>* center, const Real<T>* inverse, const Real<T>* scale,
                                   const double* means, long long n, int columns, T* dy) {
    typedef Real<T> R;
    constexpr int N = kPack<T>;
    const bool aligned = is_aligned<N>(x) && is_aligned<N>(dy);
    const bool together =
        columns % N == 0 && is_aligned<N>(center) && is_aligned<N>(inverse) && is_aligned<N>(scale);
    auto slope = [](R value, R gradient, R center, R rest, R inverse, R scale, double total, double moment) {
        return scale * inverse * (gradient - R(total) - (value - center - rest) * inverse * R(moment));
    };
    each_pack<N>(n, aligned, [=](auto size, long long i) {
        constexpr int width = decltype(size)::value;  // NVRTC rejects size.value in nested functions
        const int column = column_of(i, columns);
        auto of = [=](const R* values) { return around<width>(values, column, columns, together); };
        auto mean = [=](const double* values) { return around<width>(values, column, columns, false); };
        store(dy + i, map_pack(slope, load<width>(x + i), load<width>(dy + i), of(center), of(center + columns),
                               of(inverse), of(scale), mean(means), mean(means + columns)));
    });
}

// A team's row, read from memory once and kept in shared memory if it fits; a thread uses only what it wrote itself.
template <typename T>
__device__ void layer_norm(const T* x, Real<T> eps, const Real<T>* scale, const Real<T>* shift, long long rows,
                           int columns, T* normal, Real<T>* inverse, T* y) {
    typedef Real<T> R;
    constexpr int room = 32768 / sizeof(R);
    __shared__ R kept[room];
    const bool fits = columns * (int)blockDim.y <= room;
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const row = x + i * columns;
        R* const copy = kept + (fits ? threadIdx.y * columns : 0);
        auto value_at = [=](int j) -> R { return fits ? copy[j] : R(row[j]); };
        R total = 0, squares = 0;
        for (int j = threadIdx.x; j < columns; j += blockDim.x) {
            const R value = row[j];
            total += value;
            if (fits) copy[j] = value;
        }
        const R mean = reduce_team<Sum>(total) / columns;
        for (int j = threadIdx.x; j < columns; j += blockDim.x)
            squares += (value_at(j) - mean) * (value_at(j) - mean);
        const R factor = 1 / sqrt(reduce_team<Sum>(squares) / columns + eps);
        for (int j = threadIdx.x; j < columns; j += blockDim.x) {
            const R value = (value_at(j) - mean) * factor;
            normal[i * columns + j] = value;
            y[i * columns + j] = value * scale[j] + shift[j];
        }
        if (threadIdx.x == 0) inverse[i] = factor;
    }
}

// A team computes the gradient of its row's x from the gradient of the row's output, slope_at(j), and the normalized x.
template <typename R, typename T, typename Slope, typename Normal>
__device__ __forceinline__ void write_gradient(Slope slope_at, Normal normal_at, R inverse, const R* scale, int columns,
                                               T* row) {
    R total = 0, moment = 0;
    for (int j = threadIdx.x; j < columns; j += blockDim.x) {
        const R slope = slope_at(j) * scale[j];
        total += slope;
        moment += slope * normal_at(j);
    }
    const R mean = reduce_team<Sum>(total) / columns, tilt = reduce_team<Sum>(moment) / columns;
    for (int j = threadIdx.x; j < columns; j += blockDim.x)
        row[j] = inverse * (slope_at(j) * scale[j] - mean - normal_at(j) * tilt);
}

// A team's row that is too long for shared memory: read twice, the second time from cache.
template <typename T>
__device__ void long_layer_norm_backward(const T* normal, const Real<T>* inverse, const Real<T>* scale,
                                         long long rows, int columns, T* dy) {
    typedef Real<T> R;
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const own = normal + i * columns;
        T* const row = dy + i * columns;
        auto slope_at = [=](int j) -> R { return row[j]; };
        auto normal_at = [=](int j) -> R { return own[j]; };
        write_gradient(slope_at, normal_at, inverse[i], scale, columns, row);
    }
}

// Rows that fit in shared memory, one per team, are read once. Computes their gradients, and in parts[blockIdx.x] the
// column sums of dy and of dy times the normalized x over this block's rows.
template <typename T>
__device__ void layer_norm_backward(const T* normal, const Real<T>* inverse, const Real<T>* scale, long long rows,
                                    int columns, T* dy, double* parts) {
    typedef Real<T> R;
    constexpr int room = 12288 / sizeof(R), widest = 4096 / sizeof(R);  // the same values as in ops/layers.py
    __shared__ R kept_slopes[room], kept_normals[room];
    __shared__ double2 sums[widest];
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, lines = blockDim.y;
    R *const slopes = kept_slopes + threadIdx.y * columns, *const normals = kept_normals + threadIdx.y * columns;
    for (int j = thread; j < columns; j += 256) sums[j] = {0, 0};
    for (long long first = blockIdx.x * (long long)lines; first < rows; first += gridDim.x * (long long)lines) {
        const long long i = first + threadIdx.y;
        if (i < rows) {
            for (int j = threadIdx.x; j < columns; j += blockDim.x) {
                slopes[j] = dy[i * columns + j];
                normals[j] = normal[i * columns + j];
            }
            auto slope_at = [=](int j) { return slopes[j]; };
            auto normal_at = [=](int j) { return normals[j]; };
            write_gradient(slope_at, normal_at, inverse[i], scale, columns, dy + i * columns);
        }
        __syncthreads();
        const int count = rows - first < lines ? (int)(rows - first) : lines;
        for (int j = thread; j < columns; j += 256) {
            double2 total = sums[j];
            for (int line = 0; line < count; ++line) {
                const R slope = kept_slopes[line * columns + j];
                total.x += slope;
                total.y += slope * kept_normals[line * columns + j];
            }
            sums[j] = total;
        }
        __syncthreads();
    }
    for (int j = thread; j < columns; j += 256) {
        parts[blockIdx.x * 2LL * columns + j] = sums[j].x;
        parts[(blockIdx.x * 2LL + 1) * columns + j] = sums[j].y;
    }
}

#define INSTANCE(T)                                                                                              \
    KERNEL moments_##T(const T* x, long long rows, int columns, double* parts) {                                 \
        moments(x, rows, columns, parts);                                                                        \
    }                                                                                                            \
    KERNEL merge_moments_##T(const T* x, const double* parts, int count, int columns, double* result) {          \
        merge_moments(x, parts, count, columns, result);                                                         \
    }                                                                                                            \
    KERNEL gradient_sums_##T(const T* x, const Real<T>* center, const Real<T>* inverse, const T* dy,             \
                             long long rows, int columns, double* parts) {                                       \
        gradient_sums(x, center, inverse, dy, rows, columns, parts);                                             \
    }                                                                                                            \
    KERNEL layer_gradient_sums_##T(const T* normal, const T* dy, long long rows, int columns, double* parts) {   \
        layer_gradient_sums(normal, dy, rows, columns, parts);                                                   \
    }                                                                                                            \
    KERNEL normalize_##T(const T* x, const Real<T>* center, const Real<T>* inverse, const Real<T>* scale,        \
                         const Real<T>* shift, long long n, int columns, T* y) {                                 \
        normalize(x, center, inverse, scale, shift, n, columns, y);                                              \
    }                                                                                                            \
    KERNEL normalize_backward_##T(const T* x, const Real<T>* center, const Real<T>* inverse,                     \
                                  const Real<T>* scale, const double* means, long long n, int columns, T* dy) {  \
        normalize_backward(x, center, inverse, scale, means, n, columns, dy);                                    \
    }                                                                                                            \
    KERNEL layer_norm_##T(const T* x, Real<T> eps, const Real<T>* scale, const Real<T>* shift,                   \
                          long long rows, int columns, T* normal, Real<T>* inverse, T* y) {                      \
        layer_norm(x, eps, scale, shift, rows, columns, normal, inverse, y);                                     \
    }                                                                                                            \
    KERNEL long_layer_norm_backward_##T(const T* normal, const Real<T>* inverse, const Real<T>* scale,           \
                                        long long rows, int columns, T* dy) {                                    \
        long_layer_norm_backward(normal, inverse, scale, rows, columns, dy);                                     \
    }                                                                                                            \
    KERNEL layer_norm_backward_##T(const T* normal, const Real<T>* inverse, const Real<T>* scale,                \
                                   long long rows, int columns, T* dy, double* parts) {                          \
        layer_norm_backward(normal, inverse, scale, rows, columns, dy, parts);                                   \
    }
FOR_STORED(INSTANCE)
