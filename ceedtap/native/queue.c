/* Frames from tap handlers (any number of threads) to the receiver thread.
 *
 * A list of frames under one mutex. A producer fills its frame before it takes the lock to link it, so the lock is
 * held for a few instructions only, and the order of the list is an order in which the emissions took place. Buffers
 * are recycled, most recently used first: a frame costs no page faults, and a large one can be lent to Python as it is.
 * Compared with a ring of bytes there is nothing to wrap around and no second path for frames larger than the ring.
 *
 * Each device has a budget of bytes. What happens when it is used up is the consumer's policy. */
#define _GNU_SOURCE
#include "ceedtap.h"
#include "queue.h"
#include "signals.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
  FRAME_HEAD = 64,          /* the struct, padded: the bytes of a frame start at a cache line */
  MIN_CLASS = 9,            /* recycled buffers: 2^9 = 512 bytes ... */
  MAX_CLASS = 26,           /* ... to 2^26 = 64 MiB; larger ones are returned to the system */
  NAP_US = 200,             /* of the receiver before it asks to be woken: bounds the wake-ups that producers pay for */
};
static const uint64_t POOL_BYTES = 256u << 20; /* most bytes that are kept for recycling */
_Static_assert(sizeof(ct_frame) <= FRAME_HEAD, "the head of a frame must fit");

/* The lock is held for tens of nanoseconds at a time: spinning for it is cheaper than sleeping. */
#ifdef PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#define QUEUE_MUTEX PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP
#else
#define QUEUE_MUTEX PTHREAD_MUTEX_INITIALIZER
#endif

static struct {
  pthread_mutex_t mutex;
  pthread_cond_t ready; /* a frame has come, or somebody wants ct_queue_take to return */
  pthread_cond_t room;  /* bytes have been consumed */
  ct_frame *head, **tail;
  ct_frame *current;  /* the oldest frame that was taken and not yet consumed */
  pthread_t receiver; /* the thread that took last */
  int has_receiver;
  int sleeping; /* the receiver waits on `ready` */
  int woken;    /* ct_queue_take shall return */
  int closed;
  int blocked; /* producers that wait on `room` */
  int64_t patience_ms; /* at the end of the process, with what is emitted; 0: it does not end */
  ct_queue_stats stats;
  uint64_t seq; /* of the next frame */
  uint64_t device_bytes[CT_MAX_DEVICES + 1];
  uint64_t budget;
  int64_t timeout_ms;
  ct_frame *pool[MAX_CLASS + 1];
  uint64_t pool_bytes;
} queue = {.mutex = QUEUE_MUTEX, .budget = 64u << 20, .timeout_ms = 300000};

/* Time-outs go by the monotonic clock, which needs an attribute, so the conditions cannot be initialised statically. */
__attribute__((constructor)) static void queue_init(void) {
  pthread_condattr_t attr;
  queue.mutex = (pthread_mutex_t)QUEUE_MUTEX;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&queue.ready, &attr);
  pthread_cond_init(&queue.room, &attr);
  pthread_condattr_destroy(&attr);
  queue.tail = &queue.head;
}

static struct timespec from_now(int64_t us) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t ns = until.tv_nsec + us % 1000000 * 1000;
  until.tv_sec += us / 1000000 + ns / 1000000000;
  until.tv_nsec = ns % 1000000000;
  return until;
}

static int slot_of(int32_t device) { return device >= 0 && device < CT_MAX_DEVICES ? device : CT_MAX_DEVICES; }

static int size_class(uint64_t size) {
  int c = MIN_CLASS;
  while (c <= MAX_CLASS && (UINT64_C(1) << c) < size) c++;
  return c;
}

unsigned char *ct_frame_bytes(ct_frame *frame) { return (unsigned char *)frame + FRAME_HEAD; }

/* A buffer for `size` bytes; the lock is held. Only the pool is used under the lock; NULL asks for a fresh one. */
static ct_frame *pool_get(uint64_t size) {
  int c = size_class(size + FRAME_HEAD);
  if (c > MAX_CLASS || !queue.pool[c]) return NULL;
  ct_frame *frame = queue.pool[c];
  queue.pool[c] = frame->next;
  queue.pool_bytes -= UINT64_C(1) << c;
  return frame;
}

static ct_frame *frame_new(uint64_t size) {
  int c = size_class(size + FRAME_HEAD);
  uint64_t bytes = c > MAX_CLASS ? size + FRAME_HEAD : UINT64_C(1) << c;
  void *memory = NULL;
  if (posix_memalign(&memory, 64, bytes)) return NULL;
  ((ct_frame *)memory)->capacity = bytes - FRAME_HEAD;
  return memory;
}

/* Keeps the buffer for recycling; the lock is held. 0: there are enough, the caller must free it. */
static int pool_put(ct_frame *frame) {
  uint64_t bytes = frame->capacity + FRAME_HEAD;
  int c = size_class(bytes);
  if (c > MAX_CLASS || queue.pool_bytes + bytes > POOL_BYTES) return 0;
  frame->next = queue.pool[c];
  queue.pool[c] = frame;
  queue.pool_bytes += bytes;
  return 1;
}

void ct_frame_free(ct_frame *frame) {
  pthread_mutex_lock(&queue.mutex);
  int kept = pool_put(frame);
  pthread_mutex_unlock(&queue.mutex);
  if (!kept) free(frame);
}

/* -- consumers --------------------------------------------------------------------------------------------------- */

void ct_consumer_configure(ct_consumer *consumer, void *route, const char *name, int policy, uint64_t every) {
  pthread_mutex_lock(&queue.mutex);
  consumer->route = route;
  snprintf(consumer->name, sizeof consumer->name, "%s", name);
  consumer->policy = policy;
  __atomic_store_n(&consumer->every, every > 0 ? every : 1, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&queue.mutex);
}

void ct_consumer_enable(ct_consumer *consumer, int enabled) {
  __atomic_store_n(&consumer->enabled, enabled, __ATOMIC_RELAXED);
}

void ct_consumer_get_counts(const ct_consumer *consumer, uint64_t *offered, ct_counts *counts) {
  pthread_mutex_lock(&queue.mutex);
  *offered = __atomic_load_n(&consumer->offered, __ATOMIC_RELAXED);
  memcpy(counts, consumer->counts, sizeof consumer->counts);
  pthread_mutex_unlock(&queue.mutex);
}

int ct_consumer_idle(const ct_consumer *consumer) {
  int idle = 1;
  pthread_mutex_lock(&queue.mutex);
  for (int slot = 0; slot <= CT_MAX_DEVICES; slot++) {
    const ct_counts *counts = &consumer->counts[slot];
    idle &= counts->emitted == counts->consumed + counts->dropped;
  }
  pthread_mutex_unlock(&queue.mutex);
  return idle;
}

void ct_consumer_free(ct_consumer *consumer) {
  if (consumer->like) ct_registry_unref(ct_consumers(), consumer->like);
  free(consumer->description);
  free(consumer);
}

/* -- accounting; the lock is held -------------------------------------------------------------------------------- */

static void add_bytes(ct_consumer *consumer, int slot, uint64_t size) {
  consumer->counts[slot].queued_bytes += size;
  queue.device_bytes[slot] += size;
  queue.stats.queued_bytes += size;
  if (queue.stats.queued_bytes > queue.stats.peak_bytes) queue.stats.peak_bytes = queue.stats.queued_bytes;
}

static void remove_bytes(ct_consumer *consumer, int slot, uint64_t size) {
  consumer->counts[slot].queued_bytes -= size;
  queue.device_bytes[slot] -= size;
  queue.stats.queued_bytes -= size;
}

static void count_dropped(ct_consumer *consumer, int slot) {
  consumer->counts[slot].dropped++;
  queue.stats.dropped++;
}

/* Whether a frame fits into the device's budget. One that is larger than the budget goes alone. */
static int has_room(int slot, uint64_t size) {
  return queue.device_bytes[slot] == 0 || queue.device_bytes[slot] + size <= queue.budget;
}

/* Drops queued frames of the consumer on this device, oldest first, until there is room or none is left. */
static void drop_oldest(ct_consumer *consumer, int slot, uint64_t size) {
  ct_frame **link = &queue.head;
  while (*link && !has_room(slot, size)) {
    ct_frame *frame = *link;
    if (frame->consumer != consumer || slot_of(frame->device) != slot) {
      link = &frame->next;
      continue;
    }
    *link = frame->next;
    if (!*link) queue.tail = link;
    remove_bytes(consumer, slot, frame->size);
    count_dropped(consumer, slot);
    if (!pool_put(frame)) free(frame);
  }
}

static int is_receiver(void) { return queue.has_receiver && pthread_equal(pthread_self(), queue.receiver); }

/* Waits a little while for something to be consumed; the lock is held, and released meanwhile. */
static void wait_a_little(void) {
  struct timespec until = from_now(CT_SIGNAL_POLL_MS * 1000);
  queue.blocked++;
  pthread_cond_timedwait(&queue.room, &queue.mutex, &until);
  queue.blocked--;
}

static int64_t now_ms(void) {
  struct timespec now = from_now(0);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Waits until there is room: CT_RESERVED; or CT_TIMED_OUT when nothing has been consumed for the time-out, or
 * CT_INTERRUPTED. The lock is held, and released meanwhile. */
static int wait_for_room(int slot, uint64_t size) {
  if (is_receiver()) return CT_RESERVED; /* it would wait for itself when a consumer runs a program with taps */
  int outcome = CT_RESERVED, seen = ct_watch_signals();
  int64_t since = now_ms();
  while (outcome == CT_RESERVED && !queue.closed && !has_room(slot, size)) {
    uint64_t consumed = queue.stats.consumed;
    wait_a_little();
    if (queue.stats.consumed != consumed) since = now_ms();
    else if (queue.timeout_ms >= 0 && now_ms() >= since + queue.timeout_ms) outcome = CT_TIMED_OUT;
    if (has_room(slot, size)) break;
    pthread_mutex_unlock(&queue.mutex);
    if (ct_interrupted(&seen)) outcome = CT_INTERRUPTED;
    pthread_mutex_lock(&queue.mutex);
  }
  ct_unwatch_signals();
  return outcome;
}

/* At the end of the process: waits until the frames are consumed, or nothing is for the patience. The lock is held. */
static void linger(void) {
  int64_t since = now_ms();
  while (ct_python_runs() && !queue.closed && !is_receiver() && (queue.head || queue.current) && now_ms() < since + queue.patience_ms) {
    uint64_t consumed = queue.stats.consumed;
    wait_a_little();
    if (queue.stats.consumed != consumed) since = now_ms();
  }
}

/* -- producers --------------------------------------------------------------------------------------------------- */

int ct_queue_reserve(ct_consumer *consumer, int32_t device, uint64_t size, ct_frame **out) {
  uint64_t offered = __atomic_fetch_add(&consumer->offered, 1, __ATOMIC_RELAXED);
  if (!__atomic_load_n(&consumer->enabled, __ATOMIC_RELAXED)) return CT_SKIPPED;
  uint64_t every = __atomic_load_n(&consumer->every, __ATOMIC_RELAXED);
  if (every > 1 && offered % every) return CT_SKIPPED;

  int slot = slot_of(device);
  pthread_mutex_lock(&queue.mutex);
  if (!queue.closed && !has_room(slot, size)) {
    if (consumer->policy == CT_DROP_OLDEST) drop_oldest(consumer, slot, size);
    int outcome = consumer->policy == CT_BLOCK ? wait_for_room(slot, size) : CT_RESERVED;
    if (outcome != CT_RESERVED) {
      pthread_mutex_unlock(&queue.mutex);
      return outcome;
    }
  }
  consumer->counts[slot].emitted++;
  queue.stats.emitted++;
  if (queue.closed || (consumer->policy != CT_BLOCK && !has_room(slot, size))) {
    count_dropped(consumer, slot);
    pthread_mutex_unlock(&queue.mutex);
    return CT_SKIPPED;
  }
  add_bytes(consumer, slot, size);
  ct_frame *frame = pool_get(size);
  pthread_mutex_unlock(&queue.mutex);
  if (!frame) frame = frame_new(size);
  if (!frame) {
    pthread_mutex_lock(&queue.mutex);
    remove_bytes(consumer, slot, size);
    count_dropped(consumer, slot);
    if (queue.blocked) pthread_cond_broadcast(&queue.room);
    pthread_mutex_unlock(&queue.mutex);
    return CT_NO_MEMORY;
  }
  frame->size = size;
  frame->consumer = consumer;
  frame->device = device;
  frame->part = -1;
  *out = frame;
  return CT_RESERVED;
}

static void put_64(uint32_t *words, uint64_t value) {
  words[0] = (uint32_t)(value >> 32);
  words[1] = (uint32_t)value;
}

/* Hands a filled frame over, with the labels in its header (protocol.py, version 2). */
void ct_queue_commit(ct_frame *frame) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  frame->time_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
  frame->next = NULL;
  uint32_t *words = (uint32_t *)ct_frame_bytes(frame);
  words[5] = (uint32_t)frame->device;
  put_64(words + 6, (uint64_t)frame->run_id);
  put_64(words + 10, (uint64_t)frame->time_ns);
  words[14] = (uint32_t)(frame->part + 1);
  pthread_mutex_lock(&queue.mutex);
  frame->seq = queue.seq++;
  put_64(words + 8, frame->seq);
  *queue.tail = frame;
  queue.tail = &frame->next;
  int wake = queue.sleeping;
  queue.sleeping = 0;
  if (wake) pthread_cond_signal(&queue.ready);
  if (queue.patience_ms > 0) linger();
  pthread_mutex_unlock(&queue.mutex);
}

int ct_queue_emit(ct_consumer *consumer, int32_t device, int32_t part, const void *header, size_t header_size,
                  const void *data, size_t size) {
  ct_frame *frame;
  int outcome = ct_queue_reserve(consumer, device, header_size + size, &frame);
  if (outcome != CT_RESERVED) return outcome;
  memcpy(ct_frame_bytes(frame), header, header_size);
  memcpy(ct_frame_bytes(frame) + header_size, data, size);
  frame->run_id = 0;
  frame->part = part;
  ct_queue_commit(frame);
  return CT_RESERVED;
}

/* -- the receiver ------------------------------------------------------------------------------------------------ */

/* Cuts the first `max` frames off; the lock is held. */
static ct_frame *cut(int max) {
  ct_frame *first = queue.head, **link = &queue.head;
  for (int i = 0; i < max && *link; i++) link = &(*link)->next;
  ct_frame *rest = *link;
  *link = NULL;
  queue.head = rest;
  if (!rest) queue.tail = &queue.head;
  return first == rest ? NULL : first;
}

ct_frame *ct_queue_take(int64_t timeout_us, int max) {
  pthread_mutex_lock(&queue.mutex);
  queue.receiver = pthread_self();
  queue.has_receiver = 1;
  if (!queue.head && !queue.woken && timeout_us > 0) {
    pthread_mutex_unlock(&queue.mutex);
    usleep(timeout_us < NAP_US ? timeout_us : NAP_US);
    pthread_mutex_lock(&queue.mutex);
  }
  struct timespec until = from_now(timeout_us);
  int rc = 0;
  while (!queue.head && !queue.woken && rc != ETIMEDOUT && timeout_us > 0) {
    queue.sleeping = 1;
    rc = pthread_cond_timedwait(&queue.ready, &queue.mutex, &until);
  }
  queue.sleeping = queue.woken = 0;
  ct_frame *frames = cut(max);
  queue.current = frames;
  pthread_mutex_unlock(&queue.mutex);
  return frames;
}

void ct_queue_consumed(ct_frame *frame, int lent) {
  pthread_mutex_lock(&queue.mutex);
  int slot = slot_of(frame->device);
  frame->consumer->counts[slot].consumed++;
  queue.stats.consumed++;
  remove_bytes(frame->consumer, slot, frame->size);
  queue.current = frame->next;
  int wake = queue.blocked, keep = lent || pool_put(frame);
  pthread_mutex_unlock(&queue.mutex);
  if (!keep) free(frame);
  if (wake) pthread_cond_broadcast(&queue.room);
}

void ct_queue_busy(char *text, size_t size) {
  pthread_mutex_lock(&queue.mutex);
  if (queue.current) snprintf(text, size, "consumer %s has not returned", queue.current->consumer->name);
  else snprintf(text, size, "no consumer is running");
  pthread_mutex_unlock(&queue.mutex);
}

void ct_queue_wake(void) {
  pthread_mutex_lock(&queue.mutex);
  queue.woken = 1;
  pthread_mutex_unlock(&queue.mutex);
  pthread_cond_signal(&queue.ready);
}

void ct_queue_get_stats(ct_queue_stats *stats) {
  pthread_mutex_lock(&queue.mutex);
  *stats = queue.stats;
  pthread_mutex_unlock(&queue.mutex);
}

void ct_queue_configure(uint64_t budget, int64_t timeout_ms) {
  pthread_mutex_lock(&queue.mutex);
  queue.budget = budget;
  queue.timeout_ms = timeout_ms;
  pthread_mutex_unlock(&queue.mutex);
  pthread_cond_broadcast(&queue.room);
}

void ct_queue_linger(int64_t patience_ms) {
  pthread_mutex_lock(&queue.mutex);
  queue.patience_ms = patience_ms;
  pthread_mutex_unlock(&queue.mutex);
}

void ct_queue_close(void) {
  pthread_mutex_lock(&queue.mutex);
  queue.closed = 1;
  pthread_mutex_unlock(&queue.mutex);
  pthread_cond_broadcast(&queue.room);
  ct_queue_wake();
}

/* -- fork -------------------------------------------------------------------------------------------------------- */

/* Only the thread that calls fork lives on in the child. It holds all locks meanwhile, so that no other one dies in the
 * middle of a change; in the child, locks and conditions are made anew, since their state speaks of the other threads. */
void ct_queue_before_fork(void) {
  ct_registries_before_fork();
  pthread_mutex_lock(&queue.mutex);
}

void ct_queue_after_fork(int in_child) {
  if (!in_child) {
    pthread_mutex_unlock(&queue.mutex);
  } else {
    /* Frames that the parent's receiver has taken are not in any list any more; their memory stays with the child. */
    ct_frame *lists[MAX_CLASS + 2] = {queue.head};
    memcpy(lists + 1, queue.pool, sizeof queue.pool);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
      for (ct_frame *next, *frame = lists[i]; frame; frame = next) {
        next = frame->next;
        free(frame);
      }
    }
    uint64_t budget = queue.budget;
    int64_t timeout_ms = queue.timeout_ms;
    memset(&queue, 0, sizeof queue);
    queue.budget = budget;
    queue.timeout_ms = timeout_ms;
    queue_init();
    ct_signals_after_fork();
  }
  ct_registries_after_fork(in_child);
}
