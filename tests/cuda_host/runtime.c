/* A CUDA runtime and driver that compute nothing: torch's host code runs without a GPU.

Device memory is host memory, streams and events are tokens, kernels and matrix products return at once. What torch asks
for and this file does not answer returns 0, success: build.py generates it. `cuda_host_count` tells what the host did. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ---- what the host did */

enum { LAUNCHES, WAITS, COPIES_TO_HOST, NUM_COUNTERS };
static long counters[NUM_COUNTERS];

static void count(int counter) { __atomic_fetch_add(&counters[counter], 1, __ATOMIC_RELAXED); }

long cuda_host_count(int counter) { return counters[counter]; }

/* ---- memory: a table of allocations, so that copies know their direction */

enum { FREE, DEVICE, PINNED };
#define MAX_ALLOCATIONS (1 << 16)
static const size_t TOTAL = (size_t)139 << 30, LARGEST_DEVICE_COPY = 8 << 20;
static struct { char *start; size_t bytes; int place; } allocations[MAX_ALLOCATIONS];
static size_t device_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static cudaError_t allocate(void **pointer, size_t bytes, int place) {
    cudaError_t error = cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    if (place == PINNED || device_bytes + bytes <= TOTAL)
        for (int i = 0; i < MAX_ALLOCATIONS && error; i++)
            if (allocations[i].place == FREE) {
                /* Pages appear when they are written: a tensor that no kernel fills costs nothing. */
                char *start = mmap(NULL, bytes + !bytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (start == MAP_FAILED) break;
                *pointer = allocations[i].start = start;
                allocations[i].bytes = bytes;
                allocations[i].place = place;
                device_bytes += place == DEVICE ? bytes : 0;
                error = cudaSuccess;
            }
    pthread_mutex_unlock(&lock);
    return error;
}

static cudaError_t release(void *pointer) {
    pthread_mutex_lock(&lock);
    for (int i = 0; pointer && i < MAX_ALLOCATIONS; i++)
        if (allocations[i].place != FREE && allocations[i].start == pointer) {
            device_bytes -= allocations[i].place == DEVICE ? allocations[i].bytes : 0;
            allocations[i].place = FREE;
            munmap(pointer, allocations[i].bytes + !allocations[i].bytes);
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static int place_of(const void *pointer) {
    int place = FREE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < MAX_ALLOCATIONS && place == FREE; i++)
        if (allocations[i].place != FREE && (char *)pointer >= allocations[i].start &&
            (char *)pointer < allocations[i].start + allocations[i].bytes)
            place = allocations[i].place;
    pthread_mutex_unlock(&lock);
    return place;
}

static cudaError_t copy(void *to, const void *from, size_t bytes, int waits) {
    int target = place_of(to), source = place_of(from), inside = target == DEVICE && source == DEVICE;
    if (source == DEVICE && target != DEVICE) count(COPIES_TO_HOST);
    /* A driver waits for the device before a copy into memory that is not page-locked. */
    if (waits || (source == DEVICE && target == FREE)) count(WAITS);
    memmove(to, from, inside && bytes > LARGEST_DEVICE_COPY ? LARGEST_DEVICE_COPY : bytes);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) { return allocate(pointer, bytes, DEVICE); }
cudaError_t cudaFree(void *pointer) { return release(pointer); }
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) { return allocate(pointer, bytes, PINNED); }
cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    return copy(to, from, bytes, 1);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, 0);
}
cudaError_t cudaMemset(void *pointer, int value, size_t bytes) { memset(pointer, value, bytes); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(pointer, value, bytes);
}
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = TOTAL - device_bytes;
    *total = TOTAL;
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost};
    memset(attributes, 0, sizeof *attributes);
    attributes->type = types[place_of(pointer)];
    attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char memory[4096];
    *pointer = memory;
    return cudaSuccess;
}

/* ---- one device, of the H200's kind */

static const struct { int multiprocessors, threads, shared_bytes, major; } H200 = {132, 1024, 232448, 9};

cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA H200");
    properties->totalGlobalMem = TOTAL;
    properties->major = H200.major;
    properties->multiProcessorCount = H200.multiprocessors;
    properties->sharedMemPerBlockOptin = H200.shared_bytes;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerMultiprocessor = 233472;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->l2CacheSize = 62914560;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = H200.threads;
    properties->maxThreadsDim[2] = 64;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = H200.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = H200.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = H200.shared_bytes; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = H200.threads; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 3201000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 6144; break;
    default: *value = 1;
    }
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device) {
    snprintf(id, bytes, "0000:01:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int other) { *can = 0; return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in CUDA runtime"; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorStandIn"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = NULL;
    if (result) *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorSymbolNotFound;
}

/* ---- streams, events and launches */

static int token(void **handle) { return !(*handle = malloc(8)); }

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return token((void **)stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    return token((void **)stream);
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return token((void **)event); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return token((void **)event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t stop) {
    *milliseconds = 1.0f;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { count(WAITS); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { count(WAITS); return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { count(WAITS); return cudaSuccess; }

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;

void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    static char any;
    *kernel = &any;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) {
    count(LAUNCHES);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    count(LAUNCHES);
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->binaryVersion = attributes->ptxVersion = 10 * H200.major;
    attributes->maxThreadsPerBlock = H200.threads;
    attributes->numRegs = 32;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

/* ---- cuBLAS: handles and one algorithm; products return at once */

int cublasCreate_v2(void **handle) { return token(handle); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
static int descriptor(void **handle) { return !(*handle = calloc(1, 256)); }
int cublasLtMatmulDescCreate(void **handle, int compute, int scale) { return descriptor(handle); }
int cublasLtMatmulPreferenceCreate(void **handle) { return descriptor(handle); }
int cublasLtMatrixLayoutCreate(void **handle, int type, unsigned long rows, unsigned long columns, long stride) {
    return descriptor(handle);
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
    *found = 1;
    return 0;
}

/* ---- NCCL: a group of one rank */

static size_t element_bytes(int dtype) { /* ncclDataType_t */
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return dtype < 10 ? bytes[dtype] : 1;
}
static int collective(const void *from, void *to, size_t elements, int dtype) {
    if (from != to) copy(to, from, elements * element_bytes(dtype), 0);
    return 0;
}
typedef struct { char bytes[128]; } unique_id;

int ncclGetVersion(int *version) { *version = 22809; return 0; }
int ncclCommInitRankConfig(void **group, int ranks, unique_id id, int rank, void *config) {
    return token(group);
}
int ncclCommInitRank(void **group, int ranks, unique_id id, int rank) { return token(group); }
int ncclCommInitRankScalable(void **group, int ranks, int rank, int ids, void *id, void *config) { return token(group); }
int ncclCommSplit(void *group, int color, int key, void **part, void *config) { return token(part); }
int ncclCommGetAsyncError(void *group, int *error) { *error = 0; return 0; }
int ncclCommCount(void *group, int *ranks) { *ranks = 1; return 0; }
int ncclCommUserRank(void *group, int *rank) { *rank = 0; return 0; }
const char *ncclGetErrorString(int error) { return "an error of the stand-in NCCL"; }
const char *ncclGetLastError(void *group) { return ""; }
int ncclAllReduce(const void *from, void *to, size_t elements, int dtype, int op, void *group, void *stream) {
    return collective(from, to, elements, dtype);
}
int ncclAllGather(const void *from, void *to, size_t elements, int dtype, void *group, void *stream) {
    return collective(from, to, elements, dtype);
}
int ncclReduceScatter(const void *from, void *to, size_t elements, int dtype, int op, void *group, void *stream) {
    return collective(from, to, elements, dtype);
}
int ncclBroadcast(const void *from, void *to, size_t elements, int dtype, int root, void *group, void *stream) {
    return collective(from, to, elements, dtype);
}

/* ---- the driver, for triton and compiled graphs */

static void *any_handle(void) { static char any; return &any; }

int cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device); /* numbered alike */
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = any_handle(); return 0; }
int cuCtxGetCurrent(void **context) { *context = any_handle(); return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stand-in driver"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = any_handle(); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = any_handle(); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    enum { THREADS = 0, REGISTERS = 4 };
    *value = attribute == THREADS ? H200.threads : attribute == REGISTERS ? 64 : 0;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, void *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    return *function ? 0 : cudaErrorSymbolNotFound;
}
int cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
int cuLaunchKernel(void) { count(LAUNCHES); return 0; }
int cuLaunchKernelEx(void) { count(LAUNCHES); return 0; }
