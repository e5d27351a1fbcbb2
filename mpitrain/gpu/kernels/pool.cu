// Pooling over windows of images: the CUDA version of the kernels in nn/pool.py.
//
// Images are (batch, height, width, channels). A warp handles a line of an image: its lanes have adjacent packs of
// channels and columns. Gradients are gathered: a thread adds those of all windows that contain its element, in order.

#include "common.cuh"

// Windows of ``size`` by ``size``, ``stride`` apart: ``down`` by ``right`` of them on an image of ``height`` by
// ``width``.
struct Windows {
    int height, width, channels, down, right, size, stride;

    // Along an axis, the first window that contains a position, and one past the last.
    __device__ __forceinline__ int first(int place) const {
        return place < size ? 0 : (place - size) / stride + 1;
    }
    __device__ __forceinline__ int last(int place, int windows) const { return min(place / stride + 1, windows); }
};

// f(Size<N>(), line, cell, channel) for every N channels of every cell of every line: N is a whole pack if channels
// fill packs and arrays are aligned, else 1. There are fewer than 2**31 lines, since 32-bit division is faster.
template <typename T, typename F>
__device__ void each_pixel(long long lines, int cells, int channels, bool aligned, F f) {
    auto walk = [=](auto size) {
        const int packs = channels / decltype(size)::value;
        each_cell(lines, cells * packs, [=](long long line, int at) {
            f(size, (int)line, at / packs, at % packs * decltype(size)::value);
        });
    };
    if (aligned && channels % kPack<T> == 0) walk(Size<kPack<T>>());
    else walk(Size<1>());
}

// The element of images at the upper left corner of a window.
template <typename T>
__device__ const T* corner_of(const T* x, const Windows& w, int line, int j, int channel) {
    const int image = line / w.down, i = line - image * w.down;
    return x + (((long long)image * w.height + i * w.stride) * w.width + j * w.stride) * w.channels + channel;
}

template <typename T>
__device__ void max_pool(const T* x, Windows w, long long batch, T* y, unsigned char* place) {
    const bool aligned = is_aligned<kPack<T>>(x) && is_aligned<kPack<T>>(y) && is_aligned<kPack<T>>(place);
    each_pixel<T>(batch * w.down, w.right, w.channels, aligned, [=](auto size, int line, int j, int channel) {
        constexpr int N = decltype(size)::value;
        const T* const corner = corner_of(x, w, line, j, channel);
        Pack<Real<T>, N> largest = load<N>(corner);
        Pack<unsigned char, N> source = {};
        for (int k = 1; k < w.size * w.size; ++k) {
            const auto value = load<N>(corner + ((long long)(k / w.size) * w.width + k % w.size) * w.channels);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                // Not "greater", which is false for NaN; a NaN that is the maximum stays.
                const bool is_larger = !(value[n] <= largest[n]) && largest[n] == largest[n];
                largest[n] = is_larger ? value[n] : largest[n];
                source[n] = is_larger ? k : source[n];
            }
        }
        const long long target = ((long long)line * w.right + j) * w.channels + channel;
        store(y + target, largest);
        *reinterpret_cast<Pack<unsigned char, N>*>(place + target) = source;
    });
}

// dx = the sum, over the windows that contain an element, of gradient(Size<N>(), window's element, index in the
// window).
template <typename T, typename F>
__device__ void gather(Windows w, long long batch, T* dx, bool aligned, F gradient) {
    aligned = aligned && is_aligned<kPack<T>>(dx);
    each_pixel<T>(batch * w.height, w.width, w.channels, aligned, [=](auto size, int line, int b, int channel) {
        constexpr int N = decltype(size)::value;
        const int image = line / w.height, a = line - image * w.height;
        Pack<Real<T>, N> total = {};
        for (int i = w.first(a); i < w.last(a, w.down); ++i)
            for (int j = w.first(b); j < w.last(b, w.right); ++j) {
                const long long window = (((long long)image * w.down + i) * w.right + j) * w.channels + channel;
                const int k = (a - i * w.stride) * w.size + b - j * w.stride;
                total = map_pack(Sum::of<Real<T>>, total, gradient(size, window, k));
            }
        store(dx + ((long long)line * w.width + b) * w.channels + channel, total);
    });
}

template <typename T>
__device__ void max_pool_backward(const T* dy, const unsigned char* place, Windows w, long long batch, T* dx) {
    const bool aligned = is_aligned<kPack<T>>(dy) && is_aligned<kPack<T>>(place);
    gather(w, batch, dx, aligned, [=](auto size, long long window, int k) {
        constexpr int N = decltype(size)::value;
        auto chosen = [k](Real<T> slope, unsigned char source) { return source == k ? slope : Real<T>(0); };
        return map_pack(chosen, load<N>(dy + window), load<N>(place + window));
    });
}

template <typename T>
__device__ void average_pool(const T* x, Windows w, long long batch, Real<T> share, T* y) {
    const bool aligned = is_aligned<kPack<T>>(x) && is_aligned<kPack<T>>(y);
    each_pixel<T>(batch * w.down, w.right, w.channels, aligned, [=](auto size, int line, int j, int channel) {
        constexpr int N = decltype(size)::value;
        const T* const corner = corner_of(x, w, line, j, channel);
        Pack<Real<T>, N> total = {};
        for (int k = 0; k < w.size * w.size; ++k)
            total = map_pack(Sum::of<Real<T>>, total,
                             load<N>(corner + ((long long)(k / w.size) * w.width + k % w.size) * w.channels));
        store(y + ((long long)line * w.right + j) * w.channels + channel,
              map_pack([share](Real<T> sum) { return sum * share; }, total));
    });
}

template <typename T>
__device__ void average_pool_backward(const T* dy, Windows w, long long batch, Real<T> share, T* dx) {
    gather(w, batch, dx, is_aligned<kPack<T>>(dy), [=](auto size, long long window, int) {
        constexpr int N = decltype(size)::value;
        return map_pack([share](Real<T> slope) { return slope * share; }, load<N>(dy + window));
    });
}

#define WINDOWS int height, int width, int channels, int down, int right, int size, int stride
#define THESE {height, width, channels, down, right, size, stride}
#define INSTANCE(T)                                                                                              \
    KERNEL max_pool_##T(const T* x, WINDOWS, long long batch, T* y, unsigned char* place) {                      \
        max_pool(x, THESE, batch, y, place);                                                                     \
    }                                                                                                            \
    KERNEL max_pool_backward_##T(const T* dy, const unsigned char* place, WINDOWS, long long batch, T* dx) {     \
        max_pool_backward(dy, place, THESE, batch, dx);                                                          \
    }                                                                                                            \
    KERNEL average_pool_##T(const T* x, WINDOWS, long long batch, Real<T> share, T* y) {                         \
        average_pool(x, THESE, batch, share, y);                                                                 \
    }                                                                                                            \
    KERNEL average_pool_backward_##T(const T* dy, WINDOWS, long long batch, Real<T> share, T* dx) {              \
        average_pool_backward(dy, THESE, batch, share, dx);                                                      \
    }
FOR_STORED(INSTANCE)
