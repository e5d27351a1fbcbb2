// Pooling over windows of images: the CUDA form of the kernels in nn/pool.py.
//
// Images are (batch, height, width, channels). A warp works on a line of an image: its lanes have neighbouring channels
// and columns. Gradients are gathered: a thread adds those of all windows that hold its element, in their order.

#include "common.cuh"

// Windows of ``size`` by ``size``, ``stride`` apart: ``down`` by ``right`` of them on an image of ``height`` by ``width``.
struct Windows {
    int height, width, channels, down, right, size, stride;

    // Of windows along an axis, the first that holds a place, and the one after the last.
    __device__ __forceinline__ int first(int place) const {
        return place < size ? 0 : (place - size) / stride + 1;
    }
    __device__ __forceinline__ int last(int place, int windows) const { return min(place / stride + 1, windows); }
};

template <typename T>
__device__ void max_pool(const T* x, Windows w, long long batch, T* y, unsigned char* place) {
    each_cell(batch * w.down, w.right * w.channels, [=](long long line, int cell) {
        const long long image = line / w.down;
        const int i = line % w.down, j = cell / w.channels, channel = cell % w.channels;
        const T* const corner =
            x + ((image * w.height + i * w.stride) * w.width + j * w.stride) * w.channels + channel;
        Real<T> largest = corner[0];
        int source = 0;
        for (int k = 1; k < w.size * w.size; ++k) {
            const Real<T> value = corner[((long long)(k / w.size) * w.width + k % w.size) * w.channels];
            // Not "greater", which no NaN is; and a NaN that is there already stays.
            if (!(value <= largest) && largest == largest) largest = value, source = k;
        }
        const long long target = line * w.right * w.channels + cell;
        y[target] = largest;
        place[target] = source;
    });
}

// dx = the sum, over the windows that hold an element, of gradient(window's element, place in the window).
template <typename T, typename F>
__device__ void gather(Windows w, long long batch, T* dx, F gradient) {
    each_cell(batch * w.height, w.width * w.channels, [=](long long line, int cell) {
        const long long image = line / w.height;
        const int a = line % w.height, b = cell / w.channels, channel = cell % w.channels;
        Real<T> total = 0;
        for (int i = w.first(a); i < w.last(a, w.down); ++i)
            for (int j = w.first(b); j < w.last(b, w.right); ++j) {
                const long long window = ((image * w.down + i) * w.right + j) * w.channels + channel;
                total += gradient(window, (a - i * w.stride) * w.size + b - j * w.stride);
            }
        dx[line * w.width * w.channels + cell] = total;
    });
}

template <typename T>
__device__ void max_pool_backward(const T* dy, const unsigned char* place, Windows w, long long batch, T* dx) {
    gather(w, batch, dx, [=](long long window, int k) { return place[window] == k ? Real<T>(dy[window]) : Real<T>(0); });
}

template <typename T>
__device__ void average_pool(const T* x, Windows w, long long batch, Real<T> share, T* y) {
    each_cell(batch * w.down, w.right * w.channels, [=](long long line, int cell) {
        const long long image = line / w.down;
        const int i = line % w.down, j = cell / w.channels, channel = cell % w.channels;
        const T* const corner =
            x + ((image * w.height + i * w.stride) * w.width + j * w.stride) * w.channels + channel;
        Real<T> total = 0;
        for (int k = 0; k < w.size * w.size; ++k)
            total += corner[((long long)(k / w.size) * w.width + k % w.size) * w.channels];
        y[line * w.right * w.channels + cell] = total * share;
    });
}

template <typename T>
__device__ void average_pool_backward(const T* dy, Windows w, long long batch, Real<T> share, T* dx) {
    gather(w, batch, dx, [=](long long window, int) { return dy[window] * share; });
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
