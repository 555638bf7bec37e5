/* A stand-in for the CUDA runtime (libcudart), to preload: written over the driver's functions, as the real one is.
 *
 * Kernels do nothing, so what they would compute is zero or whatever lay there; copies and memset are done at once. A
 * single number of up to 32 bits that is read back is zero: the loss, and whether gradients overflowed, which they
 * never do here. One of 64 bits is as it was copied, such as the size of an object that ranks gather. All is in order
 * and nothing is ever pending, so streams and events are names. Memory, contexts, devices and the rules about forks
 * are the driver's (driver.c). Functions that torch needs and that are not here return 0 (build.py).
 */
#define _GNU_SOURCE
#include "runtime.h"

#include "extras.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static __thread int device; /* what cudaSetDevice chose in this thread */
static __thread cudaError_t last_error;

/* Most of the driver's codes are the runtime's too; cudaError_t documents them as the same numbers. */
static cudaError_t told(int code) {
    if (code) last_error = (cudaError_t)code;
    return (cudaError_t)code;
}

void *driver_symbol(const char *name) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return driver ? dlsym(driver, name) : NULL;
}

static cudaError_t begin(void) {
    if (!DRIVER(cuInit)) return told(cudaErrorInsufficientDriver);
    return told(DRIVER(cuInit)(0));
}

static cudaError_t use_device(int ordinal) {
    CUcontext context;
    CUresult result = DRIVER(cuDevicePrimaryCtxRetain)(&context, ordinal);
    return told(result ? result : DRIVER(cuCtxSetCurrent)(context));
}

int runtime_enter(void) {
    CUcontext context = NULL;
    cudaError_t error = begin();
    if (error) return error;
    DRIVER(cuCtxGetCurrent)(&context);
    return context ? cudaSuccess : use_device(device);
}

int runtime_device(void) { return device; }

#define BEGIN()                       \
    do {                              \
        cudaError_t error_ = begin(); \
        if (error_) return error_;    \
    } while (0)
#define ENTER()                               \
    do {                                      \
        cudaError_t error_ = runtime_enter(); \
        if (error_) return error_;            \
    } while (0)

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    BEGIN();
    return told(DRIVER(cuDeviceGetCount)(count));
}

cudaError_t cudaGetDevice(int *ordinal) {
    BEGIN();
    *ordinal = device;
    return cudaSuccess;
}

/* Opens the context, as CUDA does since version 12. */
cudaError_t cudaSetDevice(int ordinal) {
    BEGIN();
    cudaError_t error = use_device(ordinal);
    if (error || ordinal != device) DRIVER(standin_log)("cudaSetDevice", ordinal, ordinal, error);
    if (!error) device = ordinal;
    return error;
}

static int attribute(enum cudaDeviceAttr which, int ordinal) {
    int value = 0;
    DRIVER(cuDeviceGetAttribute)(&value, (CUdevice_attribute)which, ordinal); /* the numbers are the driver's */
    return value;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int ordinal) {
    BEGIN();
    return told(DRIVER(cuDeviceGetAttribute)(value, (CUdevice_attribute)which, ordinal));
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int ordinal) {
    BEGIN();
    memset(properties, 0, sizeof *properties);
    CUresult result = DRIVER(cuDeviceGetName)(properties->name, sizeof properties->name, ordinal);
    if (result) return told(result);
    DRIVER(cuDeviceTotalMem)(&properties->totalGlobalMem, ordinal);
    DRIVER(cuDeviceGetUuid)((CUuuid *)&properties->uuid, ordinal);
    properties->major = attribute(cudaDevAttrComputeCapabilityMajor, ordinal);
    properties->minor = attribute(cudaDevAttrComputeCapabilityMinor, ordinal);
    properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount, ordinal);
    properties->warpSize = attribute(cudaDevAttrWarpSize, ordinal);
    properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock, ordinal);
    properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor, ordinal);
    for (int i = 0; i < 3; i++) {
        properties->maxThreadsDim[i] = attribute((enum cudaDeviceAttr)(cudaDevAttrMaxBlockDimX + i), ordinal);
        properties->maxGridSize[i] = attribute((enum cudaDeviceAttr)(cudaDevAttrMaxGridDimX + i), ordinal);
    }
    properties->sharedMemPerBlock = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlock, ordinal);
    properties->sharedMemPerBlockOptin = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal);
    properties->sharedMemPerMultiprocessor = (size_t)attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal);
    properties->regsPerBlock = attribute(cudaDevAttrMaxRegistersPerBlock, ordinal);
    properties->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerMultiprocessor, ordinal);
    properties->totalConstMem = (size_t)attribute(cudaDevAttrTotalConstantMemory, ordinal);
    properties->l2CacheSize = attribute(cudaDevAttrL2CacheSize, ordinal);
    properties->asyncEngineCount = attribute(cudaDevAttrAsyncEngineCount, ordinal);
    properties->unifiedAddressing = attribute(cudaDevAttrUnifiedAddressing, ordinal);
    properties->textureAlignment = 512;
    properties->pciBusID = attribute(cudaDevAttrPciBusId, ordinal);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int ordinal) {
    BEGIN();
    return told(DRIVER(cuDeviceGetPCIBusId)(id, length, ordinal));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) {
    BEGIN();
    *can = from != to;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) { return told(runtime_enter()); }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }

/* ---- errors ---- */

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t error) {
    const char *text = "error of the stand-in";
    if (error == cudaErrorInsufficientDriver) return "CUDA driver version is insufficient for CUDA runtime version";
    if (DRIVER(cuGetErrorString)) DRIVER(cuGetErrorString)((CUresult)error, &text);
    return text;
}
const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown";
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **pointer, size_t size) {
    ENTER();
    return told(DRIVER(cuMemAlloc)((CUdeviceptr *)pointer, size));
}
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    return (void)stream, cudaMalloc(pointer, size);
}
cudaError_t cudaFree(void *pointer) {
    ENTER();
    return pointer ? told(DRIVER(cuMemFree)((CUdeviceptr)pointer)) : cudaSuccess;
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return (void)stream, cudaFree(pointer); }

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    ENTER();
    return told(DRIVER(cuMemHostAlloc)(pointer, size, flags));
}
cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
cudaError_t cudaFreeHost(void *pointer) {
    ENTER();
    return pointer ? told(DRIVER(cuMemFreeHost)(pointer)) : cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    ENTER();
    return told(DRIVER(cuMemHostRegister)(pointer, size, flags));
}
cudaError_t cudaHostUnregister(void *pointer) {
    ENTER();
    return told(DRIVER(cuMemHostUnregister)(pointer));
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *all) {
    ENTER();
    return told(DRIVER(cuMemGetInfo)(unused, all));
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    BEGIN();
    unsigned type;
    int ordinal;
    CUdeviceptr address = (CUdeviceptr)pointer;
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2, .hostPointer = (void *)pointer};
    if (DRIVER(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)) return cudaSuccess;
    DRIVER(cuPointerGetAttribute)(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
    attributes->type = type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = ordinal;
    attributes->devicePointer = (void *)pointer;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    ENTER();
    int code = DRIVER(cuMemcpy)((CUdeviceptr)to, (CUdeviceptr)from, size);
    if (!code && kind == cudaMemcpyDeviceToHost && size <= sizeof(float)) memset(to, 0, size);
    return told(code);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return (void)stream, cudaMemcpy(to, from, size, kind);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int at, const void *from, int of, size_t size, cudaStream_t stream) {
    return (void)at, (void)of, (void)stream, cudaMemcpy(to, from, size, cudaMemcpyDefault);
}
cudaError_t cudaMemcpy2DAsync(
    void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
    enum cudaMemcpyKind kind, cudaStream_t stream
) {
    (void)kind, (void)stream;
    ENTER();
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *pointer, int value, size_t size) {
    ENTER();
    return told(DRIVER(cuMemsetD8)((CUdeviceptr)pointer, (unsigned char)value, size));
}
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t stream) {
    return (void)stream, cudaMemset(pointer, value, size);
}

/* ---- streams and events ---- */

struct CUevent_st {
    double at_ms; /* of the host's clock */
};

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    (void)flags;
    ENTER();
    *event = calloc(1, sizeof **event);
    return *event ? cudaSuccess : told(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    (void)stream, (void)flags;
    ENTER();
    event->at_ms = now_ms();
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventQuery(cudaEvent_t event) { return (void)event, told(runtime_enter()); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return (void)event, told(runtime_enter()); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    ENTER();
    *ms = (float)(to->at_ms - from->at_ms);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    ENTER();
    *stream = calloc(1, sizeof(long)); /* an address of its own */
    return *stream ? cudaSuccess : told(cudaErrorMemoryAllocation);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return free(stream), cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { return (void)stream, told(runtime_enter()); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return (void)stream, told(runtime_enter()); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return (void)stream, (void)event, (void)flags, told(runtime_enter());
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    return (void)stream, *priority = 0, cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return (void)stream, *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count
) {
    (void)stream, (void)id, (void)graph, (void)nodes, (void)edges;
    *status = cudaStreamCaptureStatusNone;
    if (count) *count = 0;
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return (void)stream, function(argument), cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *argument, unsigned flags) {
    return (void)flags, call(stream, cudaSuccess, argument), cudaSuccess;
}

/* ---- kernels ---- */

cudaError_t cudaLaunchKernel(
    const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    (void)kernel, (void)grid, (void)block, (void)arguments, (void)shared_bytes, (void)stream;
    return told(runtime_enter());
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return (void)config, (void)kernel, (void)arguments, told(runtime_enter());
}
cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes, cudaStream_t stream
) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    return *kernel = (cudaKernel_t)function, cudaSuccess;
}

/* Asked before a launch to choose its shape; CUB divides by what the second and third return. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    (void)kernel;
    ENTER();
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90,
        .maxDynamicSharedSizeBytes = 48 << 10,
    };
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *kernel, int block_size, size_t shared_bytes, unsigned flags
) {
    return (void)kernel, (void)block_size, (void)shared_bytes, (void)flags, *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int size, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, size, shared_bytes, 0);
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char somewhere[1 << 20];
    return (void)symbol, *pointer = somewhere, cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found
) {
    CUdriverProcAddressQueryResult result = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = NULL;
    if (DRIVER(cuGetProcAddress)) DRIVER(cuGetProcAddress)(name, function, (int)version, flags, &result);
    if (found) *found = (enum cudaDriverEntryPointQueryResult)result;
    return cudaSuccess;
}

/* ---- what nvcc's code calls: it registers kernels when a library is loaded, and parks a launch's shape ---- */

static __thread struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} parked;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
    parked = (__typeof__(parked)){grid, block, shared_bytes, stream};
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = parked.grid;
    *block = parked.block;
    *shared_bytes = parked.shared_bytes;
    *(void **)stream = parked.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return (void)binary, handle;
}
char __cudaInitModule(void **handle) { return (void)handle, 1; }
