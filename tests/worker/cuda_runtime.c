/* A CUDA runtime without a device: preloaded, it lets the host code of compiled CUDA libraries run on a CPU. What they ask of the
 * device is answered as of compute capability 9.0; copies are done at once, and launches do nothing. Linked in the place of the
 * driver's library too, of which nothing is called. */

#include <stddef.h>
#include <string.h>

enum {
    ATTRIBUTE_SHARED_MEMORY_PER_BLOCK = 8,
    ATTRIBUTE_PROCESSORS = 16,
    ATTRIBUTE_CAPABILITY_MAJOR = 75,
    ATTRIBUTE_CAPABILITY_MINOR = 76,
    ATTRIBUTE_SHARED_MEMORY_PER_PROCESSOR = 81,
    ATTRIBUTE_SHARED_MEMORY_PER_BLOCK_AT_MOST = 97,
};

static int num_processors = 132;
static int num_blocks_per_processor = 2;

/* Of any kernel, at the same time. */
void set_device(int processors, int blocks_per_processor) {
    num_processors = processors;
    num_blocks_per_processor = blocks_per_processor;
}

int cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

int cudaSetDevice(int device) {
    (void)device;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case ATTRIBUTE_SHARED_MEMORY_PER_BLOCK: *value = 48 << 10; break;
    case ATTRIBUTE_PROCESSORS: *value = num_processors; break;
    case ATTRIBUTE_CAPABILITY_MAJOR: *value = 9; break;
    case ATTRIBUTE_CAPABILITY_MINOR: *value = 0; break;
    case ATTRIBUTE_SHARED_MEMORY_PER_PROCESSOR: *value = 228 << 10; break;
    case ATTRIBUTE_SHARED_MEMORY_PER_BLOCK_AT_MOST: *value = 227 << 10; break;
    default: *value = 1;
    }
    return 0;
}

int cudaFuncSetAttribute(const void *function, int attribute, int value) {
    (void)function, (void)attribute, (void)value;
    return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int block_size, size_t shared_memory, unsigned flags) {
    (void)function, (void)block_size, (void)shared_memory, (void)flags;
    *blocks = num_blocks_per_processor;
    return 0;
}

int cudaMemcpyAsync(void *target, const void *source, size_t num_bytes, int kind, void *stream) {
    (void)kind, (void)stream;
    memcpy(target, source, num_bytes);
    return 0;
}

int cudaLaunchKernel() { return 0; }

int cudaLaunchKernelExC(const void *configuration, const void *function, void **arguments) {
    (void)configuration, (void)function, (void)arguments;
    return 0;
}
