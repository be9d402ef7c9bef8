/* Frames from tap handlers (any number of threads) to the receiver thread.
 *
 * A list of frames under one mutex. A producer fills its frame before it takes the lock to link it, so the lock is
 * held for a few instructions only, and the order of the list is an order in which the emissions took place. Buffers
 * are recycled, most recently used first: a frame costs no page faults, and a large one can be lent to Python as it is.
 * Compared with a ring of bytes there is nothing to wrap around and no second path for frames larger than the ring.
 *
 * Producers that find more bytes queued than the budget wait until the receiver has consumed enough. */
#define _GNU_SOURCE
#include "ceedtap.h"

#include <errno.h>
#include <pthread.h>
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

static struct {
  pthread_mutex_t mutex;
  pthread_cond_t ready; /* a frame has come, or somebody wants ct_queue_take to return */
  pthread_cond_t room;  /* bytes have been consumed */
  ct_frame *head, **tail;
  int sleeping; /* the receiver waits on `ready` */
  int woken;    /* ct_queue_take shall return */
  int closed;
  int blocked; /* producers that wait on `room` */
  uint64_t emitted, consumed, dropped, queued_bytes, peak_bytes, budget;
  ct_frame *pool[MAX_CLASS + 1];
  uint64_t pool_bytes;
} queue = {.mutex = PTHREAD_MUTEX_INITIALIZER, .room = PTHREAD_COND_INITIALIZER, .budget = 64u << 20};

/* `ready` is waited for by the monotonic clock, which needs an attribute and so cannot be initialised statically. */
__attribute__((constructor)) static void queue_init(void) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&queue.ready, &attr);
  pthread_condattr_destroy(&attr);
  queue.tail = &queue.head;
}

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

/* An empty frame with room for `size` bytes in the budget. NULL: closed (`*closed` is set) or no memory. */
ct_frame *ct_queue_reserve(uint64_t size, int *closed) {
  pthread_mutex_lock(&queue.mutex);
  /* A frame larger than the budget goes alone: it waits for an empty queue. */
  while (!queue.closed && queue.queued_bytes > 0 && queue.queued_bytes + size > queue.budget) {
    queue.blocked++;
    pthread_cond_wait(&queue.room, &queue.mutex);
    queue.blocked--;
  }
  *closed = queue.closed;
  if (queue.closed) {
    queue.emitted++;
    queue.dropped++;
    pthread_mutex_unlock(&queue.mutex);
    return NULL;
  }
  queue.queued_bytes += size;
  if (queue.queued_bytes > queue.peak_bytes) queue.peak_bytes = queue.queued_bytes;
  ct_frame *frame = pool_get(size);
  pthread_mutex_unlock(&queue.mutex);
  if (!frame) frame = frame_new(size);
  if (!frame) {
    pthread_mutex_lock(&queue.mutex);
    queue.queued_bytes -= size;
    if (queue.blocked) pthread_cond_broadcast(&queue.room);
    pthread_mutex_unlock(&queue.mutex);
    return NULL;
  }
  frame->size = size;
  return frame;
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
  pthread_mutex_lock(&queue.mutex);
  frame->seq = queue.emitted++;
  put_64(words + 8, frame->seq);
  *queue.tail = frame;
  queue.tail = &frame->next;
  int wake = queue.sleeping;
  queue.sleeping = 0;
  pthread_mutex_unlock(&queue.mutex);
  if (wake) pthread_cond_signal(&queue.ready);
}

static ct_frame *take_all(void) {
  ct_frame *frames = queue.head;
  queue.head = NULL;
  queue.tail = &queue.head;
  return frames;
}

ct_frame *ct_queue_take(int64_t timeout_us) {
  pthread_mutex_lock(&queue.mutex);
  if (!queue.head && !queue.woken && timeout_us > 0) {
    pthread_mutex_unlock(&queue.mutex);
    usleep(timeout_us < NAP_US ? timeout_us : NAP_US);
    pthread_mutex_lock(&queue.mutex);
  }
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  int64_t ns = until.tv_nsec + (timeout_us % 1000000) * 1000;
  until.tv_sec += timeout_us / 1000000 + ns / 1000000000;
  until.tv_nsec = ns % 1000000000;
  int rc = 0;
  while (!queue.head && !queue.woken && rc != ETIMEDOUT && timeout_us > 0) {
    queue.sleeping = 1;
    rc = pthread_cond_timedwait(&queue.ready, &queue.mutex, &until);
  }
  queue.sleeping = queue.woken = 0;
  ct_frame *frames = take_all();
  pthread_mutex_unlock(&queue.mutex);
  return frames;
}

void ct_queue_consumed(ct_frame *frame, int lent) {
  pthread_mutex_lock(&queue.mutex);
  queue.consumed++;
  queue.queued_bytes -= frame->size;
  int wake = queue.blocked, keep = lent || pool_put(frame);
  pthread_mutex_unlock(&queue.mutex);
  if (!keep) free(frame);
  if (wake) pthread_cond_broadcast(&queue.room);
}

void ct_queue_wake(void) {
  pthread_mutex_lock(&queue.mutex);
  queue.woken = 1;
  pthread_mutex_unlock(&queue.mutex);
  pthread_cond_signal(&queue.ready);
}

uint64_t ct_queue_emitted(void) {
  pthread_mutex_lock(&queue.mutex);
  uint64_t emitted = queue.emitted;
  pthread_mutex_unlock(&queue.mutex);
  return emitted;
}

void ct_queue_get_stats(ct_queue_stats *stats) {
  pthread_mutex_lock(&queue.mutex);
  *stats = (ct_queue_stats){queue.emitted, queue.consumed, queue.dropped, queue.queued_bytes, queue.peak_bytes};
  pthread_mutex_unlock(&queue.mutex);
}

void ct_queue_set_budget(uint64_t bytes) {
  pthread_mutex_lock(&queue.mutex);
  queue.budget = bytes;
  pthread_mutex_unlock(&queue.mutex);
  pthread_cond_broadcast(&queue.room);
}

void ct_queue_close(void) {
  pthread_mutex_lock(&queue.mutex);
  queue.closed = 1;
  pthread_mutex_unlock(&queue.mutex);
  pthread_cond_broadcast(&queue.room);
  ct_queue_wake();
}

int ct_queue_emit(const void *header, size_t header_size, uint64_t consumer, int32_t device, const void *data,
                  size_t size) {
  int closed;
  ct_frame *frame = ct_queue_reserve(header_size + size, &closed);
  if (!frame) return closed ? 0 : -1;
  memcpy(ct_frame_bytes(frame), header, header_size);
  memcpy(ct_frame_bytes(frame) + header_size, data, size);
  frame->consumer = consumer;
  frame->run_id = 0;
  frame->device = device;
  ct_queue_commit(frame);
  return 0;
}
