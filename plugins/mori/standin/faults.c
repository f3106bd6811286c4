// Faults that a card reports by itself, without a transfer: while a file exists, every pair of a device breaks, and the
// device's file descriptor counts an event for each.

#include "card.h"

#include <stdlib.h>
#include <unistd.h>

enum { LOOK_US = 10000 };

static void break_pairs(struct device *device) {
  pthread_mutex_lock(&device->lock);
  for (struct pair *pair = device->pairs; pair != NULL; pair = pair->next) {
    pthread_mutex_lock(&pair->lock);
    bool breaks = pair->running && !pair->broken && device->count < MOST_EVENTS;
    if (breaks) {
      pair->broken = true;
      pair->qp.state = IBV_QPS_ERR;
    }
    pthread_mutex_unlock(&pair->lock);
    if (!breaks) continue;
    device->events[(device->first + device->count++) % MOST_EVENTS] =
        (struct ibv_async_event){.element.qp = &pair->qp, .event_type = IBV_EVENT_QP_FATAL};
    uint64_t one = 1;
    if (write(device->context.async_fd, &one, sizeof one) != sizeof one) break;
  }
  pthread_mutex_unlock(&device->lock);
}

static void *look(void *given) {
  struct device *device = given;
  for (bool closing = false; !closing;) {
    if (file_of("MORI_SIM_FAULT")) break_pairs(device);
    usleep(LOOK_US);
    pthread_mutex_lock(&device->lock);
    closing = device->closing;
    pthread_mutex_unlock(&device->lock);
  }
  return NULL;
}

int device_watch(struct device *device) {
  if (getenv("MORI_SIM_FAULT") == NULL) return 0;
  int error = pthread_create(&device->faults, NULL, look, device);
  device->watched = error == 0;
  return error;
}

void device_close(struct device *device) {
  pthread_mutex_lock(&device->lock);
  device->closing = true;
  pthread_mutex_unlock(&device->lock);
  if (device->watched) pthread_join(device->faults, NULL);
}
