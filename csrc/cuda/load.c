#include "cuda/load.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static ss_code find(void *handle, const char *path, const char *name, void *function, ss_error *err)
{
    void *symbol = dlsym(handle, name);
    if (symbol == NULL) {
        return ss_fail(err, SS_ERR_USAGE, "the CUDA kernels in %s lack %s: install shardstep again", path, name);
    }
    memcpy(function, &symbol, sizeof symbol); /* ISO C has no conversion from an object to a function pointer; POSIX does */
    return SS_OK;
}

static ss_code check_abi(void *handle, const char *path, ss_error *err)
{
    int (*abi_version)(void) = NULL;
    SS_TRY(find(handle, path, "ss_cuda_abi_version", &abi_version, err));
    int version = abi_version();
    if (version != SS_CUDA_ABI_VERSION) {
        return ss_fail(err, SS_ERR_USAGE,
                       "the CUDA kernels in %s have interface version %d and this shardstep needs %d: install shardstep again",
                       path, version, SS_CUDA_ABI_VERSION);
    }
    return SS_OK;
}

static ss_code find_all(ss_cuda *cuda, const char *path, ss_error *err)
{
#define SS_CUDA_FIND(name) SS_TRY(find(cuda->handle, path, "ss_cuda_" #name, &cuda->name, err));
    SS_CUDA_FUNCTIONS(SS_CUDA_FIND)
#undef SS_CUDA_FIND
    return SS_OK;
}

/* CUDA's numbers: 13.1 is 13010. */
static int major_of(int version) { return version / 1000; }
static int minor_of(int version) { return version % 1000 / 10; }

/* A driver runs what any release of its major version was compiled for, and older ones. */
static ss_code check_versions(const ss_cuda *cuda, const char *torch_cuda, ss_error *err)
{
    int built = 0, driver = 0;
    SS_TRY(ss_cuda_check(cuda, cuda->versions(&built, &driver), "asking for CUDA's versions", err));
    int torch_major = atoi(torch_cuda);
    if (torch_major != major_of(built)) {
        return ss_fail(err, SS_ERR_USAGE,
                       "torch is built with CUDA %s and shardstep's kernels with CUDA %d.%d: install shardstep again with the "
                       "nvcc of CUDA %d",
                       torch_cuda, major_of(built), minor_of(built), torch_major);
    }
    if (driver == 0) {
        return ss_fail(err, SS_ERR_USAGE, "there is no NVIDIA driver on this host: CUDA tensors need one for CUDA %d or newer",
                       major_of(built));
    }
    if (major_of(driver) < major_of(built)) {
        return ss_fail(err, SS_ERR_USAGE,
                       "the NVIDIA driver is for CUDA %d.%d and older, shardstep's kernels are built with CUDA %d.%d: update the "
                       "driver to one for CUDA %d",
                       major_of(driver), minor_of(driver), major_of(built), minor_of(built), major_of(built));
    }
    return SS_OK;
}

ss_code ss_cuda_load(const char *path, const char *torch_cuda, ss_cuda *cuda, ss_error *err)
{
    memset(cuda, 0, sizeof *cuda);
    if (torch_cuda == NULL) {
        return ss_fail(err, SS_ERR_USAGE, "this torch is built without CUDA");
    }
    if (access(path, R_OK) != 0) {
        return ss_fail(err, SS_ERR_USAGE,
                       "shardstep is installed without its CUDA kernels (there is no %s): install it again where nvcc of CUDA %d "
                       "is on PATH or in CUDA_HOME",
                       path, atoi(torch_cuda));
    }
    cuda->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (cuda->handle == NULL) {
        return ss_fail(err, SS_ERR_USAGE, "cannot load the CUDA kernels: %s", dlerror());
    }
    ss_code code;
    SS_TRY_GOTO(code, check_abi(cuda->handle, path, err), fail);
    SS_TRY_GOTO(code, find_all(cuda, path, err), fail);
    SS_TRY_GOTO(code, check_versions(cuda, torch_cuda, err), fail);
    return SS_OK;
fail:
    ss_cuda_unload(cuda);
    return code;
}

void ss_cuda_unload(ss_cuda *cuda)
{
    if (cuda->handle != NULL) {
        dlclose(cuda->handle);
    }
    memset(cuda, 0, sizeof *cuda);
}

ss_code ss_cuda_check(const ss_cuda *cuda, int result, const char *what, ss_error *err)
{
    return result == 0 ? SS_OK : ss_fail(err, SS_ERR_USAGE, "%s failed: %s (CUDA error %d)", what, cuda->message(result), result);
}
