// The stand-in's network card: memory that is registered, queue pairs, and what they move between processes. Tests change
// it by environment variables: MORI_SIM_GPUS (1) and MORI_SIM_PORTS (1), GPUs that ROCm reports, and active RDMA ports;
// MORI_SIM_MEMLOCK and MORI_SIM_MAX_MSG, bytes that a process may pin, and that one request may carry; and three that name
// a file: while it exists, no byte moves (MORI_SIM_HOLD), the card reports errors (MORI_SIM_BREAK), or it breaks connections
// by itself (MORI_SIM_FAULT).

#ifndef CARD_H
#define CARD_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

// libibverbs' header replaces these two by wrappers of its own. The library exports them under their own names.
#undef ibv_reg_mr
#undef ibv_query_port

enum {
  MOST_KEYS = 1 << 16,
  MOST_PARTS = 16,      // pieces of memory in one work request
  MOST_EVENTS = 256,    // asynchronous events that nobody has read
  RETRY_MS = 500,       // how long a card tries to reach a process that has ended
  IDLE_US = 50,         // how long an empty completion queue makes its reader wait: MoRI asks without a pause
};

// One registered piece of memory. Other processes read this table, so a peer's card needs no help of this process.
struct key {
  uint64_t base, length;
  uint32_t access, born;  // `born` is zero where nothing is registered
};

// What a GID says of a process, and all that a peer needs to reach its memory: 16 bytes.
struct place {
  uint16_t prefix, born;  // `born` differs in a later process with the same id
  uint32_t pid;
  uint64_t keys;  // address of its table
};

struct work {
  uint64_t id, remote;
  uint32_t rkey;
  int opcode, count, flags;
  struct ibv_sge parts[MOST_PARTS];
};

// A completion queue: a ring that pairs fill and the library empties.
struct completions {
  struct ibv_cq cq;
  pthread_mutex_t lock;
  int first, count, size;
  struct ibv_wc *ring;
};

// An opened device, with its pairs, and the asynchronous events that its file descriptor counts.
struct device {
  struct ibv_context context;
  pthread_mutex_t lock;
  struct pair *pairs;
  pthread_t faults;
  bool watched, closing;
  int first, count;
  struct ibv_async_event events[MOST_EVENTS];
};

// A queue pair: a ring of work, and a thread that does it in order.
struct pair {
  struct ibv_qp qp;
  struct pair *next;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t more;
  int first, count, size;
  bool running, stopping, broken, signal_all;
  struct work *ring;
  struct place peer;
};

// Whether a file exists that an environment variable names: so tests change the card while it works.
bool file_of(const char *variable);

uint32_t card_register(void *at, uint64_t length, uint32_t access);  // a key, or 0 with errno set
void card_deregister(uint32_t key);
struct place card_place(void);

int pair_post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int pair_start(struct pair *pair);
void pair_stop(struct pair *pair);
int completions_poll(struct ibv_cq *cq, int most, struct ibv_wc *out);

int device_watch(struct device *device);  // start the thread that looks for faults, if a test may ask for one
void device_close(struct device *device);

#endif
