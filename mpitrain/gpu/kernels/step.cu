// Decisions of a step on the device, so that the host need not wait: whether to update, and by how much.

#include "common.cuh"

// In the order of the list in ops/updates.py.
struct State {
    double go;        // 1 if this step's update is applied
    double factor;    // factor of parameter gradients: the inverse of the loss scale
    double scale;     // loss scale of the next step
    double good;      // steps since scale was changed
    double stopped;   // 1 after a non-finite loss, if the run is to stop then
    double overflow;  // 1 if a gradient was not finite
    double own, total, updated;  // this step's values, for the host
};

// The table of strategy/non_finite.py, decided on the device, so that no update waits for the host.
constexpr int kStop = 0, kIgnore = 2;  // indices in the policies stop, skip, ignore

// The scale is doubled after this many steps without overflow, and halved at each overflow. Micikevicius et al., Mixed
// precision training, 2018, section 3.2, with the constants that frameworks use.
constexpr double kGrowAfter = 2000, kLargest = 16777216.0;

KERNEL(decide_update)(const double* own, const void* total, int kind, int policy, int scaled, double* packed) {
    if (thread_number() > 0) return;
    State& state = *reinterpret_cast<State*>(packed);
    const double loss = number<double>(total, kind, 0);
    const bool overflow = state.overflow != 0;
    // A gradient that is not finite even without a scale is not an overflow: it counts as a non-finite loss.
    const bool hopeless = overflow && state.scale <= 1, broken = !isfinite(loss) || hopeless;
    if (broken && policy == kStop) state.stopped = 1;
    state.go = state.updated = state.stopped == 0 && (broken ? policy == kIgnore : !overflow);
    state.own = hopeless ? nan("") : *own;
    state.total = hopeless ? nan("") : loss;
    state.factor = 1 / state.scale;
    state.overflow = 0;
    if (!scaled || broken) return;
    if (overflow) {
        state.scale = fmax(1.0, state.scale / 2);
        state.good = 0;
    } else if (++state.good >= kGrowAfter) {
        state.scale = fmin(kLargest, state.scale * 2);
        state.good = 0;
    }
}

// flag = 1 if a value is not finite; all threads that write it write the same value.
KERNEL(find_overflow)(long long n, const T* values, double* flag) {
    bool found = false;
    each_pack<N>(n, is_aligned<N>(values), [&](auto size, long long i) {
        const auto pack = load<size.value>(values + i);
#pragma unroll
        for (int j = 0; j < size.value; ++j) found = found || !isfinite(pack[j]);
    });
    if (found) *flag = 1;
}

KERNEL(copy_loss)(const double* loss, T* place) {
    if (thread_number() == 0) *place = T(*loss);
}
