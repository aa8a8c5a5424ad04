/* Element types of flat buckets. */
#ifndef SHARDSTEP_CORE_DTYPE_H
#define SHARDSTEP_CORE_DTYPE_H

#include <stddef.h>

typedef enum { SS_F32 = 0, SS_F64 = 1, SS_BF16 = 2, SS_F16 = 3 } ss_dtype;

static inline size_t ss_dtype_size(ss_dtype dtype)
{
    switch (dtype) {
    case SS_F32: return 4;
    case SS_F64: return 8;
    case SS_BF16: return 2;
    case SS_F16: return 2;
    }
    return 0;
}

#endif
