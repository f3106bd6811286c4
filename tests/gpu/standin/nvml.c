// A stand-in for NVIDIA's management library, which UCX links with: it finds no device.
#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum { NOT_SUPPORTED = 3 };

API const char *nvmlErrorString(int error) { return error ? "not supported by a stand-in" : "no error"; }
API int nvmlInit_v2(void) { return 0; }
API int nvmlShutdown(void) { return 0; }
API int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 0;
    return 0;
}

#define ABSENT(name) \
    API int name(void) { return NOT_SUPPORTED; }

ABSENT(nvmlDeviceGetFieldValues)
ABSENT(nvmlDeviceGetGpuFabricInfo)
ABSENT(nvmlDeviceGetGpuFabricInfoV)
ABSENT(nvmlDeviceGetHandleByIndex_v2)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT(nvmlDeviceGetPciInfo_v3)
