// Starting the driver, its devices, and the contexts of threads.
#include "standin.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <dlfcn.h>

enum { DEEPEST = 64, DRIVER_VERSION = 12080 };

int device_count = 2;
static int started_by;  // the process that called cuInit; 0 before
static Context primary[MOST_DEVICES];
static FILE *log_file;
static long ordering;  // the device's ordering of writes from network cards
static __thread Context *stack[DEEPEST];
static __thread int depth;

Context *current_context(void) { return depth ? stack[depth - 1] : NULL; }
Context *primary_context(int device) { return &primary[device]; }

void note(const char *format, ...) {
    if (!log_file) return;
    char line[400];
    Context *context = current_context();
    int used = snprintf(line, sizeof line, "%d %ld %d ", getpid(), (long)syscall(SYS_gettid), context ? context->device : -1);
    va_list given;
    va_start(given, format);
    vsnprintf(line + used, sizeof line - (size_t)used, format, given);
    va_end(given);
    fprintf(log_file, "%s\n", line);
    fflush(log_file);
}

long number_of(const char *variable, long otherwise) {
    const char *text = getenv(variable);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

Result check_started(const char *function) {
    if (started_by == getpid()) return OK;
    if (started_by) note("%s after a fork", function);
    return NOT_INITIALIZED;
}

Result check_context(const char *function) {
    Result started = check_started(function);
    if (started) return started;
    if (current_context()) return OK;
    note("%s without a context", function);
    return INVALID_CONTEXT;
}

API Result cuInit(unsigned flags) {
    const char *allowed = getenv("STANDIN_GPU");
    if (flags) return INVALID_VALUE;
    if (!allowed || strcmp(allowed, "for tests only")) return NO_DEVICE;
    if (started_by) return started_by == getpid() ? OK : NOT_INITIALIZED;
    long count = number_of("STANDIN_GPU_DEVICES", 2);
    ordering = number_of("STANDIN_GPU_ORDERING", 0);
    device_count = (int)count < MOST_DEVICES ? (int)count : MOST_DEVICES;
    const char *log = getenv("STANDIN_GPU_LOG");
    if (log) {
        char path[400];
        snprintf(path, sizeof path, "%s.%d", log, getpid());
        log_file = fopen(path, "a");
    }
    for (int device = 0; device < MOST_DEVICES; device++) primary[device] = (Context){device, (unsigned)device + 1, 0};
    started_by = getpid();
    return OK;
}

// Devices.

API Result cuDriverGetVersion(int *version) {
    *version = DRIVER_VERSION;
    return OK;
}

API Result cuDeviceGetCount(int *count) {
    STARTED;
    *count = device_count;
    return OK;
}

API Result cuDeviceGet(int *device, int ordinal) {
    STARTED;
    if (ordinal < 0 || ordinal >= device_count) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API Result cuDeviceGetName(char *name, int length, int device) {
    STARTED;
    snprintf(name, (size_t)length, "stand-in %d, for tests only", device);
    return OK;
}

API Result cuDeviceTotalMem_v2(size_t *nbytes, int device) {
    STARTED;
    (void)device;
    *nbytes = (size_t)8 << 30;
    return OK;
}

API Result cuDeviceGetUuid(char *uuid, int device) {
    STARTED;
    memset(uuid, 0, 16);
    uuid[0] = 0x5a;
    uuid[15] = (char)device;
    return OK;
}

API Result cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }

// Values of CUdevice_attribute that UCX, torch or Statelink ask for.
API Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    STARTED;
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    switch (attribute) {
    case 1:  // most threads of a block
        *value = 1024;
        break;
    case 16:  // multiprocessors
        *value = 132;
        break;
    case 33:  // bus of the device
        *value = 0x10 + device;
        break;
    case 10: case 15: case 19: case 31:  // registers' unit, copies beside kernels, mapped host memory, concurrent kernels
    case 41:                             // one address space with the host
    case 83: case 102: case 103: case 115:  // managed memory, virtual addresses, handles of files, pools
    case 116:                            // network cards reach its memory
        *value = 1;
        break;
    case 40:  // engines that copy
        *value = 3;
        break;
    case 75:  // compute capability, major
        *value = 9;
        break;
    case 117:  // how writes of network cards can be flushed: by the host
        *value = 1;
        break;
    case 118:  // how far such writes are in order by themselves: 0 not, 100 for this device, 200 for all
        *value = (int)ordering;
        break;
    default:
        *value = 0;
    }
    return OK;
}

// Makes writes of network cards visible that came before. A test counts the calls in the log.
API Result cuFlushGPUDirectRDMAWrites(int target, int scope) {
    IN_CONTEXT;
    if (target != 0 || (scope != 100 && scope != 200)) return INVALID_VALUE;
    note("cuFlushGPUDirectRDMAWrites");
    return OK;
}

API Result cuGetErrorName(Result error, const char **text) {
    switch (error) {
    case OK: *text = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *text = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *text = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_INITIALIZED: *text = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case NO_DEVICE: *text = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *text = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_CONTEXT: *text = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case INVALID_HANDLE: *text = "CUDA_ERROR_INVALID_HANDLE"; break;
    case NOT_FOUND: *text = "CUDA_ERROR_NOT_FOUND"; break;
    case NOT_READY: *text = "CUDA_ERROR_NOT_READY"; break;
    case NOT_SUPPORTED: *text = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: return INVALID_VALUE;
    }
    return OK;
}

API Result cuGetErrorString(Result error, const char **text) { return cuGetErrorName(error, text); }

// Contexts. A device has one, the primary one, which CUDA's runtime uses, too.

API Result cuDevicePrimaryCtxRetain(Context **context, int device) {
    STARTED;
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    if (!__atomic_fetch_add(&primary[device].users, 1, __ATOMIC_SEQ_CST)) note("context made on device %d", device);
    *context = &primary[device];
    return OK;
}

API Result cuDevicePrimaryCtxRelease_v2(int device) {
    STARTED;
    __atomic_fetch_sub(&primary[device].users, 1, __ATOMIC_SEQ_CST);
    return OK;
}

API Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    STARTED;
    if (device < 0 || device >= device_count) return INVALID_DEVICE;
    if (flags) *flags = 0;
    *active = primary[device].users > 0;
    return OK;
}

API Result cuCtxGetCurrent(Context **context) {
    STARTED;
    *context = current_context();
    return OK;
}

API Result cuCtxSetCurrent(Context *context) {
    STARTED;
    if (!context) {
        depth = depth ? depth - 1 : 0;
        return OK;
    }
    if (!depth) depth = 1;
    stack[depth - 1] = context;
    return OK;
}

API Result cuCtxPushCurrent_v2(Context *context) {
    STARTED;
    if (!context || depth == DEEPEST) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

API Result cuCtxPopCurrent_v2(Context **context) {
    STARTED;
    if (!depth) return INVALID_CONTEXT;
    Context *left = stack[--depth];
    if (context) *context = left;
    return OK;
}

API Result cuCtxGetDevice(int *device) {
    IN_CONTEXT;
    *device = current_context()->device;
    return OK;
}

API Result cuCtxGetId(Context *context, unsigned long long *id) {
    STARTED;
    if (!context) context = current_context();
    if (!context) return INVALID_CONTEXT;
    *id = context->id;
    return OK;
}

API Result cuCtxGetFlags(unsigned *flags) {
    IN_CONTEXT;
    *flags = 0;
    return OK;
}

API Result cuCtxSetFlags(unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    return OK;
}

// Libraries ask for functions by name, without the suffix that the newest form of a function has.
API Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *how) {
    static const char *const suffixes[] = {"_v3", "_v2", ""};
    (void)version, (void)flags;
    void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    *function = NULL;
    for (size_t each = 0; each < sizeof suffixes / sizeof *suffixes && !*function; each++) {
        char full[160];
        snprintf(full, sizeof full, "%s%s", name, suffixes[each]);
        *function = dlsym(driver, full);
    }
    if (how) *how = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
