// What MoRI asks of ROCm and of the PCI bus before it moves host memory: rocm-smi counts one GPU, or MORI_SIM_GPUS, HIP can
// use them only where there are several, and the bus is empty.

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { HIP_NO_DEVICE = 100 };

static int gpus(void) {
  const char *given = getenv("MORI_SIM_GPUS");
  return given != NULL ? atoi(given) : 1;
}

int hipGetDeviceCount(int *count) {
  *count = gpus() > 1 ? gpus() : 0;
  return 0;
}

int hipDeviceCanAccessPeer(int *can, int from, int to) {
  *can = 1;
  return 0;
}

int hipGetDevice(int *device) {
  *device = 0;
  return HIP_NO_DEVICE;
}

const char *hipGetErrorString(int error) { return error == 0 ? "no error" : "no device: this is a stand-in for HIP"; }

void *pci_alloc(void) {
  static char access[4096];
  return access;
}

int rsmi_init(uint64_t flags) { return 0; }
int rsmi_shut_down(void) { return 0; }

int rsmi_num_monitor_devices(uint32_t *count) {
  *count = gpus();
  return 0;
}

int rsmi_dev_pci_id_get(uint32_t index, uint64_t *id) {
  *id = 1 << 8;  // bus 1
  return 0;
}

int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, bool *can) {
  *can = false;
  return 0;
}

int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type) {
  *hops = 1;
  *type = 0;
  return 0;
}

int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) {
  *weight = 1;
  return 0;
}

int rsmi_status_string(int status, const char **text) {
  *text = "this is a stand-in for rocm-smi";
  return 0;
}
