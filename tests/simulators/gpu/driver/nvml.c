/* Takes the place of libnvidia-ml.so.1: two devices; the second runs a process and does not report its temperature. The
   first has no error correction. SIMULATED_GPU_ERRORS is the number of errors of the second, or "lost". */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute;
} Process;

enum { success = 0, not_supported = 3, insufficient_size = 7, lost = 15 };

static int write(char* out, unsigned length, const char* text) {
    snprintf(out, length, "%s", text);
    return success;
}

int nvmlInitWithFlags(unsigned flags) { return success; }
int nvmlInit_v2(void) { return success; }
int nvmlShutdown(void) { return success; }
const char* nvmlErrorString(int error) { return "an error"; }
int nvmlSystemGetDriverVersion(char* out, unsigned length) { return write(out, length, "580.95.05"); }
int nvmlSystemGetProcessName(unsigned pid, char* out, unsigned length) {
    return write(out, length, "/usr/bin/python3");
}
int nvmlDeviceGetCount_v2(unsigned* count) {
    *count = 2;
    return success;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
    *handle = (void*)(unsigned long)(index + 1);
    return success;
}
static int second(void* handle) { return handle == (void*)2; }
int nvmlDeviceGetName(void* handle, char* out, unsigned length) {
    return write(out, length, "NVIDIA H100 80GB HBM3");
}
int nvmlDeviceGetUUID(void* handle, char* out, unsigned length) {
    const char* first = "GPU-11000000-0000-0000-0000-000000000000";
    return write(out, length, second(handle) ? "GPU-11000101-0101-0101-0101-010101010101" : first);
}
int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
    memory->total = 80ull << 30;
    memory->used = second(handle) ? 60ull << 30 : 1ull << 30;
    memory->free = memory->total - memory->used;
    return success;
}
int nvmlDeviceGetTemperature(void* handle, int sensor, unsigned* degrees) {
    *degrees = 31;
    return second(handle) ? not_supported : success;
}
int nvmlDeviceGetTotalEccErrors(void* handle, int kind, int counter, unsigned long long* count) {
    const char* errors = getenv("SIMULATED_GPU_ERRORS");
    if (!second(handle)) return not_supported;
    if (errors != NULL && strcmp(errors, "lost") == 0) return lost;
    *count = errors == NULL ? 0 : strtoull(errors, NULL, 10);
    return success;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* processes) {
    const unsigned room = *count;
    *count = second(handle);
    if (*count == 0) return success;
    if (processes == NULL || room < 1) return insufficient_size;
    // More than any process can have.
    processes[0] = (Process){4194305, 59ull << 30, ~0u, ~0u};
    return success;
}
