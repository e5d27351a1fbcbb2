// Runs the threads of a launch as fibers, in either order. Detects errors that a GPU would not report, or that would
// make it hang:
// - a barrier, a shuffle or a ballot that some threads do not reach, or that threads reach at different places;
// - accesses outside the given arrays and the shared arrays; __stwb to a shared array;
// - accesses that are not aligned.
// With -fsanitize=kernel-address, the compiler inserts a call of a handler at every memory access.

#include "emulation.hpp"

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace emulation {

Place block_index, thread_index, block_size, grid_size;

namespace {

enum class State { ready, at_barrier, in_warp, done };

struct Range {
    const char *begin, *end;
};

struct Fiber {
    ucontext_t context;      // where the fiber begins
    jmp_buf place;           // where it continues: unlike a context switch, a jump makes no system call
    bool is_begun = false;
    State state;
    int line;                // where it waits
    unsigned exchanges = 0;  // number of completed exchanges, which use two buffers in turn
};

struct Warp {
    unsigned long long words[2][32];
};

constexpr std::size_t kStack = 64 * 1024;

struct Entry {
    std::string parameters;
    Call call;
};

std::map<std::string, Entry>& kernels() {
    static std::map<std::string, Entry> found;
    return found;
}

std::vector<Fiber> fibers;
Warp warps[32];
std::vector<char> stacks;
std::vector<Range> arrays;
Range image;  // this library: its constants, and the static arrays in place of shared memory
Fiber* running = nullptr;
jmp_buf scheduler;
std::string error;
Call kernel;
unsigned long long values[64];
void* arguments[64];

int number_of(const Fiber* fiber) { return fiber - fibers.data(); }

void report(const std::string& what) {
    char at[128];
    std::snprintf(at, sizeof at, " (block %u %u, thread %u %u)", block_index.x, block_index.y, thread_index.x,
                  thread_index.y);
    error = what + at;
}

// Ends the launch from within a thread; no thread continues.
void fail(const std::string& what) {
    report(what);
    _longjmp(scheduler, 1);
}

void pause_as(State state, int line) {
    Fiber* const self = running;
    self->state = state;
    self->line = line;
    if (_setjmp(self->place) == 0) _longjmp(scheduler, 1);
}

// A fiber runs the thread with its number in each block, one block after the other.
void body() {
    for (;;) {
        kernel(arguments);
        pause_as(State::done, 0);
    }
}

void make(int thread) {
    Fiber& fiber = fibers[thread];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + thread * kStack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, body, 0);
    fiber.is_begun = false;
}

void go_on(int thread) {
    running = &fibers[thread];
    thread_index = {thread % block_size.x, thread / block_size.x, 0};
    if (_setjmp(scheduler) == 0) {
        if (running->is_begun) _longjmp(running->place, 1);
        running->is_begun = true;
        setcontext(&running->context);
    }
    running = nullptr;
}

// Makes fibers, unless the fibers of the previous launch are as many and have all ended: these can be used again.
void prepare(int threads) {
    bool is_ready = (int)fibers.size() == threads;
    for (const Fiber& fiber : fibers) is_ready &= fiber.state == State::done;
    if (is_ready) return;
    fibers.assign(threads, Fiber());
    stacks.resize(threads * kStack);
    for (int thread = 0; thread < threads; ++thread) make(thread);
}

// Lets threads [first, last) continue if all of them are in this state; returns whether they are. Reports an error if
// they wait at different places.
bool release(int first, int last, State state) {
    for (int thread = first; thread < last; ++thread)
        if (fibers[thread].state != state) return false;
    for (int thread = first; thread < last; ++thread) {
        const Fiber &one = fibers[first], &other = fibers[thread];
        const bool are_even = state == State::at_barrier || one.exchanges == other.exchanges;
        if (one.line != other.line || !are_even) report("threads wait for each other at different places");
        fibers[thread].state = State::ready;
    }
    return true;
}

// Runs the threads of a warp until each has ended, is at a barrier, or waits for a thread that has ended or is there.
void run_warp(int first, bool reversed) {
    do {
        for (int i = 0; i < 32 && error.empty(); ++i) {
            const int thread = first + (reversed ? 31 - i : i);
            if (fibers[thread].state == State::ready) go_on(thread);
        }
    } while (error.empty() && release(first, first + 32, State::in_warp));
}

// Each warp runs as far as it can before the next warp begins: if a barrier is missing, the first warp is far ahead.
void run_block(int threads, bool reversed) {
    for (Fiber& fiber : fibers) fiber.state = State::ready, fiber.exchanges = 0;
    do {
        for (int i = 0; i < threads; i += 32) run_warp(reversed ? threads - 32 - i : i, reversed);
    } while (error.empty() && release(0, threads, State::at_barrier));
    int done = 0;
    for (const Fiber& fiber : fibers) done += fiber.state == State::done;
    if (error.empty() && done < threads)
        report("divergence: some threads wait at a barrier or in a warp's exchange, others do not come");
}

bool holds(const Range& range, const void* place, std::size_t size) {
    const char* const begin = static_cast<const char*>(place);
    return range.begin <= begin && begin + size <= range.end;
}

bool is_global(const void* place, std::size_t size) {
    for (const Range& array : arrays)
        if (holds(array, place, size)) return true;
    return false;
}

void check(const void* place, std::size_t size) {
    if (running == nullptr || holds({stacks.data(), stacks.data() + stacks.size()}, place, size)) return;
    if (!holds(image, place, size) && !is_global(place, size))
        fail("an access of " + std::to_string(size) + " bytes outside all arrays");
}

int find_image(dl_phdr_info* info, std::size_t, void*) {
    const char* const own = reinterpret_cast<const char*>(&error);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const char* const begin = reinterpret_cast<const char*>(info->dlpi_addr + part.p_vaddr);
        if (part.p_type != PT_LOAD || own < begin || own >= begin + part.p_memsz) continue;
        image = {reinterpret_cast<const char*>(info->dlpi_addr), begin + part.p_memsz};
        return 1;
    }
    return 0;
}

}  // namespace

Kernel::Kernel(const char* name, std::string parameters, Call call) { kernels()[name] = {std::move(parameters), call}; }

void check_global(const void* place, std::size_t size) {
    if (holds(image, place, size)) fail("a store for global memory to a shared array");
}

void wait_for_block(int line) { pause_as(State::at_barrier, line); }

const unsigned long long* exchange(unsigned mask, unsigned long long bits, int line) {
    if (mask != 0xffffffffu) fail("a mask without all lanes");
    Fiber* const self = running;
    auto& words = warps[number_of(self) / 32].words[self->exchanges++ % 2];
    words[lane()] = bits;
    pause_as(State::in_warp, line);
    return words;
}

int lane() { return number_of(running) % 32; }

}  // namespace emulation

using namespace emulation;

// The types of a kernel's parameters, or null.
extern "C" const char* parameters_of(const char* name) {
    const auto found = kernels().find(name);
    return found == kernels().end() ? nullptr : found->second.parameters.c_str();
}

// Runs a launch; returns an error message, or null. ``words``: the arguments; ``bounds``: begin and end of each array.
extern "C" const char* launch(const char* name, const unsigned* sizes, int reversed, int count,
                              const unsigned long long* words, int array_count, char* const* bounds) {
    if (image.begin == nullptr) dl_iterate_phdr(find_image, nullptr);
    kernel = kernels().at(name).call;
    grid_size = {sizes[0], sizes[1], 1};
    block_size = {sizes[2], sizes[3], 1};
    const int threads = sizes[2] * sizes[3];
    error.clear();
    if (threads % 32 != 0 || threads > 1024 || sizes[0] == 0 || sizes[1] == 0 || sizes[1] > 65535)
        return "a grid or a block that is not allowed";
    prepare(threads);
    arrays.clear();
    for (int i = 0; i < array_count; ++i) arrays.push_back({bounds[2 * i], bounds[2 * i + 1]});
    for (int i = 0; i < count; ++i) values[i] = words[i], arguments[i] = &values[i];
    const unsigned blocks = sizes[0] * sizes[1];
    for (unsigned i = 0; i < blocks && error.empty(); ++i) {
        const unsigned block = reversed ? blocks - 1 - i : i;
        block_index = {block % sizes[0], block / sizes[0], 0};
        run_block(threads, reversed);
    }
    return error.empty() ? nullptr : error.c_str();
}

#define HANDLERS(size)                                                                     \
    extern "C" void __asan_load##size##_noabort(void* place) { check(place, size); }       \
    extern "C" void __asan_store##size##_noabort(void* place) { check(place, size); }
HANDLERS(1)
HANDLERS(2)
HANDLERS(4)
HANDLERS(8)
HANDLERS(16)
extern "C" void __asan_loadN_noabort(void* place, std::size_t size) { check(place, size); }
extern "C" void __asan_storeN_noabort(void* place, std::size_t size) { check(place, size); }
extern "C" void __asan_handle_no_return() {}
extern "C" void __asan_before_dynamic_init(const char*) {}
extern "C" void __asan_after_dynamic_init() {}
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { fail("an access that is not aligned"); }
extern "C" void __ubsan_handle_out_of_bounds(void*, void*) { fail("an index outside a shared array"); }
