// Kernels with one bug each, which the emulation must detect.

#include "common.cuh"

KERNEL(some_skip_the_barrier)(float* x, long long n) {
    if (threadIdx.x < n) __syncthreads();
    x[0] = 0;
}

KERNEL(some_leave_the_warp)(float* x, long long n) {
    if (threadIdx.x >= n) return;
    x[threadIdx.x] = reduce_warp<Sum>(x[threadIdx.x]);
}

KERNEL(two_barriers)(float* x, long long n) {
    if (threadIdx.x < n) __syncthreads();
    else
        __syncthreads();
    x[0] = 0;
}

KERNEL(one_value_too_far)(float* x, long long n) {
    const long long i = thread_number();
    if (i <= n) x[i] += 1;
}

KERNEL(a_pack_too_far)(float* x, long long n) {
    const long long i = thread_number() * 4;
    if (i < n) *reinterpret_cast<Pack<float, 4>*>(x + i) = {};
}

KERNEL(shared_too_far)(float* x, long long n) {
    __shared__ float shared[32];
    shared[threadIdx.x] = n;
    __syncthreads();
    x[0] = shared[0];
}

KERNEL(stwb_to_shared)(float* x, long long n) {
    __shared__ Pack<float, 4> shared[1];
    store(shared[0].values, Pack<float, 4>{});
    if (thread_number() < n) x[thread_number()] = shared[0][0];
}

KERNEL(race)(float* x, long long n) {
    __shared__ float shared[256];
    shared[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < n) x[threadIdx.x] = shared[n - 1 - threadIdx.x];  // there should be a barrier before
}

KERNEL(last_writer)(float* x, long long n) { x[n - 1] = threadIdx.x; }

KERNEL(one_barrier_too_few)(float* x, long long n) {
    __shared__ float shared[8];
    float total = 0;
    for (int round = 0; round < n; ++round) {  // a barrier is missing here: a warp may still read
        const float all = reduce_warp<Sum>(float(threadIdx.x));
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = all + round;
        __syncthreads();
        for (int warp = 0; warp < 8; ++warp) total += shared[warp];
    }
    if (threadIdx.x == 0) x[0] = total;
    if (threadIdx.x == 255) x[1] = total;
}
