/* Null GPU: answers torch's calls of the CUDA runtime, the driver, cuBLAS and cuDNN, and computes nothing.
 *
 * Real: dispatch, the caching allocator, streams and events as objects, host memory, which kernels are launched and in
 * which order. Not real: the results of kernels, and times.
 *
 * Device memory is ordinary memory of this process, mapped when it is touched. Host-to-device copies of up to
 * MAX_COPIED_BYTES are made, so they can be read back, whatever kernels would have done to them. Device-to-host copies
 * of up to 8 bytes read zero (a truth value reads true with NULLGPU_TRUE=1), so that the control flow of a program is
 * the same in every run. With NULLGPU_READS=zero, larger copies read zero, too; otherwise they may read garbage. With
 * NULLGPU_READS=stored, all copies read what was last copied to the place (DDP exchanges its bucket sizes in this way).
 */
#include "nullgpu.h"

#include <sys/mman.h>

#include "driver_types.h" /* from the wheels that torch installs; the layout of its structs depends on the version */

#define GIB ((size_t)1 << 30)
#define MEMORY (80 * GIB)
#define USABLE_MEMORY (79 * GIB) /* a real device also holds its context */
#define MAX_COPIED_BYTES ((size_t)1 << 20)
#define OUT_OF_MEMORY 2          /* cudaErrorMemoryAllocation */
#define INVALID_DEVICE 101
#define MAX_DEVICES 64

/* ---- counters and kernels ---- */

static double counters[NUM_COUNTERS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void count(int counter, double by) {
    pthread_mutex_lock(&mutex);
    counters[counter] += by;
    pthread_mutex_unlock(&mutex);
}

/* Copies the first `size` counters to `out`; returns how many there are. */
API int nullgpu_counters(double *out, int size) {
    int n = size < NUM_COUNTERS ? size : NUM_COUNTERS;
    pthread_mutex_lock(&mutex);
    memcpy(out, counters, n * sizeof *out);
    pthread_mutex_unlock(&mutex);
    return NUM_COUNTERS;
}

/* Open-addressing hash table from a kernel's host address; torch registers about 60,000 kernels. */
#define KERNELS (1u << 19)
static struct { const void *address; const char *name; long launches; } kernels[KERNELS];

static unsigned kernel_index(const void *address) {
    unsigned i = (unsigned)(((uintptr_t)address >> 4) * 2654435761u) & (KERNELS - 1);
    while (kernels[i].address && kernels[i].address != address) i = (i + 1) & (KERNELS - 1);
    return i;
}

void name_kernel(const void *address, const char *name) {
    pthread_mutex_lock(&mutex);
    unsigned i = kernel_index(address);
    kernels[i].address = address;
    kernels[i].name = name;
    pthread_mutex_unlock(&mutex);
}

int record_launch(const void *address) {
    pthread_mutex_lock(&mutex);
    counters[LAUNCH] += 1;
    unsigned i = kernel_index(address);
    kernels[i].address = address;
    kernels[i].launches += 1;
    pthread_mutex_unlock(&mutex);
    return 0;
}

/* Calls `callback(name, launches)` for every kernel that was launched, and resets the numbers of launches. */
API void nullgpu_kernels(void (*callback)(const char *, long)) {
    for (unsigned i = 0; i < KERNELS; i++)
        if (kernels[i].launches) {
            callback(kernels[i].name ? kernels[i].name : "library", kernels[i].launches);
            kernels[i].launches = 0;
        }
}

/* nvcc's generated code registers kernels with these when a library is loaded. */
API void **__cudaRegisterFatBinary(void *binary) { static void *handle; (void)binary; return &handle; }
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
API char __cudaInitModule(void **handle) { (void)handle; return 0; }
API void __cudaRegisterVar(void) {}
API void __cudaRegisterManagedVar(void) {}
API void __cudaRegisterFunction(void **handle, const char *address, char *device_symbol, const char *name) {
    (void)handle; (void)device_symbol;
    name_kernel(address, name);
}

/* ---- memory ---- */

enum { UNKNOWN, PINNED, DEVICE };
#define MAX_BLOCKS 65536
static struct { char *start; size_t bytes; int kind; int device; } blocks[MAX_BLOCKS];
static int num_blocks;
static size_t allocated[MAX_DEVICES];
static __thread int device_of_thread;

int current_device(void) { return device_of_thread; }

static void *map_memory(size_t bytes) {
    void *start = mmap(0, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? 0 : start;
}

static void add_block(void *start, size_t bytes, int kind) {
    pthread_mutex_lock(&mutex);
    int i = 0;
    while (i < num_blocks && blocks[i].start) i++;
    if (i == num_blocks && num_blocks < MAX_BLOCKS) num_blocks++;
    blocks[i].start = start, blocks[i].bytes = bytes, blocks[i].kind = kind, blocks[i].device = device_of_thread;
    pthread_mutex_unlock(&mutex);
}

/* Returns the kind of memory that contains `address`, and optionally the block's size and device; `remove` forgets the block. */
static int find_block(const void *address, size_t *bytes, int *device, int remove) {
    int kind = UNKNOWN;
    const char *at = address;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < num_blocks; i++)
        if (blocks[i].start && at >= blocks[i].start && at < blocks[i].start + blocks[i].bytes) {
            kind = blocks[i].kind;
            if (bytes) *bytes = blocks[i].bytes;
            if (device) *device = blocks[i].device;
            if (remove) blocks[i].start = 0;
            break;
        }
    pthread_mutex_unlock(&mutex);
    return kind;
}

static int kind_of(const void *address) { return find_block(address, 0, 0, 0); }

API int cudaMalloc(void **out, size_t bytes) {
    size_t *total = &allocated[device_of_thread % MAX_DEVICES];
    *out = 0;
    if (*total + bytes > USABLE_MEMORY || !(*out = map_memory(bytes))) return OUT_OF_MEMORY;
    __atomic_add_fetch(total, bytes, __ATOMIC_SEQ_CST);
    count(MALLOC, 1);
    add_block(*out, bytes, DEVICE);
    return 0;
}

API int cudaFree(void *start) {
    size_t bytes = 0;
    int device = 0;
    if (start && find_block(start, &bytes, &device, 1)) {
        if (bytes) munmap(start, bytes);
        __atomic_sub_fetch(&allocated[device % MAX_DEVICES], bytes, __ATOMIC_SEQ_CST);
    }
    return 0;
}

/* Segments that grow: an address range, of which pieces are backed by memory one by one. */
API int cuMemAddressReserve(void **out, size_t bytes) {
    if (!(*out = map_memory(bytes))) return OUT_OF_MEMORY;
    add_block(*out, bytes, DEVICE);
    return 0;
}

API int cuMemAddressFree(void *start, size_t bytes) {
    find_block(start, 0, 0, 1);
    munmap(start, bytes);
    return 0;
}

struct memory { size_t bytes; int device; };

API int cuMemCreate(struct memory **out, size_t bytes) {
    int device = device_of_thread % MAX_DEVICES;
    if (allocated[device] + bytes > USABLE_MEMORY) return OUT_OF_MEMORY;
    __atomic_add_fetch(&allocated[device], bytes, __ATOMIC_SEQ_CST);
    count(MALLOC, 1);
    *out = new_handle();
    (*out)->bytes = bytes, (*out)->device = device;
    return 0;
}

API int cuMemRelease(struct memory *memory) {
    __atomic_sub_fetch(&allocated[memory->device], memory->bytes, __ATOMIC_SEQ_CST);
    memory->bytes = 0;
    return 0;
}

API int cudaMallocAsync(void **out, size_t bytes, void *stream) { (void)stream; return cudaMalloc(out, bytes); }
API int cudaFreeAsync(void *start, void *stream) { (void)stream; return cudaFree(start); }

API int cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    (void)flags;
    if (!(*out = map_memory(bytes))) return OUT_OF_MEMORY;
    count(HOST_ALLOC, 1);
    add_block(*out, bytes, PINNED);
    return 0;
}

API int cudaFreeHost(void *start) {
    size_t bytes = 0;
    if (start && find_block(start, &bytes, 0, 1) && bytes) munmap(start, bytes);
    return 0;
}

API int cudaHostRegister(void *start, size_t bytes, unsigned flags) { (void)flags; add_block(start, bytes, PINNED); return 0; }
API int cudaHostUnregister(void *start) { find_block(start, 0, 0, 1); return 0; }

API int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = MEMORY;
    *available = MEMORY - allocated[device_of_thread % MAX_DEVICES];
    return 0;
}

API int cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    int device = 0, kind = find_block(address, 0, &device, 0);
    memset(out, 0, sizeof *out);
    out->type = kind == DEVICE ? cudaMemoryTypeDevice : kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = device;
    out->devicePointer = kind ? (void *)address : 0;
    out->hostPointer = kind == PINNED ? (void *)address : 0;
    return 0;
}

static void read_back(void *to, const void *from, size_t bytes) {
    const char *reads = getenv("NULLGPU_READS"), *truth = getenv("NULLGPU_TRUE");
    int zero = reads && !strcmp(reads, "zero"), stored = reads && !strcmp(reads, "stored");
    if (stored || (bytes > 8 && !zero)) memcpy(to, from, bytes);
    else memset(to, bytes == 1 && truth && *truth == '1', bytes);
}

static int copy(void *to, const void *from, size_t bytes) {
    int to_kind = kind_of(to), from_kind = kind_of(from);
    if (to_kind == DEVICE && from_kind == DEVICE) {
        count(D2D, 1);
    } else if (from_kind == DEVICE) {
        count(D2H, 1), count(D2H_BYTES, bytes);
        read_back(to, from, bytes);
    } else if (to_kind == DEVICE) {
        count(H2D, 1), count(H2D_BYTES, bytes), count(H2D_PAGEABLE, from_kind != PINNED);
        if (bytes <= MAX_COPIED_BYTES) memcpy(to, from, bytes);
    } else {
        memcpy(to, from, bytes);
    }
    return 0;
}

API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int direction, void *stream) {
    (void)direction; (void)stream;
    return copy(to, from, bytes);
}

API int cudaMemcpy(void *to, const void *from, size_t bytes, int direction) {
    (void)direction;
    count(STREAM_SYNC, 1);
    return copy(to, from, bytes);
}

API int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
    for (size_t row = 0; row < height; row++) copy(to + row * to_pitch, from + row * from_pitch, width);
    return 0;
}

API int cudaMemcpyPeerAsync(void) { count(D2D, 1); return 0; }
API int cudaMemset(void) { count(MEMSET, 1); return 0; }
API int cudaMemsetAsync(void) { count(MEMSET, 1); return 0; }

/* ---- devices: the sizes of an H100 ---- */

int num_devices(void) { const char *number = getenv("NULLGPU_DEVICES"); return number ? atoi(number) : 1; }

API int cudaGetDeviceCount(int *out) { *out = num_devices(); return 0; }
API int cudaGetDevice(int *out) { *out = device_of_thread; return 0; }
API int cudaSetDevice(int device) {
    if (device < 0 || device >= num_devices()) return INVALID_DEVICE;
    device_of_thread = device;
    return 0;
}

int device_attribute(int *value, int attribute) {
    switch (attribute) {
    case 1: *value = 1024; break;              /* threads per block */
    case 5: *value = 2147483647; break;        /* grid x */
    case 6: case 7: *value = 65535; break;     /* grid y, z */
    case 8: *value = 49152; break;             /* shared memory per block */
    case 10: *value = 32; break;               /* threads per warp */
    case 12: case 82: *value = 65536; break;   /* registers */
    case 16: *value = 132; break;              /* multiprocessors */
    case 39: *value = 2048; break;             /* threads per multiprocessor */
    case 75: *value = 9; break;                /* compute capability 9.0 */
    case 76: *value = 0; break;
    case 81: *value = 233472; break;           /* shared memory per multiprocessor */
    case 97: *value = 232448; break;           /* shared memory per block, after opting in */
    case 106: *value = 32; break;              /* blocks per multiprocessor */
    default: *value = 1;
    }
    return 0;
}

API int cudaDeviceGetAttribute(int *value, int attribute, int device) { (void)device; return device_attribute(value, attribute); }

#undef cudaGetDeviceProperties
API int cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof *out);
    strcpy(out->name, "Null GPU (sm_90)"); /* so that no table can be mistaken for a real card's */
    out->totalGlobalMem = MEMORY;
    out->major = 9;
    out->multiProcessorCount = 132;
    out->warpSize = 32;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->sharedMemPerBlock = 49152, out->sharedMemPerBlockOptin = 232448, out->sharedMemPerMultiprocessor = 233472;
    out->maxThreadsPerBlock = 1024, out->maxThreadsPerMultiProcessor = 2048, out->maxBlocksPerMultiProcessor = 32;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->l2CacheSize = 50 << 20;
    out->memoryBusWidth = 5120;
    out->textureAlignment = 512;
    out->unifiedAddressing = out->concurrentKernels = out->canMapHostMemory = 1;
    out->asyncEngineCount = 3;
    out->pciBusID = device;
    return 0;
}
API int cudaGetDeviceProperties_v2(struct cudaDeviceProp *out, int device) { return cudaGetDeviceProperties(out, device); } /* CUDA 12 */

API int cudaDriverGetVersion(int *version) { *version = REPORTED_CUDA_VERSION; return 0; }
API int cudaRuntimeGetVersion(int *version) { *version = REPORTED_CUDA_VERSION; return 0; }
API int cudaDeviceCanAccessPeer(int *out) { *out = 1; return 0; }
API int cudaDeviceGetPCIBusId(char *out, int size, int device) { snprintf(out, size, "0000:%02x:00.0", device); return 0; }
API int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return 0;
}
API const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "null GPU"; }
API const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "null GPU"; }

/* ---- streams, events, launches ---- */

void *new_handle(void) { return calloc(1, 4096); }

API int cudaDeviceGetDefaultMemPool(void **out) { *out = new_handle(); return 0; }
API int cudaStreamCreate(void **out) { *out = new_handle(); return 0; }
API int cudaStreamCreateWithFlags(void **out) { *out = new_handle(); return 0; }
API int cudaStreamCreateWithPriority(void **out) { *out = new_handle(); return 0; }
API int cudaStreamGetPriority(void *stream, int *out) { (void)stream; *out = 0; return 0; }
API int cudaStreamIsCapturing(void *stream, int *out) { (void)stream; *out = 0; return 0; }
API int cudaStreamGetCaptureInfo(void *stream, int *state, unsigned long long *id) {
    (void)stream;
    *state = 0;
    if (id) *id = 0;
    return 0;
}
API int cudaStreamGetCaptureInfo_v2(void *stream, int *state, unsigned long long *id) { return cudaStreamGetCaptureInfo(stream, state, id); }
API int cudaStreamGetCaptureInfo_v3(void *stream, int *state, unsigned long long *id) { return cudaStreamGetCaptureInfo(stream, state, id); }
API int cudaStreamSynchronize(void) { count(STREAM_SYNC, 1); return 0; }
API int cudaDeviceSynchronize(void) { count(DEVICE_SYNC, 1); return 0; }
API int cudaEventSynchronize(void) { count(EVENT_SYNC, 1); return 0; }
API int cudaEventCreate(void **out) { *out = calloc(1, 64); return 0; }
API int cudaEventCreateWithFlags(void **out) { *out = calloc(1, 64); return 0; }
API int cudaEventDestroy(void *event) { free(event); return 0; }
API int cudaEventElapsedTime(float *milliseconds) { *milliseconds = 1; return 0; }
API int cudaEventElapsedTime_v2(float *milliseconds) { *milliseconds = 1; return 0; }

API int cudaLaunchKernel(const void *kernel) { return record_launch(kernel); }
API int cudaLaunchKernelExC(const void *config, const void *kernel) { (void)config; return record_launch(kernel); }
API int cudaLaunchCooperativeKernel(const void *kernel) { return record_launch(kernel); }
API int __cudaLaunchKernel(void *kernel) { return record_launch(kernel); }
API int __cudaGetKernel(void **out, const void *symbol) { *out = (void *)symbol; return 0; }
API int cudaGetFuncBySymbol(void **out, const void *symbol) { *out = (void *)symbol; return 0; }

typedef struct { unsigned x, y, z; } Dim;
static __thread struct { Dim grid, block; size_t shared_bytes; void *stream; } launch_config;
API unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared_bytes, void *stream) {
    launch_config.grid = grid, launch_config.block = block;
    launch_config.shared_bytes = shared_bytes, launch_config.stream = stream;
    return 0;
}
API int __cudaPopCallConfiguration(Dim *grid, Dim *block, size_t *shared_bytes, void **stream) {
    *grid = launch_config.grid, *block = launch_config.block;
    *shared_bytes = launch_config.shared_bytes, *stream = launch_config.stream;
    return 0;
}

API int cudaFuncGetAttributes(struct cudaFuncAttributes *out) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024, out->numRegs = 32, out->binaryVersion = out->ptxVersion = 90;
    out->maxDynamicSharedSizeBytes = 232448;
    return 0;
}
API int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { *blocks = 4; return 0; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 4; return 0; }
