// Windows of images as rows of a matrix (im2col), and the transpose: the CUDA version of the kernels in nn/windows.py.

#include "common.cuh"

// Images (batch, lines, columns, channels); windows (batch, down_count, right_count, row), where a row has at least
// height * width * channels values. The first window is at line ``start * down``; strides are ``down`` and ``right``.
struct Windows {
    int lines, columns, channels, start, down, right, height, width, down_count, right_count, row;
};

// Values of a row of windows beyond the window are not written.
template <typename T>
__device__ void copy_windows(const T* x, Windows w, long long batch, T* windows) {
    const int run = w.width * w.channels;
    each_cell(batch * w.down_count * w.right_count, w.height * run, [=](long long window, int cell) {
        const int j = window % w.right_count, i = window / w.right_count % w.down_count;
        const long long image = window / w.right_count / w.down_count;
        const long long line = image * w.lines + (w.start + i) * w.down + cell / run;
        windows[window * w.row + cell] = x[(line * w.columns + j * w.right) * w.channels + cell % run];
    });
}

// Along an axis, the first window that contains a position, or 0.
__device__ __forceinline__ int first_window(int place, int size, int stride) {
    return place < size ? 0 : (place - size) / stride + 1;
}

// As a gather: a thread adds to its element the values of all windows that contain it, in order.
template <typename T>
__device__ void add_windows(const T* windows, Windows w, long long batch, T* x) {
    each_cell(batch * w.lines, w.columns * w.channels, [=](long long line, int cell) {
        const int a = line % w.lines - w.start * w.down, b = cell / w.channels, channel = cell % w.channels;
        if (a < 0) return;
        const long long image = line / w.lines;
        Real<T> total = x[line * w.columns * w.channels + cell];
        for (int i = first_window(a, w.height, w.down); i <= a / w.down && i < w.down_count; ++i)
            for (int j = first_window(b, w.width, w.right); j <= b / w.right && j < w.right_count; ++j) {
                const long long window = (image * w.down_count + i) * w.right_count + j;
                const int inside = (a - i * w.down) * w.width + b - j * w.right;
                total += windows[window * w.row + inside * w.channels + channel];
            }
        x[line * w.columns * w.channels + cell] = total;
    });
}

#define WINDOWS                                                                                                  \
    int lines, int columns, int channels, int start, int down, int right, int height, int width, int down_count, \
        int right_count, int row
#define THESE {lines, columns, channels, start, down, right, height, width, down_count, right_count, row}
#define INSTANCE(T)                                                                                              \
    KERNEL copy_windows_##T(const T* x, WINDOWS, long long batch, T* windows) {                                  \
        copy_windows(x, THESE, batch, windows);                                                                  \
    }                                                                                                            \
    KERNEL add_windows_##T(const T* windows, WINDOWS, long long batch, T* x) {                                   \
        add_windows(windows, THESE, batch, x);                                                                   \
    }
FOR_STORED(INSTANCE)
