/* Stress of queue.c, registry.c and lock.c, for the sanitizers: many producers and devices, every policy, a consumer
 * thread, large frames that are lent and freed late, a producer that is blocked when the queue is closed, and fork.
 *
 *   stress [events of each round]
 *
 * Every round checks the accounting: emitted = consumed + dropped for each consumer and device, and what the consumer
 * thread saw is what the counters say. The exit status is 0 when all is well. */
#include "ceedtap.h"
#include "queue.h"
#include "signals.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Without Python there are no signals to look for. */
int ct_python_runs(void) { return 1; }
int ct_watch_signals(void) { return 0; }
void ct_unwatch_signals(void) {}
int ct_interrupted(int *seen) { return 0; }
void ct_signals_after_fork(void) {}

enum { THREADS = 4, DEVICES = 4, HEADER = 128, LENT = 64 };

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);       \
      exit(1);                                                                            \
    }                                                                                     \
  } while (0)

/* -- the consumer thread ----------------------------------------------------------------------------------------- */

typedef struct receiver {
  atomic_int stop, paused;
  uint64_t last[THREADS + 1]; /* of each producer: numbers must grow */
  uint64_t seen[CT_MAX_DEVICES + 1];
  ct_frame *lent[LENT];
  uint64_t lends;
} receiver;

typedef struct event {
  uint64_t producer, number, filler;
} event;

static void consume(receiver *self, ct_frame *frame) {
  event event;
  memcpy(&event, ct_frame_bytes(frame) + HEADER, sizeof event);
  CHECK(event.producer <= THREADS);
  CHECK(event.number > self->last[event.producer]);
  self->last[event.producer] = event.number;
  const unsigned char *bytes = ct_frame_bytes(frame);
  for (uint64_t i = HEADER + sizeof event; i < frame->size; i++) CHECK(bytes[i] == (unsigned char)event.filler);
  self->seen[frame->device >= 0 && frame->device < CT_MAX_DEVICES ? frame->device : CT_MAX_DEVICES]++;
  int lend = event.number % 7 == 0;
  ct_queue_consumed(frame, lend);
  if (!lend) return;
  ct_frame **slot = &self->lent[self->lends++ % LENT]; /* given back when LENT more have been lent */
  if (*slot) ct_frame_free(*slot);
  *slot = frame;
}

static void *receive(void *object) {
  receiver *self = object;
  for (;;) {
    int stop = atomic_load(&self->stop);
    if (atomic_load(&self->paused) && !stop) {
      usleep(100);
      continue;
    }
    ct_frame *frame = ct_queue_take(1000, 64);
    if (!frame && stop) return NULL;
    while (frame) {
      ct_frame *next = frame->next;
      consume(self, frame);
      frame = next;
    }
  }
}

/* -- producers --------------------------------------------------------------------------------------------------- */

typedef struct producer {
  ct_consumer *consumers[DEVICES];
  uint64_t index, events, timed_out;
  int32_t device;
} producer;

static void *produce(void *object) {
  producer *self = object;
  unsigned char bytes[2048];
  memset(bytes, 0, HEADER);
  for (uint64_t number = 1; number <= self->events; number++) {
    event event = {self->index, number, number * 31 + self->index};
    memcpy(bytes + HEADER, &event, sizeof event);
    uint64_t size = HEADER + sizeof event + number * 37 % 1500;
    memset(bytes + HEADER + sizeof event, (int)event.filler, size - HEADER - sizeof event);
    int32_t device = self->device < 0 ? (int32_t)(number % DEVICES) : self->device;
    ct_consumer *consumer = self->consumers[number % DEVICES];
    int outcome = ct_queue_emit(consumer, device, -1, bytes, HEADER, bytes + HEADER, size - HEADER);
    CHECK(outcome == CT_RESERVED || outcome == CT_SKIPPED || outcome == CT_TIMED_OUT);
    self->timed_out += outcome == CT_TIMED_OUT;
  }
  return NULL;
}

/* One round: `threads` producers, each on a device of its own, and all consumers with one policy. */
static void round_of(int policy, uint64_t every, uint64_t events, uint64_t budget) {
  static uint64_t next_id = 1;
  receiver receiver = {0};
  producer producers[THREADS];
  ct_consumer *consumers[DEVICES];
  pthread_t thread, threads[THREADS];
  ct_queue_configure(budget, 60000);
  for (int i = 0; i < DEVICES; i++) {
    consumers[i] = ct_consumer_get(next_id++);
    CHECK(consumers[i]);
    ct_consumer_configure(consumers[i], NULL, "stress", policy, every);
  }
  CHECK(!pthread_create(&thread, NULL, receive, &receiver));
  for (uint64_t i = 0; i < THREADS; i++) {
    producers[i] = (producer){.index = i, .events = events / THREADS, .device = (int32_t)i};
    memcpy(producers[i].consumers, consumers, sizeof consumers);
    CHECK(!pthread_create(&threads[i], NULL, produce, &producers[i]));
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  atomic_store(&receiver.stop, 1);
  ct_queue_wake();
  pthread_join(thread, NULL);
  for (int i = 0; i < LENT; i++)
    if (receiver.lent[i]) ct_frame_free(receiver.lent[i]);

  uint64_t offered_in_all = 0, emitted_in_all = 0, consumed_on[CT_MAX_DEVICES + 1] = {0};
  for (int i = 0; i < DEVICES; i++) {
    uint64_t offered;
    ct_counts counts[CT_MAX_DEVICES + 1];
    ct_consumer_get_counts(consumers[i], &offered, counts);
    CHECK(ct_consumer_idle(consumers[i]));
    offered_in_all += offered;
    for (int slot = 0; slot <= CT_MAX_DEVICES; slot++) {
      CHECK(counts[slot].emitted == counts[slot].consumed + counts[slot].dropped);
      CHECK(counts[slot].queued_bytes == 0);
      CHECK(policy != CT_BLOCK || counts[slot].dropped == 0);
      emitted_in_all += counts[slot].emitted;
      consumed_on[slot] += counts[slot].consumed;
    }
    ct_registry_unref(ct_consumers(), consumers[i]->id);
  }
  CHECK(offered_in_all == events / THREADS * THREADS);
  CHECK(every > 1 || emitted_in_all == offered_in_all);
  uint64_t consumed_in_all = 0;
  for (int slot = 0; slot <= CT_MAX_DEVICES; slot++) {
    CHECK(consumed_on[slot] == receiver.seen[slot]);
    consumed_in_all += consumed_on[slot];
  }
  uint64_t keys[DEVICES];
  void *payloads[DEVICES];
  CHECK(ct_registry_reap(ct_consumers(), keys, payloads, DEVICES) == DEVICES);
  for (int i = 0; i < DEVICES; i++) ct_consumer_free(payloads[i]);
  CHECK(ct_registry_size(ct_consumers()) == 0);
  printf("policy %d, every %lu: %lu offered, %lu emitted, %lu consumed, %lu dropped\n", policy, (unsigned long)every,
         (unsigned long)offered_in_all, (unsigned long)emitted_in_all, (unsigned long)consumed_in_all,
         (unsigned long)(emitted_in_all - consumed_in_all));
}

/* -- registry and lock ------------------------------------------------------------------------------------------- */

typedef struct shared {
  ct_lock *lock;
  uint64_t guarded, events;
} shared;

static void *churn(void *object) {
  shared *shared = object;
  uint64_t keys[16];
  void *payloads[16];
  for (uint64_t i = 0; i < shared->events; i++) {
    uint64_t key = 1 + i % 97;
    CHECK(!ct_registry_add(ct_operators(), key, shared));
    if (ct_registry_ref(ct_operators(), key)) ct_registry_unref(ct_operators(), key);
    void *payload = ct_registry_payload(ct_operators(), key);
    CHECK(payload == NULL || payload == shared);
    ct_registry_unref(ct_operators(), key);
    if (i % 50 == 0) ct_registry_reap(ct_operators(), keys, payloads, 16);

    ct_lock_ref(shared->lock);
    if (i % 3 || !ct_lock_try_acquire(shared->lock)) ct_lock_acquire(shared->lock);
    ct_lock_acquire(shared->lock); /* it is recursive */
    shared->guarded++;
    ct_lock_release(shared->lock);
    ct_lock_release(shared->lock);
    ct_lock_unref(shared->lock);
  }
  return NULL;
}

static void registry_and_lock(uint64_t events) {
  shared shared = {ct_lock_new(), 0, events};
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) CHECK(!pthread_create(&threads[i], NULL, churn, &shared));
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  CHECK(shared.guarded == THREADS * events);
  ct_lock_unref(shared.lock);
  uint64_t keys[128];
  void *payloads[128];
  ct_registry_reap(ct_operators(), keys, payloads, 128);
  CHECK(ct_registry_size(ct_operators()) == 0);
}

/* -- fork, and close while producers are blocked ------------------------------------------------------------------ */

static void fork_with_events_in_flight(void) {
  ct_consumer *consumer = ct_consumer_get(7);
  ct_consumer_configure(consumer, NULL, "parent", CT_BLOCK, 1);
  unsigned char bytes[HEADER + sizeof(event)] = {0};
  event first = {THREADS, 1, 0};
  memcpy(bytes + HEADER, &first, sizeof first);
  CHECK(ct_queue_emit(consumer, 0, -1, bytes, HEADER, bytes + HEADER, sizeof first) == CT_RESERVED);
  ct_queue_before_fork();
  pid_t child = fork();
  CHECK(child >= 0);
  ct_queue_after_fork(child == 0);
  if (child == 0) {
    CHECK(ct_queue_take(1000, 1) == NULL); /* the event belongs to the parent */
    CHECK(ct_consumer_idle(consumer));
    CHECK(ct_queue_emit(consumer, 0, -1, bytes, HEADER, bytes + HEADER, sizeof first) == CT_RESERVED);
    ct_frame *frame = ct_queue_take(100000, 1);
    CHECK(frame && frame->seq == 0);
    ct_queue_consumed(frame, 0);
    _exit(0);
  }
  int status;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ct_frame *frame = ct_queue_take(100000, 1);
  CHECK(frame);
  ct_queue_consumed(frame, 0);
  ct_registry_unref(ct_consumers(), 7);
  uint64_t key;
  void *payload;
  CHECK(ct_registry_reap(ct_consumers(), &key, &payload, 1) == 1);
  ct_consumer_free(payload);
}

static void close_while_blocked(void) {
  receiver receiver = {.paused = 1};
  producer producers[THREADS];
  pthread_t thread, threads[THREADS];
  ct_consumer *consumer = ct_consumer_get(9);
  ct_consumer_configure(consumer, NULL, "closed", CT_BLOCK, 1);
  ct_queue_configure(10000, -1);
  CHECK(!pthread_create(&thread, NULL, receive, &receiver));
  for (uint64_t i = 0; i < THREADS; i++) {
    producers[i] = (producer){.index = i, .events = 1000, .device = (int32_t)i};
    for (int k = 0; k < DEVICES; k++) producers[i].consumers[k] = consumer;
    CHECK(!pthread_create(&threads[i], NULL, produce, &producers[i]));
  }
  usleep(50000); /* the producers are blocked now: nothing is consumed and the budget is small */
  ct_queue_close();
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  atomic_store(&receiver.stop, 1);
  ct_queue_wake();
  pthread_join(thread, NULL);
  for (int i = 0; i < LENT; i++)
    if (receiver.lent[i]) ct_frame_free(receiver.lent[i]);
  uint64_t offered, emitted = 0, dropped = 0;
  ct_counts counts[CT_MAX_DEVICES + 1];
  ct_consumer_get_counts(consumer, &offered, counts);
  for (int slot = 0; slot <= CT_MAX_DEVICES; slot++) {
    CHECK(counts[slot].emitted == counts[slot].consumed + counts[slot].dropped);
    emitted += counts[slot].emitted;
    dropped += counts[slot].dropped;
  }
  CHECK(emitted == THREADS * 1000 && dropped > 0);
  ct_registry_unref(ct_consumers(), 9);
  uint64_t key;
  void *payload;
  CHECK(ct_registry_reap(ct_consumers(), &key, &payload, 1) == 1);
  ct_consumer_free(payload);
}

int main(int argc, char **argv) {
  uint64_t events = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
  fork_with_events_in_flight();
  registry_and_lock(events / 20);
  round_of(CT_BLOCK, 1, events, 1 << 20);
  round_of(CT_BLOCK, 1, events, 0);
  round_of(CT_DROP_NEWEST, 1, events, 20000);
  round_of(CT_DROP_OLDEST, 1, events, 20000);
  round_of(CT_BLOCK, 10, events, 1 << 20);
  close_while_blocked();
  return 0;
}
