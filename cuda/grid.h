/*
 * Where the kernels run: blocks of threads on a GPU under nvcc, loops under any other compiler. A kernel is a struct
 *
 *     struct work {
 *         typedef ... table;                                                  what it works on, passed by value
 *         static SS_ON_DEVICE void block(const table &work, int64_t b);       what block number b of it does
 *     };
 *
 * whose block() says what its threads do, up to a barrier, with SS_THREADS_DO(t) { ... }. The loops are for tests without a GPU:
 * the same lines, one thread after the other.
 */
#ifndef SHARDSTEP_CUDA_GRID_H
#define SHARDSTEP_CUDA_GRID_H

#include "shardstep_cuda.h"

#define SS_THREADS 256 /* of a block */

#ifdef __CUDACC__

#include <cuda_runtime.h>

#define SS_ON_DEVICE __device__ __forceinline__
#define SS_ON_BOTH __host__ __device__ __forceinline__
#define SS_SHARED __shared__
#define SS_UNROLL _Pragma("unroll")
#define SS_THREADS_DO(t) for (int t = (int)threadIdx.x, ss_once_ = 1; ss_once_; ss_once_ = 0)
#define SS_BARRIER() __syncthreads()

typedef uint4 ss_16_bytes;

/* An assignment would be taken apart into four stores. */
static SS_ON_DEVICE void ss_store_16(ss_16_bytes *to, ss_16_bytes value) { __stwb(to, value); }

/* Registers are limited to what lets this many blocks reside on a multiprocessor: their loads hide each other's latency. */
#define SS_RESIDENT_BLOCKS 3

/* __grid_constant__: the table is read where the launch has put it; else every thread would copy it to a stack. */
template <class Work>
__global__ void __launch_bounds__(SS_THREADS, SS_RESIDENT_BLOCKS)
    ss_blocks(const __grid_constant__ typename Work::table table, int64_t blocks)
{
    for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
        Work::block(table, b);
    }
}

/* More blocks than the GPU holds at a time would only queue. */
#define SS_BLOCKS_PER_MULTIPROCESSOR 8

template <class Work> int ss_run(const typename Work::table &table, int64_t blocks, void *stream)
{
    static_assert(sizeof table + sizeof blocks <= 32764, "the parameters of a launch");
    int device = 0, multiprocessors = 0;
    if (blocks == 0) {
        return SS_CUDA_OK;
    }
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) {
        code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    if (code != cudaSuccess) {
        return (int)code;
    }
    int64_t most = (int64_t)multiprocessors * SS_BLOCKS_PER_MULTIPROCESSOR;
    unsigned grid = (unsigned)(blocks < most ? blocks : most);
    ss_blocks<Work><<<grid, SS_THREADS, 0, (cudaStream_t)stream>>>(table, blocks);
    return (int)cudaGetLastError();
}

#else

#define SS_ON_DEVICE inline
#define SS_ON_BOTH inline
#define SS_SHARED
#define SS_UNROLL
#define SS_THREADS_DO(t) for (int t = 0; t < SS_THREADS; t++)
#define SS_BARRIER()

struct alignas(16) ss_16_bytes {
    uint32_t word[4];
};

static SS_ON_DEVICE void ss_store_16(ss_16_bytes *to, ss_16_bytes value) { *to = value; }

template <class Work> int ss_run(const typename Work::table &table, int64_t blocks, void *)
{
    for (int64_t b = 0; b < blocks; b++) {
        Work::block(table, b);
    }
    return SS_CUDA_OK;
}

#endif

#define SS_CUDA_TRY(call)          \
    do {                           \
        int ss_code_ = (call);     \
        if (ss_code_ != 0) {       \
            return ss_code_;       \
        }                          \
    } while (0)

#endif
