/* A stand-in for the CUDA driver (libcuda.so.1): devices, contexts and memory, but nothing that computes.
 *
 * It keeps the rules that a program can fall foul of:
 *   - a process forked after cuInit can do nothing (CUDA_ERROR_NOT_INITIALIZED), nor can one that has not called it;
 *   - CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are read once, by cuInit;
 *   - a context on a device takes memory, and memory ends: what all processes hold together is at most what the
 *     machine's description says (machine.c), beyond it CUDA_ERROR_OUT_OF_MEMORY; so does memory pinned on the host;
 *   - what a process held is free as soon as it is dead.
 * Device memory is the host's, mapped and unmapped; pages that nobody writes cost nothing. All other functions that
 * cuda.h declares are there and return 0 (build.py writes them).
 */
#define _GNU_SOURCE
#include "extras.h"
#include "machine.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct CUctx_st {
    int device;
    bool open;
};

enum kind { ON_DEVICE, PINNED, REGISTERED };
struct block {
    char *start;
    size_t size;
    int device;
    enum kind kind;
    struct block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialised_by;
static struct machine machine;    /* as it was at cuInit; what may change since is read anew */
static int rows[MAX_GPUS];        /* of machine.gpus, by ordinal */
static int device_count;
static struct account *account;
static struct CUctx_st contexts[MAX_GPUS];
static struct block *blocks;
static uint64_t pinned_bytes;
static __thread CUcontext current;

static CUresult ready(void) { return initialised_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED; }
static const struct gpu *gpu_of(int device) { return &machine.gpus[rows[device]]; }

/* Leave the function where the driver is not initialised in this process, or the device is none. */
#define NEED_DRIVER()                              \
    do {                                           \
        CUresult ready_ = ready();                 \
        if (ready_) return ready_;                 \
    } while (0)
#define NEED_DEVICE(device)                                                        \
    do {                                                                           \
        NEED_DRIVER();                                                             \
        if ((device) < 0 || (device) >= device_count) return CUDA_ERROR_INVALID_DEVICE; \
    } while (0)
#define NEED_CONTEXT()                                         \
    do {                                                       \
        NEED_DRIVER();                                         \
        if (!current) return CUDA_ERROR_INVALID_CONTEXT;       \
    } while (0)

/* ---- which devices there are ---- */

static int order[MAX_GPUS], order_count; /* whole GPUs as CUDA numbers them before CUDA_VISIBLE_DEVICES */

static void find_order(void) {
    const char *text = getenv("CUDA_DEVICE_ORDER");
    bool by_bus = text && !strcmp(text, "PCI_BUS_ID");
    order_count = 0;
    for (int row = 0; row < machine.gpu_count; row++) {
        if (machine.gpus[row].part) continue;
        int place = order_count++;
        for (; !by_bus && place && machine.gpus[order[place - 1]].speed < machine.gpus[row].speed; place--)
            order[place] = order[place - 1];
        order[place] = row;
    }
}

/* The row that one entry of CUDA_VISIBLE_DEVICES names, -1 for none. `kind` is the list's: "GPU-", "MIG-" or "". */
static int row_named(const char *entry, const char *kind) {
    if (!*kind) {
        char *end;
        long place = strtol(entry, &end, 10);
        return end == entry || place < 0 || place >= order_count ? -1 : order[place];
    }
    int found = -1;
    if (strncmp(entry, kind, strlen(kind))) return -1;
    for (int row = 0; row < machine.gpu_count; row++) {
        if (strncmp(machine.gpus[row].uuid, entry, strlen(entry))) continue;
        if (found >= 0) return -1; /* the prefix of more than one */
        found = row;
    }
    return found;
}

/* As the CUDA programming guide says: up to the first entry that is invalid; and none if one is named twice. */
static void find_devices(void) {
    find_order();
    device_count = 0;
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        memcpy(rows, order, sizeof rows);
        device_count = order_count;
        return;
    }
    char copy[2048], *rest = copy;
    snprintf(copy, sizeof copy, "%s", text);
    const char *kind = NULL;
    for (char *entry; (entry = strsep(&rest, ",")) && device_count < MAX_GPUS;) {
        entry += strspn(entry, " ");
        entry[strcspn(entry, " ")] = 0;
        if (!kind) kind = !strncmp(entry, "GPU-", 4) ? "GPU-" : !strncmp(entry, "MIG-", 4) ? "MIG-" : "";
        int row = row_named(entry, kind);
        if (row < 0) return;
        for (int i = 0; i < device_count; i++) {
            if (rows[i] != row) continue;
            device_count = 0;
            return;
        }
        rows[device_count++] = row;
    }
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_SUCCESS;
    bool known = initialised_by == getpid();
    if (initialised_by && !known) result = CUDA_ERROR_NOT_INITIALIZED;
    else if (!known) {
        machine_read(&machine);
        find_devices();
        result = machine_failure(&machine, "cuInit", -1);
        if (!result && !device_count) result = CUDA_ERROR_NO_DEVICE;
        if (!result) {
            account = ledger_open();
            initialised_by = getpid();
        }
    }
    pthread_mutex_unlock(&lock);
    if (!known) log_call("cuInit", "-", device_count, result);
    return result;
}

CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) {
    NEED_DRIVER();
    *count = device_count;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    NEED_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    NEED_DEVICE(device);
    snprintf(name, (size_t)length, "%s", gpu_of(device)->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    NEED_DEVICE(device);
    *bytes = gpu_of(device)->memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    NEED_DEVICE(device);
    const char *digits = gpu_of(device)->uuid + strlen("GPU-");
    memset(uuid, 0, sizeof *uuid);
    for (int i = 0; i < 16 && *digits; i++) {
        unsigned byte;
        digits += *digits == '-';
        if (sscanf(digits, "%2x", &byte) != 1) break;
        uuid->bytes[i] = (char)byte;
        digits += 2;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice device) {
    NEED_DEVICE(device);
    snprintf(id, (size_t)length, "00000000:%02X:00.0", rows[device]);
    return CUDA_SUCCESS;
}

/* An H100, as NVIDIA's CUDA programming guide tabulates compute capability 9.0. */
static int attribute_of(CUdevice_attribute attribute) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 227 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 228 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: return 1;
    default: return 0;
    }
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    NEED_DEVICE(device);
    *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? rows[device] : attribute_of(attribute);
    return CUDA_SUCCESS;
}

/* ---- contexts: one a device, the primary one ---- */

static uint64_t free_bytes(const struct machine *now, int device) {
    uint64_t used = ledger_used_bytes(now, rows[device]), all = gpu_of(device)->memory_bytes;
    return used < all ? all - used : 0;
}

static void book(int device, int64_t bytes) {
    if (account) account->bytes[rows[device]] += (uint64_t)bytes;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    NEED_DEVICE(device);
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_SUCCESS;
    struct CUctx_st *primary = &contexts[device];
    if (!primary->open) {
        struct machine now;
        machine_read(&now);
        if (free_bytes(&now, device) < now.context_bytes) result = CUDA_ERROR_OUT_OF_MEMORY;
        else {
            *primary = (struct CUctx_st){device, true};
            book(device, (int64_t)now.context_bytes);
        }
        log_call("context", gpu_of(device)->uuid, device, result);
    }
    pthread_mutex_unlock(&lock);
    if (!result) *context = primary;
    return result;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    NEED_DEVICE(device);
    *flags = 0;
    *active = contexts[device].open;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    NEED_DRIVER();
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    NEED_DRIVER();
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    NEED_CONTEXT();
    *device = current->device;
    return CUDA_SUCCESS;
}

/* ---- memory ---- */

static CUresult map_block(void **pointer, size_t size, int device, enum kind kind) {
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    struct block *block = malloc(sizeof *block);
    if (start == MAP_FAILED || !block) return CUDA_ERROR_OUT_OF_MEMORY;
    *block = (struct block){start, size, device, kind, blocks};
    blocks = block;
    *pointer = start;
    return CUDA_SUCCESS;
}

static struct block *find_block(const void *pointer) {
    for (struct block *block = blocks; block; block = block->next)
        if ((const char *)pointer >= block->start && (const char *)pointer < block->start + block->size) return block;
    return NULL;
}

static CUresult drop_block(const void *pointer) {
    for (struct block **link = &blocks; *link; link = &(*link)->next) {
        struct block *block = *link;
        if (block->start != pointer) continue;
        *link = block->next;
        if (block->kind == ON_DEVICE) book(block->device, -(int64_t)block->size);
        else pinned_bytes -= block->size;
        if (block->kind != REGISTERED) munmap(block->start, block->size);
        free(block);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t size) {
    NEED_CONTEXT();
    int device = current->device;
    struct machine now;
    machine_read(&now);
    pthread_mutex_lock(&lock);
    CUresult result = machine_failure(&now, "cuMemAlloc", gpu_of(device)->number);
    if (!result && size > free_bytes(&now, device)) result = CUDA_ERROR_OUT_OF_MEMORY;
    void *start = NULL;
    if (!result) result = map_block(&start, size, device, ON_DEVICE);
    if (!result) book(device, (int64_t)size);
    pthread_mutex_unlock(&lock);
    log_call("cuMemAlloc", gpu_of(device)->uuid, (long)size, result);
    *pointer = (CUdeviceptr)start;
    return result;
}

static CUresult pin(void **pointer, size_t size, const char *function, bool own) {
    struct machine now;
    machine_read(&now);
    pthread_mutex_lock(&lock);
    CUresult result = machine_failure(&now, function, -1);
    if (!result && pinned_bytes + size > now.pinned_bytes) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result && own) result = map_block(pointer, size, current->device, PINNED);
    else if (!result) {
        struct block *block = malloc(sizeof *block);
        if (block) *block = (struct block){*pointer, size, current->device, REGISTERED, blocks};
        if (block) blocks = block;
        else result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!result) pinned_bytes += size;
    pthread_mutex_unlock(&lock);
    log_call(function, gpu_of(current->device)->uuid, (long)size, result);
    return result;
}

CUresult cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    NEED_CONTEXT();
    return pin(pointer, size, "cuMemHostAlloc", true);
}

CUresult cuMemHostRegister(void *pointer, size_t size, unsigned flags) {
    (void)flags;
    NEED_CONTEXT();
    return pin(&pointer, size, "cuMemHostRegister", false);
}

static CUresult release(const void *pointer) {
    pthread_mutex_lock(&lock);
    CUresult result = drop_block(pointer);
    pthread_mutex_unlock(&lock);
    return result;
}
CUresult cuMemFree(CUdeviceptr pointer) {
    NEED_DRIVER();
    return release((const void *)pointer);
}
CUresult cuMemFreeHost(void *pointer) {
    NEED_DRIVER();
    return release(pointer);
}
CUresult cuMemHostUnregister(void *pointer) {
    NEED_DRIVER();
    return release(pointer);
}

CUresult cuMemGetInfo(size_t *unused, size_t *all) {
    NEED_CONTEXT();
    struct machine now;
    machine_read(&now);
    *unused = free_bytes(&now, current->device);
    *all = gpu_of(current->device)->memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *size, CUdeviceptr pointer) {
    NEED_DRIVER();
    pthread_mutex_lock(&lock);
    const struct block *block = find_block((const void *)pointer);
    if (block && start) *start = (CUdeviceptr)block->start;
    if (block && size) *size = block->size;
    pthread_mutex_unlock(&lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    NEED_DRIVER();
    pthread_mutex_lock(&lock);
    const struct block *block = find_block((const void *)pointer);
    CUresult result = block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (block && attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)value = block->kind == ON_DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else if (block && attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)value = block->device;
    else if (block) result = CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    NEED_CONTEXT();
    memmove((void *)to, (const void *)from, size);
    return CUDA_SUCCESS;
}

/* Zeros over whole pages of our own mappings are the pages' removal: a large empty tensor costs no memory. */
CUresult cuMemsetD8(CUdeviceptr pointer, unsigned char value, size_t size) {
    NEED_CONTEXT();
    const uint64_t page = 4096;
    uint64_t first = ((uint64_t)pointer + page - 1) / page * page, last = ((uint64_t)pointer + size) / page * page;
    pthread_mutex_lock(&lock);
    const struct block *block = find_block((const void *)pointer);
    bool own = block && block->kind != REGISTERED && (char *)(pointer + size) <= block->start + block->size;
    pthread_mutex_unlock(&lock);
    if (value || !own || last <= first || madvise((void *)first, last - first, MADV_DONTNEED)) {
        memset((void *)pointer, value, size);
        return CUDA_SUCCESS;
    }
    memset((void *)pointer, 0, first - (uint64_t)pointer);
    memset((void *)last, 0, (uint64_t)pointer + size - last);
    return CUDA_SUCCESS;
}

/* ---- how libraries find functions, and what they say of errors ---- */

CUresult cuGetProcAddress(
    const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *found
) {
    (void)version, (void)flags;
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = NULL;
    for (const char *const *end = (const char *const[]){"_v4", "_v3", "_v2", "", NULL}; *end && !*function; end++) {
        char versioned[128];
        snprintf(versioned, sizeof versioned, "%s%s", name, *end);
        *function = self ? dlsym(self, versioned) : NULL;
    }
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
};

CUresult cuGetErrorString(CUresult code, const char **text) {
    *text = "error of the stand-in";
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *text = errors[i].text;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char **name) {
    *name = "CUDA_ERROR_UNKNOWN";
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) *name = errors[i].name;
    return CUDA_SUCCESS;
}

int standin_failure(const char *function) {
    struct machine now;
    machine_read(&now);
    return machine_failure(&now, function, current ? gpu_of(current->device)->number : -1);
}

void standin_log(const char *function, int device, long number, int code) {
    int of = device >= 0 && device < device_count ? device : current ? current->device : -1;
    log_call(function, of < 0 ? "-" : gpu_of(of)->uuid, number, code);
}
