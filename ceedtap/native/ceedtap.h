/* The native part of ceedtap: what must run on XLA's threads without Python and without the GIL.
 *
 *   lock.c      the lock of a Ceed tree, shared by Python and the operator handler
 *   registry.c  reference counts of the Python objects that compiled programs point to
 *   queue.c     frames from tap handlers to the receiver thread
 *   tap.c       the XLA FFI handler of a tap
 *   call.c      calls of host functions that return values to the program, and their XLA FFI handler
 *   operator.c  the XLA FFI handler of an embedded libCEED operator
 *   signals.c   Ctrl-C while a program waits for Python
 *   crc.c       checksums of large frames
 *   pointwise.c the XLA FFI handler of a compiled point function over plain arrays
 *
 * Everything between CDEF BEGIN and CDEF END is also what build.py declares to cffi. */
#ifndef CEEDTAP_H
#define CEEDTAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* CDEF BEGIN */

/* -- lock.c: a recursive mutex with shared ownership ------------------------------------------------------------ */
typedef struct ct_lock ct_lock;
ct_lock *ct_lock_new(void);              /* one reference; NULL when memory is exhausted */
void ct_lock_ref(ct_lock *lock);
void ct_lock_unref(ct_lock *lock);       /* the last reference frees it */
int ct_lock_acquire(ct_lock *lock);      /* 1: acquired; 0: never, see ct_lock_lost */
int ct_lock_try_acquire(ct_lock *lock);  /* 1: acquired */
void ct_lock_release(ct_lock *lock);
extern const char ct_lock_lost[]; /* what to say when a thread of the parent process had the lock at the fork */

/* -- registry.c: keys of Python objects that compiled programs refer to ----------------------------------------- */
/* One registry per kind of object. A key lives while Python or a compiled program holds a reference to it. */
typedef struct ct_registry ct_registry;
ct_registry *ct_operators(void);
ct_registry *ct_consumers(void);
ct_registry *ct_functions(void);
ct_registry *ct_pointwise_functions(void);
int ct_registry_add(ct_registry *registry, uint64_t key, void *payload); /* one reference; 0 on success */
int ct_registry_ref(ct_registry *registry, uint64_t key);                /* 0: no such key */
void ct_registry_unref(ct_registry *registry, uint64_t key);
void *ct_registry_payload(ct_registry *registry, uint64_t key);
/* Removes keys without references and returns how many. */
size_t ct_registry_reap(ct_registry *registry, uint64_t *keys, void **payloads, size_t max);
size_t ct_registry_size(ct_registry *registry);

/* -- queue.c: frames from tap handlers to the receiver thread --------------------------------------------------- */
#define CT_MAX_DEVICES 64

typedef struct ct_counts {
  uint64_t emitted, consumed, dropped; /* events; emitted = consumed + dropped + queued */
  uint64_t queued_bytes;
} ct_counts;

/* What becomes of the events of one consumer. The queue's lock guards all but `enabled` and `offered`; that of the
 * registry guards the description. */
typedef struct ct_consumer {
  uint64_t id;
  void *route; /* for Python; NULL: nobody has asked for the events */
  char name[128];
  int policy;       /* when the budget of a device is used up: see CT_BLOCK ... */
  uint64_t every;   /* only every n-th event is emitted */
  int enabled;      /* 0: nothing is emitted */
  uint64_t offered; /* events of programs, emitted or not */
  void *description; /* what a program says of a tap that this process need not know; or NULL. It does not change */
  uint64_t description_size;
  uint64_t like; /* the consumer that it stands for in a part of a program, which lives as long; 0: none */
  ct_counts counts[CT_MAX_DEVICES + 1]; /* by device; the last one is for devices that are unknown */
} ct_consumer;

#define CT_BLOCK 0       /* the program waits */
#define CT_DROP_NEWEST 1 /* the event is dropped */
#define CT_DROP_OLDEST 2 /* earlier events of the consumer are dropped */

typedef struct ct_frame {
  struct ct_frame *next;
  uint64_t size;     /* bytes of the frame: header and arrays */
  uint64_t capacity; /* bytes that the buffer has */
  uint64_t seq;      /* 0, 1, 2, ... in the order of emission, over all devices */
  ct_consumer *consumer;
  int64_t run_id;  /* of the program's execution; the same on all devices of one launch */
  int64_t time_ns; /* CLOCK_REALTIME at emission */
  int32_t device;  /* local device ordinal; -1: unknown */
  int32_t part;    /* of a program that runs on several devices; -1: unknown */
} ct_frame;

typedef struct ct_queue_stats {
  uint64_t emitted, consumed, dropped, queued_bytes, peak_bytes;
} ct_queue_stats;

#define CT_RESERVED 0  /* there is a frame to fill */
#define CT_SKIPPED 1   /* the event is not wanted, or has been dropped and counted */
#define CT_TIMED_OUT 2 /* no event has been consumed for the time-out */
#define CT_NO_MEMORY 3
#define CT_INTERRUPTED 4 /* by a signal, while it waited for room */

ct_consumer *ct_consumer_get(uint64_t id); /* the consumer with this id, made when there is none; one reference */
/* The consumers that programs have described and nobody has configured. They live as long as nobody reaps. */
size_t ct_consumers_unknown(ct_consumer **found, size_t max);
void ct_consumer_configure(ct_consumer *consumer, void *route, const char *name, int policy, uint64_t every);
void ct_consumer_enable(ct_consumer *consumer, int enabled);
void ct_consumer_get_counts(const ct_consumer *consumer, uint64_t *offered, ct_counts *counts);
int ct_consumer_idle(const ct_consumer *consumer); /* whether all its events have been consumed or dropped */
void ct_consumer_free(ct_consumer *consumer);      /* when it was reaped and is idle */

unsigned char *ct_frame_bytes(ct_frame *frame);
ct_frame *ct_queue_take(int64_t timeout_us, int max); /* frames, linked, oldest first; NULL after the time-out */
void ct_queue_consumed(ct_frame *frame, int lent); /* the consumer has returned: makes room for producers, and frees the
                                                    * frame unless something still reads its bytes */
void ct_frame_free(ct_frame *frame);               /* of a lent one */
void ct_queue_wake(void);                          /* lets ct_queue_take return */
void ct_queue_get_stats(ct_queue_stats *stats);
void ct_queue_configure(uint64_t budget, int64_t timeout_ms); /* bytes for each device; -1: producers wait for ever */
/* Around fork. The child gets an empty queue: the events belong to the parent. */
void ct_queue_before_fork(void);
void ct_queue_after_fork(int in_child);
/* The process ends: what is emitted from now on is waited for, until no event has been consumed for the patience. */
void ct_queue_linger(int64_t patience_ms);
void ct_queue_close(void); /* later frames are dropped and counted; blocked producers go on */
int ct_queue_emit(ct_consumer *consumer, int32_t device, int32_t part, const void *header, size_t header_size,
                  const void *data, size_t size); /* CT_RESERVED: emitted */
void ct_queue_busy(char *text, size_t size); /* describes what the receiver is doing */

/* -- call.c: calls of host functions, from handlers to threads of Python's -------------------------------------- */
typedef struct ct_function {
  uint64_t id;
  void *route; /* for Python */
  char name[128];
  int64_t timeout_ms; /* -1: none */
} ct_function;

typedef struct ct_call {
  ct_function *function;
  void *bytes;   /* the frame: header and operands */
  uint64_t size; /* of the frame */
  int on_pool;   /* while the program waits, it may keep a thread of XLA's pool */
  int32_t device; /* local device ordinal; -1: unknown */
} ct_call;

/* Waits for a call. *alone: no other thread waits, so somebody must, before the host function runs. NULL: the thread is
 * not needed any more. What is taken must be given back to ct_call_finish or ct_call_fail. */
ct_call *ct_call_take(int *alone);
void *ct_call_take_bytes(ct_call *call); /* the frame becomes the caller's */
void ct_call_free_bytes(void *bytes);
/* The results, each in C order; elements of fewer than 8 bits take a byte. 0: nobody waits for them any more. */
int ct_call_finish(ct_call *call, int num_results, const void **data, const uint64_t *sizes);
int ct_call_fail(ct_call *call, const char *message); /* the program fails with this message */
int ct_call_set_on_pool(int value); /* the same of calls in programs that this thread starts; returns what it was */
void ct_call_close(int64_t patience_ms); /* the process ends: no call lasts longer than this from now on */
uint64_t ct_call_lost(char *name, size_t size); /* calls that had no answer then, and the function of one of them */

/* -- crc.c: checksums --------------------------------------------------------------------------------------------- */
/* 16 bytes whose CRC-32 from the register 0 is that of the data, of which `crc` came before; the size is a multiple of
 * 64 and not 0. 0: this processor cannot. */
int ct_crc32_fold(uint32_t crc, const void *data, size_t size, void *rest);

/* -- tap.c, operator.c: XLA FFI handlers, as addresses for jax.ffi ---------------------------------------------- */
void *ct_tap_instantiate_address(void);
void *ct_tap_execute_address(void);
void *ct_call_instantiate_address(void);
void *ct_call_execute_address(void);
void *ct_operator_instantiate_address(void);
void *ct_operator_execute_address(void);
void *ct_pointwise_instantiate_address(void);
void *ct_pointwise_execute_address(void);
void *ct_tap_type_id(void);
void *ct_tap_type_info(void);
void *ct_call_type_id(void);
void *ct_call_type_info(void);
void *ct_operator_type_id(void);
void *ct_operator_type_info(void);
void *ct_pointwise_type_id(void);
void *ct_pointwise_type_info(void);

/* libCEED is opened at run time, so its functions come as addresses. */
typedef struct ct_ceed_api {
  int (*vector_get_state)(void *vec, uint64_t *state);
  int (*vector_has_valid_array)(void *vec, bool *has_valid_array);
  int (*vector_get_array_write)(void *vec, int mem_type, void **array);
  int (*vector_restore_array)(void *vec, void **array);
  int (*qfunction_get_inner_context)(void *qf, void **context); /* borrowed, in every libCEED */
  int (*context_get_state)(void *context, uint64_t *state);
  int (*context_has_valid_data)(void *context, bool *has_valid_data);
  int (*vector_set_array)(void *vec, int mem_type, int copy_mode, void *array);
  int (*vector_take_array)(void *vec, int mem_type, void **array);
  int (*operator_apply)(void *op, void *in, void *out, void **request);
  int (*get_error_message)(void *ceed, const char **message);
  int (*reset_error_message)(void *ceed, const char **message);
  void **request_immediate;
  int scalar_size; /* bytes of a CeedScalar */
} ct_ceed_api;

/* Why libCEED left an operator or a QFunction locked; empty while it can be used. Python and the handler share it, under
 * the lock. */
typedef struct ct_poison {
  char text[1280];
} ct_poison;

/* Something that can change between two calls, and that libCEED would fail for in the middle of an application. */
typedef struct ct_condition {
  int kind;
  void *object;     /* by the kind: a vector, a vector, a QFunction, a ct_poison */
  const char *name; /* for messages */
  int (*take_status)(void); /* of a QFunction: what its last call that failed in this thread returned; or NULL */
} ct_condition;

#define CT_READABLE 0 /* the vector has data, and nobody is writing to it */
#define CT_WRITABLE 1 /* nobody has an array of the vector */
#define CT_CONTEXT 2  /* the QFunction's context, where it has one, has data, and nobody is writing to it */
#define CT_USABLE 3   /* not poisoned */

/* An operator as the handler calls it. The vectors belong to Python, which keeps them until the key is reaped. */
typedef struct ct_operator {
  const ct_ceed_api *api;
  ct_lock *lock;
  void *ceed, *op;
  void *active_in, *active_out; /* arguments of CeedOperatorApply */
  void *idle_op;    /* the operator without what is only there to be tapped, for when nobody listens; or NULL */
  uint8_t **wanted; /* whether somebody listens: one of these is not 0. Python's threads write them */
  int num_wanted;
  int num_in, num_out;
  void **vectors;   /* num_in inputs, then num_out outputs; NULL for an input that goes into a context, and for an
                     * output of one number that says whether `op` (1) or `idle_op` (0) was applied */
  void **contexts;  /* where such an input is copied to */
  int64_t *lengths; /* of inputs and outputs */
  ct_condition *conditions;
  int num_conditions;
  ct_poison *poison, *idle_poison; /* of `op`, of `idle_op` */
} ct_operator;

/* A compiled point function: a QFunction without a context. */
typedef struct ct_pointwise {
  uint64_t key;
  int (*function)(void *context, int num_points, const double *const *in, double *const *out);
  int num_in, num_out;
  int64_t *sizes; /* values for a point, of inputs and outputs */
} ct_pointwise;

/* CDEF END */

#endif
