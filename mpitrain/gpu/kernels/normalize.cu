// Normalization: the CUDA version of core/ops/normalization.py, which explains the two numbers of a center.
//
// Sums over rows are computed by blocks that share the rows; add_columns, in sum.cu, adds the blocks' results. Moments
// are computed in tiles of 32 columns, and merged by merge_moments. Sums over a row are computed by a team.

#include "common.cuh"

// Values of a 16-byte access; of 8 bytes for 16-bit types, because the factors of more columns need too many registers.
constexpr int M = N > 4 ? 4 : N;

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
KERNEL(moments)(const T* x, long long rows, int columns, double* parts) {
    constexpr int group = 8;
    const int column = blockIdx.x * kWarp + threadIdx.x;
    const long long apart = gridDim.y * 8LL;
    Moments total = {0, 0, 0};
    if (column < columns) {
        const double first = R(x[column]);
        long long row = blockIdx.y * 8LL + threadIdx.y;
        for (; row + (group - 1) * apart < rows; row += group * apart) {
            double values[group], sum = 0, squares = 0;
#pragma unroll
            for (int k = 0; k < group; ++k) {
                values[k] = R(x[(row + k * apart) * columns + column]) - first;
                sum += values[k];
            }
            const double mean = sum / group;
#pragma unroll
            for (int k = 0; k < group; ++k) squares += (values[k] - mean) * (values[k] - mean);
            total = merged(total, {group, mean, squares});
        }
        for (; row < rows; row += apart)
            total = merged(total, {1, R(x[row * columns + column]) - first, 0});
    }
    total = merged_lines(total);
    if (threadIdx.y > 0 || column >= columns) return;
    double* const part = parts + blockIdx.y * 3LL * columns + column;
    part[0] = total.count;
    part[columns] = total.mean;
    part[2LL * columns] = total.squares;
}

// Merges the blocks' parts. result: the first row, the mean minus the first row, and the biased variance.
KERNEL(merge_moments)(const T* x, const double* parts, int count, int columns, double* result) {
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
    result[column] = R(x[column]);
    result[columns + column] = total.mean;
    result[2LL * columns + column] = total.squares / total.count;
}

// parts[blockIdx.y] = sums over this block's rows of dy, and of dy times the normalized x, normal_at(size, column)(i).
template <typename F>
__device__ __forceinline__ void sum_gradients(const T* dy, long long rows, int columns, bool aligned, double* parts,
                                              F normal_at) {
    auto terms = [=](auto size, int column) {
        constexpr int width = decltype(size)::value;  // NVRTC rejects size.value in nested functions
        const auto normal = normal_at(size, column);
        return [=](long long i, Pack<double, width>* totals) {
            const auto slopes = load<width>(dy + i), normals = normal(i);
#pragma unroll
            for (int j = 0; j < width; ++j) {
                totals[0][j] += slopes[j];
                totals[1][j] += slopes[j] * normals[j];
            }
        };
    };
    sum_columns<M, 2>(rows, columns, aligned && is_aligned<M>(dy), terms, [=](int w, int column, double sum) {
        parts[(blockIdx.y * 2LL + w) * columns + column] = sum;
    });
}

// (x - center) * factor, for a pack of columns.
template <int width>
struct Centered {
    Pack<R, width> first, rest, factor;
    __device__ __forceinline__ Pack<R, width> operator()(const Pack<R, width>& x) const {
        return map_pack([](R x, R first, R rest, R factor) { return (x - first - rest) * factor; }, x, first, rest,
                        factor);
    }
};

KERNEL(gradient_sums)(const T* x, const R* center, const R* inverse, const T* dy, long long rows, int columns,
                      double* parts) {
    sum_gradients(dy, rows, columns, is_aligned<M>(x), parts, [=](auto size, int column) {
        constexpr int width = decltype(size)::value;
        const Centered<width> normal{collect<width>(center + column), collect<width>(center + columns + column),
                                     collect<width>(inverse + column)};
        return [=](long long i) { return normal(load<width>(x + i)); };
    });
}

KERNEL(layer_gradient_sums)(const T* normal, const T* dy, long long rows, int columns, double* parts) {
    sum_gradients(dy, rows, columns, is_aligned<M>(normal), parts, [=](auto size, int) {
        constexpr int width = decltype(size)::value;
        return [=](long long i) { return load<width>(normal + i); };
    });
}

KERNEL(normalize)(const T* x, const R* center, const R* inverse, const R* scale, const R* shift, long long rows,
                  int columns, T* y) {
    each_column<M>(rows, columns, is_aligned<M>(x) && is_aligned<M>(y), [=](auto size, int column) {
        constexpr int width = decltype(size)::value;
        const auto gain = map_pack(Product::of<R>, collect<width>(inverse + column), collect<width>(scale + column));
        const Centered<width> scaled{collect<width>(center + column), collect<width>(center + columns + column), gain};
        const auto shifts = collect<width>(shift + column);
        return [=](long long i) { store(y + i, map_pack(Sum::of<R>, scaled(load<width>(x + i)), shifts)); };
    });
}

// means: of dy, then of dy times the normalized x; float64, one per column.
KERNEL(normalize_backward)(const T* x, const R* center, const R* inverse, const R* scale, const double* means,
                           long long rows, int columns, T* dy) {
    each_column<M>(rows, columns, is_aligned<M>(x) && is_aligned<M>(dy), [=](auto size, int column) {
        constexpr int width = decltype(size)::value;
        const auto inverses = collect<width>(inverse + column);
        const auto gain = map_pack(Product::of<R>, inverses, collect<width>(scale + column));
        Pack<R, width> mean, tilt;
#pragma unroll
        for (int j = 0; j < width; ++j) {
            mean[j] = means[column + j];
            tilt[j] = inverses[j] * R(means[columns + column + j]);
        }
        const Centered<width> tilted{collect<width>(center + column), collect<width>(center + columns + column), tilt};
        auto slope = [](R gradient, R mean, R tilted, R gain) { return gain * (gradient - mean - tilted); };
        return [=](long long i) {
            store(dy + i, map_pack(slope, load<width>(dy + i), mean, tilted(load<width>(x + i)), gain));
        };
    });
}

// A team's row, read from memory once and kept in shared memory if it fits; a thread uses only what it wrote itself.
KERNEL(layer_norm)(const T* x, R eps, const R* scale, const R* shift, long long rows, int columns, T* normal,
                   R* inverse, T* y) {
    constexpr int room = 32768 / sizeof(R);
    __shared__ Pack<R, M> kept[room / M];
    const bool fits = columns * (int)blockDim.y <= room;
    const bool aligned = is_aligned<M>(x) && is_aligned<M>(normal) && is_aligned<M>(y) && is_aligned<M>(scale) &&
                         is_aligned<M>(shift);
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const row = x + i * columns;
        R* const copy = reinterpret_cast<R*>(kept) + (fits ? threadIdx.y * columns : 0);
        R total = 0, squares = 0;
        each_pack_of_row<M>(columns, aligned, [&](auto size, int j) {
            constexpr int width = decltype(size)::value;
            const auto values = load<width>(row + j);
#pragma unroll
            for (int k = 0; k < width; ++k) total += values[k];
            if (fits) *reinterpret_cast<Pack<R, width>*>(copy + j) = values;
        });
        const R mean = reduce_team<Sum>(total) / columns;
        each_pack_of_row<M>(columns, aligned, [&](auto size, int j) {
            constexpr int width = decltype(size)::value;
            const auto values = fits ? load<width>(copy + j) : load<width>(row + j);
#pragma unroll
            for (int k = 0; k < width; ++k) squares += (values[k] - mean) * (values[k] - mean);
        });
        const R factor = 1 / sqrt(reduce_team<Sum>(squares) / columns + eps);
        each_pack_of_row<M>(columns, aligned, [&](auto size, int j) {
            constexpr int width = decltype(size)::value;
            auto values = fits ? load<width>(copy + j) : load<width>(row + j);
            const auto gains = load<width>(scale + j), shifts = load<width>(shift + j);
#pragma unroll
            for (int k = 0; k < width; ++k) values[k] = (values[k] - mean) * factor;
            store(normal + i * columns + j, values);
#pragma unroll
            for (int k = 0; k < width; ++k) values[k] = values[k] * gains[k] + shifts[k];
            store(y + i * columns + j, values);
        });
        if (threadIdx.x == 0) inverse[i] = factor;
    }
}

// Replaces dy, the gradient of a row's output, with that of its x. A team's row is read twice, the second time from
// cache.
KERNEL(layer_norm_backward)(const T* normal, const R* inverse, const R* scale, long long rows, int columns, T* dy) {
    const bool aligned = is_aligned<M>(normal) && is_aligned<M>(dy) && is_aligned<M>(scale);
    for (long long i = team_number(); i < rows; i += team_count()) {
        const T* const own = normal + i * columns;
        T* const row = dy + i * columns;
        const R factor = inverse[i];
        R total = 0, moment = 0;
        each_pack_of_row<M>(columns, aligned, [&](auto size, int j) {
            constexpr int width = decltype(size)::value;
            const auto slopes = load<width>(row + j), normals = load<width>(own + j), gains = load<width>(scale + j);
#pragma unroll
            for (int k = 0; k < width; ++k) {
                const R slope = slopes[k] * gains[k];
                total += slope;
                moment += slope * normals[k];
            }
        });
        const R mean = reduce_team<Sum>(total) / columns, tilt = reduce_team<Sum>(moment) / columns;
        each_pack_of_row<M>(columns, aligned, [&](auto size, int j) {
            constexpr int width = decltype(size)::value;
            auto slopes = load<width>(row + j);
            const auto normals = load<width>(own + j), gains = load<width>(scale + j);
#pragma unroll
            for (int k = 0; k < width; ++k)
                slopes[k] = factor * (slopes[k] * gains[k] - mean - normals[k] * tilt);
            store(row + j, slopes);
        });
    }
}
