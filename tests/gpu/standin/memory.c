// Memory of devices, what the driver says about an address, and memory of other processes.
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_ALLOCATIONS = 4096, PAGE = 4096, HANDLE_BYTES = 64, SOME_POOL = 0x77 };

typedef struct {
    char *guarded;  // the address that callers have; the host must not touch it, unless the memory is managed
    char *open;     // the same bytes, for copies of the driver
    size_t nbytes;
    int file, kind, device, used;
    unsigned long long id;
} Allocation;

// What an IPC handle holds. The kernel lets a process of the same user open another one's file by this path.
typedef struct {
    int process, file, device;
    size_t nbytes;
} Handle;

typedef struct {
    char bytes[HANDLE_BYTES];
} PackedHandle;

static Allocation allocations[MOST_ALLOCATIONS];
static int count;
static unsigned long long next_id = 100;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t whole_pages(size_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

// The allocation that an address is in. With the lock held.
static Allocation *find(Address address) {
    char *at = (char *)address;
    for (int each = 0; each < count; each++) {
        Allocation *one = &allocations[each];
        if (one->used && at >= one->guarded && at < one->guarded + one->nbytes) return one;
    }
    return NULL;
}

char *reachable(Address address) {
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    char *at = found ? found->open + ((char *)address - found->guarded) : (char *)address;
    pthread_mutex_unlock(&lock);
    return at;
}

// Not of the real driver: where a kernel of a test may touch what an address stands for.
API void *standinReachable(Address address) { return reachable(address); }

// Map a file as memory of a device.
static Result map(int file, size_t nbytes, int kind, int device, Address *address) {
    size_t mapped = whole_pages(nbytes);
    char *open = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (open == MAP_FAILED) return OUT_OF_MEMORY;
    char *guarded = kind == MANAGED ? open : mmap(NULL, mapped, PROT_NONE, MAP_SHARED, file, 0);
    if (guarded == MAP_FAILED) {
        munmap(open, mapped);
        return OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    int place = 0;
    while (place < count && allocations[place].used) place++;
    Result result = place < MOST_ALLOCATIONS ? OK : OUT_OF_MEMORY;
    if (!result) {
        if (place == count) count++;
        allocations[place] = (Allocation){guarded, open, nbytes, file, kind, device, 1, next_id++};
        *address = (Address)guarded;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

// Not of the real driver: allocate memory of a kind that takes many calls there.
API Result standinAllocate(Address *address, size_t nbytes, int device, int kind) {
    STARTED;
    if (!nbytes || device < 0 || device >= device_count || kind < PLAIN || kind > POOL) return INVALID_VALUE;
    int file = memfd_create("standin-gpu", MFD_CLOEXEC);
    if (file < 0) return OUT_OF_MEMORY;
    Result result = ftruncate(file, (off_t)whole_pages(nbytes)) ? OUT_OF_MEMORY : map(file, nbytes, kind, device, address);
    if (result) close(file);
    return result;
}

// STANDIN_GPU_KIND makes it another kind of memory than the plain one: 1 virtual, 3 of a pool.
API Result cuMemAlloc_v2(Address *address, size_t nbytes) {
    IN_CONTEXT;
    return standinAllocate(address, nbytes, current_context()->device, (int)number_of("STANDIN_GPU_KIND", PLAIN));
}

API Result cuMemAllocManaged(Address *address, size_t nbytes, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    return standinAllocate(address, nbytes, current_context()->device, MANAGED);
}

API Result cuMemFree_v2(Address address) {
    STARTED;
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    Result result = found && (Address)found->guarded == address ? OK : INVALID_VALUE;
    if (!result) {
        munmap(found->open, whole_pages(found->nbytes));
        if (found->guarded != found->open) munmap(found->guarded, whole_pages(found->nbytes));
        close(found->file);
        found->used = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

// Memory of the host that is pinned needs nothing here.

API Result cuMemAllocHost_v2(void **memory, size_t nbytes) {
    IN_CONTEXT;
    return posix_memalign(memory, PAGE, whole_pages(nbytes)) ? OUT_OF_MEMORY : OK;
}

API Result cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    (void)flags;
    return cuMemAllocHost_v2(memory, nbytes);
}

API Result cuMemFreeHost(void *memory) {
    STARTED;
    free(memory);
    return OK;
}

API Result cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags) {
    IN_CONTEXT;
    (void)memory, (void)nbytes, (void)flags;
    return OK;
}

API Result cuMemHostUnregister(void *memory) {
    STARTED;
    (void)memory;
    return OK;
}

// What is known about an address.

static Result attribute(const Allocation *one, int which, void *value) {
    int plain = one->kind == PLAIN, own = one->kind != VIRTUAL && one->kind != POOL;
    switch (which) {
    case 1: *(Context **)value = own ? primary_context(one->device) : NULL; return OK;  // the context
    case 2: *(unsigned *)value = 2; return OK;                                           // memory of a device
    case 3: case 11: case 19: *(Address *)value = (Address)one->guarded; return OK;      // where it and its range begin
    case 6: *(int *)value = 1; return OK;                                                // copies of it are synchronous
    case 7: case 20: *(unsigned long long *)value = one->id; return OK;                  // ids of buffer and block
    case 8: *(unsigned *)value = one->kind == MANAGED; return OK;
    case 9: *(int *)value = one->device; return OK;
    case 10: case 15: *(int *)value = plain; return OK;                                  // IPC and network cards
    case 12: case 18: *(size_t *)value = one->nbytes; return OK;                         // sizes of range and mapping
    case 13: *(int *)value = 1; return OK;                                               // it is mapped
    case 14: *(long *)value = 0; return OK;                                              // handles that it may have
    case 16: *(int *)value = 3; return OK;                                               // may be read and written
    case 17: *(Address *)value = one->kind == POOL ? SOME_POOL : 0; return OK;
    default: return INVALID_VALUE;
    }
}

API Result cuPointerGetAttribute(void *value, int which, Address address) {
    STARTED;
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    Result result = found ? attribute(found, which, value) : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return result;
}

// Unlike the function for one attribute, this one says nothing of an unknown address, and succeeds.
API Result cuPointerGetAttributes(unsigned asked, int *which, void **values, Address address) {
    STARTED;
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    for (unsigned each = 0; each < asked; each++) {
        if (found && !attribute(found, which[each], values[each])) continue;
        switch (which[each]) {
        case 1: case 3: case 7: case 11: case 12: case 17: case 18: case 19: *(Address *)values[each] = 0; break;
        case 9: *(int *)values[each] = -2; break;  // no device
        default: *(int *)values[each] = 0;
        }
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

API Result cuPointerSetAttribute(void *value, int which, Address address) {
    STARTED;
    (void)value, (void)which;
    pthread_mutex_lock(&lock);
    Result result = find(address) ? OK : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return result;
}

API Result cuMemGetAddressRange_v2(Address *base, size_t *nbytes, Address address) {
    STARTED;
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    if (found && base) *base = (Address)found->guarded;
    if (found && nbytes) *nbytes = found->nbytes;
    pthread_mutex_unlock(&lock);
    return found ? OK : INVALID_VALUE;
}

API Result cuMemRetainAllocationHandle(Address *handle, void *address) {
    STARTED;
    pthread_mutex_lock(&lock);
    Allocation *found = find((Address)address);
    Result result = found && found->kind == VIRTUAL ? OK : INVALID_VALUE;
    if (!result) *handle = found->id;
    pthread_mutex_unlock(&lock);
    return result;
}

// Begins like CUmemAllocationProp.
typedef struct {
    int type, handle_types, location_type, location;
    void *windows;
    unsigned char flags[8];
} Properties;

API Result cuMemGetAllocationPropertiesFromHandle(Properties *properties, Address handle) {
    STARTED;
    pthread_mutex_lock(&lock);
    Result result = INVALID_VALUE;
    for (int each = 0; each < count; each++) {
        if (!allocations[each].used || allocations[each].id != handle) continue;
        *properties = (Properties){.type = 1, .location_type = 1, .location = allocations[each].device};
        result = OK;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API Result cuMemRelease(Address handle) {
    STARTED;
    (void)handle;
    return OK;
}

API Result cuMemGetAllocationGranularity(size_t *nbytes, const void *properties, int option) {
    STARTED;
    (void)properties, (void)option;
    *nbytes = (size_t)2 << 20;
    return OK;
}

API Result cuMemGetInfo_v2(size_t *left, size_t *total) {
    IN_CONTEXT;
    *left = (size_t)7 << 30;
    *total = (size_t)8 << 30;
    return OK;
}

// Memory of another process.

API Result cuIpcGetMemHandle(PackedHandle *packed, Address address) {
    IN_CONTEXT;
    pthread_mutex_lock(&lock);
    Allocation *found = find(address);
    Result result = found && found->kind == PLAIN ? OK : INVALID_VALUE;
    if (!result) {
        Handle handle = {getpid(), found->file, found->device, found->nbytes};
        memset(packed, 0, sizeof *packed);
        memcpy(packed, &handle, sizeof handle);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API Result cuIpcOpenMemHandle_v2(Address *address, PackedHandle packed, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    Handle handle;
    memcpy(&handle, &packed, sizeof handle);
    if (handle.process == getpid()) return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        note("cuIpcOpenMemHandle: %s", strerror(errno));
        return INVALID_HANDLE;
    }
    note("cuIpcOpenMemHandle");
    return map(file, handle.nbytes, IMPORTED, current_context()->device, address);
}

API Result cuIpcCloseMemHandle(Address address) { return cuMemFree_v2(address); }
