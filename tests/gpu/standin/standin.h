// A stand-in for NVIDIA's driver, for tests only: it has no device. What its files share.
//
// Memory of a device is a file in memory that is mapped twice. Callers get the address of the first mapping, which the
// host must not touch: a read or a write there faults, as it would on a card without managed memory. Copies of the
// driver use the second mapping. A stream is a thread that does its work in order. Contexts are per thread. A process
// that was forked from one that had started the driver is refused, as by the real one.
//
// cuInit refuses to start unless STANDIN_GPU says "for tests only".
#ifndef STANDIN_H
#define STANDIN_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef int Result;
typedef unsigned long long Address;

// Values of CUresult.
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_SUPPORTED = 801,
};

enum { MOST_DEVICES = 8 };

// How memory was allocated.
enum { PLAIN, VIRTUAL, MANAGED, POOL, IMPORTED };

typedef struct Context {
    int device;
    unsigned long long id;
    int users;
} Context;

typedef struct Stream Stream;
typedef struct Event Event;

// contexts.c
extern int device_count;
Context *current_context(void);
Context *primary_context(int device);
Result check_started(const char *function);   // NOT_INITIALIZED before cuInit, and in a forked child
Result check_context(const char *function);   // INVALID_CONTEXT on a thread that has none
void note(const char *format, ...);           // a line of the log, with the process, the thread and its context
long number_of(const char *variable, long otherwise);  // an environment variable

// memory.c
char *reachable(Address address);             // where this process may touch what an address stands for

#define STARTED                                       \
    do {                                              \
        Result started_ = check_started(__func__);    \
        if (started_) return started_;                \
    } while (0)

#define IN_CONTEXT                                    \
    do {                                              \
        Result bound_ = check_context(__func__);      \
        if (bound_) return bound_;                    \
    } while (0)

#endif
