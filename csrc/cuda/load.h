/* Loads the library of the CUDA kernels (cuda/), which is there only where it was built, and of use only where there is a GPU. */
#ifndef SHARDSTEP_CUDA_LOAD_H
#define SHARDSTEP_CUDA_LOAD_H

#include "core/status.h"
#include "shardstep_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Its functions: adam is ss_cuda_adam, and so on. */
typedef struct {
    void *handle;
#define SS_CUDA_MEMBER(name) __typeof__(&ss_cuda_##name) name;
    SS_CUDA_FUNCTIONS(SS_CUDA_MEMBER)
#undef SS_CUDA_MEMBER
} ss_cuda;

/*
 * Loads the library at `path`. Fails, saying what to do, when it is not there or of another shardstep, when there is no NVIDIA
 * driver or one too old for it, and when it is built with another major version of CUDA than torch. `torch_cuda` is
 * torch.version.cuda, NULL for a torch without CUDA. Touches no GPU.
 */
ss_code ss_cuda_load(const char *path, const char *torch_cuda, ss_cuda *cuda, ss_error *err);
/* No work of its kernels may be in flight. */
void ss_cuda_unload(ss_cuda *cuda);

/* 0 is SS_OK; any other result of a function of the library becomes an error that says `what` failed. */
ss_code ss_cuda_check(const ss_cuda *cuda, int result, const char *what, ss_error *err);

#ifdef __cplusplus
}
#endif
#endif
