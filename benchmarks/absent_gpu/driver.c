// The part of the CUDA driver that torch and Triton ask for themselves (see runtime.c), by the numbers of cuda.h.
long cuGetErrorString(int error, const char **text) { return *text = "the GPU is absent", 0; }
long cuDriverGetVersion(int *version) { return *version = 13000, 0; }
long cuDeviceGet(int *device, int number) { return *device = number, 0; }
long cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
long cuModuleLoadData(void **module, const void *image) { return *module = (void *)1, 0; }
long cuModuleGetFunction(void **function, void *module, const char *name) { return *function = (void *)1, 0; }
long cuFuncGetAttribute(int *value, int which, void *function) { return *value = which == 0 ? 1024 : 32, 0; }
long cuStreamIsCapturing(void *stream, int *status) { return *status = 0, 0; }

long cuPointerGetAttribute(unsigned long *told, int which, unsigned long pointer) { return *told = pointer, 0; }

long cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0, *active = 1;
  return 0;
}

long cuDeviceGetAttribute(int *value, int which, int device) {
  static const int known[][2] = {
      {1, 1024},    // threads of a block
      {8, 49152},   // its shared memory
      {10, 32},     // a warp
      {12, 65536},  // registers of a block
      {13, 1980000}, {36, 3201000}, {37, 6144}, // clocks, kHz, and the memory's width
      {16, 132},    // multiprocessors
      {75, 9}, {76, 0}, // capability
      {97, 232448}, // shared memory of a block, if asked for
  };
  *value = 0;
  for (unsigned n = 0; n < sizeof known / sizeof known[0]; n++)
    if (known[n][0] == which) *value = known[n][1];
  return 0;
}
