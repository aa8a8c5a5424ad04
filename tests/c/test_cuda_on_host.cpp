/*
 * The CUDA kernels' source, compiled for the host, beside the portable CPU kernels on random tables: the same bits, for any
 * lengths, alignments and cuts. Every array is an allocation of its own and of its exact length, for the sanitizers.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <vector>

#include "kernels/kernels.h"
#include "shardstep_cuda.h"

extern "C" const ss_kernels ss_kernels_portable;

static std::mt19937 generator;
static int64_t below(int64_t n) { return (int64_t)(generator() % (uint64_t)n); }
static float normal() { return std::normal_distribution<float>()(generator); }

#define REQUIRE(condition)                                                  \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

static int64_t any_length()
{
    static const int64_t some[] = {0, 1, 7, 8, 9, 16, 31, 100, 1000, 16384, 16391};
    return below(3) ? below(40) : some[below(sizeof some / sizeof some[0])];
}

/* n elements, `offset` elements into an exact allocation; two copies, for the two implementations. */
template <class T> struct twins {
    std::vector<T> ours, theirs;
    int64_t offset;

    twins(int64_t n, int64_t offset_) : ours((size_t)(n + offset_)), offset(offset_) {}
    template <class Make> twins &fill(Make make)
    {
        for (T &x : ours) {
            x = make();
        }
        theirs = ours;
        return *this;
    }
    T *a() { return ours.data() + offset; }
    T *b() { return theirs.data() + offset; }
    void same() const { REQUIRE(ours.empty() || memcmp(ours.data(), theirs.data(), ours.size() * sizeof(T)) == 0); }
};

struct piece {
    int64_t n;
    twins<float> param, grad, state0, state1, state2;
    twins<uint16_t> low;
    float step_a, step_b;
    ss_dtype low_dtype;
    bool has_low, amsgrad, momentum;
    int32_t tail;

    explicit piece(const ss_kernels *cpu, int64_t n_)
        : n(n_), param(n, below(5)), grad(n, below(5)), state0(n, below(3)), state1(n, below(3)), state2(n, below(3)),
          low(n, below(9)), step_a((float)below(4)), step_b(step_a), low_dtype(below(2) ? SS_BF16 : SS_F16), has_low(below(2)),
          amsgrad(below(2)), momentum(below(2)), tail((int32_t)(n < 8 ? below(n + 1) : below(8)))
    {
        param.fill(normal);
        grad.fill(normal);
        state0.fill(normal);
        state1.fill([] { return normal() * normal() + 4.0f; });
        state2.fill([] { return 4.0f; });
        (low_dtype == SS_BF16 ? cpu->f32_to_bf16 : cpu->f32_to_f16)(low.a(), param.a(), n);
        for (int64_t k = 0; k < n; k += 1 + below(50)) {
            low.a()[k] = (uint16_t)generator(); /* the user's */
        }
        low.theirs = low.ours;
    }

    void same() const
    {
        param.same();
        grad.same();
        state0.same();
        state1.same();
        state2.same();
        low.same();
        REQUIRE(step_a == step_b);
    }
};

static void on_cpu(const ss_kernels *cpu, piece &p, const ss_cuda_options &o, float scale, bool adam)
{
    void *low = p.has_low ? p.low.b() : NULL;
    if (adam) {
        p.step_b += 1;
        ss_adam_args args = {p.param.b(), low, p.low_dtype, p.grad.b(), scale, p.state0.b(), p.state1.b(),
                             p.amsgrad ? p.state2.b() : NULL, o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, p.step_b,
                             o.decoupled, o.maximize, p.tail};
        cpu->adam(&args, p.n);
    } else {
        p.step_b += p.momentum;
        ss_sgd_args args = {p.param.b(), low, p.low_dtype, p.grad.b(), scale, p.momentum ? p.state0.b() : NULL, o.lr, o.momentum,
                            o.dampening, o.weight_decay, o.nesterov, o.maximize, p.step_b <= 1.0f};
        cpu->sgd(&args, p.n);
    }
}

static void test_updates(const ss_kernels *cpu)
{
    bool adam = below(2);
    ss_cuda_options options[3];
    for (ss_cuda_options &o : options) {
        o = {0.01, 0.9, 0.99, 1e-8, below(2) * 0.1, 0.9, below(2) * 0.3, (int)below(2), (int)below(2), (int)below(2)};
    }
    std::vector<piece> pieces;
    for (int64_t count = below(20) ? below(9) : 300; count > 0; count--) {
        pieces.emplace_back(cpu, any_length());
    }
    double scale = 0.5, clip = 0.75;
    int32_t skip = below(4) == 0;
    std::vector<ss_cuda_piece> table;
    for (piece &p : pieces) {
        bool state = adam || p.momentum;
        table.push_back({p.n, p.param.a(), p.has_low ? p.low.a() : NULL, p.grad.a(),
                         {state ? p.state0.a() : NULL, adam ? p.state1.a() : NULL, adam && p.amsgrad ? p.state2.a() : NULL},
                         state ? &p.step_a : NULL, 2.0, p.low_dtype, SS_F32, p.tail, (int32_t)below(3)});
        if (!skip) {
            on_cpu(cpu, p, options[table.back().options], 2.0f * 0.5f * 0.75f, adam);
        }
    }
    std::vector<max_align_t> workspace(table.size() * SS_CUDA_UPDATE_WORKSPACE / sizeof(max_align_t));
    ss_cuda_update u = {sizeof u, (int32_t)table.size(), 3, table.data(), options, &scale, &clip, &skip, workspace.data(),
                        workspace.size() * sizeof(max_align_t)};
    REQUIRE((adam ? ss_cuda_adam : ss_cuda_sgd)(&u, NULL) == 0);
    for (const piece &p : pieces) {
        p.same();
    }
}

static void test_elements(const ss_kernels *cpu)
{
    int64_t n = any_length();
    twins<float> x(n, below(5)), y(n, below(5));
    twins<uint16_t> h(n, below(9));
    x.fill(normal);
    y.fill(normal);
    h.fill([] { return (uint16_t)generator(); });
    bool bf16 = below(2);
    ss_dtype low = bf16 ? SS_BF16 : SS_F16;
    ss_cuda_range narrow = {h.a(), x.a(), n, 0}, widen = {y.a(), h.a(), n, 0}, add = {x.a(), h.a(), n, 0},
                  scaled = {x.a(), y.a(), n, 0.3}, scale = {y.a(), NULL, n, 0.7};
    REQUIRE(ss_cuda_cast(&narrow, 1, low, SS_F32, NULL) == 0);
    (bf16 ? cpu->f32_to_bf16 : cpu->f32_to_f16)(h.b(), x.b(), n);
    REQUIRE(ss_cuda_add(&add, 1, low, NULL) == 0);
    (bf16 ? cpu->add_bf16 : cpu->add_f16)(x.b(), h.b(), n);
    REQUIRE(ss_cuda_add_scaled(&scaled, 1, SS_F32, NULL) == 0);
    cpu->add_scaled_f32(x.b(), y.b(), 0.3f, n);
    REQUIRE(ss_cuda_cast(&widen, 1, SS_F32, low, NULL) == 0);
    (bf16 ? cpu->bf16_to_f32 : cpu->f16_to_f32)(y.b(), h.b(), n);
    REQUIRE(ss_cuda_scale(&scale, 1, SS_F32, NULL) == 0);
    cpu->scale_f32(y.b(), 0.7f, n);
    x.same();
    y.same();
    h.same();
    REQUIRE(ss_cuda_zero(&scale, 1, SS_F32, NULL) == 0);
    for (int64_t k = 0; k < n; k++) {
        REQUIRE(y.a()[k] == 0.0f);
    }
}

/* Fewer than 17 elements are added in one order only, so that the bits are the CPU's. */
static void test_norms(const ss_kernels *cpu)
{
    int64_t n = below(17), phase = below(3) ? 16 * below(4000) : below(70000);
    twins<float> x(n, below(5));
    x.fill(normal);
    double lanes[SS_NORM_LANES] = {0}, expected = 0, sum = -1;
    cpu->sumsq_f32(x.b(), n, phase, lanes);
    for (double lane : lanes) {
        expected += lane;
    }
    ss_cuda_norm_range range = {x.a(), n, phase, 1.0};
    std::vector<max_align_t> workspace(ss_cuda_norm_workspace(&range, 1) / sizeof(max_align_t));
    ss_cuda_norms_args args = {sizeof args, 1, SS_F32, &range, &sum, workspace.data(), workspace.size() * sizeof(max_align_t)};
    REQUIRE(ss_cuda_norms(&args, NULL) == 0);
    REQUIRE(sum == expected);
}

int main(int argc, char **argv)
{
    int turns = argc > 1 ? atoi(argv[1]) : 100;
    const ss_kernels *cpu = &ss_kernels_portable;
    for (int turn = 0; turn < turns; turn++) {
        generator.seed((unsigned)turn);
        test_updates(cpu);
        test_elements(cpu);
        test_norms(cpu);
    }
    printf("%d turns\n", turns);
    return 0;
}
