/*
 * Is this still the process that made the mark, or a forked child? Asked at every gradient, so without a system call: the
 * kernel wipes the marked page in a child.
 */
#ifndef SHARDSTEP_CORE_ORIGIN_H
#define SHARDSTEP_CORE_ORIGIN_H

#include <stdbool.h>
#include <stdint.h>

#include "core/status.h"

typedef struct {
    const volatile uint8_t *page; /* its first byte is 1 here and 0 in a child */
} ss_origin;

ss_code ss_origin_mark(ss_origin *origin, ss_error *err);
void ss_origin_forget(ss_origin *origin);

static inline bool ss_origin_is_here(const ss_origin *origin) { return *origin->page == 1; }

#endif
