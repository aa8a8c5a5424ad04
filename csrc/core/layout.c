#include "core/layout.h"

#include <stdlib.h>
#include <string.h>

static int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

ss_code ss_layout_init(ss_layout *layout, int world, int32_t n_params, ss_error *err)
{
    memset(layout, 0, sizeof *layout);
    if (world < 1 || n_params < 0) {
        return ss_fail(err, SS_ERR_USAGE, "a layout needs world >= 1 and n_params >= 0, not %d and %d", world, n_params);
    }
    layout->world = world;
    layout->n_params = n_params;
    layout->placements = calloc((size_t)n_params + 1, sizeof *layout->placements);
    layout->members = calloc((size_t)n_params + 1, sizeof *layout->members);
    if (layout->placements == NULL || layout->members == NULL) {
        ss_layout_free(layout);
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the layout of %d parameters", n_params);
    }
    for (int32_t i = 0; i < n_params; i++) {
        layout->placements[i].bucket = -1;
    }
    return SS_OK;
}

void ss_layout_free(ss_layout *layout)
{
    free(layout->placements);
    free(layout->buckets);
    free(layout->members);
    memset(layout, 0, sizeof *layout);
}

/* The last bucket of each dtype pair while buckets are being filled. Four dtypes make at most sixteen pairs. */
typedef struct {
    int32_t bucket; /* -1: none is open */
} open_bucket;

static int pair_of(const ss_param_spec *spec) { return (int)spec->param_dtype * 4 + (int)spec->grad_dtype; }

ss_code ss_layout_add(ss_layout *layout, const ss_param_spec *specs, const int32_t *params, int32_t count,
                      int64_t bucket_bytes, ss_error *err)
{
    int32_t old_buckets = layout->n_buckets;
    open_bucket open[16];
    for (int k = 0; k < 16; k++) {
        open[k].bucket = -1;
    }
    ss_bucket_shape *grown = realloc(layout->buckets, ((size_t)old_buckets + (size_t)count + 1) * sizeof *grown);
    if (grown == NULL) {
        return ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the layout of %d parameters", count);
    }
    layout->buckets = grown;

    for (int32_t k = count - 1; k >= 0; k--) {
        int32_t i = params[k];
        if (i < 0 || i >= layout->n_params || layout->placements[i].bucket >= 0) {
            return ss_fail(err, SS_ERR_USAGE, "parameter %d cannot be placed (twice)", i);
        }
        const ss_param_spec *spec = &specs[i];
        open_bucket *slot = &open[pair_of(spec)];
        ss_bucket_shape *b = slot->bucket >= 0 ? &layout->buckets[slot->bucket] : NULL;
        int64_t begin = b != NULL ? round_up(b->used, SS_PARAM_ALIGN) : 0;
        int64_t bytes = (begin + spec->numel) * (int64_t)ss_dtype_size(spec->grad_dtype);
        if (b == NULL || (bytes > bucket_bytes && b->used > 0)) {
            slot->bucket = layout->n_buckets++;
            b = &layout->buckets[slot->bucket];
            memset(b, 0, sizeof *b);
            b->param_dtype = spec->param_dtype;
            b->grad_dtype = spec->grad_dtype;
            begin = 0;
        }
        layout->placements[i] = (ss_placement){slot->bucket, begin};
        b->used = begin + spec->numel;
        b->n_members++;
    }

    /* Counting sort of the members by bucket; within a bucket the order of placement is the order of offsets. */
    int32_t next = layout->n_members;
    for (int32_t b = old_buckets; b < layout->n_buckets; b++) {
        ss_bucket_shape *bucket = &layout->buckets[b];
        bucket->first_member = next;
        next += bucket->n_members;
        bucket->n_members = 0;
        int64_t per_rank = (bucket->used + layout->world - 1) / layout->world;
        bucket->segment = round_up(per_rank > 0 ? per_rank : 1, SS_SEGMENT_ALIGN);
    }
    for (int32_t k = count - 1; k >= 0; k--) {
        ss_bucket_shape *bucket = &layout->buckets[layout->placements[params[k]].bucket];
        layout->members[bucket->first_member + bucket->n_members++] = params[k];
    }
    layout->n_members = next;
    return SS_OK;
}

ss_piece ss_layout_piece(const ss_layout *layout, int32_t param, int64_t numel, int rank)
{
    ss_piece piece = {0, 0, 0};
    const ss_placement *place = &layout->placements[param];
    if (place->bucket < 0) {
        return piece;
    }
    int64_t segment = layout->buckets[place->bucket].segment;
    int64_t begin = rank * segment, end = begin + segment;
    int64_t from = place->offset > begin ? place->offset : begin;
    int64_t to = place->offset + numel < end ? place->offset + numel : end;
    if (from < to) {
        piece.in_param = from - place->offset;
        piece.in_segment = from - begin;
        piece.numel = to - from;
    }
    return piece;
}
