/* The native part of ceedtap: what must run on XLA's threads without Python and without the GIL.
 *
 *   lock.c      the lock of a Ceed tree, shared by Python and the operator handler
 *   registry.c  reference counts of the Python objects that compiled programs point to
 *   queue.c     frames from tap handlers to the receiver thread
 *   tap.c       the XLA FFI handler of a tap
 *   operator.c  the XLA FFI handler of an embedded libCEED operator
 *
 * Everything between CDEF BEGIN and CDEF END is also what build.py declares to cffi. */
#ifndef CEEDTAP_H
#define CEEDTAP_H

#include <stddef.h>
#include <stdint.h>

/* CDEF BEGIN */

/* -- lock.c: a recursive mutex with shared ownership ------------------------------------------------------------ */
typedef struct ct_lock ct_lock;
ct_lock *ct_lock_new(void);              /* one reference; NULL when memory is exhausted */
void ct_lock_ref(ct_lock *lock);
void ct_lock_unref(ct_lock *lock);       /* the last reference frees it */
void ct_lock_acquire(ct_lock *lock);
int ct_lock_try_acquire(ct_lock *lock);  /* 1: acquired */
void ct_lock_release(ct_lock *lock);

/* -- registry.c: keys of Python objects that compiled programs refer to ----------------------------------------- */
/* One registry per kind of object. A key lives while Python or a compiled program holds a reference to it. */
typedef struct ct_registry ct_registry;
ct_registry *ct_operators(void);
ct_registry *ct_consumers(void);
int ct_registry_add(ct_registry *registry, uint64_t key, void *payload); /* one reference; 0 on success */
int ct_registry_ref(ct_registry *registry, uint64_t key);                /* 0: no such key */
void ct_registry_unref(ct_registry *registry, uint64_t key);
void *ct_registry_payload(ct_registry *registry, uint64_t key);
size_t ct_registry_reap(ct_registry *registry, uint64_t *keys, size_t max); /* removes keys without references; how many */
size_t ct_registry_size(ct_registry *registry);

/* -- queue.c: frames from tap handlers to the receiver thread --------------------------------------------------- */
typedef struct ct_frame {
  struct ct_frame *next;
  uint64_t size;     /* bytes of the frame: header and arrays */
  uint64_t capacity; /* bytes that the buffer has */
  uint64_t seq;      /* 0, 1, 2, ... in the order of emission, over all devices */
  uint64_t consumer; /* consumer id, as in the frame's header */
  int64_t run_id;    /* of the program's execution; the same on all devices of one launch */
  int64_t time_ns;   /* CLOCK_REALTIME at emission */
  int32_t device;    /* local device ordinal; -1: unknown */
} ct_frame;

typedef struct ct_queue_stats {
  uint64_t emitted, consumed, dropped; /* frames; emitted = consumed + dropped + queued */
  uint64_t queued_bytes, peak_bytes;
} ct_queue_stats;

unsigned char *ct_frame_bytes(ct_frame *frame);
ct_frame *ct_queue_take(int64_t timeout_us);   /* all frames in the queue, linked, oldest first; NULL after the time-out */
void ct_queue_consumed(ct_frame *frame, int lent); /* the consumer has returned: makes room for producers, and frees the
                                                    * frame unless something still reads its bytes */
void ct_frame_free(ct_frame *frame);               /* of a lent one */
void ct_queue_wake(void);                      /* lets ct_queue_take return */
uint64_t ct_queue_emitted(void);
void ct_queue_get_stats(ct_queue_stats *stats);
void ct_queue_set_budget(uint64_t bytes);
void ct_queue_close(void);                     /* later frames are dropped and counted; blocked producers go on */
int ct_queue_emit(const void *header, size_t header_size, uint64_t consumer, int32_t device, const void *data,
                  size_t size); /* 0: emitted; -1: no memory */

/* -- tap.c, operator.c: XLA FFI handlers, as addresses for jax.ffi ---------------------------------------------- */
void *ct_tap_instantiate_address(void);
void *ct_tap_execute_address(void);
void *ct_operator_instantiate_address(void);
void *ct_operator_execute_address(void);
void *ct_tap_type_id(void);
void *ct_tap_type_info(void);
void *ct_operator_type_id(void);
void *ct_operator_type_info(void);

/* libCEED is opened at run time, so its functions come as addresses. */
typedef struct ct_ceed_api {
  int (*vector_set_array)(void *vec, int mem_type, int copy_mode, void *array);
  int (*vector_take_array)(void *vec, int mem_type, void **array);
  int (*operator_apply)(void *op, void *in, void *out, void **request);
  int (*get_error_message)(void *ceed, const char **message);
  int (*reset_error_message)(void *ceed, const char **message);
  void **request_immediate;
  int scalar_size; /* bytes of a CeedScalar */
} ct_ceed_api;

/* An operator as the handler calls it. The vectors belong to Python, which keeps them until the key is reaped. */
typedef struct ct_operator {
  const ct_ceed_api *api;
  ct_lock *lock;
  void *ceed, *op;
  void *active_in, *active_out; /* arguments of CeedOperatorApply */
  int num_in, num_out;
  void **vectors;   /* num_in inputs, then num_out outputs */
  int64_t *lengths; /* of the vectors */
  int poisoned;     /* libCEED left the operator locked: it must not be called again */
  char error[1280]; /* text of the failure that poisoned it */
} ct_operator;

/* CDEF END */

#endif
