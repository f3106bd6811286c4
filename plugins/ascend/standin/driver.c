/* A stand-in for an Ascend NPU's driver and for the parts of CANN that MemFabric loads.
 *
 * MemFabric itself is the released package, unchanged. It opens ten libraries by name, and asks each for functions
 * by name. This one file answers for all ten: `driver.py` gives it their names. There is no NPU. "Memory of an NPU"
 * is memory of the process, at the addresses where a driver puts it. A copy by "SDMA" is a copy by the kernel, from
 * one process to another, in which the other takes no part.
 *
 * What it enforces, as the driver does: only memory of an NPU can be registered or be an end of a copy. A copy that
 * leaves that memory, or whose other process has ended, fails. An NPU that is not there cannot be opened.
 *
 * A function that moving bytes by SDMA does not need ends the process, and says its name. So nothing is answered by
 * accident.
 *
 * The environment can set, each read whenever it matters:
 *   STANDIN_NPUS         how many NPUs there are; 8 if it is not set
 *   STANDIN_FAILS_AFTER  from when it is set, so many more copies succeed, and every later one fails
 *
 * Every function may be called from any thread.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OK = 0, INVALID = 3, NO_MEMORY = 6, NO_DEVICE = 107001, COPY_FAILED = 507899 };

static int npus(void)
{
    const char *set = getenv("STANDIN_NPUS");
    return set && *set ? atoi(set) : 8;
}

/* --- Memory ------------------------------------------------------------------------------------------------------
 *
 * Memory of an NPU is at addresses from 16 TiB to 24 TiB, by which the library tells it from the host's. It has
 * pages of 2 MiB. An address of another process's memory is reserved here, and is only a number: it stands for that
 * memory.
 */
enum { PAGE = 2 << 20, MOST = 4096 };
static const uint64_t FIRST = 16ull << 40, LAST = 24ull << 40;

struct span {
    uint64_t begin, size; /* here; a size of 0 means that the place in the table is free */
    uint64_t there;       /* where it begins in the process that has it */
    pid_t owner;
};
static struct span spans[MOST];
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

static int add(struct span span)
{
    int result = NO_MEMORY;
    pthread_rwlock_wrlock(&lock);
    for (int i = 0; i < MOST && result != OK; i++)
        if (spans[i].size == 0) {
            spans[i] = span;
            result = OK;
        }
    pthread_rwlock_unlock(&lock);
    return result;
}

/* The span with `size` bytes at an address; one of size 0 if there is none. */
static struct span find(uint64_t address, uint64_t size)
{
    struct span found = {0};
    pthread_rwlock_rdlock(&lock);
    for (int i = 0; i < MOST; i++)
        if (address >= spans[i].begin && size <= spans[i].size && address - spans[i].begin <= spans[i].size - size)
            found = spans[i];
    pthread_rwlock_unlock(&lock);
    return found;
}

static uint64_t forget(uint64_t begin)
{
    uint64_t size = 0;
    pthread_rwlock_wrlock(&lock);
    for (int i = 0; i < MOST; i++)
        if (spans[i].size && spans[i].begin == begin) {
            size = spans[i].size;
            spans[i].size = 0;
        }
    pthread_rwlock_unlock(&lock);
    return size;
}

/* Another process may then reach into this one, where the kernel asks whether it may. */
__attribute__((constructor)) static void invite(void) { prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

int aclrtMalloc(void **address, size_t size, uint32_t policy)
{
    static uint64_t next;
    uint64_t whole = (size + PAGE - 1) / PAGE * PAGE;
    (void)policy;
    /* Two processes have different addresses, so that none is taken for one of the other's. */
    uint64_t start = FIRST + (uint64_t)(getpid() % 4096) * (1ull << 30);
    void *got = MAP_FAILED;
    while (got == MAP_FAILED) {
        uint64_t at = start + __atomic_fetch_add(&next, whole + PAGE, __ATOMIC_RELAXED);
        if (size == 0 || at + whole > LAST)
            return NO_MEMORY;
        got = mmap((void *)at, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    }
    *address = got;
    return add((struct span){(uint64_t)got, whole, (uint64_t)got, getpid()});
}

int aclrtFree(void *address)
{
    uint64_t size = forget((uint64_t)address);
    return size && munmap(address, size) == 0 ? OK : INVALID;
}

int aclrtMallocHost(void **address, size_t size) { return posix_memalign(address, PAGE, size) ? NO_MEMORY : OK; }

int aclrtFreeHost(void *address)
{
    free(address);
    return OK;
}

/* The NPU reads this memory of the host at the same address. */
int halHostRegister(void *address, uint64_t size, uint32_t flag, uint32_t device, void **seen)
{
    (void)size, (void)flag, (void)device;
    *seen = address;
    return OK;
}

int halHostUnregisterEx(void *address, uint32_t device, uint32_t flag)
{
    (void)address, (void)device, (void)flag;
    return OK;
}

struct attributes {
    uint32_t kind, reserved[2], device, page, more[8];
};

int drvMemGetAttribute(uint64_t address, struct attributes *found)
{
    enum { AN_NPUS = 0x10, A_PROGRAMS = 0x80 };
    int npu = find(address, 1).size != 0;
    *found = (struct attributes){.kind = npu ? AN_NPUS : A_PROGRAMS, .page = npu ? PAGE : 4096};
    return OK;
}

/* --- Memory that one process names and another opens -------------------------------------------------------------
 *
 * The library sends the name to its peer, which opens it. The name says where the memory is.
 */
int rtIpcSetMemoryName(const void *address, uint64_t size, char *name, uint32_t most)
{
    if (find((uint64_t)address, size).size == 0)
        return INVALID;
    int length = snprintf(name, most, "%d:%lx:%lx", getpid(), (uint64_t)address, size);
    return length > 0 && (uint32_t)length < most ? OK : INVALID;
}

int rtIpcOpenMemory(void **address, const char *name)
{
    struct span span = {0};
    if (sscanf(name, "%d:%lx:%lx", &span.owner, &span.there, &span.size) != 3)
        return INVALID;
    *address = mmap(NULL, span.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*address == MAP_FAILED)
        return NO_MEMORY;
    span.begin = (uint64_t)*address;
    return add(span);
}

int rtIpcCloseMemory(void *address) { return aclrtFree(address); }

/* --- Copies ------------------------------------------------------------------------------------------------------ */

/* Has the kernel copy bytes of this process from or to those of another; the other need not run for it. */
static int copy(pid_t other, uint64_t here, uint64_t there, uint64_t size, int write)
{
    while (size) {
        struct iovec near = {(void *)here, size}, far = {(void *)there, size};
        ssize_t moved = write ? process_vm_writev(other, &near, 1, &far, 1, 0)
                              : process_vm_readv(other, &near, 1, &far, 1, 0);
        if (moved <= 0)
            return COPY_FAILED;
        here += moved;
        there += moved;
        size -= moved;
    }
    return OK;
}

/* Between two places, each in memory of an NPU: at most one of them is another process's. */
static int sdma(uint64_t to, uint64_t from, uint64_t size)
{
    struct span target = find(to, size), source = find(from, size);
    if (!target.size || !source.size)
        return COPY_FAILED;
    to += target.there - target.begin;
    from += source.there - source.begin;
    if (source.owner == getpid())
        return copy(target.owner, from, to, size, 1);
    return target.owner == getpid() ? copy(source.owner, to, from, size, 0) : COPY_FAILED;
}

int aclrtMemcpy(void *to, size_t most, const void *from, size_t size, int direction)
{
    (void)direction;
    if (size > most)
        return INVALID;
    memcpy(to, from, size);
    return OK;
}

/* --- Queues ------------------------------------------------------------------------------------------------------
 *
 * Each thread of the library has a queue, into which it puts one copy after the other. It then asks how far the
 * queue is, and whether a copy failed; if so, it asks which. Here, a copy is done when it is put there. A queue is
 * used by its own thread.
 */
enum { QUEUES = 4096, DEPTH = 2048 };

static struct queue {
    uint32_t done;         /* how many copies */
    uint16_t stream, task; /* of the copy that failed last; the library's own numbers */
    int failed;            /* whether one did, and the library does not know it yet */
} queues[QUEUES];

static uint32_t fresh(void)
{
    static uint32_t last;
    return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED) % QUEUES;
}

/* Whether STANDIN_FAILS_AFTER lets the next copy succeed. */
static int works(void)
{
    static uint32_t moved;
    const char *set = getenv("STANDIN_FAILS_AFTER");
    if (!set || !*set) {
        __atomic_store_n(&moved, 0, __ATOMIC_RELAXED);
        return 1;
    }
    return __atomic_fetch_add(&moved, 1, __ATOMIC_RELAXED) < (uint32_t)atoi(set);
}

int halResourceIdAlloc(uint32_t device, const void *wanted, uint32_t *id)
{
    (void)device, (void)wanted;
    *id = fresh();
    return OK;
}

int halSqCqAllocate(uint32_t device, const void *wanted, uint32_t *ids)
{
    (void)device, (void)wanted;
    ids[0] = ids[1] = fresh();
    queues[ids[0]] = (struct queue){0};
    return OK;
}

struct task {
    uint16_t flags, blocks, stream, number;
    uint32_t more[5], size;
    uint64_t from, to;
};

struct sending {
    uint32_t type, scheduler, queue;
    int32_t timeout;
    const struct task *task;
    uint32_t count, position, reserved[8];
};

int halSqTaskSend(uint32_t device, struct sending *sending)
{
    const struct task *task = sending->task;
    struct queue *queue = &queues[sending->queue % QUEUES];
    (void)device;
    if (sending->count != 1)
        return INVALID;
    if (!works() || sdma(task->to, task->from, task->size) != OK) {
        queue->failed = 1;
        queue->stream = task->stream;
        queue->task = task->number;
    }
    queue->done++;
    return OK;
}

struct query {
    uint32_t type, scheduler, queue, completions, property, value[8];
};

int halSqCqQuery(uint32_t device, struct query *query)
{
    enum { HEAD = 1, FAILED = 4 };
    const struct queue *queue = &queues[query->queue % QUEUES];
    (void)device;
    if (query->property != HEAD && query->property != FAILED)
        return INVALID;
    query->value[0] = query->property == HEAD ? queue->done % DEPTH : (uint32_t)queue->failed;
    return OK;
}

struct report {
    uint16_t stream, task;
    uint32_t error;
    uint8_t kind, type;
    uint16_t queue, head, flags;
    uint64_t times[2];
};

struct receiving {
    uint32_t type, scheduler, completions;
    int32_t timeout;
    struct report *reports;
    uint32_t most, count, stream, task, reserved[8];
};

int halCqReportRecv(uint32_t device, struct receiving *receiving)
{
    enum { SDMA = 11, ADDRESS_ERROR = 6 };
    (void)device;
    receiving->count = 0;
    for (int i = 0; i < QUEUES; i++)
        if (queues[i].failed && queues[i].stream == receiving->stream && receiving->count < receiving->most) {
            queues[i].failed = 0;
            receiving->reports[receiving->count++] = (struct report){
                .stream = queues[i].stream, .task = queues[i].task, .error = ADDRESS_ERROR, .type = SDMA, .queue = i};
        }
    return OK;
}

/* --- The NPU ----------------------------------------------------------------------------------------------------- */

static _Thread_local int current;

int aclrtSetDevice(int device)
{
    if (device < 0 || device >= npus())
        return NO_DEVICE;
    current = device;
    return OK;
}

int aclrtGetDevice(int *device)
{
    *device = current;
    return OK;
}

int rtGetLogicDevIdByUserDevId(int user, int *logical)
{
    *logical = user;
    return OK;
}

int aclrtGetPhyDevIdByLogicDevId(int logical, int *physical)
{
    *physical = logical;
    return OK;
}

const char *aclrtGetSocName(void) { return "Ascend910B1"; }

int aclrtGetVersion(int *major, int *minor, int *patch)
{
    *major = 1, *minor = 15, *patch = 0;
    return OK;
}

int aclsysGetVersionStr(const char *name, char *version)
{
    (void)name;
    strcpy(version, "8.5.0");
    return OK;
}

int rtDeviceGetBareTgid(uint32_t *process)
{
    *process = getpid();
    return OK;
}

/* Where the NPU is among others: all are in the first server of the first super-pod. */
int rtGetDeviceInfo(uint32_t device, int module, int what, int64_t *value)
{
    enum { NUMBER = 26, SERVER = 27, SCALE = 28, POD = 29 };
    (void)module;
    *value = what == NUMBER ? device : what == SERVER || what == SCALE ? 1 : 0;
    return what >= NUMBER && what <= POD ? OK : INVALID;
}

/* --- What succeeds without doing anything ------------------------------------------------------------------------ */
#define NOTHING(name) \
    int name(void) { return OK; }
NOTHING(dcmiv2_init) NOTHING(halResourceConfig) NOTHING(halResourceIdFree) NOTHING(halSqCqFree)
NOTHING(rtIpcDestroyMemoryName) NOTHING(rtSetIpcMemorySuperPodPid)

/* --- What the library wants to find, and does not call to move bytes by SDMA ------------------------------------- */
static void refuse(const char *name)
{
    fprintf(stderr, "stand-in driver: MemFabric called %s, which is not stood in for\n", name);
    abort();
}
#define REFUSED(name) \
    int name(void) { refuse(#name); return INVALID; }
int g_devmm_mem_dev = -1;
REFUSED(aclrtBinaryGetFunction) REFUSED(aclrtBinaryLoadFromFile) REFUSED(aclrtCreateNotify) REFUSED(aclrtCreateStream)
REFUSED(aclrtCreateStreamWithConfig) REFUSED(aclrtDestroyNotify) REFUSED(aclrtDestroyStream)
REFUSED(aclrtDeviceEnablePeerAccess) REFUSED(aclrtGetCurrentContext) REFUSED(aclrtGetNotifyId)
REFUSED(aclrtKernelArgsAppend) REFUSED(aclrtKernelArgsFinalize) REFUSED(aclrtKernelArgsInit)
REFUSED(aclrtLaunchKernelWithConfig) REFUSED(aclrtMemcpy2d) REFUSED(aclrtMemcpy2dAsync) REFUSED(aclrtMemcpyAsync)
REFUSED(aclrtMemcpyBatch) REFUSED(aclrtMemset) REFUSED(aclrtSetStreamAttribute) REFUSED(aclrtStreamAbort)
REFUSED(aclrtStreamGetId) REFUSED(aclrtSynchronizeStream) REFUSED(aclrtWaitAndResetNotify)
REFUSED(dcmiv2_get_affinity_cpu_info_by_dev_id) REFUSED(dcmiv2_get_device_pcie_info)
REFUSED(dcmiv2_get_eid_list_by_urma_dev_index) REFUSED(dcmiv2_get_urma_device_cnt) REFUSED(drvNotifyIdAddrOffset)
REFUSED(halMemAddressFree) REFUSED(halMemAddressReserve) REFUSED(halMemAlloc)
REFUSED(halMemCreate) REFUSED(halMemExportToShareableHandleV2) REFUSED(halMemFree)
REFUSED(halMemGetAllocationGranularity) REFUSED(halMemImportFromShareableHandleV2) REFUSED(halMemMap)
REFUSED(halMemRelease) REFUSED(halMemRetainAllocationHandle) REFUSED(halMemSetAccess)
REFUSED(halMemShareHandleSetAttribute) REFUSED(halMemTransShareableHandle) REFUSED(halMemUnmap)
REFUSED(halResourceDetailQuery) REFUSED(HcclCommDestroy)
REFUSED(HcclCommInitClusterInfoMemConfig) REFUSED(RaAiQpCreate) REFUSED(RaDeregisterMr) REFUSED(RaGetIfaddrs)
REFUSED(RaGetIfnum) REFUSED(RaGetNotifyBaseAddr) REFUSED(RaGetNotifyMrInfo) REFUSED(RaGetQpStatus)
REFUSED(RaGetSockets) REFUSED(RaInit) REFUSED(RaQpConnectAsync) REFUSED(RaQpCreate) REFUSED(RaQpCreateWithAttrs)
REFUSED(RaQpDestroy) REFUSED(RaRdevGetHandle) REFUSED(RaRdevInitV2) REFUSED(RaRegisterMr) REFUSED(RaSendWr)
REFUSED(RaSendWrV2) REFUSED(RaSetQpAttrQos) REFUSED(RaSocketBatchClose) REFUSED(RaSocketBatchConnect)
REFUSED(RaSocketDeinit) REFUSED(RaSocketInit) REFUSED(RaSocketListenStart) REFUSED(RaSocketListenStop)
REFUSED(RaSocketWhiteListAdd) REFUSED(RaSocketWhiteListDel) REFUSED(rtDisableP2P) REFUSED(rtEnableP2P)
REFUSED(rtGetP2PStatus) REFUSED(rtMemcpyAsyncWithoutCheckKind)
REFUSED(TsdOpen)
