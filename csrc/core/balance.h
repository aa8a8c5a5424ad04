/* Whole parameters over ranks: who gets which, so that the largest load is small. */
#ifndef SHARDSTEP_CORE_BALANCE_H
#define SHARDSTEP_CORE_BALANCE_H

#include <stdint.h>

typedef struct {
    int64_t size;
    int32_t key;  /* orders items of equal size; unique */
    int32_t rank; /* out: who gets it */
} ss_item;

/*
 * Divides the items among `world` ranks by MULTIFIT (Coffman, Garey and Johnson 1978): the smallest capacity, to half a
 * percent, for which putting each item, longest first, to the first rank that has room succeeds. At most 13/11 of the best
 * possible largest load, and the same on every rank. The items come back longest first. Returns the largest load; -1 without
 * memory.
 */
int64_t ss_balance(ss_item *items, int32_t n, int world);

#endif
