// Windows of images: pooling, and windows as rows of a matrix (im2col) and the transpose. The CUDA version of the
// kernels in core/ops/pooling.py and core/ops/windows.py.
//
// Images are (batch, lines, columns, channels). A block handles lines of images or of windows: the lanes of a warp have
// adjacent packs of channels and columns. Gradients are gathered: a thread adds those of all windows that contain its
// element, in order; or, if the windows tile the images, scattered: a thread writes all elements of a window. There are
// fewer than 2**31 lines, so that divisions have 32 bits, which are faster than 64.

#include "common.cuh"

// ``down_count`` by ``right_count`` windows of ``height`` by ``width`` on each image. Windows are ``down`` and
// ``right`` apart; the first one is at line ``start * down``.
struct Windows {
    int lines, columns, channels, start, down, right, height, width, down_count, right_count;
};

// The range [first, last) of windows along an axis that contain a position.
struct Range {
    int first, last;
    __device__ __forceinline__ Range(int place, int size, int stride, int count)
        : first(place < size ? 0 : (unsigned)(place - size) / (unsigned)stride + 1),
          last(place < 0 ? 0 : min((int)((unsigned)place / (unsigned)stride) + 1, count)) {}
};

// f(size, line)(cell, channel) for all packs of channels of ``cells`` cells of every line. Packs have N values if
// channels consist of packs and arrays are aligned, else 1.
template <typename F>
__device__ __forceinline__ void each_pixel(long long lines, int cells, int channels, bool aligned, F f) {
    const auto walk = [=](auto size) {
        const unsigned packs = (unsigned)channels / size.value;
        each_cell(lines, cells * packs, [=](long long line) {
            const auto of_pack = f(size, (int)line);
            return [=](int at) {
                const unsigned cell = (unsigned)at / packs;
                of_pack((int)cell, (int)((at - cell * packs) * decltype(size)::value));
            };
        });
    };
    if (aligned && channels % N == 0) walk(Size<N>());
    else walk(Size<1>());
}

// The first line of images that belongs to a line of windows.
__device__ __forceinline__ long long top_of(const Windows& w, int line) {
    const int image = (unsigned)line / (unsigned)w.down_count;
    return (long long)image * w.lines + (w.start + line - image * w.down_count) * w.down;
}

// f(pack, index in the window, row by row) for a pack of channels at all positions of a window.
template <int width, typename F>
__device__ __forceinline__ void each_position(const T* corner, const Windows& w, F f) {
    for (int i = 0; i < w.height; ++i)
#pragma unroll 1  // copies of the body would take registers; other warps hide the wait for memory
        for (int j = 0; j < w.width; ++j)
            f(load<width>(corner + ((long long)i * w.columns + j) * w.channels), i * w.width + j);
}

// dx = the sum, over the windows that contain an element, of gradient(size, window, channel)(index in the window); added
// to dx if ``adds``.
template <typename F>
__device__ __forceinline__ void gather(const Windows& w, long long batch, T* dx, bool adds, bool aligned, F gradient) {
    each_pixel(batch * w.lines, w.columns, w.channels, aligned && is_aligned<N>(dx), [=](auto size, int line) {
        const int image = (unsigned)line / (unsigned)w.lines, a = line - image * w.lines - w.start * w.down;
        const Range down(a, w.height, w.down, w.down_count);
        return [=](int b, int channel) {
            constexpr int width = decltype(size)::value;
            const Range right(b, w.width, w.right, w.right_count);
            T* const target = dx + ((long long)line * w.columns + b) * w.channels + channel;
            Pack<R, width> total = {};
            if (adds) total = load<width>(target);
            for (int i = down.first; i < down.last; ++i)
#pragma unroll 1  // copies of the body would take registers, and most windows overlap little
                for (int j = right.first; j < right.last; ++j) {
                    const long long window = ((long long)image * w.down_count + i) * w.right_count + j;
                    const int k = (a - i * w.down) * w.width + b - j * w.right;
                    total = map_pack(Sum::of<R>, total, gradient(size, window, channel)(k));
                }
            store(target, total);
        };
    });
}

// Whether each element is in exactly one window.
__device__ __forceinline__ bool are_tiles(const Windows& w) {
    return w.start == 0 && w.down == w.height && w.right == w.width && w.lines == w.down_count * w.height &&
           w.columns == w.right_count * w.width;
}

// The same as gather without ``adds``; if the windows tile the images, each gradient is read once.
template <typename F>
__device__ __forceinline__ void scatter(const Windows& w, long long batch, T* dx, bool aligned, F gradient) {
    if (!are_tiles(w)) return gather(w, batch, dx, false, aligned, gradient);
    each_pixel(batch * w.down_count, w.right_count, w.channels, aligned && is_aligned<N>(dx), [=](auto size, int line) {
        const long long top = top_of(w, line);
        return [=](int j, int channel) {
            const auto gradient_at = gradient(size, (long long)line * w.right_count + j, channel);
            T* const corner = dx + (top * w.columns + j * w.right) * w.channels + channel;
            for (int a = 0; a < w.height; ++a)
                for (int b = 0; b < w.width; ++b)
                    store(corner + ((long long)a * w.columns + b) * w.channels, gradient_at(a * w.width + b));
        };
    });
}

#define WINDOWS                                                                                                  \
    int lines, int columns, int channels, int start, int down, int right, int height, int width, int down_count, \
        int right_count
#define THESE {lines, columns, channels, start, down, right, height, width, down_count, right_count}

// place: the index of each maximum in its window.
KERNEL(max_pool)(const T* x, WINDOWS, long long batch, T* y, unsigned char* place) {
    const Windows w THESE;
    const bool aligned = is_aligned<N>(x) && is_aligned<N>(y) && is_aligned<N>(place);
    each_pixel(batch * down_count, right_count, channels, aligned, [=](auto size, int line) {
        const long long top = top_of(w, line);
        return [=](int j, int channel) {
            constexpr int width = decltype(size)::value;
            const T* const corner = x + (top * w.columns + j * w.right) * w.channels + channel;
            Pack<R, width> largest = load<width>(corner);
            Pack<unsigned char, width> source = {};
            each_position<width>(corner, w, [&](const Pack<R, width>& value, int k) {
#pragma unroll
                for (int n = 0; n < width; ++n) {
                    // Not "greater", which is false for NaN; a NaN that is the maximum stays.
                    const bool is_larger = !(value[n] <= largest[n]) && largest[n] == largest[n];
                    largest[n] = is_larger ? value[n] : largest[n];
                    source[n] = is_larger ? k : source[n];
                }
            });
            const long long target = ((long long)line * w.right_count + j) * w.channels + channel;
            store(y + target, largest);
            *reinterpret_cast<Pack<unsigned char, width>*>(place + target) = source;
        };
    });
}

KERNEL(max_pool_backward)(const T* dy, const unsigned char* place, WINDOWS, long long batch, T* dx) {
    const bool aligned = is_aligned<N>(dy) && is_aligned<N>(place);
    scatter(THESE, batch, dx, aligned, [=](auto size, long long window, int channel) {
        constexpr int width = decltype(size)::value;
        const auto slopes = load<width>(dy + window * channels + channel);
        const auto places = load<width>(place + window * channels + channel);
        return [=](int k) {
            return map_pack([k](R slope, unsigned char source) { return source == k ? slope : R(0); }, slopes, places);
        };
    });
}

KERNEL(average_pool)(const T* x, WINDOWS, long long batch, R share, T* y) {
    const Windows w THESE;
    const bool aligned = is_aligned<N>(x) && is_aligned<N>(y);
    each_pixel(batch * down_count, right_count, channels, aligned, [=](auto size, int line) {
        const long long top = top_of(w, line);
        return [=](int j, int channel) {
            constexpr int width = decltype(size)::value;
            Pack<R, width> total = {};
            each_position<width>(x + (top * w.columns + j * w.right) * w.channels + channel, w,
                                 [&](const Pack<R, width>& value, int) { total = map_pack(Sum::of<R>, total, value); });
            store(y + ((long long)line * w.right_count + j) * w.channels + channel,
                  map_pack([share](R sum) { return sum * share; }, total));
        };
    });
}

KERNEL(average_pool_backward)(const T* dy, WINDOWS, long long batch, R share, T* dx) {
    scatter(THESE, batch, dx, is_aligned<N>(dy), [=](auto size, long long window, int channel) {
        constexpr int width = decltype(size)::value;
        const auto slopes =
            map_pack([share](R slope) { return slope * share; }, load<width>(dy + window * channels + channel));
        return [=](int) { return slopes; };
    });
}

// windows: shape (windows, row), where a row has at least height * width * channels values; others are not written. A
// thread copies one pack of each line of a window, whose values are adjacent in the image and in the row.
KERNEL(copy_windows)(const T* x, int row, WINDOWS, long long batch, T* windows) {
    const Windows w THESE;
    const bool aligned = channels % N == 0 && row % N == 0 && is_aligned<N>(x) && is_aligned<N>(windows);
    each_pixel(batch * down_count, right_count, width * channels, aligned, [=](auto size, int line) {
        const long long top = top_of(w, line);
        return [=](int j, int at) {
            constexpr int width = decltype(size)::value;
            const T* source = x + (top * w.columns + j * w.right) * w.channels + at;
            T* target = windows + ((long long)line * w.right_count + j) * row + at;
            for (int i = 0; i < w.height; ++i, source += w.columns * w.channels, target += w.width * w.channels)
                store(target, load<width>(source));
        };
    });
}

// Adds windows to the elements that copy_windows reads them from.
KERNEL(add_windows)(const T* windows, int row, WINDOWS, long long batch, T* x) {
    gather(THESE, batch, x, true, row % N == 0 && is_aligned<N>(windows),
           [=](auto size, long long window, int channel) {
               return [=](int k) {
                   return load<decltype(size)::value>(windows + window * row + k * channels + channel);
               };
           });
}
