// The functions of libibverbs that MoRI calls: one RoCE device with one port. Shared receive queues, completion channels
// and GPU memory by dma-buf are refused.

#define _GNU_SOURCE
#include "card.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

static int refuse(void) {
  errno = EOPNOTSUPP;
  return -1;
}

// Devices

// MoRI takes the card's PCI address from the last part of a path that has to exist.
struct ibv_device **ibv_get_device_list(int *count) {
  static struct ibv_device device = {
      .node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "standin0", .dev_name = "uverbs0"};
  char folder[] = "/tmp/mori-standin";
  snprintf(device.ibdev_path, sizeof device.ibdev_path, "%s/0000:02:00.0", folder);
  mkdir(folder, 0755);
  mkdir(device.ibdev_path, 0755);
  struct ibv_device **list = calloc(2, sizeof *list);
  list[0] = &device;
  if (count != NULL) *count = 1;
  return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) { return 0; }
static int req_notify_cq(struct ibv_cq *cq, int solicited) { return 0; }

struct ibv_context *ibv_open_device(struct ibv_device *given) {
  struct device *device = calloc(1, sizeof *device);
  struct ibv_context *context = &device->context;
  context->device = given;
  context->cmd_fd = -1;
  context->num_comp_vectors = 1;
  context->async_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC | EFD_SEMAPHORE);
  context->ops.poll_cq = completions_poll;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = pair_post;
  context->ops.post_recv = post_recv;
  pthread_mutex_init(&device->lock, NULL);
  device_watch(device);
  return context;
}

int ibv_close_device(struct ibv_context *context) {
  device_close((struct device *)context);
  close(context->async_fd);
  free(context);
  return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  *attr = (struct ibv_device_attr){.phys_port_cnt = 1,
                                   .max_qp = 1 << 16,
                                   .max_qp_wr = 1 << 15,
                                   .max_sge = MOST_PARTS,
                                   .max_cq = 1 << 16,
                                   .max_cqe = 1 << 20,
                                   .max_mr = MOST_KEYS,
                                   .max_mr_size = 1ull << 40,
                                   .max_pd = 1 << 16,
                                   .max_qp_rd_atom = 16,
                                   .max_qp_init_rd_atom = 16};
  return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *given) {
  struct ibv_port_attr *attr = (struct ibv_port_attr *)given;
  const char *ports = getenv("MORI_SIM_PORTS"), *most = getenv("MORI_SIM_MAX_MSG");
  attr->state = ports != NULL && strcmp(ports, "0") == 0 ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
  attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
  attr->gid_tbl_len = attr->pkey_tbl_len = 1;
  attr->max_msg_sz = most != NULL ? strtoul(most, NULL, 10) : 1u << 30;
  attr->active_width = 2;   // four lanes
  attr->active_speed = 32;  // of 25 Gb/s
  attr->phys_state = 5;     // link up
  attr->link_layer = IBV_LINK_LAYER_ETHERNET;
  return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  if (index != 0) return -1;
  struct place place = card_place();
  _Static_assert(sizeof place == sizeof gid->raw, "a place fills a GID");
  memcpy(gid->raw, &place, sizeof place);
  return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                      uint32_t flags, size_t size) {
  if (index != 0) return ENODATA;
  entry->gid_index = index;
  entry->port_num = port;
  entry->gid_type = IBV_GID_TYPE_ROCE_V2;
  return ibv_query_gid(context, port, index, &entry->gid);
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
  struct device *device = (struct device *)context;
  uint64_t one;
  if (read(context->async_fd, &one, sizeof one) != sizeof one) return -1;  // EAGAIN, if there is none
  pthread_mutex_lock(&device->lock);
  *event = device->events[device->first];
  device->first = (device->first + 1) % MOST_EVENTS;
  device->count--;
  pthread_mutex_unlock(&device->lock);
  return 0;
}

void ibv_ack_async_event(struct ibv_async_event *event) {}

// Memory

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  struct ibv_pd *pd = calloc(1, sizeof *pd);
  pd->context = context;
  return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
  free(pd);
  return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *at, size_t length, int access) {
  uint32_t key = card_register(at, length, access);
  if (key == 0) return NULL;
  struct ibv_mr *mr = calloc(1, sizeof *mr);
  *mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = at, .length = length, .lkey = key, .rkey = key};
  return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *at, size_t length, uint64_t iova, unsigned access) {
  return ibv_reg_mr(pd, at, length, access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  refuse();
  return NULL;
}

int ibv_dereg_mr(struct ibv_mr *mr) {
  card_deregister(mr->lkey);
  free(mr);
  return 0;
}

// Completion queues

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int size, void *user, struct ibv_comp_channel *channel, int v) {
  struct completions *queue = calloc(1, sizeof *queue);
  queue->cq.context = context;
  queue->cq.cq_context = user;
  queue->cq.cqe = queue->size = size;
  queue->ring = calloc(size, sizeof *queue->ring);
  pthread_mutex_init(&queue->lock, NULL);
  return &queue->cq;
}

int ibv_destroy_cq(struct ibv_cq *cq) {
  free(((struct completions *)cq)->ring);
  free(cq);
  return 0;
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
  refuse();
  return NULL;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) { return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **user) { return refuse(); }
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) {}

// Queue pairs

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  static atomic_uint number = 100;
  struct device *device = (struct device *)pd->context;
  struct pair *pair = calloc(1, sizeof *pair);
  pair->qp = (struct ibv_qp){.context = pd->context,
                             .qp_context = attr->qp_context,
                             .pd = pd,
                             .send_cq = attr->send_cq,
                             .recv_cq = attr->recv_cq,
                             .qp_num = atomic_fetch_add(&number, 1),
                             .state = IBV_QPS_RESET,
                             .qp_type = attr->qp_type};
  pair->size = attr->cap.max_send_wr > 0 ? attr->cap.max_send_wr : 1;
  pair->signal_all = attr->sq_sig_all;
  pair->ring = calloc(pair->size, sizeof *pair->ring);
  pthread_mutex_init(&pair->lock, NULL);
  pthread_cond_init(&pair->more, NULL);
  pthread_mutex_lock(&device->lock);
  pair->next = device->pairs;
  device->pairs = pair;
  pthread_mutex_unlock(&device->lock);
  return &pair->qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
  struct pair *pair = (struct pair *)qp;
  if (mask & IBV_QP_AV) memcpy(&pair->peer, attr->ah_attr.grh.dgid.raw, sizeof pair->peer);
  if (!(mask & IBV_QP_STATE)) return 0;
  pthread_mutex_lock(&pair->lock);
  qp->state = attr->qp_state;
  if (attr->qp_state == IBV_QPS_ERR) pair->broken = true;
  int error = attr->qp_state == IBV_QPS_RTS && !pair->running ? pair_start(pair) : 0;
  pthread_mutex_unlock(&pair->lock);
  return error;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
  struct pair *pair = (struct pair *)qp;
  struct device *device = (struct device *)qp->context;
  pthread_mutex_lock(&device->lock);
  struct pair **link = &device->pairs;
  while (*link != pair) link = &(*link)->next;
  *link = pair->next;
  pthread_mutex_unlock(&device->lock);
  pair_stop(pair);
  free(pair->ring);
  free(pair);
  return 0;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) {
  refuse();
  return NULL;
}

int ibv_destroy_srq(struct ibv_srq *srq) { return 0; }

const char *ibv_wc_status_str(enum ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS: return "success";
    case IBV_WC_LOC_PROT_ERR: return "local protection error";
    case IBV_WC_WR_FLUSH_ERR: return "Work Request Flushed Error";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error";
    case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
    default: return "unknown";
  }
}
