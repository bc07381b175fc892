/* Shared by the files of the null GPU (see runtime.c). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* build.py generates a stub for every symbol that torch needs and that no line beginning with API defines. */
#define API __attribute__((visibility("default")))

/* The order is that of COUNTERS in tests/nullgpu/counters.py. */
enum {
    LAUNCH, STREAM_SYNC, DEVICE_SYNC, EVENT_SYNC,
    D2H, D2H_BYTES, H2D, H2D_BYTES, H2D_PAGEABLE, D2D,
    MEMSET, MALLOC, HOST_ALLOC,
    GEMM_16BIT, GEMM_FP32, GEMM_FLOP, CUDNN, DRIVER_LAUNCH, MODULES,
    NUM_COUNTERS
};

/* Kernels of closed libraries have no address that we know, so they get these. */
#define GEMM_FP32_KERNEL ((const void *)1)
#define GEMM_16BIT_KERNEL ((const void *)2)
#define CUDNN_KERNEL ((const void *)3)

void count(int counter, double by);
int record_launch(const void *kernel);  /* returns 0, the status of success */
void name_kernel(const void *kernel, const char *name);
void *new_handle(void);                 /* zeroed memory for an opaque object */
int num_devices(void);
int current_device(void);
int device_attribute(int *value, int attribute);
