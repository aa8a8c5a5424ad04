/*
 * A test double of the library of the CUDA kernels, for tests of its loader: it has its functions, which do nothing, and the
 * versions that are defined when it is compiled. LACKS_ADOPT leaves one out.
 */
#include "shardstep_cuda.h"

#ifndef ABI
#define ABI SS_CUDA_ABI_VERSION
#endif

int ss_cuda_abi_version(void) { return ABI; }

int ss_cuda_versions(int *runtime, int *driver)
{
    *runtime = RUNTIME;
    *driver = DRIVER;
    return RESULT;
}

const char *ss_cuda_message(int code) { return code == 0 ? "no error" : "a fake failure"; }

#define DOUBLE(name) \
    SS_CUDA_EXPORT void fake_##name(void) __asm__("ss_cuda_" #name); \
    void fake_##name(void) {}

DOUBLE(adam) DOUBLE(sgd) DOUBLE(norm_workspace) DOUBLE(norms) DOUBLE(clip) DOUBLE(skip) DOUBLE(zero) DOUBLE(scale)
DOUBLE(add_scaled) DOUBLE(add) DOUBLE(cast)
#ifndef LACKS_ADOPT
DOUBLE(adopt)
#endif
