/* Element work on what this rank owns of one parameter's gradient, in the bucket or in its carry. */
#include "core/engine_state.h"
#include "core/work.h"

static ss_dtype dtype_of(const ss_engine *e, int32_t i) { return e->params[i].spec.grad_dtype; }

void ss_piece_scale(ss_engine *e, int32_t i)
{
    ss_param *p = &e->params[i];
    if (p->scale == 1.0) {
        return;
    }
    /* Ranks must agree on whether norms are known, so this does not depend on what this one owns. */
    if (p->piece.numel > 0) {
        ss_work_scale(e, dtype_of(e, i), ss_piece_grad(e, i), p->scale, p->piece.numel);
    }
    p->scale = 1.0;
    e->buckets[e->layout.placements[i].bucket].norms_ready = false;
    e->norms_valid = false;
}

void ss_piece_zero(ss_engine *e, int32_t i, bool carry)
{
    ss_param *p = &e->params[i];
    if (p->piece.numel > 0) {
        void *at = carry ? ss_piece_carry(e, i) : ss_piece_grad(e, i);
        ss_work_zero(e, at, (size_t)p->piece.numel * ss_dtype_size(p->spec.grad_dtype));
    }
}

/* gradient = carry + gradient * scale */
void ss_piece_add_carry(ss_engine *e, int32_t i, double scale)
{
    const ss_param *p = &e->params[i];
    if (p->piece.numel > 0) {
        ss_work_add_scaled(e, dtype_of(e, i), ss_piece_grad(e, i), ss_piece_carry(e, i), scale, p->piece.numel);
    }
}

/* carry = gradient * scale */
void ss_piece_to_carry(ss_engine *e, int32_t i, double scale)
{
    const ss_param *p = &e->params[i];
    if (p->piece.numel == 0) {
        return;
    }
    ss_work_copy(e, ss_piece_carry(e, i), ss_piece_grad(e, i), (size_t)p->piece.numel * ss_dtype_size(dtype_of(e, i)));
    ss_work_scale(e, dtype_of(e, i), ss_piece_carry(e, i), scale, p->piece.numel);
}
