/* A stand-in for NVML (libnvidia-ml.so.1): answers from the machine's description and the ledger, see machine.h.
 *
 * Only what pynvml, torch and optuna-dsat ask. Nothing is kept between two calls, so a test may change the description
 * while a program runs. As with the real library every failure is a code, and a process is listed on a GPU while it
 * lives and holds a context there.
 */
#define _GNU_SOURCE
#include "machine.h"

#include <stdio.h>
#include <string.h>

/* nvmlReturn_t, as documented in NVIDIA's NVML API reference. */
enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
};

struct memory {
    unsigned long long total, free, used;
};

/* nvmlProcessInfo_v1_t, which the function without a version fills, and nvmlProcessInfo_t since version 2. */
struct process_v1 {
    unsigned pid;
    unsigned long long used;
};
struct process_v2 {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* Handles are rows of machine.gpus, counted from 1 because NULL is no handle. */
static void *handle_of(int row) { return (void *)(size_t)(row + 1); }
static int row_of(void *handle) { return (int)(size_t)handle - 1; }

/* Read the machine and leave the function where it is to fail, or where the handle is none. */
#define ASK_SYSTEM(function)                                    \
    struct machine machine;                                     \
    machine_read(&machine);                                     \
    do {                                                        \
        int code_ = machine_failure(&machine, function, -1);    \
        if (code_) return code_;                                \
    } while (0)
#define ASK_GPU(function, handle)                               \
    struct machine machine;                                     \
    machine_read(&machine);                                     \
    int row = row_of(handle);                                   \
    if (row < 0 || row >= machine.gpu_count) return INVALID_ARGUMENT; \
    const struct gpu *gpu = &machine.gpus[row];                 \
    do {                                                        \
        int code_ = machine_failure(&machine, function, gpu->number); \
        if (code_) return code_;                                \
    } while (0)

static int initialise(void) {
    ASK_SYSTEM("nvmlInit");
    log_call("nvmlInit", "-", 0, SUCCESS);
    return SUCCESS;
}
int nvmlInit(void) { return initialise(); }
int nvmlInit_v2(void) { return initialise(); }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, initialise(); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ASK_SYSTEM("nvmlSystemGetDriverVersion");
    snprintf(version, length, "%s", machine.driver_version);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ASK_SYSTEM("nvmlSystemGetCudaDriverVersion");
    *version = 13000;
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

int nvmlDeviceGetCount_v2(unsigned *count) {
    ASK_SYSTEM("nvmlDeviceGetCount");
    *count = 0;
    for (int i = 0; i < machine.gpu_count; i++) *count += !machine.gpus[i].part;
    return SUCCESS;
}
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) {
    struct machine machine;
    machine_read(&machine);
    int code = machine_failure(&machine, "nvmlDeviceGetHandleByIndex", (int)number);
    if (code) return code;
    for (int i = 0; i < machine.gpu_count; i++) {
        if (machine.gpus[i].part || machine.gpus[i].number != (int)number) continue;
        *handle = handle_of(i);
        return SUCCESS;
    }
    return INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByIndex(unsigned number, void **handle) { return nvmlDeviceGetHandleByIndex_v2(number, handle); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    ASK_SYSTEM("nvmlDeviceGetHandleByUUID");
    for (int i = 0; i < machine.gpu_count; i++) {
        if (strcmp(machine.gpus[i].uuid, uuid)) continue;
        *handle = handle_of(i);
        return SUCCESS;
    }
    return NOT_FOUND;
}

/* The driver (driver.c) gives each row of machine.gpus the bus of its number. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
    ASK_SYSTEM("nvmlDeviceGetHandleByPciBusId");
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2 || bus >= (unsigned)machine.gpu_count) return NOT_FOUND;
    *handle = handle_of((int)bus);
    return SUCCESS;
}

int nvmlDeviceGetIndex(void *handle, unsigned *number) {
    ASK_GPU("nvmlDeviceGetIndex", handle);
    if (gpu->part) return NOT_SUPPORTED;
    *number = (unsigned)gpu->number;
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    ASK_GPU("nvmlDeviceGetName", handle);
    snprintf(name, length, "%s", gpu->name);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    ASK_GPU("nvmlDeviceGetUUID", handle);
    snprintf(uuid, length, "%s", gpu->uuid);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    ASK_GPU("nvmlDeviceGetMemoryInfo", handle);
    memory->total = gpu->memory_bytes;
    memory->used = ledger_used_bytes(&machine, row);
    if (memory->used > memory->total) memory->used = memory->total;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

/* Fills either version of the list: `fill` writes the i-th entry. */
static int list_compute(void *handle, unsigned *count, void *infos, void (*fill)(void *, int, const struct usage *)) {
    ASK_GPU("nvmlDeviceGetComputeRunningProcesses", handle);
    (void)gpu;
    struct usage users[MAX_HOLDERS];
    int found = ledger_users(&machine, row, users, MAX_HOLDERS);
    bool fits = infos && (unsigned)found <= *count;
    for (int i = 0; fits && i < found; i++) fill(infos, i, &users[i]);
    *count = (unsigned)found;
    return fits || !found ? SUCCESS : INSUFFICIENT_SIZE;
}
static void fill_v1(void *infos, int i, const struct usage *user) {
    ((struct process_v1 *)infos)[i] = (struct process_v1){(unsigned)user->pid, user->bytes};
}
static void fill_v2(void *infos, int i, const struct usage *user) {
    ((struct process_v2 *)infos)[i] = (struct process_v2){(unsigned)user->pid, user->bytes, ~0u, ~0u};
}
int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *infos) {
    return list_compute(handle, count, infos, fill_v1);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, void *infos) {
    return list_compute(handle, count, infos, fill_v2);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *infos) {
    return list_compute(handle, count, infos, fill_v2);
}

/* No desktop runs on this machine. */
static int list_graphics(void *handle, unsigned *count) {
    ASK_GPU("nvmlDeviceGetGraphicsRunningProcesses", handle);
    (void)gpu;
    *count = 0;
    return SUCCESS;
}
int nvmlDeviceGetGraphicsRunningProcesses(void *handle, unsigned *count, void *infos) {
    return (void)infos, list_graphics(handle, count);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, void *infos) {
    return (void)infos, list_graphics(handle, count);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *after_reboot) {
    ASK_GPU("nvmlDeviceGetMigMode", handle);
    (void)gpu;
    *now = *after_reboot = 0;
    return NOT_SUPPORTED;
}

/* Asked by torch, which does without. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, void *type) {
    return (void)handle, (void)link, (void)type, NOT_SUPPORTED;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, void *pci) {
    return (void)handle, (void)link, (void)pci, NOT_SUPPORTED;
}
int nvmlDeviceGetGpuFabricInfoV(void *handle, void *fabric) { return (void)handle, (void)fabric, NOT_SUPPORTED; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}
