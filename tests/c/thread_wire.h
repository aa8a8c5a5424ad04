/*
 * A wire between threads of one process, over heap memory, so that the race detector and the address sanitizer see
 * the shared-memory protocol. Use:
 *
 *     thread_world *world = thread_world_new(n_ranks);
 *     in thread r:  ss_shm_wire *wire = thread_wire_open(world, r, timeout);
 *                   ss_shm_open(wire, kernels, callbacks, &transport, &err);
 *     when all transports are closed and all regions released:  thread_world_free(world);
 */
#ifndef SHARDSTEP_TESTS_THREAD_WIRE_H
#define SHARDSTEP_TESTS_THREAD_WIRE_H

#include "transport/shm.h"

typedef struct thread_world thread_world;

thread_world *thread_world_new(int n_ranks);
void thread_world_free(thread_world *world);
ss_shm_wire *thread_wire_open(thread_world *world, int rank, double timeout);

/* From now on peers see `rank` as dead. */
void thread_world_kill(thread_world *world, int rank);

#endif
