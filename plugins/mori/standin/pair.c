// Queue pairs. Each has a thread, which moves memory between this process and the peer's with process_vm_readv and
// process_vm_writev. What a card does is kept: work is done later and in order, keys, bounds and rights are checked on
// both sides, the target takes no part, a peer that has ended is noticed after the retries, and a broken pair stays
// broken. A send, of which MoRI's notifications consist, succeeds and arrives nowhere.

#define _GNU_SOURCE
#include "card.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

bool file_of(const char *variable) {
  const char *path = getenv(variable);
  return path != NULL && *path != '\0' && access(path, F_OK) == 0;
}

// Of a process that has ended, or whose place another process has taken.
static enum ibv_wc_status unreachable(void) {
  usleep(RETRY_MS * 1000);
  return IBV_WC_RETRY_EXC_ERR;
}

static bool within(const struct key *key, uint64_t at, uint64_t length, uint32_t access) {
  return key->born != 0 && at >= key->base && at + length >= at && at + length <= key->base + key->length &&
         (key->access & access) == access;
}

// Reads one entry of a process's table of keys.
static bool read_key(const struct place *place, uint32_t number, struct key *key) {
  struct iovec mine = {key, sizeof *key};
  struct iovec theirs = {(void *)(place->keys + (number % MOST_KEYS) * sizeof *key), sizeof *key};
  bool read = process_vm_readv(place->pid, &mine, 1, &theirs, 1, 0) == sizeof *key;
  return read && (key->born == 0 || (uint16_t)key->born == place->born);
}

static enum ibv_wc_status move(struct pair *pair, const struct work *work) {
  if (work->opcode == IBV_WR_SEND) return IBV_WC_SUCCESS;
  bool reads = work->opcode == IBV_WR_RDMA_READ;
  struct place here = card_place();
  struct iovec parts[MOST_PARTS];
  struct key key;
  uint64_t length = 0;
  for (int i = 0; i < work->count; i++) {
    const struct ibv_sge *part = &work->parts[i];
    uint32_t access = reads ? IBV_ACCESS_LOCAL_WRITE : 0;
    if (!read_key(&here, part->lkey, &key) || !within(&key, part->addr, part->length, access)) return IBV_WC_LOC_PROT_ERR;
    parts[i] = (struct iovec){(void *)part->addr, part->length};
    length += part->length;
  }
  if (!read_key(&pair->peer, work->rkey, &key)) return unreachable();
  if (!within(&key, work->remote, length, reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE))
    return IBV_WC_REM_ACCESS_ERR;
  struct iovec there = {(void *)work->remote, length};
  for (int i = 0; there.iov_len > 0;) {  // one call may move less than all
    ssize_t moved = reads ? process_vm_readv(pair->peer.pid, parts + i, work->count - i, &there, 1, 0)
                          : process_vm_writev(pair->peer.pid, parts + i, work->count - i, &there, 1, 0);
    if (moved <= 0) return moved < 0 && errno == ESRCH ? unreachable() : IBV_WC_REM_ACCESS_ERR;
    there.iov_base = (char *)there.iov_base + moved;
    there.iov_len -= moved;
    for (; i < work->count && (size_t)moved >= parts[i].iov_len; i++) moved -= parts[i].iov_len;
    if (moved > 0) {
      parts[i].iov_base = (char *)parts[i].iov_base + moved;
      parts[i].iov_len -= moved;
    }
  }
  return IBV_WC_SUCCESS;
}

static void complete(struct pair *pair, const struct work *work, enum ibv_wc_status status) {
  if (status == IBV_WC_SUCCESS && !(work->flags & IBV_SEND_SIGNALED) && !pair->signal_all) return;
  struct completions *queue = (struct completions *)pair->qp.send_cq;
  enum ibv_wc_opcode opcode = work->opcode == IBV_WR_SEND        ? IBV_WC_SEND
                              : work->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ
                                                                 : IBV_WC_RDMA_WRITE;
  pthread_mutex_lock(&queue->lock);
  while (queue->count == queue->size) {  // a card would break the queue; MoRI makes it long enough
    pthread_mutex_unlock(&queue->lock);
    usleep(IDLE_US);
    pthread_mutex_lock(&queue->lock);
  }
  queue->ring[(queue->first + queue->count++) % queue->size] =
      (struct ibv_wc){.wr_id = work->id, .status = status, .opcode = opcode, .qp_num = pair->qp.qp_num};
  pthread_mutex_unlock(&queue->lock);
}

int completions_poll(struct ibv_cq *cq, int most, struct ibv_wc *out) {
  struct completions *queue = (struct completions *)cq;
  int found = 0;
  pthread_mutex_lock(&queue->lock);
  for (; found < most && queue->count > 0; found++, queue->count--) {
    out[found] = queue->ring[queue->first];
    queue->first = (queue->first + 1) % queue->size;
  }
  pthread_mutex_unlock(&queue->lock);
  if (found == 0) usleep(IDLE_US);
  return found;
}

// The thread of a pair. It holds the pair's lock, except while it moves memory or waits.
static void *serve(void *given) {
  struct pair *pair = given;
  pthread_mutex_lock(&pair->lock);
  while (!pair->stopping) {
    if (pair->count == 0) {
      pthread_cond_wait(&pair->more, &pair->lock);
      continue;
    }
    struct work work = pair->ring[pair->first];
    bool broken = pair->broken;
    pthread_mutex_unlock(&pair->lock);
    if (file_of("MORI_SIM_HOLD")) {
      usleep(500);
      pthread_mutex_lock(&pair->lock);
      continue;
    }
    enum ibv_wc_status status = broken                      ? IBV_WC_WR_FLUSH_ERR
                                : file_of("MORI_SIM_BREAK") ? IBV_WC_RETRY_EXC_ERR
                                                            : move(pair, &work);
    pthread_mutex_lock(&pair->lock);
    if (status != IBV_WC_SUCCESS) {
      pair->broken = true;
      pair->qp.state = IBV_QPS_ERR;
    }
    pair->first = (pair->first + 1) % pair->size;
    pair->count--;
    pthread_mutex_unlock(&pair->lock);
    complete(pair, &work, status);
    pthread_mutex_lock(&pair->lock);
  }
  pthread_mutex_unlock(&pair->lock);
  return NULL;
}

int pair_post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
  struct pair *pair = (struct pair *)qp;
  int error = 0;
  pthread_mutex_lock(&pair->lock);
  for (; wr != NULL && error == 0; wr = wr->next) {
    bool known = wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_READ || wr->opcode == IBV_WR_SEND;
    error = !pair->running || !known || wr->num_sge > MOST_PARTS ? EINVAL : pair->count == pair->size ? ENOMEM : 0;
    if (error != 0) {
      *bad = wr;
      break;
    }
    struct work *work = &pair->ring[(pair->first + pair->count++) % pair->size];
    *work = (struct work){.id = wr->wr_id,
                          .remote = wr->wr.rdma.remote_addr,
                          .rkey = wr->wr.rdma.rkey,
                          .opcode = wr->opcode,
                          .count = wr->num_sge,
                          .flags = wr->send_flags};
    memcpy(work->parts, wr->sg_list, wr->num_sge * sizeof *wr->sg_list);
  }
  pthread_cond_signal(&pair->more);
  pthread_mutex_unlock(&pair->lock);
  return error;
}

int pair_start(struct pair *pair) {
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 128 << 10);
  int error = pthread_create(&pair->thread, &small, serve, pair);
  pthread_attr_destroy(&small);
  pair->running = error == 0;
  return error;
}

void pair_stop(struct pair *pair) {
  pthread_mutex_lock(&pair->lock);
  pair->stopping = true;
  pthread_cond_signal(&pair->more);
  pthread_mutex_unlock(&pair->lock);
  if (pair->running) pthread_join(pair->thread, NULL);
}
