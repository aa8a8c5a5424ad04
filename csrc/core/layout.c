#include "core/layout.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/balance.h"

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

/* ---- Filling buckets: which parameter goes into which, in the order of backward ---- */

/* A bucket while it is filled. Its members are a list through `fill.next`, the last one first. */
typedef struct {
    ss_dtype param_dtype, grad_dtype;
    int32_t kind;
    int32_t last, n_members; /* positions in `fill.params` */
    int64_t size;            /* elements with the padding between parameters */
    int64_t balanced_at;     /* whole: not balanced below this size */
} filling;

typedef struct {
    const ss_layout *layout;
    const ss_param_spec *specs;
    const int32_t *params, *kinds;
    int64_t bucket_bytes;
    filling *buckets; /* in order of their first parameter */
    int32_t n_buckets;
    int32_t *next;  /* [count] */
    ss_item *items; /* [count], scratch */
} fill;

static bool is_whole(int32_t kind) { return (kind & SS_KIND_WHOLE) != 0; }

static void append(fill *f, filling *b, int32_t k)
{
    f->next[k] = b->last;
    b->last = k;
    b->n_members++;
    b->size = round_up(b->size, SS_PARAM_ALIGN) + f->specs[f->params[k]].numel;
}

/* Divides the bucket's parameters among the ranks; f->items says how. Returns the segment that takes, -1 without memory. */
static int64_t balance(const fill *f, const filling *b)
{
    int32_t n = 0;
    for (int32_t k = b->last; k >= 0; k = f->next[k]) {
        f->items[n++] = (ss_item){round_up(f->specs[f->params[k]].numel, SS_PARAM_ALIGN), k, 0};
    }
    int64_t load = ss_balance(f->items, n, f->layout->world);
    return load < 0 ? -1 : round_up(load > 0 ? load : 1, SS_SEGMENT_ALIGN);
}

static bool padding_is_small(const fill *f, const filling *b, int64_t segment)
{
    return f->layout->world * segment - b->size <= b->size / SS_WHOLE_PADDING;
}

/* Is this bucket full, with the next parameter (or, of a whole kind, with those it has)? */
static bool is_full(const fill *f, filling *b, const ss_param_spec *next)
{
    int64_t element = (int64_t)ss_dtype_size(b->grad_dtype);
    if (!is_whole(b->kind)) {
        return b->size > 0 && (round_up(b->size, SS_PARAM_ALIGN) + next->numel) * element > f->bucket_bytes;
    }
    if (b->size * element < f->bucket_bytes || b->size < b->balanced_at) {
        return false;
    }
    b->balanced_at = b->size + b->size / SS_WHOLE_PADDING;
    return padding_is_small(f, b, balance(f, b));
}

static bool same_kind(const filling *a, const filling *b)
{
    return a->kind == b->kind && a->param_dtype == b->param_dtype && a->grad_dtype == b->grad_dtype;
}

/* The last bucket of the same kind as `like` among the first `n`, or NULL. Merged ones have no members. */
static filling *last_of_kind(const fill *f, const filling *like, int32_t n)
{
    while (n-- > 0) {
        if (f->buckets[n].n_members > 0 && same_kind(&f->buckets[n], like)) {
            return &f->buckets[n];
        }
    }
    return NULL;
}

static void add(fill *f, int32_t k)
{
    const ss_param_spec *spec = &f->specs[f->params[k]];
    filling fresh = {.param_dtype = spec->param_dtype,
                     .grad_dtype = spec->grad_dtype,
                     .kind = f->kinds != NULL ? f->kinds[k] : 0,
                     .last = -1};
    filling *b = last_of_kind(f, &fresh, f->n_buckets);
    if (b == NULL || is_full(f, b, spec)) {
        b = &f->buckets[f->n_buckets++];
        *b = fresh;
    }
    append(f, b, k);
}

static void merge(const fill *f, filling *from, filling *into)
{
    int32_t first = from->last;
    while (f->next[first] >= 0) {
        first = f->next[first];
    }
    f->next[first] = into->last;
    into->last = from->last;
    into->n_members += from->n_members;
    into->size += from->size;
    from->n_members = 0;
}

/* What is left at the end of a whole kind may be too little to be divided well. When that is felt in all of its kind, it goes
   into the bucket before it. */
static void merge_rests(const fill *f)
{
    for (int32_t j = f->n_buckets - 1; j > 0; j--) {
        filling *b = &f->buckets[j], *before = last_of_kind(f, b, j);
        if (!is_whole(b->kind) || before == NULL || last_of_kind(f, b, f->n_buckets) != b) {
            continue;
        }
        int64_t total = 0;
        for (int32_t k = 0; k < f->n_buckets; k++) {
            total += f->buckets[k].n_members > 0 && same_kind(&f->buckets[k], b) ? f->buckets[k].size : 0;
        }
        if (f->layout->world * balance(f, b) - b->size > total / SS_WHOLE_PADDING) {
            merge(f, b, before);
        }
    }
}

/* ---- Placing: buckets get numbers, parameters offsets ---- */

/* Backward goes through positions downwards. */
static int completed_first(const void *a, const void *b)
{
    const filling *x = a, *y = b;
    return x->last > y->last ? -1 : x->last < y->last;
}

static int by_key(const void *a, const void *b)
{
    const ss_item *x = a, *y = b;
    if (x->rank != y->rank) {
        return x->rank < y->rank ? -1 : 1;
    }
    return x->key > y->key ? -1 : x->key < y->key;
}

static ss_code place(ss_layout *layout, const fill *f, const filling *b, ss_error *err)
{
    int32_t number = layout->n_buckets++, n = b->n_members;
    ss_bucket_shape *shape = &layout->buckets[number];
    *shape = (ss_bucket_shape){.param_dtype = b->param_dtype,
                               .grad_dtype = b->grad_dtype,
                               .kind = b->kind,
                               .first_member = layout->n_members,
                               .n_members = n};
    if (is_whole(b->kind)) {
        shape->segment = balance(f, b);
        if (shape->segment < 0) {
            return ss_fail(err, SS_ERR_NO_MEMORY, "no memory to divide %d parameters among %d ranks", n, layout->world);
        }
        qsort(f->items, (size_t)n, sizeof *f->items, by_key);
    } else {
        int64_t per_rank = (b->size + layout->world - 1) / layout->world;
        shape->segment = round_up(per_rank > 0 ? per_rank : 1, SS_SEGMENT_ALIGN);
        for (int32_t k = b->last, m = n - 1; k >= 0; k = f->next[k], m--) {
            f->items[m] = (ss_item){0, k, 0};
        }
    }
    int64_t offset = 0;
    for (int32_t m = 0; m < n; m++) {
        const ss_item *item = &f->items[m];
        int32_t i = f->params[item->key];
        int64_t begin = item->rank * shape->segment; /* of a rank that has none of the earlier ones */
        offset = offset > begin ? offset : begin;
        layout->placements[i] = (ss_placement){number, offset};
        layout->members[layout->n_members++] = i;
        shape->used = offset + f->specs[i].numel;
        offset = round_up(shape->used, SS_PARAM_ALIGN);
    }
    return SS_OK;
}

ss_code ss_layout_add(ss_layout *layout, const ss_param_spec *specs, const int32_t *params, const int32_t *kinds,
                      int32_t count, int64_t bucket_bytes, ss_error *err)
{
    size_t n = (size_t)count + 1;
    fill f = {.layout = layout, .specs = specs, .params = params, .kinds = kinds, .bucket_bytes = bucket_bytes};
    ss_code code = SS_OK;
    ss_bucket_shape *grown = realloc(layout->buckets, ((size_t)layout->n_buckets + n) * sizeof *grown);
    layout->buckets = grown != NULL ? grown : layout->buckets;
    f.buckets = malloc(n * sizeof *f.buckets);
    f.next = malloc(n * sizeof *f.next);
    f.items = malloc(n * sizeof *f.items);
    if (grown == NULL || f.buckets == NULL || f.next == NULL || f.items == NULL) {
        code = ss_fail(err, SS_ERR_NO_MEMORY, "no memory for the layout of %d parameters", count);
        goto out;
    }
    for (int32_t k = 0; k < count; k++) {
        int32_t i = params[k];
        if (i < 0 || i >= layout->n_params || layout->placements[i].bucket >= 0 || (k > 0 && i <= params[k - 1])) {
            code = ss_fail(err, SS_ERR_USAGE, "parameter %d cannot be placed (twice)", i);
            goto out;
        }
    }
    for (int32_t k = count - 1; k >= 0; k--) {
        add(&f, k);
    }
    merge_rests(&f);
    qsort(f.buckets, (size_t)f.n_buckets, sizeof *f.buckets, completed_first);
    for (int32_t j = 0; code == SS_OK && j < f.n_buckets; j++) {
        if (f.buckets[j].n_members > 0) {
            code = place(layout, &f, &f.buckets[j], err);
        }
    }
out:
    free(f.buckets);
    free(f.next);
    free(f.items);
    return code;
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

int ss_layout_is_whole(const ss_layout *layout, int32_t param, int64_t numel)
{
    const ss_placement *place = &layout->placements[param];
    int64_t segment = place->bucket >= 0 ? layout->buckets[place->bucket].segment : 1;
    return numel == 0 || place->offset / segment == (place->offset + numel - 1) / segment;
}
