/*
 * A piece of memory that outlives whoever made it: tensors over a bucket hold a reference, so a weight the user kept
 * stays valid after the engine and its transport are gone.
 */
#ifndef SHARDSTEP_CORE_REGION_H
#define SHARDSTEP_CORE_REGION_H

#include <stddef.h>

#ifdef __cplusplus /* which has no stdatomic.h before C++23; std::atomic<int> is laid out alike */
#include <atomic>
using std::atomic_int;
#else
#include <stdatomic.h>
#endif

typedef struct ss_region ss_region;
struct ss_region {
    void *base;
    size_t bytes;
    atomic_int references;              /* set to 1 by the maker */
    void (*destroy)(ss_region *region); /* frees the memory and the struct itself */
};

static inline void ss_region_retain(ss_region *region) { atomic_fetch_add(&region->references, 1); }

static inline void ss_region_release(ss_region *region)
{
    if (region != NULL && atomic_fetch_sub(&region->references, 1) == 1) {
        region->destroy(region);
    }
}

#endif
