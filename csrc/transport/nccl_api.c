#define _GNU_SOURCE
#include "transport/nccl_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define SONAME "libnccl.so.2"

static void *open_library(const char *override, const char *wheel)
{
    if (override != NULL) {
        return dlopen(override, RTLD_NOW | RTLD_LOCAL);
    }
    void *library = dlopen(SONAME, RTLD_NOW | RTLD_NOLOAD);
    if (library == NULL && wheel != NULL) {
        library = dlopen(wheel, RTLD_NOW | RTLD_LOCAL);
    }
    return library != NULL ? library : dlopen(SONAME, RTLD_NOW | RTLD_LOCAL);
}

static void describe_version(int version, char *text, size_t size)
{
    if (version < 10000) { /* before 2.9 versions were numbered otherwise */
        snprintf(text, size, "%d.%d.%d", version / 1000, version % 1000 / 100, version % 100);
    } else {
        snprintf(text, size, "%d.%d.%d", version / 10000, version % 10000 / 100, version % 100);
    }
}

static ss_code check_version(ss_nccl_api *api, ss_error *err)
{
    char found[32], oldest[32];
    if (api->get_version(&api->version) != SS_NCCL_SUCCESS) {
        return ss_fail(err, SS_ERR_TRANSPORT, "%s does not tell its version", api->path);
    }
    if (api->version < SS_NCCL_OLDEST) {
        describe_version(api->version, found, sizeof found);
        describe_version(SS_NCCL_OLDEST, oldest, sizeof oldest);
        return ss_fail(err, SS_ERR_TRANSPORT,
                       "NCCL %s (%s) is too old: shardstep needs %s or newer. Install a newer nvidia-nccl package, or name a "
                       "library in SHARDSTEP_NCCL", found, api->path, oldest);
    }
    return SS_OK;
}

/* POSIX has dlsym's void * hold a function; ISO C wants the detour. */
static int resolve(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);
    memcpy(slot, &symbol, sizeof symbol);
    return symbol != NULL;
}

ss_code ss_nccl_load(const char *override, const char *wheel, ss_nccl_api *api, ss_error *err)
{
    memset(api, 0, sizeof *api);
    void *library = open_library(override, wheel);
    if (library == NULL) {
        const char *why = dlerror();
        return ss_fail(err, SS_ERR_TRANSPORT,
                       "NCCL was not found: %s. It comes with a CUDA build of torch (package nvidia-nccl-cu12 or -cu13); "
                       "SHARDSTEP_NCCL=/path/to/libnccl.so.2 names another", why != NULL ? why : SONAME);
    }
    Dl_info info = {0};
    void *version = dlsym(library, "ncclGetVersion");
    snprintf(api->path, sizeof api->path, "%s",
             version != NULL && dladdr(version, &info) != 0 && info.dli_fname != NULL ? info.dli_fname
             : override != NULL                                                       ? override
                                                                                      : SONAME);
    const struct {
        const char *name;
        void *slot;
        int since;
    } symbols[] = {
        {"ncclGetVersion", &api->get_version, 0},
        {"ncclGetUniqueId", &api->get_unique_id, SS_NCCL_OLDEST},
        {"ncclCommInitRankConfig", &api->comm_init_rank_config, SS_NCCL_OLDEST},
        {"ncclCommGetAsyncError", &api->comm_get_async_error, SS_NCCL_OLDEST},
        {"ncclCommFinalize", &api->comm_finalize, SS_NCCL_OLDEST},
        {"ncclCommDestroy", &api->comm_destroy, SS_NCCL_OLDEST},
        {"ncclCommAbort", &api->comm_abort, SS_NCCL_OLDEST},
        {"ncclGetErrorString", &api->get_error_string, SS_NCCL_OLDEST},
        {"ncclGetLastError", &api->get_last_error, SS_NCCL_OLDEST},
        {"ncclGroupStart", &api->group_start, SS_NCCL_OLDEST},
        {"ncclGroupEnd", &api->group_end, SS_NCCL_OLDEST},
        {"ncclReduceScatter", &api->reduce_scatter, SS_NCCL_OLDEST},
        {"ncclAllGather", &api->all_gather, SS_NCCL_OLDEST},
        {"ncclMemAlloc", &api->mem_alloc, SS_NCCL_HAS_MEMORY},
        {"ncclMemFree", &api->mem_free, SS_NCCL_HAS_MEMORY},
        {"ncclCommRegister", &api->comm_register, SS_NCCL_HAS_MEMORY},
        {"ncclCommDeregister", &api->comm_deregister, SS_NCCL_HAS_MEMORY},
        {"ncclCommWindowRegister", &api->window_register, SS_NCCL_HAS_WINDOWS},
        {"ncclCommWindowDeregister", &api->window_deregister, SS_NCCL_HAS_WINDOWS},
    };
    for (size_t k = 0; k < sizeof symbols / sizeof *symbols; k++) {
        if (symbols[k].since > api->version && symbols[k].since > SS_NCCL_OLDEST) {
            continue; /* this version has none */
        }
        if (!resolve(library, symbols[k].name, symbols[k].slot)) {
            return ss_fail(err, SS_ERR_TRANSPORT, "%s is not NCCL: it has no %s", api->path, symbols[k].name);
        }
        if (k == 0) {
            SS_TRY(check_version(api, err));
        }
    }
    return SS_OK;
}
