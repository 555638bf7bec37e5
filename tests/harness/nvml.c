/* Stands in for NVML in the tests: answers the questions that optuna-dsat asks, out of a text file read at each call.
 *
 * The file is named by NVML_MACHINE and holds one fact a line; numbers of memory are MiB, "-" is "not told":
 *
 *     gpu UUID TOTAL USED NAME...        the next GPU; a UUID that begins with MIG- is a part, found by UUID alone
 *     process GPU compute|graphics PID USED
 *     clocks GPU REASONS                 why its clocks are low, as a mask in hexadecimal digits
 *     power GPU WATTS                    its energy counter grows by this power since the machine was started
 *     refuse FUNCTION CODE [GPU]         FUNCTION answers CODE, for one GPU or for all
 *
 * Layouts and codes are those of NVIDIA's nvml.h. With -DOLD_DRIVER the versioned lists of processes are not there.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, MOST = 32 };
#define MIB 1048576ULL
#define NOT_TOLD (~0ULL)

struct gpu { char uuid[80], name[80]; unsigned long long total, used; };
struct process { unsigned gpu, pid; char kind[16]; unsigned long long used; };
struct clocks { unsigned gpu; unsigned long long reasons; };
struct power { unsigned gpu, watts; };
struct refusal { char function[80]; int code, gpu; };
static struct { unsigned gpus, processes, refusals, clocked, powered; struct gpu gpu[MOST]; struct clocks clocks[MOST]; struct power power[MOST]; struct process process[MOST]; struct refusal refusal[MOST]; } machine;

static unsigned long long bytes(const char *word) {
    return strcmp(word, "-") ? strtoull(word, NULL, 10) * MIB : NOT_TOLD;
}

static void read_machine(void) {
    char line[512], one[80], two[80];
    const char *path = getenv("NVML_MACHINE");
    FILE *file = path ? fopen(path, "re") : NULL;
    memset(&machine, 0, sizeof machine);
    while (file && fgets(line, sizeof line, file)) {
        struct gpu *gpu = &machine.gpu[machine.gpus];
        struct process *process = &machine.process[machine.processes];
        struct refusal *refusal = &machine.refusal[machine.refusals];
        refusal->gpu = -1;
        if (sscanf(line, "gpu %79s %79s %79s %79[^\n]", gpu->uuid, one, two, gpu->name) == 4) {
            gpu->total = bytes(one), gpu->used = bytes(two), machine.gpus++;
        } else if (sscanf(line, "process %u %15s %u %79s", &process->gpu, process->kind, &process->pid, one) == 4) {
            process->used = bytes(one), machine.processes++;
        } else if (sscanf(line, "clocks %u %llx", &machine.clocks[machine.clocked].gpu, &machine.clocks[machine.clocked].reasons) == 2) {
            machine.clocked++;
        } else if (sscanf(line, "power %u %u", &machine.power[machine.powered].gpu, &machine.power[machine.powered].watts) == 2) {
            machine.powered++;
        } else if (sscanf(line, "refuse %79s %d %d", refusal->function, &refusal->code, &refusal->gpu) >= 2) {
            machine.refusals++;
        }
    }
    if (file) fclose(file);
}

/* Every question begins here: what the machine is now, and whether it refuses this one. */
static int asked(const char *function, int gpu) {
    read_machine();
    for (unsigned i = 0; i < machine.refusals; i++) {
        const struct refusal *refusal = &machine.refusal[i];
        if (!strcmp(refusal->function, function) && (refusal->gpu < 0 || refusal->gpu == gpu)) return refusal->code;
    }
    return gpu >= (int)machine.gpus ? INVALID_ARGUMENT : SUCCESS;
}

static int is_part(unsigned gpu) { return !strncmp(machine.gpu[gpu].uuid, "MIG-", 4); }
static int number(void *handle) { return (int)((intptr_t)handle - 1); }
static void *handle_of(unsigned gpu) { return (void *)((intptr_t)gpu + 1); }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return asked("nvmlInit", -1); }
int nvmlInit_v2(void) { return asked("nvmlInit", -1); }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    int code = asked("nvmlSystemGetDriverVersion", -1);
    if (!code) snprintf(text, size, "580.00");
    return code;
}

int nvmlDeviceGetMaxClockInfo(void *handle, unsigned kind, unsigned *mhz) {
    int code = asked("nvmlDeviceGetMaxClockInfo", number(handle));
    if (!code) *mhz = kind == 1 ? 1980 : 2619;
    return code;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
    int code = asked("nvmlDeviceGetEnforcedPowerLimit", number(handle));
    if (!code) *milliwatts = 700000;
    return code;
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules) {
    int code = asked("nvmlDeviceGetTotalEnergyConsumption", number(handle));
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (unsigned i = 0; !code && i < machine.powered; i++) {
        if ((int)machine.power[i].gpu != number(handle)) continue;
        return *millijoules = machine.power[i].watts * (now.tv_sec * 1000ULL + now.tv_nsec / 1000000), SUCCESS;
    }
    return code ? code : NOT_SUPPORTED;
}

int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned size) {
    int code = asked("nvmlSystemGetProcessName", -1);
    if (!code) snprintf(text, size, "/opt/elsewhere/bin/far-%u --flag", pid);
    return code;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = asked("nvmlDeviceGetCount", -1);
    *count = 0;
    for (unsigned i = 0; i < machine.gpus; i++) *count += !is_part(i);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    int code = asked("nvmlDeviceGetHandleByIndex", (int)index);
    *handle = handle_of(index);
    return code ? code : is_part(index) ? INVALID_ARGUMENT : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int code = asked("nvmlDeviceGetHandleByUUID", -1);
    for (unsigned i = 0; !code && i < machine.gpus; i++) {
        if (!strcmp(machine.gpu[i].uuid, uuid)) return *handle = handle_of(i), SUCCESS;
    }
    return code ? code : NOT_FOUND;
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    int code = asked("nvmlDeviceGetIndex", number(handle));
    *index = (unsigned)number(handle);
    return code;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    int code = asked("nvmlDeviceGetName", number(handle));
    if (!code) snprintf(text, size, "%s", machine.gpu[number(handle)].name);
    return code;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    int code = asked("nvmlDeviceGetUUID", number(handle));
    if (!code) snprintf(text, size, "%s", machine.gpu[number(handle)].uuid);
    return code;
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    int code = asked("nvmlDeviceGetMemoryInfo", number(handle));
    if (!code) {
        const struct gpu *gpu = &machine.gpu[number(handle)];
        *memory = (struct memory){gpu->total, gpu->total - gpu->used, gpu->used};
    }
    return code;
}

static int low_clocks(const char *function, void *handle, unsigned long long *reasons) {
    int code = asked(function, number(handle));
    *reasons = 0;
    for (unsigned i = 0; !code && i < machine.clocked; i++) {
        if ((int)machine.clocks[i].gpu == number(handle)) *reasons = machine.clocks[i].reasons;
    }
    return code;
}

#ifdef OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    return low_clocks("nvmlDeviceGetCurrentClocksThrottleReasons", handle, reasons);
}
#else
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
    return low_clocks("nvmlDeviceGetCurrentClocksEventReasons", handle, reasons);
}
#endif

#ifndef OLD_DRIVER
struct listed { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static int list(const char *function, const char *kind, void *handle, unsigned *room, struct listed *out) {
    int code = asked(function, number(handle));
    unsigned found = 0, had = *room;
    for (unsigned i = 0; !code && i < machine.processes; i++) {
        const struct process *process = &machine.process[i];
        if ((int)process->gpu != number(handle) || strcmp(process->kind, kind)) continue;
        if (out && found < had) out[found] = (struct listed){process->pid, process->used, ~0u, ~0u};
        found++;
    }
    *room = found;
    return code ? code : found > (out ? had : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *room, struct listed *out) {
    return list("nvmlDeviceGetComputeRunningProcesses", "compute", handle, room, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *room, struct listed *out) {
    return list("nvmlDeviceGetGraphicsRunningProcesses", "graphics", handle, room, out);
}
#endif
