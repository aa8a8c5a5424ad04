/*
 * The arithmetic of shardstep, once: casts and update rules of one element, for the CPU and (under nvcc) the GPU.
 *
 * The order of operations here is the specification. Every fused multiply-add is written as fmaf and everything else
 * rounds on its own, so the translation unit must not contract expressions (-ffp-contract=off, nvcc --fmad=false).
 * Scalars of the step are computed in double and rounded once, as torch does.
 */
#ifndef SHARDSTEP_NUMERIC_H
#define SHARDSTEP_NUMERIC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

#ifdef __CUDACC__
#define SS_RULE static inline __host__ __device__
#else
#define SS_RULE static inline __attribute__((always_inline))
#endif

/* ---- Bits ---- */

SS_RULE uint32_t ss_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

SS_RULE float ss_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/*
 * ---- Casts ----
 * Round to nearest, ties to even. The bits of a NaN are those of torch's vectorised CPU casts: bfloat16 has a single
 * NaN, 0xFFFF; float16 keeps sign and payload and becomes quiet (what the F16C instructions do). All selections are
 * between values already computed, so that the loops over them vectorise.
 */

SS_RULE uint16_t ss_f32_to_bf16(float x)
{
    uint32_t bits = ss_bits(x);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16; /* a carry goes on to the next binade */
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0xFFFFu : rounded);
}

SS_RULE float ss_bf16_to_f32(uint16_t x) { return ss_from_bits((uint32_t)x << 16); }

SS_RULE uint16_t ss_f32_to_f16(float x)
{
    uint32_t bits = ss_bits(x);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;

    /* Normal result: rebias the exponent (127 - 15), round at bit 13. From 65520 upwards the carry gives infinity. */
    uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    /* Subnormal result: adding 0.5, whose last place is 2^-24 (float16's smallest step), makes the adder round. */
    uint32_t subnormal = ss_bits(ss_from_bits(magnitude) + 0.5f) - (126u << 23);
    uint32_t nan = 0x7E00u | ((magnitude >> 13) & 0x3FFu);

    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= (143u << 23) ? 0x7C00u : result; /* 65536 and more, and infinity */
    result = magnitude > 0x7F800000u ? nan : result;
    return (uint16_t)(sign | result);
}

SS_RULE float ss_f16_to_f32(uint16_t x)
{
    uint32_t sign = ((uint32_t)x & 0x8000u) << 16;
    uint32_t magnitude = ((uint32_t)x & 0x7FFFu) << 13;

    uint32_t normal = magnitude + (112u << 23);
    /* Subnormal: read the mantissa as that of 2^-14 and take the implicit one away again; exact. */
    uint32_t subnormal = ss_bits(ss_from_bits(magnitude + (113u << 23)) - ss_from_bits(113u << 23));
    uint32_t special = magnitude | 0x7F800000u | (magnitude > (0x7C00u << 13) ? 0x400000u : 0u); /* NaN becomes quiet */

    uint32_t result = magnitude < (1u << 23) ? subnormal : normal;
    result = magnitude >= (0x7C00u << 13) ? special : result;
    return ss_from_bits(sign | result);
}

/*
 * ---- Adam and AdamW ----
 * Algorithms: Kingma & Ba 2015 (Adam), Loshchilov & Hutter 2019 (AdamW), Reddi et al. 2018 (amsgrad), in the form of
 * torch.optim's documentation. Operation order: torch.optim.Adam(fused=True) and AdamW(fused=True) on an x86 CPU with
 * FMA, to the bit, found by comparing candidate orders with torch's results.
 */

/* The constants of one step. */
typedef struct {
    float grad_scale;    /* negative when maximising: negation is exact, so it folds into the scale */
    float decay;         /* decoupled decay: p *= 1 - lr * weight_decay */
    float l2;            /* L2 regularisation: g += weight_decay * p */
    float lerp;          /* 1 - beta1, or -beta1 when lerp_from_grad */
    int lerp_from_grad;  /* torch's lerp starts from the nearer end: from the gradient when 1 - beta1 >= 0.5 */
    float beta2, one_minus_beta2;
    float negative_step; /* -lr / (1 - beta1^step) */
    float sqrt_bias2;    /* sqrt(1 - beta2^step) */
    float eps;
} ss_adam_constants;

SS_RULE ss_adam_constants ss_adam_prepare(const ss_adam_args *args)
{
    ss_adam_constants c;
    float weight = (float)(1.0 - args->beta1);
    c.grad_scale = args->maximize ? -args->grad_scale : args->grad_scale;
    c.decay = args->decoupled && args->weight_decay != 0.0 ? (float)(1.0 - args->lr * args->weight_decay) : 1.0f;
    c.l2 = (float)args->weight_decay;
    c.lerp_from_grad = !(fabsf(weight) < 0.5f);
    c.lerp = c.lerp_from_grad ? weight - 1.0f : weight;
    c.beta2 = (float)args->beta2;
    c.one_minus_beta2 = (float)(1.0 - args->beta2);
    c.negative_step = (float)-(args->lr / (1.0 - pow(args->beta1, args->step)));
    c.sqrt_bias2 = (float)sqrt(1.0 - pow(args->beta2, args->step));
    c.eps = (float)args->eps;
    return c;
}

/*
 * One element. `l2` and `amsgrad` say whether the term is in the rule at all: adding 0 * p is not the same when p is
 * infinite. `tail`: the element is one of the last numel % 8 of its parameter, where torch's loop is scalar and
 * compiles to the other of the two ways to fuse the second moment.
 */
SS_RULE float ss_adam_rule(const ss_adam_constants *c, float p, float grad, float *exp_avg, float *exp_avg_sq,
                           float *max_exp_avg_sq, int l2, int amsgrad, int tail)
{
    float g = grad * c->grad_scale;
    if (l2) {
        g = fmaf(p, c->l2, g);
    }
    p = p * c->decay;

    float m = *exp_avg;
    m = fmaf(c->lerp, g - m, c->lerp_from_grad ? g : m);
    *exp_avg = m;

    float v = *exp_avg_sq;
    float weighted = c->one_minus_beta2 * g;
    v = tail ? fmaf(v, c->beta2, weighted * g) : fmaf(weighted, g, v * c->beta2);
    *exp_avg_sq = v;

    if (amsgrad) {
        float largest = *max_exp_avg_sq;
        v = (v > largest) | (v != v) ? v : largest; /* NaN stays visible, as in torch.maximum */
        *max_exp_avg_sq = v;
    }
    float denominator = sqrtf(v) / c->sqrt_bias2 + c->eps;
    return p + (c->negative_step * m) / denominator;
}

/*
 * ---- SGD ----
 * torch.optim.SGD in its default (foreach) and for-loop forms on CPU, to the bit, at every position. fused=True has
 * the same bits except in the last numel % 8 elements when there is momentum.
 */

typedef struct {
    float grad_scale;
    float weight_decay, momentum, one_minus_dampening, negative_lr;
} ss_sgd_constants;

SS_RULE ss_sgd_constants ss_sgd_prepare(const ss_sgd_args *args)
{
    ss_sgd_constants c;
    c.grad_scale = args->maximize ? -args->grad_scale : args->grad_scale;
    c.weight_decay = (float)args->weight_decay;
    c.momentum = (float)args->momentum;
    c.one_minus_dampening = (float)(1.0 - args->dampening);
    c.negative_lr = (float)-args->lr;
    return c;
}

typedef enum { SS_MOMENTUM_NONE, SS_MOMENTUM_FIRST, SS_MOMENTUM_NEXT } ss_momentum;

SS_RULE float ss_sgd_rule(const ss_sgd_constants *c, float p, float grad, float *momentum_buffer, int decay,
                          ss_momentum momentum, int nesterov)
{
    float g = grad * c->grad_scale;
    if (decay) {
        g = fmaf(p, c->weight_decay, g);
    }
    if (momentum != SS_MOMENTUM_NONE) {
        /* At the first step the buffer becomes the gradient itself, whatever the dampening. */
        float b = momentum == SS_MOMENTUM_FIRST ? g : fmaf(g, c->one_minus_dampening, *momentum_buffer * c->momentum);
        *momentum_buffer = b;
        g = nesterov ? fmaf(b, c->momentum, g) : b;
    }
    return fmaf(g, c->negative_lr, p);
}

#endif
