/*
 * The fused updates: scale, update and cast, of many pieces, in one pass over memory. The rules are kernels/numeric.h's, line
 * for line those of the CPU.
 *
 * A step is two kernels. The first has one thread per piece: it reads what only the device knows (scale, clip coefficient, skip
 * flag), advances the step count, and leaves the constants of the rule, with their powers in FP64, to the second.
 */
#include "chunks.h"

/* ---- Constants ---- */

struct step_constants {
    int32_t skip;
    int32_t decay;       /* SGD: there is weight decay; Adam: it is L2 regularisation */
    ss_momentum momentum;
    int32_t nesterov;
    union {
        ss_adam_constants adam;
        ss_sgd_constants sgd;
    };
};
static_assert(sizeof(step_constants) <= SS_CUDA_UPDATE_WORKSPACE, "the workspace that the header asks for");

struct prepare_entry {
    float *step;
    double grad_scale;
    ss_cuda_options options;
    int32_t momentum;
};

struct adam {
    static const int states = 3;

    static SS_ON_DEVICE void prepare(const prepare_entry &e, float grad_scale, double step, step_constants *c)
    {
        ss_adam_args args = {};
        args.grad_scale = grad_scale;
        args.lr = e.options.lr;
        args.beta1 = e.options.beta1;
        args.beta2 = e.options.beta2;
        args.eps = e.options.eps;
        args.weight_decay = e.options.weight_decay;
        args.step = step;
        args.decoupled = e.options.decoupled;
        args.maximize = e.options.maximize;
        c->adam = ss_adam_prepare(&args);
        c->decay = !e.options.decoupled && e.options.weight_decay != 0.0;
    }

    static SS_ON_DEVICE float apply(const step_constants &c, float p, float grad, float *exp_avg, float *exp_avg_sq,
                                    float *max_exp_avg_sq, bool amsgrad, bool tail)
    {
        return ss_adam_rule(&c.adam, p, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, c.decay, amsgrad, tail);
    }
};

struct sgd {
    static const int states = 1;

    static SS_ON_DEVICE void prepare(const prepare_entry &e, float grad_scale, double step, step_constants *c)
    {
        ss_sgd_args args = {};
        args.grad_scale = grad_scale;
        args.lr = e.options.lr;
        args.momentum = e.options.momentum;
        args.dampening = e.options.dampening;
        args.weight_decay = e.options.weight_decay;
        args.maximize = e.options.maximize;
        c->sgd = ss_sgd_prepare(&args);
        c->decay = e.options.weight_decay != 0.0;
        c->momentum = !e.momentum ? SS_MOMENTUM_NONE : step <= 1.0 ? SS_MOMENTUM_FIRST : SS_MOMENTUM_NEXT;
        c->nesterov = e.options.nesterov;
    }

    static SS_ON_DEVICE float apply(const step_constants &c, float p, float grad, float *buffer, float *, float *, bool, bool)
    {
        return ss_sgd_rule(&c.sgd, p, grad, buffer, c.decay, c.momentum, c.nesterov);
    }
};

template <class Rule> struct prepare {
    struct table {
        int32_t count;
        const double *scale, *clip;
        const int32_t *skip;
        step_constants *constants;
        prepare_entry entry[SS_CUDA_PIECES_PER_LAUNCH];
    };

    static SS_ON_DEVICE void block(const table &work, int64_t)
    {
        SS_THREADS_DO(t)
        {
            if (t < work.count) {
                one(work, t);
            }
        }
    }

    static SS_ON_DEVICE void one(const table &work, int t)
    {
        const prepare_entry &e = work.entry[t];
        step_constants *c = &work.constants[t];
        c->skip = work.skip != NULL && *work.skip != 0;
        if (c->skip) {
            return;
        }
        float step = 0.0f;
        if (e.step != NULL) {
            step = *e.step + 1.0f;
            *e.step = step;
        }
        double scale = e.grad_scale;
        scale *= work.scale != NULL ? *work.scale : 1.0;
        scale *= work.clip != NULL ? *work.clip : 1.0;
        Rule::prepare(e, (float)scale, step, c);
    }
};
static_assert(SS_CUDA_PIECES_PER_LAUNCH <= SS_THREADS, "one thread prepares one piece");

/* ---- Elements ---- */

struct update_entry {
    ss_span span;
    float *param;
    void *low;
    const void *grad;
    float *state[3];
    int64_t body; /* elements from here on are the parameter's tail */
    int32_t constants;
};

template <class Rule, class Low, class Grad> struct update {
    struct table : ss_table<update_entry> {
        const step_constants *constants;
    };

    static SS_ON_DEVICE void block(const table &work, int64_t chunk)
    {
        int32_t i = ss_range_of(work, chunk);
        const update_entry &e = work.entry[i];
        const step_constants c = work.constants[e.constants];
        if (c.skip) {
            return;
        }
        int64_t first = (chunk - work.first[i]) * SS_CHUNK_PACKS;
        SS_THREADS_DO(t)
        {
            for (int64_t number = first + t; number < first + SS_CHUNK_PACKS; number += SS_THREADS) {
                ss_pack pack = ss_pack_of(e.span, number);
                if (pack.from < pack.to) {
                    one(e, c, pack);
                }
            }
        }
    }

    static SS_ON_DEVICE void one(const update_entry &e, const step_constants &c, const ss_pack &pack)
    {
        float p[SS_PACK], state[3][SS_PACK] = {};
        typename Grad::raw grad[SS_PACK];
        typename Low::raw low[SS_PACK];
        ss_load<f32>(pack, e.param, p);
        ss_load<Grad>(pack, (const typename Grad::raw *)e.grad, grad);
        SS_UNROLL
        for (int k = 0; k < Rule::states; k++) {
            if (e.state[k] != NULL) {
                ss_load<f32>(pack, e.state[k], state[k]);
            }
        }
        if constexpr (Low::present) {
            ss_load<Low>(pack, (const typename Low::raw *)e.low, low);
        }
        SS_UNROLL
        for (int k = 0; k < SS_PACK; k++) {
            if constexpr (Low::present) { /* adopt what the user wrote */
                p[k] = Low::narrow(p[k]) == low[k] ? p[k] : Low::widen(low[k]);
            }
            p[k] = Rule::apply(c, p[k], Grad::widen(grad[k]), &state[0][k], &state[1][k], &state[2][k], e.state[2] != NULL,
                               pack.begin + k >= e.body);
            if constexpr (Low::present) {
                low[k] = Low::narrow(p[k]);
            }
        }
        ss_store<f32>(pack, e.param, p);
        SS_UNROLL
        for (int k = 0; k < Rule::states; k++) {
            if (e.state[k] != NULL) {
                ss_store<f32>(pack, e.state[k], state[k]);
            }
        }
        if constexpr (Low::present) {
            ss_store<Low>(pack, (typename Low::raw *)e.low, low);
        }
    }
};

/* ---- The call ---- */

static update_entry entry_of(const ss_cuda_piece &p, int32_t constants)
{
    size_t low = ss_dtype_size(SS_BF16), grad = ss_dtype_size(p.grad_dtype);
    const void *arrays[] = {p.param, p.low, p.grad, p.state[0], p.state[1], p.state[2]};
    const size_t elements[] = {4, low, grad, 4, 4, 4};
    update_entry e = {ss_span_over(p.n, arrays, elements, 6), p.param, p.low, p.grad, {}, p.n - p.tail, constants};
    memcpy(e.state, p.state, sizeof e.state);
    return e;
}

template <class Rule, class Low, class Grad>
static int update_those(ss_dtype low_dtype, ss_dtype grad_dtype, const ss_cuda_piece *pieces, int32_t count,
                        const step_constants *constants, void *stream)
{
    typename update<Rule, Low, Grad>::table table;
    ss_clear(&table);
    table.constants = constants;
    for (int32_t i = 0; i < count; i++) {
        const ss_cuda_piece &p = pieces[i];
        bool low_fits = Low::present ? p.low != NULL && p.low_dtype == low_dtype : p.low == NULL;
        if (p.n > 0 && low_fits && p.grad_dtype == grad_dtype) {
            SS_CUDA_TRY(ss_add(&table, entry_of(p, i)));
        }
    }
    return ss_run_table<update<Rule, Low, Grad>>(table, stream);
}

template <class Rule> static int step_batch(const ss_cuda_update &u, int32_t first, int32_t count, void *stream)
{
    const ss_cuda_piece *pieces = u.pieces + first;
    typename prepare<Rule>::table table;
    table.count = count;
    table.scale = u.scale;
    table.clip = u.clip;
    table.skip = u.skip;
    table.constants = (step_constants *)u.workspace + first;
    for (int32_t i = 0; i < count; i++) {
        table.entry[i] = {pieces[i].step, pieces[i].grad_scale, u.options[pieces[i].options], pieces[i].state[0] != NULL};
    }
    SS_CUDA_TRY(ss_run<prepare<Rule>>(table, 1, stream));

    const step_constants *c = table.constants;
    SS_CUDA_TRY((update_those<Rule, none, f32>(SS_F32, SS_F32, pieces, count, c, stream)));
    SS_CUDA_TRY((update_those<Rule, bf16, f32>(SS_BF16, SS_F32, pieces, count, c, stream)));
    SS_CUDA_TRY((update_those<Rule, f16, f32>(SS_F16, SS_F32, pieces, count, c, stream)));
    SS_CUDA_TRY((update_those<Rule, none, bf16>(SS_F32, SS_BF16, pieces, count, c, stream)));
    SS_CUDA_TRY((update_those<Rule, bf16, bf16>(SS_BF16, SS_BF16, pieces, count, c, stream)));
    return update_those<Rule, f16, bf16>(SS_F16, SS_BF16, pieces, count, c, stream);
}

static int check_piece(const ss_cuda_update &u, const ss_cuda_piece &p, bool needs_state)
{
    bool some = p.n > 0;
    bool missing = some && (p.param == NULL || p.grad == NULL || (needs_state && (p.state[0] == NULL || p.state[1] == NULL)));
    bool uncounted = p.step == NULL && (needs_state || p.state[0] != NULL);
    if (p.n < 0 || p.tail < 0 || p.tail > p.n || missing || uncounted || p.options < 0 || p.options >= u.n_options) {
        return SS_CUDA_ERR_ARGUMENT;
    }
    bool known = (p.grad_dtype == SS_F32 || p.grad_dtype == SS_BF16) &&
                 (p.low == NULL || p.low_dtype == SS_BF16 || p.low_dtype == SS_F16);
    return known ? SS_CUDA_OK : SS_CUDA_ERR_DTYPE;
}

/* Everything is checked before anything is enqueued: a step that is refused has changed nothing. */
template <class Rule> static int step(const ss_cuda_update *u, bool needs_state, void *stream)
{
    if (u->size != sizeof *u) {
        return SS_CUDA_ERR_SIZE;
    }
    for (int32_t i = 0; i < u->n_pieces; i++) {
        SS_CUDA_TRY(check_piece(*u, u->pieces[i], needs_state));
    }
    if (u->n_pieces > 0 && (u->workspace == NULL || (uintptr_t)u->workspace % 16 != 0 ||
                            u->workspace_bytes < (size_t)u->n_pieces * SS_CUDA_UPDATE_WORKSPACE)) {
        return SS_CUDA_ERR_WORKSPACE;
    }
    SS_EACH_LAUNCH(u->n_pieces, first, count)
    {
        SS_CUDA_TRY(step_batch<Rule>(*u, first, count, stream));
    }
    return SS_CUDA_OK;
}

int ss_cuda_adam(const ss_cuda_update *update, void *stream) { return step<adam>(update, true, stream); }

int ss_cuda_sgd(const ss_cuda_update *update, void *stream) { return step<sgd>(update, false, stream); }
