// What MoRI asks of ROCm and of the PCI bus before it moves host memory: HIP has no device, rocm-smi counts one GPU, and
// the bus is empty.

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { HIP_NO_DEVICE = 100 };

int hipGetDeviceCount(int *count) {
  *count = 0;
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
  const char *gpus = getenv("MORI_SIM_GPUS");
  *count = gpus != NULL ? atoi(gpus) : 1;
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
