// Streams, which are threads that work in order; events; copies.
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { COPY, RAISE, CALL, WAIT };
enum { LEGACY_STREAMS = 16 };  // small numbers stand for the streams that every context has

typedef void (*Callback)(Stream *, Result, void *);

typedef struct Work {
    struct Work *next;
    int kind;
    Address target, source;
    size_t nbytes;
    long microseconds;  // waits before
    Callback callback;
    void *given;
    Event *event;
    unsigned long turn;
} Work;

struct Stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Work *first, *last;
    int busy, ends;
    Stream *next;  // in the list of all
};

struct Event {
    unsigned long recorded, reached;  // how often; both only grow
};

static Stream default_stream;
static pthread_once_t default_once = PTHREAD_ONCE_INIT;
static Stream *streams;
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;

static void sleep_for(long microseconds) {
    if (microseconds <= 0) return;
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static void run(Stream *stream, Work *work) {
    sleep_for(work->microseconds);
    switch (work->kind) {
    case COPY: memmove(reachable(work->target), reachable(work->source), work->nbytes); break;
    case RAISE: __atomic_store_n(&work->event->reached, work->turn, __ATOMIC_RELEASE); break;
    case CALL: work->callback(stream, OK, work->given); break;
    case WAIT:
        while (__atomic_load_n(&work->event->reached, __ATOMIC_ACQUIRE) < work->turn) sleep_for(50);
        break;
    }
}

static void *follow(void *given) {
    Stream *stream = given;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ends) pthread_cond_wait(&stream->changed, &stream->lock);
        Work *work = stream->first;
        if (!work) break;
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        run(stream, work);
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static void start(Stream *stream) {
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, follow, stream);
    pthread_mutex_lock(&streams_lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&streams_lock);
}

static void start_default(void) { start(&default_stream); }

static Stream *resolved(Stream *stream) {
    if ((uintptr_t)stream >= LEGACY_STREAMS) return stream;
    pthread_once(&default_once, start_default);
    return &default_stream;
}

static Result enqueue(Stream *stream, Work work) {
    Work *kept = malloc(sizeof work);
    if (!kept) return OUT_OF_MEMORY;
    *kept = work;
    stream = resolved(stream);
    pthread_mutex_lock(&stream->lock);
    if (stream->last) stream->last->next = kept;
    else stream->first = kept;
    stream->last = kept;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}

static void wait_for(Stream *stream) {
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

API Result cuStreamCreate(Stream **stream, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    *stream = calloc(1, sizeof **stream);
    if (!*stream) return OUT_OF_MEMORY;
    start(*stream);
    return OK;
}

API Result cuStreamSynchronize(Stream *stream) {
    STARTED;
    wait_for(resolved(stream));
    return OK;
}

API Result cuCtxSynchronize(void) {
    IN_CONTEXT;
    pthread_mutex_lock(&streams_lock);
    Stream *each = streams;
    pthread_mutex_unlock(&streams_lock);
    for (; each; each = each->next) wait_for(each);  // streams stay in the list
    return OK;
}

API Result cuStreamQuery(Stream *stream) {
    STARTED;
    stream = resolved(stream);
    pthread_mutex_lock(&stream->lock);
    int under_way = stream->first || stream->busy;
    pthread_mutex_unlock(&stream->lock);
    return under_way ? NOT_READY : OK;
}

API Result cuStreamDestroy_v2(Stream *stream) {
    STARTED;
    wait_for(stream);
    pthread_mutex_lock(&stream->lock);
    stream->ends = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}

API Result cuStreamAddCallback(Stream *stream, Callback callback, void *given, unsigned flags) {
    STARTED;
    (void)flags;
    return enqueue(stream, (Work){.kind = CALL, .callback = callback, .given = given});
}

API Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    STARTED;
    (void)flags;
    return enqueue(stream, (Work){.kind = WAIT, .event = event, .turn = event->recorded});
}

API Result cuEventCreate(Event **event, unsigned flags) {
    IN_CONTEXT;
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event ? OK : OUT_OF_MEMORY;
}

API Result cuEventDestroy_v2(Event *event) {
    STARTED;
    (void)event;  // a stream may still raise it
    return OK;
}

API Result cuEventRecord(Event *event, Stream *stream) {
    IN_CONTEXT;
    return enqueue(stream, (Work){.kind = RAISE, .event = event, .turn = ++event->recorded});
}

API Result cuEventQuery(Event *event) {
    STARTED;
    return __atomic_load_n(&event->reached, __ATOMIC_ACQUIRE) >= event->recorded ? OK : NOT_READY;
}

API Result cuEventSynchronize(Event *event) {
    STARTED;
    while (cuEventQuery(event)) sleep_for(50);
    return OK;
}

// Copies. STANDIN_GPU_COPY_US makes each of them take so long.

API Result cuMemcpyAsync(Address target, Address source, size_t nbytes, Stream *stream) {
    static long pause = -1;
    IN_CONTEXT;
    if (pause < 0) pause = number_of("STANDIN_GPU_COPY_US", 0);
    return enqueue(stream, (Work){.kind = COPY, .target = target, .source = source, .nbytes = nbytes, .microseconds = pause});
}

API Result cuMemcpyDtoDAsync_v2(Address target, Address source, size_t nbytes, Stream *stream) {
    return cuMemcpyAsync(target, source, nbytes, stream);
}

API Result cuMemcpyDtoHAsync_v2(void *target, Address source, size_t nbytes, Stream *stream) {
    return cuMemcpyAsync((Address)target, source, nbytes, stream);
}

API Result cuMemcpyHtoDAsync_v2(Address target, const void *source, size_t nbytes, Stream *stream) {
    return cuMemcpyAsync(target, (Address)source, nbytes, stream);
}

API Result cuMemcpy(Address target, Address source, size_t nbytes) {
    IN_CONTEXT;
    memmove(reachable(target), reachable(source), nbytes);
    return OK;
}

API Result cuMemcpyHtoD_v2(Address target, const void *source, size_t nbytes) {
    return cuMemcpy(target, (Address)source, nbytes);
}

API Result cuMemcpyDtoH_v2(void *target, Address source, size_t nbytes) {
    return cuMemcpy((Address)target, source, nbytes);
}
