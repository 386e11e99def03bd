/* A stand-in for the CUDA driver with the functions that docs/ahead-of-time.md calls. Its GPU is the CPU: a launch runs
   the object file that the same kernel compiles to, so a host program that passes the right arguments gets the right
   numbers. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int32_t tilewright_weighted_sum_fwd(const void *const *args, const int32_t pid[3], const int32_t num_programs[3],
                                    void *arena, const void *hooks);

enum { INVALID_VALUE = 1, INVALID_PTX = 218, NOT_FOUND = 500 };
static int device, context, module, function;

int cuInit(unsigned flags) { return flags == 0 ? 0 : INVALID_VALUE; }
int cuDeviceGet(int *out, int ordinal) { return *out = device, ordinal == 0 ? 0 : INVALID_VALUE; }
int cuDevicePrimaryCtxRetain(void **out, int which) { return *out = &context, which == device ? 0 : INVALID_VALUE; }
int cuCtxSetCurrent(void *which) { return which == &context ? 0 : INVALID_VALUE; }
int cuCtxSynchronize(void) { return 0; }
int cuGetErrorName(int status, const char **name) { return (void)status, *name = "an error of the stand-in", 0; }

int cuModuleLoadData(void **out, const char *ptx) {
    return *out = &module, strstr(ptx, ".visible .entry") ? 0 : INVALID_PTX;
}

int cuModuleGetFunction(void **out, void *which, const char *name) {
    *out = &function;
    return which == &module && strcmp(name, "weighted_sum_fwd") == 0 ? 0 : NOT_FOUND;
}

int cuFuncSetAttribute(void *which, int attribute, int value) {
    return which == &function && attribute == 8 && value >= 0 ? 0 : INVALID_VALUE;
}

int cuMemAlloc_v2(uint64_t *out, size_t bytes) {
    return *out = (uint64_t)aligned_alloc(256, (bytes + 255) / 256 * 256), *out ? 0 : INVALID_VALUE;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) { return memcpy((void *)to, from, bytes), 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { return memcpy(to, (void *)from, bytes), 0; }

int cuLaunchKernel(void *which, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared_bytes, void *stream, void **args, void **extra) {
    if (which != &function || stream || extra || y != 1 || z != 1 || block_y != 1 || block_z != 1) return INVALID_VALUE;
    printf("%u blocks of %u threads with %u bytes\n", x, block_x, shared_bytes);
    fflush(stdout);
    void *arena = aligned_alloc(64, 1 << 20);
    int32_t programs[3] = {(int32_t)x, 1, 1};
    for (int32_t i = 0; i < programs[0]; i++) {
        int32_t pid[3] = {i, 0, 0};
        tilewright_weighted_sum_fwd((const void *const *)args, pid, programs, arena, NULL);
    }
    return free(arena), 0;
}
