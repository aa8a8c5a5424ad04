/*
 * Where every parameter lives: parameters -> buckets -> rank segments. Pure functions over counts; no memory, no ranks'
 * state. Everything is 64-bit.
 *
 * Parameters fill buckets in reverse registration order (about the order in which backward produces gradients), one
 * open bucket per pair of dtypes and kind. A bucket is `world` equal segments. Usually they ignore parameter boundaries;
 * bucket boundaries do not depend on the world size then, only the padding at a bucket's end does. Parameters of a whole
 * kind are never cut: each lies in one rank's segment, the ranks' loads are balanced, and the segment is the largest load.
 */
#ifndef SHARDSTEP_CORE_LAYOUT_H
#define SHARDSTEP_CORE_LAYOUT_H

#include <stdint.h>

#include "core/dtype.h"
#include "core/status.h"

/* Segments are multiples of this many elements: 256 bytes of the smallest element type. */
#define SS_SEGMENT_ALIGN 128
/* Parameters begin at multiples of this many elements: one cache line of FP32. */
#define SS_PARAM_ALIGN 16
/* Of a parameter's kind: it is placed whole. Parameters of different kinds share no bucket. */
#define SS_KIND_WHOLE 1
/* A bucket of whole parameters is large enough when at most one part in this many of it is padding. */
#define SS_WHOLE_PADDING 16

typedef struct {
    int64_t numel;
    ss_dtype param_dtype;
    ss_dtype grad_dtype;
    int pairs; /* 1: a complex parameter, whose elements count as two, real and imaginary part; only norms tell them apart */
} ss_param_spec;

typedef struct {
    int32_t bucket; /* -1: this parameter is not in the layout */
    int64_t offset; /* elements from the bucket's begin */
} ss_placement;

typedef struct {
    ss_dtype param_dtype, grad_dtype;
    int32_t kind;
    int32_t first_member, n_members; /* range in ss_layout.members */
    int64_t used;                    /* elements up to the last parameter's end */
    int64_t segment;                 /* elements per rank */
} ss_bucket_shape;

typedef struct {
    int world;
    int32_t n_params, n_buckets;
    ss_placement *placements; /* [n_params] */
    ss_bucket_shape *buckets; /* [n_buckets] */
    int32_t *members;         /* parameter indices, grouped by bucket in order of offset */
    int32_t n_members;
} ss_layout;

/* The part of a parameter that falls into one rank's segment. numel is 0 where there is none. */
typedef struct {
    int64_t in_param;   /* elements from the parameter's begin */
    int64_t in_segment; /* elements from the segment's begin */
    int64_t numel;
} ss_piece;

/* An empty layout over n_params parameters. */
ss_code ss_layout_init(ss_layout *layout, int world, int32_t n_params, ss_error *err);
void ss_layout_free(ss_layout *layout);

/*
 * Adds new buckets for `count` parameters, given by index in registration order with their kinds (NULL: all 0); none may
 * be placed already. A bucket is closed before a parameter that would take its gradients past `bucket_bytes`; one of whole
 * parameters after one that does, once its padding is small. New buckets are numbered in the order in which backward
 * completes them.
 */
ss_code ss_layout_add(ss_layout *layout, const ss_param_spec *specs, const int32_t *params, const int32_t *kinds,
                      int32_t count, int64_t bucket_bytes, ss_error *err);

/* What rank `rank` owns of parameter `param`, which has `numel` elements. */
ss_piece ss_layout_piece(const ss_layout *layout, int32_t param, int64_t numel, int rank);

/* Does it lie in one rank's segment? */
int ss_layout_is_whole(const ss_layout *layout, int32_t param, int64_t numel);

#endif
