// The CUDA runtime, cuBLAS and NCCL of GPUs that are not there: what allocates, copies and answers questions works, what
// computes does nothing. ABSENT_GPUS says how many there are. They answer as H200s do.
//
// Memory of a GPU is the process's own, taken from the system when it is first written. Memory that nothing was copied
// into reads as zeros. Everything is done at once, so that streams and events have nothing to wait for; but a wait for
// the whole device takes a quarter of a second, in which torch's threads notice what is done, as they do in the time
// that a real step takes. Of what ranks exchange, bytes and 64-bit integers arrive (torch's own bookkeeping), and
// nothing else.
#define _GNU_SOURCE
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MEMORY (141ull * 1000 * 1000 * 1000)
#define PAGE 4096ull
#define MOST_BLOCKS (1 << 16)
#define MOST_RANKS 64

static __thread int current = 0;

static int gpus(void) {
  const char *said = getenv("ABSENT_GPUS");
  return said ? atoi(said) : 1;
}

// ------------------------------------------------------------------------------------------------------- memory

struct block {
  char *start;
  size_t size;
  int device; // -1: the host's
};

static struct block blocks[MOST_BLOCKS];
static size_t used[MOST_RANKS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *take(size_t size, int device) {
  size_t rounded = size ? (size + PAGE - 1) & ~(PAGE - 1) : PAGE;
  char *start = mmap(0, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 0;
  pthread_mutex_lock(&lock);
  int place = 0;
  while (place < MOST_BLOCKS && blocks[place].start) place++;
  if (place == MOST_BLOCKS) abort();
  blocks[place] = (struct block){start, rounded, device};
  if (device >= 0) used[device] += rounded;
  pthread_mutex_unlock(&lock);
  return start;
}

static void give(void *start) {
  pthread_mutex_lock(&lock);
  for (int place = 0; start && place < MOST_BLOCKS; place++)
    if (blocks[place].start == start) {
      if (blocks[place].device >= 0) used[blocks[place].device] -= blocks[place].size;
      munmap(start, blocks[place].size);
      blocks[place].start = 0;
      break;
    }
  pthread_mutex_unlock(&lock);
}

cudaError_t cudaMalloc(void **made, size_t size) {
  *made = used[current] + size > MEMORY ? 0 : take(size, current);
  return *made ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaHostAlloc(void **made, size_t size, unsigned flags) {
  *made = take(size, -1);
  return *made ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *start) { return give(start), cudaSuccess; }
cudaError_t cudaFreeHost(void *start) { return give(start), cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t *left, size_t *whole) {
  *whole = MEMORY, *left = MEMORY - used[current];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *told, const void *address) {
  memset(told, 0, sizeof *told);
  pthread_mutex_lock(&lock);
  for (int place = 0; place < MOST_BLOCKS; place++) {
    struct block *b = &blocks[place];
    if (b->start && (char *)address >= b->start && (char *)address < b->start + b->size) {
      told->type = b->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
      told->device = b->device < 0 ? 0 : b->device;
      told->devicePointer = (void *)address;
      told->hostPointer = b->device < 0 ? (void *)address : 0;
      break;
    }
  }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, kind);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
  return cudaMemcpy(to, from, size, cudaMemcpyDefault);
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
  memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  return cudaMemset(to, value, size);
}

// ------------------------------------------------------------------------------------------------------ devices

cudaError_t cudaGetDeviceCount(int *count) { return *count = gpus(), cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { return *device = current, cudaSuccess; }

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= gpus()) return cudaErrorInvalidDevice;
  current = device;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { return *can = 1, cudaSuccess; }

cudaError_t cudaDeviceSynchronize(void) {
  usleep(250000);
  return cudaSuccess;
}

#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *told, int device) {
  memset(told, 0, sizeof *told);
  strcpy(told->name, "NVIDIA H200 (absent)");
  told->totalGlobalMem = MEMORY;
  told->major = 9, told->minor = 0;
  told->multiProcessorCount = 132, told->warpSize = 32, told->maxBlocksPerMultiProcessor = 32;
  told->maxThreadsPerBlock = 1024, told->maxThreadsPerMultiProcessor = 2048;
  told->sharedMemPerBlock = 49152, told->sharedMemPerBlockOptin = 232448, told->sharedMemPerMultiprocessor = 233472;
  told->regsPerBlock = told->regsPerMultiprocessor = 65536;
  told->maxThreadsDim[0] = told->maxThreadsDim[1] = 1024, told->maxThreadsDim[2] = 64;
  told->maxGridSize[0] = 2147483647, told->maxGridSize[1] = told->maxGridSize[2] = 65535;
  told->l2CacheSize = 60 << 20, told->textureAlignment = 512;
  told->unifiedAddressing = told->concurrentKernels = told->managedMemory = 1;
  told->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  struct cudaDeviceProp told;
  cudaGetDeviceProperties(&told, device);
  switch (which) {
  case cudaDevAttrMaxThreadsPerBlock: *value = told.maxThreadsPerBlock; break;
  case cudaDevAttrMultiProcessorCount: *value = told.multiProcessorCount; break;
  case cudaDevAttrWarpSize: *value = told.warpSize; break;
  case cudaDevAttrComputeCapabilityMajor: *value = told.major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = told.minor; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = told.sharedMemPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = told.sharedMemPerBlockOptin; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = told.sharedMemPerMultiprocessor; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = told.maxThreadsPerMultiProcessor; break;
  case cudaDevAttrMaxRegistersPerBlock: *value = told.regsPerBlock; break;
  case cudaDevAttrMaxGridDimX: *value = told.maxGridSize[0]; break;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ: *value = told.maxGridSize[1]; break;
  case cudaDevAttrMaxBlocksPerMultiprocessor: *value = told.maxBlocksPerMultiProcessor; break;
  case cudaDevAttrUnifiedAddressing: *value = 1; break;
  default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) { return "the GPU is absent"; }
const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorAbsent"; }

// ---------------------------------------------------------------------------------------------- streams and events

static void *handle(void) { return calloc(1, 256); }

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *made) { return *made = handle(), cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return cudaStreamCreate(made); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned f, int p) { return cudaStreamCreate(made); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { return *priority = 0, cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *made) { return *made = handle(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return cudaEventCreate(made); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return free(event), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) { return *(double *)event = now(), cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned f) { return cudaEventRecord(event, s); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = *(double *)to - *(double *)from;
  return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------------- kernels

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *told, const void *kernel) {
  memset(told, 0, sizeof *told);
  told->maxThreadsPerBlock = 1024, told->numRegs = 32;
  told->binaryVersion = told->ptxVersion = 90, told->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
  *count = threads > 0 && threads < 2048 ? 2048 / threads : 1;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) { return *address = calloc(1, 1 << 16), cudaSuccess; }

static void *registered[8];
void **__cudaRegisterFatBinary(void *binary) { return registered; }
char __cudaInitModule(void **module) { return 1; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = (dim3){1, 1, 1}, *shared = 0, *(void **)stream = 0;
  return cudaSuccess;
}

static long nothing(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  void *found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (void *)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------- cuBLAS

cublasStatus_t cublasCreate_v2(cublasHandle_t *made) { return *made = handle(), CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *mode) { return *mode = 0, 0; }
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *mode) { return *mode = 0, 0; }
size_t cublasLtGetVersion(void) { return 130101; }

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t found[], int *count) {
  memset(found, 0, sizeof found[0]);
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t compute, cudaDataType_t scale) {
  return *made = handle(), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) {
  return *made = handle(), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t leading) {
  return *made = handle(), CUBLAS_STATUS_SUCCESS;
}

// --------------------------------------------------------------------------------------------------------- NCCL

struct group {
  int size, rank;
  unsigned long id;
  unsigned sent[MOST_RANKS], received[MOST_RANKS], gathered, broadcast;
};

static size_t width(ncclDataType_t type) { // of what arrives; 0: it does not
  return type == ncclInt8 || type == ncclUint8 ? 1 : type == ncclInt64 || type == ncclUint64 ? 8 : 0;
}

static void message(char *path, struct group *g, char kind, int from, int to, unsigned number) {
  sprintf(path, "/dev/shm/absent-gpu-%lx-%c-%d-%d-%u", g->id, kind, from, to, number);
}

static void post(struct group *g, char kind, int to, unsigned number, const void *data, size_t size) {
  char path[128], part[136];
  message(path, g, kind, g->rank, to, number);
  sprintf(part, "%s.part", path);
  int file = open(part, O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (file < 0 || write(file, data, size) != (ssize_t)size) abort();
  close(file);
  rename(part, path);
}

static ncclResult_t collect(struct group *g, char kind, int from, unsigned number, void *data, size_t size) {
  char path[128];
  message(path, g, kind, from, g->rank, number);
  int file = -1;
  for (int tries = 0; tries < 60000 && (file = open(path, O_RDONLY)) < 0; tries++) usleep(1000);
  if (file < 0 || read(file, data, size) != (ssize_t)size) return ncclSystemError;
  close(file);
  unlink(path);
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) { return *version = 22907, ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t result) { return "the GPU is absent"; }
const char *ncclGetLastError(ncclComm_t comm) { return "the GPU is absent"; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  int file = open("/dev/urandom", O_RDONLY);
  if (read(file, id, sizeof *id) != sizeof *id) abort();
  close(file);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
  struct group *g = calloc(1, sizeof *g);
  g->size = size, g->rank = rank;
  memcpy(&g->id, &id, sizeof g->id);
  *made = (ncclComm_t)g;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return ncclCommInitRank(made, size, id, rank);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { return *error = ncclSuccess, ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int *count) { return *count = ((struct group *)c)->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) { return *rank = ((struct group *)c)->rank, ncclSuccess; }

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int to, ncclComm_t comm, cudaStream_t s) {
  struct group *g = (struct group *)comm;
  if (width(type)) post(g, 'p', to, g->sent[to]++, data, count * width(type));
  return ncclSuccess;
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t s) {
  struct group *g = (struct group *)comm;
  return width(type) ? collect(g, 'p', from, g->received[from]++, data, count * width(type)) : ncclSuccess;
}

ncclResult_t ncclAllGather(const void *own, void *all, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t s) {
  struct group *g = (struct group *)comm;
  size_t size = count * width(type);
  if (!size) return ncclSuccess;
  unsigned number = g->gathered++;
  for (int to = 0; to < g->size; to++)
    if (to != g->rank) post(g, 'g', to, number, own, size);
  memmove((char *)all + g->rank * size, own, size);
  for (int from = 0; from < g->size; from++)
    if (from != g->rank && collect(g, 'g', from, number, (char *)all + from * size, size)) return ncclSystemError;
  return ncclSuccess;
}

ncclResult_t ncclBroadcast(const void *data, void *into, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t s) {
  struct group *g = (struct group *)comm;
  size_t size = count * width(type);
  if (!size) return ncclSuccess;
  unsigned number = g->broadcast++;
  if (g->rank != root) return collect(g, 'b', root, number, into, size);
  for (int to = 0; to < g->size; to++)
    if (to != root) post(g, 'b', to, number, data, size);
  if (into != data) memmove(into, data, size);
  return ncclSuccess;
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}
