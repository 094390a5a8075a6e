// The CUDA runtime, cuBLAS, cuSOLVER's QR and NCCL of GPUs that are not there: what allocates, copies and answers
// questions works, what computes does nothing. ABSENT_GPUS says how many there are. They answer as H200s do.
//
// Memory of a GPU is the process's own, taken from the system when it is first written. Memory that nothing was copied
// into reads as zeros. What a stream is given is done at once, but for exchanges between ranks, which a thread of the
// stream does one after the other. A wait for the whole device takes a quarter of a second, in which torch's threads
// notice what is done, as they do in the time that a real step takes.
//
// With ABSENT_GPUS_COMPUTE set the CPU computes in their place (site/on_host.py), and all that ranks exchange arrives.
// Otherwise of that only bytes and 64-bit integers do (torch's own bookkeeping).
#define _GNU_SOURCE
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>
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

// Returns which of the machine's GPUs is the process's `nth`, -1 if it does not see so many. CUDA_VISIBLE_DEVICES has
// numbers, or the names by which a driver knows them, whose last two digits are the number here.
static int visible(int nth) {
  const char *said = getenv("ABSENT_GPUS"), *seen = getenv("CUDA_VISIBLE_DEVICES");
  int all = said ? atoi(said) : 1;
  if (!seen) return nth < all ? nth : -1;
  while (nth-- > 0 && (seen = strchr(seen, ','))) seen++;
  if (!seen || !*seen) return -1;
  size_t length = strcspn(seen, ",");
  int number = strncmp(seen, "GPU-", 4) ? atoi(seen) : (int)strtol(seen + length - 2, NULL, 16);
  return number < all ? number : -1;
}

static int gpus(void) {
  int count = 0;
  while (visible(count) >= 0) count++;
  return count;
}

static int computes(void) {
  const char *said = getenv("ABSENT_GPUS_COMPUTE");
  return said && *said;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

static void *handle(void) { return calloc(1, 256); }

// ---------------------------------------------------------------------------------------------- streams and events

struct exchange;
static void carry_out(struct exchange *first);
static struct exchange *following(struct exchange *one);

struct stream { // what its thread has been given and has done
  struct exchange *first, *last;
  unsigned long given, done;
  int runs;
};

struct event {
  double time;
  struct stream *stream;
  unsigned long number;
};

static struct stream standard, *streams[1024] = {&standard};
static pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static struct stream *behind(cudaStream_t stream) {
  return (unsigned long)stream < 3 ? &standard : (struct stream *)stream;
}

static void *work(void *of) {
  struct stream *s = of;
  pthread_mutex_lock(&queues);
  while (1) {
    while (!s->first) pthread_cond_wait(&changed, &queues);
    struct exchange *bundle = s->first;
    s->first = following(bundle);
    pthread_mutex_unlock(&queues);
    carry_out(bundle);
    pthread_mutex_lock(&queues);
    s->done++;
    pthread_cond_broadcast(&changed);
  }
}

static void await(struct stream *s, unsigned long number) {
  pthread_mutex_lock(&queues);
  while (s && s->done < number) pthread_cond_wait(&changed, &queues);
  pthread_mutex_unlock(&queues);
}

// Before the CPU does what a stream was given.
void absent_gpu_reach(cudaStream_t stream) { await(behind(stream), behind(stream)->given); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return absent_gpu_reach(stream), cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return behind(stream)->done < behind(stream)->given ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  for (int n = 0; n < 1024 && streams[n]; n++) absent_gpu_reach((cudaStream_t)streams[n]);
  if (!computes()) usleep(250000);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *made) {
  pthread_mutex_lock(&queues);
  int place = 0;
  while (place < 1024 && streams[place]) place++;
  if (place == 1024) abort();
  *made = handle(), streams[place] = (struct stream *)*made;
  pthread_mutex_unlock(&queues);
  return cudaSuccess;
}

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

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *(struct event *)event = (struct event){now(), behind(stream), behind(stream)->given};
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned f) { return cudaEventRecord(event, s); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  struct event *e = (struct event *)event;
  return e->stream && e->stream->done < e->number ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  struct event *e = (struct event *)event;
  return await(e->stream, e->number), cudaSuccess;
}

// What comes after is done at once, so that the wait is here.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  return cudaEventSynchronize(event);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = ((struct event *)to)->time - ((struct event *)from)->time;
  return cudaSuccess;
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
  absent_gpu_reach(0);
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  absent_gpu_reach(stream);
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
  absent_gpu_reach(0);
  memset(to, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  absent_gpu_reach(stream);
  memset(to, value, size);
  return cudaSuccess;
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
  told->uuid.bytes[15] = visible(device), told->pciBusID = visible(device) + 1;
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

// ------------------------------------------------------------------------------ cuSOLVER: `torch.linalg.qr` alone

cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t *made) { return *made = handle(), 0; }
cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t h, cudaStream_t stream) { return 0; }
cusolverStatus_t cusolverDnCreateParams(cusolverDnParams_t *made) { return *made = handle(), 0; }
cusolverStatus_t cusolverDnDestroyParams(cusolverDnParams_t params) { return free(params), 0; }

cusolverStatus_t cusolverDnXgeqrf_bufferSize(cusolverDnHandle_t h, cusolverDnParams_t params, int64_t rows,
                                             int64_t cols, cudaDataType type, const void *a, int64_t leading,
                                             cudaDataType tau_type, const void *tau, cudaDataType compute,
                                             size_t *on_device, size_t *on_host) {
  *on_device = *on_host = 4096;
  return 0;
}

cusolverStatus_t cusolverDnXgeqrf(cusolverDnHandle_t h, cusolverDnParams_t params, int64_t rows, int64_t cols,
                                  cudaDataType type, void *a, int64_t leading, cudaDataType tau_type, void *tau,
                                  cudaDataType compute, void *on_device, size_t size, void *on_host, size_t host_size,
                                  int *info) {
  return 0;
}

cusolverStatus_t cusolverDnSorgqr_bufferSize(cusolverDnHandle_t h, int rows, int cols, int count, const float *a,
                                             int leading, const float *tau, int *numbers) {
  return *numbers = 1024, 0;
}

cusolverStatus_t cusolverDnSorgqr(cusolverDnHandle_t h, int rows, int cols, int count, float *a, int leading,
                                  const float *tau, float *work, int numbers, int *info) {
  return 0;
}

// --------------------------------------------------------------------------------------------------------- NCCL

struct group {
  int size, rank;
  unsigned long id;
  unsigned sent[MOST_RANKS], received[MOST_RANKS], collectives;
  volatile ncclResult_t error;
};

// What the ranks of a group do with one another. `peer`: who sends or receives; the root of a collective; -1: nobody.
struct exchange {
  enum { SEND, RECEIVE, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE, ALL_REDUCE, REDUCE_SCATTER } kind;
  struct group *group;
  unsigned number;
  const char *from;
  char *to;
  size_t count;
  ncclDataType_t type;
  int op, peer;
  struct exchange *bundled, *next; // of one ncclGroup; of a stream
};

static struct exchange *following(struct exchange *one) { return one->next; }

static size_t width(ncclDataType_t type) {
  switch (type) {
  case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
  case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
  case ncclFloat16: case ncclBfloat16: return 2;
  default: return 1;
  }
}

static double read_one(const void *data, size_t place, ncclDataType_t type) {
  switch (type) {
  case ncclInt8: return ((int8_t *)data)[place];
  case ncclUint8: return ((uint8_t *)data)[place];
  case ncclInt32: return ((int32_t *)data)[place];
  case ncclUint32: return ((uint32_t *)data)[place];
  case ncclInt64: return ((int64_t *)data)[place];
  case ncclFloat16: return ((_Float16 *)data)[place];
  case ncclFloat32: return ((float *)data)[place];
  case ncclFloat64: return ((double *)data)[place];
  case ncclBfloat16: {
    uint32_t bits = (uint32_t)((uint16_t *)data)[place] << 16;
    float value;
    return memcpy(&value, &bits, 4), value;
  }
  default: fprintf(stderr, "absent_gpu: NCCL's type %d is not known here\n", type), abort();
  }
}

static void write_one(void *data, size_t place, ncclDataType_t type, double value) {
  switch (type) {
  case ncclInt8: ((int8_t *)data)[place] = value; break;
  case ncclUint8: ((uint8_t *)data)[place] = value; break;
  case ncclInt32: ((int32_t *)data)[place] = value; break;
  case ncclUint32: ((uint32_t *)data)[place] = value; break;
  case ncclInt64: ((int64_t *)data)[place] = value; break;
  case ncclFloat16: ((_Float16 *)data)[place] = value; break;
  case ncclFloat32: ((float *)data)[place] = value; break;
  case ncclFloat64: ((double *)data)[place] = value; break;
  default: { // bfloat16, to the nearest, ties to even
    float rounded = value;
    uint32_t bits;
    memcpy(&bits, &rounded, 4);
    ((uint16_t *)data)[place] = rounded != rounded ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  }
}

static double scales[64]; // of ncclRedOpCreatePreMulSum
static int known_scales;

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *made, void *scale, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  int place = known_scales++ % 64;
  scales[place] = read_one(scale, 0, type);
  *made = ncclNumOps + place;
  return ncclSuccess;
}

static void message(char *path, struct exchange *e, int from, int to) {
  char kind = e->kind == RECEIVE ? SEND : e->kind;
  sprintf(path, "/dev/shm/absent-gpu-%lx-%d-%d-%d-%u", e->group->id, kind, from, to, e->number);
}

static void post(struct exchange *e, int to, const void *data, size_t size) {
  char path[128], part[136];
  message(path, e, e->group->rank, to);
  sprintf(part, "%s.part", path);
  int file = open(part, O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (file < 0 || write(file, data, size) != (ssize_t)size) abort();
  close(file);
  rename(part, path);
}

static void collect(struct exchange *e, int from, void *data, size_t size) {
  struct group *g = e->group;
  char path[128];
  message(path, e, from, g->rank);
  int file = -1;
  double late = now() + 120e3;
  while (!g->error && (file = open(path, O_RDONLY)) < 0) {
    if (now() > late) g->error = ncclSystemError;
    usleep(100);
  }
  if (file < 0) return;
  if (read(file, data, size) != (ssize_t)size) g->error = ncclSystemError;
  close(file);
  unlink(path);
}

// All that a rank sends goes out before it waits for anything.
static void post_all(struct exchange *e) {
  struct group *g = e->group;
  size_t size = e->count * width(e->type);
  if (e->kind == SEND) post(e, e->peer, e->from, size);
  for (int to = 0; to < g->size && e->kind > RECEIVE; to++) {
    if (to == g->rank) continue;
    if (e->kind == ALL_GATHER || e->kind == ALL_REDUCE) post(e, to, e->from, size);
    if (e->kind == ALL_TO_ALL || e->kind == REDUCE_SCATTER) post(e, to, e->from + to * size, size);
    if (e->kind == BROADCAST && e->peer == g->rank) post(e, to, e->from, size);
    if (e->kind == REDUCE && e->peer == to) post(e, to, e->from, size);
  }
}

static double joined(double one, double other, int op) {
  switch (op) {
  case ncclProd: return one * other;
  case ncclMax: return one > other ? one : other;
  case ncclMin: return one < other ? one : other;
  default: return one + other;
  }
}

static void collect_all(struct exchange *e) {
  struct group *g = e->group;
  size_t size = e->count * width(e->type);
  const char *own = e->kind == ALL_TO_ALL || e->kind == REDUCE_SCATTER ? e->from + g->rank * size : e->from;
  if (e->kind == RECEIVE) collect(e, e->peer, e->to, size);
  if (e->kind == BROADCAST) {
    if (e->peer != g->rank) collect(e, e->peer, e->to, size);
    else memmove(e->to, own, size);
  }
  if (e->kind == ALL_GATHER || e->kind == ALL_TO_ALL)
    for (int from = 0; from < g->size; from++)
      if (from == g->rank) memmove(e->to + from * size, own, size);
      else collect(e, from, e->to + from * size, size);
  if (e->kind < REDUCE || e->kind == REDUCE && e->peer != g->rank) return;
  // In the order of the ranks, so that all have the same result; in double precision.
  double *sum = malloc(e->count * sizeof *sum + 1), scale = e->op >= ncclNumOps ? scales[e->op - ncclNumOps] : 1;
  char *theirs = malloc(size + 1);
  for (int from = 0; from < g->size; from++) {
    const char *piece = from == g->rank ? own : theirs;
    if (from != g->rank) collect(e, from, theirs, size);
    for (size_t n = 0; n < e->count; n++) {
      double value = scale * read_one(piece, n, e->type);
      sum[n] = from ? joined(sum[n], value, e->op) : value;
    }
  }
  for (size_t n = 0; n < e->count; n++) write_one(e->to, n, e->type, e->op == ncclAvg ? sum[n] / g->size : sum[n]);
  free(sum), free(theirs);
}

static void carry_out(struct exchange *first) {
  for (struct exchange *e = first; e; e = e->bundled) post_all(e);
  for (struct exchange *e = first, *after; e; e = after) {
    collect_all(e);
    after = e->bundled;
    free(e);
  }
}

static __thread int depth;
static __thread struct exchange *bundle, *bundle_end;
static __thread cudaStream_t bundle_stream;

static void give_to_stream(struct exchange *e, cudaStream_t stream) {
  struct stream *s = behind(stream);
  pthread_mutex_lock(&queues);
  if (s->first) s->last->next = e;
  else s->first = e;
  s->last = e;
  s->given++;
  pthread_t thread;
  if (!s->runs++) pthread_create(&thread, 0, work, s);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&queues);
}

static ncclResult_t ask(struct exchange asked, cudaStream_t stream) {
  struct group *g = asked.group;
  if (g->error) return g->error;
  if (!computes() && (asked.kind >= REDUCE || width(asked.type) != 1 && asked.type != ncclInt64)) return ncclSuccess;
  asked.number = asked.kind == SEND ? g->sent[asked.peer]++ : asked.kind == RECEIVE ? g->received[asked.peer]++ : g->collectives++;
  struct exchange *e = malloc(sizeof *e);
  *e = asked;
  if (!depth) return give_to_stream(e, stream), ncclSuccess;
  if (bundle) bundle_end->bundled = e;
  else bundle = e, bundle_stream = stream;
  bundle_end = e;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart(void) { return depth++, ncclSuccess; }

ncclResult_t ncclGroupEnd(void) {
  if (--depth || !bundle) return ncclSuccess;
  give_to_stream(bundle, bundle_stream);
  bundle = 0;
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

ncclResult_t ncclCommAbort(ncclComm_t comm) { return ((struct group *)comm)->error = ncclSystemError, ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  return *error = ((struct group *)comm)->error, ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t c, int *count) { return *count = ((struct group *)c)->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *rank) { return *rank = ((struct group *)c)->rank, ncclSuccess; }

#define GROUP .group = (struct group *)comm, .count = count, .type = type

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int to, ncclComm_t comm, cudaStream_t s) {
  return ask((struct exchange){SEND, GROUP, .from = data, .peer = to}, s);
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t s) {
  return ask((struct exchange){RECEIVE, GROUP, .to = data, .peer = from}, s);
}

ncclResult_t ncclBroadcast(const void *data, void *into, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t s) {
  return ask((struct exchange){BROADCAST, GROUP, .from = data, .to = into, .peer = root}, s);
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *own, void *all, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t s) {
  return ask((struct exchange){ALL_GATHER, GROUP, .from = own, .to = all, .peer = -1}, s);
}

ncclResult_t ncclAlltoAll(const void *own, void *all, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t s) {
  return ask((struct exchange){ALL_TO_ALL, GROUP, .from = own, .to = all, .peer = -1}, s);
}

ncclResult_t ncclReduce(const void *own, void *into, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t s) {
  return ask((struct exchange){REDUCE, GROUP, .from = own, .to = into, .op = op, .peer = root}, s);
}

ncclResult_t ncclAllReduce(const void *own, void *into, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t s) {
  return ask((struct exchange){ALL_REDUCE, GROUP, .from = own, .to = into, .op = op, .peer = -1}, s);
}

ncclResult_t ncclReduceScatter(const void *own, void *into, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t s) {
  return ask((struct exchange){REDUCE_SCATTER, GROUP, .from = own, .to = into, .op = op, .peer = -1}, s);
}
