/* Versions and messages. */
#include "grid.h"

int ss_cuda_abi_version(void) { return SS_CUDA_ABI_VERSION; }

#ifdef __CUDACC__
int ss_cuda_versions(int *runtime, int *driver)
{
    *runtime = CUDART_VERSION;
    return (int)cudaDriverGetVersion(driver);
}
#else
int ss_cuda_versions(int *runtime, int *driver)
{
    *runtime = *driver = 0;
    return SS_CUDA_OK;
}
#endif

const char *ss_cuda_message(int code)
{
    switch (code) {
    case SS_CUDA_OK: return "no error";
    case SS_CUDA_ERR_SIZE: return "a struct is of another version of the CUDA kernels";
    case SS_CUDA_ERR_DTYPE: return "no CUDA kernel for these element types";
    case SS_CUDA_ERR_WORKSPACE: return "too little workspace for the CUDA kernels, or not aligned to 16 bytes";
    case SS_CUDA_ERR_ARGUMENT: return "an argument of the CUDA kernels is missing or out of range";
    default: break;
    }
#ifdef __CUDACC__
    return cudaGetErrorString((cudaError_t)code);
#else
    return "unknown error";
#endif
}
