// Functions that UCX's modules are linked with, and that this driver does not have.
#include "standin.h"

#define ABSENT(name) \
    API Result name(void) { return NOT_SUPPORTED; }

ABSENT(cuMemCreate)
ABSENT(cuMemMap)
ABSENT(cuMemUnmap)
ABSENT(cuMemSetAccess)
ABSENT(cuMemAddressReserve)
ABSENT(cuMemAddressFree)
ABSENT(cuMemExportToShareableHandle)
ABSENT(cuMemImportFromShareableHandle)
ABSENT(cuMemGetHandleForAddressRange)
ABSENT(cuMemPoolDestroy)
ABSENT(cuMemPoolExportPointer)
ABSENT(cuMemPoolExportToShareableHandle)
ABSENT(cuMemPoolImportFromShareableHandle)
ABSENT(cuMemPoolImportPointer)
ABSENT(cuMemPoolSetAccess)
ABSENT(cuMemRangeGetAttribute)
ABSENT(cuMemcpyBatchAsync_v2)
