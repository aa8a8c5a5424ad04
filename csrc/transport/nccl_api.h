/*
 * NCCL's C interface, as much as is used here, resolved at run time: torch's own copy where it is loaded already. The
 * declarations are ours, from NCCL's documentation; they have not changed since 2.18, the oldest version accepted.
 */
#ifndef SHARDSTEP_TRANSPORT_NCCL_API_H
#define SHARDSTEP_TRANSPORT_NCCL_API_H

#include <stddef.h>

#include "core/dtype.h"
#include "core/status.h"

#define SS_NCCL_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define SS_NCCL_OLDEST SS_NCCL_VERSION(2, 18, 0)
#define SS_NCCL_HAS_MEMORY SS_NCCL_VERSION(2, 19, 0) /* ncclMemAlloc, ncclCommRegister */
#define SS_NCCL_HAS_WINDOWS SS_NCCL_VERSION(2, 27, 0)

enum { SS_NCCL_SUCCESS = 0, SS_NCCL_IN_PROGRESS = 7 }; /* ncclResult_t; every other value is a failure */
enum { SS_NCCL_SUM = 0 };                              /* ncclRedOp_t */
enum { SS_NCCL_INT8 = 0, SS_NCCL_FLOAT32 = 7, SS_NCCL_FLOAT64 = 8 }; /* ncclDataType_t */
enum { SS_NCCL_WINDOW_SYMMETRIC = 1 };

typedef struct ss_nccl_comm *ss_nccl_comm_t;
typedef struct {
    char internal[128];
} ss_nccl_id;

/* ncclConfig_t as of 2.18. NCCL reads `size` bytes and takes `version` to know what they are. */
typedef struct {
    size_t size;
    unsigned int magic, version;
    int blocking, cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} ss_nccl_config;
#define SS_NCCL_CONFIG_MAGIC 0xcafebeefu
#define SS_NCCL_UNDEFINED ((int)0x80000000)

typedef struct {
    int version; /* SS_NCCL_VERSION(...) */
    char path[512];
    int (*get_version)(int *version);
    int (*get_unique_id)(ss_nccl_id *id);
    int (*comm_init_rank_config)(ss_nccl_comm_t *comm, int world, ss_nccl_id id, int rank, ss_nccl_config *config);
    int (*comm_get_async_error)(ss_nccl_comm_t comm, int *error);
    int (*comm_finalize)(ss_nccl_comm_t comm);
    int (*comm_destroy)(ss_nccl_comm_t comm);
    int (*comm_abort)(ss_nccl_comm_t comm);
    const char *(*get_error_string)(int result);
    const char *(*get_last_error)(ss_nccl_comm_t comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*reduce_scatter)(const void *send, void *receive, size_t count, int type, int op, ss_nccl_comm_t comm, void *stream);
    int (*all_gather)(const void *send, void *receive, size_t count, int type, ss_nccl_comm_t comm, void *stream);
    /* NULL in versions that have none. */
    int (*mem_alloc)(void **memory, size_t size);
    int (*mem_free)(void *memory);
    int (*comm_register)(ss_nccl_comm_t comm, void *memory, size_t size, void **handle);
    int (*comm_deregister)(ss_nccl_comm_t comm, void *handle);
    int (*window_register)(ss_nccl_comm_t comm, void *memory, size_t size, void **window, int flags);
    int (*window_deregister)(ss_nccl_comm_t comm, void *window);
} ss_nccl_api;

/*
 * Fills `api`. With `override` (a path) that library and no other is used; else the libnccl.so.2 that is loaded already, then
 * `wheel` (a path, or NULL), then the system's. The library stays loaded until the process ends.
 */
ss_code ss_nccl_load(const char *override, const char *wheel, ss_nccl_api *api, ss_error *err);

#endif
