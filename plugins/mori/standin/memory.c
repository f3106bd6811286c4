// Memory that is registered with the card, and what a process may pin.

#define _GNU_SOURCE
#include "card.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static struct key keys[MOST_KEYS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t born, used = 1;
static double pinned;

__attribute__((constructor)) static void begin(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  born = (uint32_t)(now.tv_nsec ^ (now.tv_sec << 20) ^ getpid()) | 1;
  // The threads of peers move this process's memory, as its card would. Yama asks for leave.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

struct place card_place(void) {
  return (struct place){.prefix = 0x80fe, .born = (uint16_t)born, .pid = getpid(), .keys = (uintptr_t)keys};
}

// A card pins pages for writing, so this is refused where the kernel cannot make them.
static bool pin(void *at, uint64_t length) {
  const char *limit = getenv("MORI_SIM_MEMLOCK");
  if (limit != NULL && pinned + (double)length > strtod(limit, NULL)) {
    errno = ENOMEM;
    return false;
  }
  uintptr_t page = sysconf(_SC_PAGESIZE), from = (uintptr_t)at & -page, to = ((uintptr_t)at + length + page - 1) & -page;
  if (madvise((void *)from, to - from, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) return false;
  pinned += (double)length;
  return true;
}

uint32_t card_register(void *at, uint64_t length, uint32_t access) {
  uint32_t key = 0;
  pthread_mutex_lock(&lock);
  if (used == MOST_KEYS) {
    errno = ENOMEM;
  } else if (pin(at, length)) {
    key = used++;  // never given out again: a peer that uses a key after its end is refused
    keys[key] = (struct key){(uintptr_t)at, length, access, born};
  }
  pthread_mutex_unlock(&lock);
  return key;
}

void card_deregister(uint32_t key) {
  pthread_mutex_lock(&lock);
  pinned -= (double)keys[key].length;
  keys[key].born = 0;
  pthread_mutex_unlock(&lock);
}
