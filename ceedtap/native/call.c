/* Calls of host functions from programs: the XLA FFI handler copies the operands into a frame (frame.h) and queues it,
 * a thread of Python's takes it, runs the host function and answers.
 *
 * No thread of XLA waits for the answer: the handler returns a future, and the program goes on where that is completed.
 * The one exception is Python's main thread, which must stay able to see a signal: when the program runs on it, the
 * handler waits there.
 *
 * A call ends once: by an answer, by its time-out, by a signal, or because the process ends. XLA's buffers are valid
 * until then and no longer; an answer that comes later is thrown away. */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "ceedtap.h"
#include "frame.h"
#include "signals.h"
#include "xla_ffi.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum {
  IDLE_MS = 10000,      /* after which a spare thread of Python's is let go */
  SPARE_THREADS = 2,    /* that are kept: with one caller at a time, one works and one waits */
};
static const int64_t NEVER = INT64_MAX;

typedef struct result {
  void *data;
  uint64_t count; /* elements */
  int bits;       /* of one */
} result;

typedef enum state {
  QUEUED,
  RUNNING,   /* a thread of Python's has it */
  ANSWERING, /* results are being copied: it cannot be ended by anything else */
  ENDED
} state;

typedef struct pending {
  ct_call call; /* what Python sees; first, so that the addresses are the same */
  struct pending *prev, *next; /* in the list of what programs wait for */
  struct pending *next_queued;
  state state;
  int refs;          /* the queue's or Python's, and the handler's when it waits */
  int64_t deadline;  /* CLOCK_MONOTONIC, nanoseconds */
  int closing;       /* the deadline is that of the end of the process */
  const XLA_FFI_Api *api;
  XLA_FFI_Future *future; /* NULL: the handler waits on `answered` */
  pthread_cond_t answered;
  XLA_FFI_Error *error;
  int num_results;
  result results[];
} pending;

static struct {
  pthread_mutex_t mutex;
  pthread_cond_t queued; /* a call has come, or Python's threads shall return */
  pthread_cond_t alarm;  /* a deadline has come that is earlier than those before */
  pending *open;         /* what programs wait for */
  pending *head, **tail; /* those of them that no thread has taken */
  int takers;            /* threads of Python's that wait */
  int timer_runs;
  int64_t alarm_at;    /* when the timer looks next */
  int64_t patience_ns; /* with calls when the process ends; -1: it does not end */
  uint64_t lost;       /* calls that were ended by that */
  char lost_name[128]; /* the host function of one of them */
} calls = {.mutex = PTHREAD_MUTEX_INITIALIZER, .alarm_at = INT64_MAX, .patience_ns = -1};

static void cond_init(pthread_cond_t *cond) {
  pthread_condattr_t attr;
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(cond, &attr);
  pthread_condattr_destroy(&attr);
}

static void calls_reset(void) {
  pthread_mutex_init(&calls.mutex, NULL);
  cond_init(&calls.queued);
  cond_init(&calls.alarm);
  calls.open = calls.head = NULL;
  calls.tail = &calls.head;
  calls.takers = calls.timer_runs = 0;
  calls.alarm_at = NEVER;
}

__attribute__((constructor)) static void calls_init(void) {
  calls_reset();
  /* A forked process has none of the threads, and what they were doing is not its business. */
  pthread_atfork(NULL, NULL, calls_reset);
}

/* Whether programs that this thread starts or continues may keep a thread of XLA from doing anything else. */
static __thread int on_pool;

int ct_call_set_on_pool(int value) {
  int before = on_pool;
  on_pool = value;
  return before;
}

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int wait_until(pthread_cond_t *cond, int64_t until) {
  if (until == NEVER) return pthread_cond_wait(cond, &calls.mutex);
  struct timespec time = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
  return pthread_cond_timedwait(cond, &calls.mutex, &time);
}

static void release(pending *p) {
  pthread_mutex_lock(&calls.mutex);
  int last = --p->refs == 0;
  pthread_mutex_unlock(&calls.mutex);
  if (!last) return;
  ct_registry_unref(ct_functions(), p->call.function->id);
  pthread_cond_destroy(&p->answered);
  free(p->call.bytes);
  free(p);
}

/* -- the end of a call ------------------------------------------------------------------------------------------- */

/* Takes the call out of the list of those that programs wait for; the lock is held. */
static void close_call(pending *p) {
  p->state = ENDED;
  *(p->prev ? &p->prev->next : &calls.open) = p->next;
  if (p->next) p->next->prev = p->prev;
}

/* Tells the program, once the call is closed. With a future the program may go on in this thread, to its end: the lock
 * must not be held. */
static void tell(pending *p, XLA_FFI_Error *error) {
  if (!p->future) {
    pthread_mutex_lock(&calls.mutex);
    p->error = error;
    p->future = (void *)p; /* answered: anything but NULL */
    pthread_cond_signal(&p->answered);
    pthread_mutex_unlock(&calls.mutex);
    return;
  }
  int before = ct_call_set_on_pool(p->call.on_pool);
  if (error) {
    XLA_FFI_Future_SetError_Args args = {XLA_FFI_Future_SetError_Args_STRUCT_SIZE, NULL, p->future, error};
    p->api->XLA_FFI_Future_SetError(&args);
  } else {
    XLA_FFI_Future_SetAvailable_Args args = {XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, NULL, p->future};
    p->api->XLA_FFI_Future_SetAvailable(&args);
  }
  ct_call_set_on_pool(before);
}

/* Ends a call from outside, unless its answer has come. The lock is held, and released for a while. */
static void end(pending *p, XLA_FFI_Error_Code code, const char *why) {
  if (p->state == ANSWERING || p->state == ENDED) return;
  int unqueue = p->state == QUEUED;
  if (unqueue) {
    pending **link = &calls.head;
    while (*link != p) link = &(*link)->next_queued;
    *link = p->next_queued;
    if (!*link) calls.tail = link;
  }
  close_call(p);
  if (!unqueue) p->refs++; /* Python may let go of it meanwhile */
  pthread_mutex_unlock(&calls.mutex);
  char text[512];
  snprintf(text, sizeof text, "ceedtap: host function `%s` %s", p->call.function->name, why);
  tell(p, ct_ffi_error(p->api, code, text));
  release(p);
  pthread_mutex_lock(&calls.mutex);
}

static void count_lost(const pending *p) {
  calls.lost++;
  memcpy(calls.lost_name, p->call.function->name, sizeof calls.lost_name);
}

static void end_late(pending *p) {
  if (p->closing) {
    count_lost(p);
    end(p, XLA_FFI_Error_Code_CANCELLED, "has not returned, and the process ends");
    return;
  }
  char text[160];
  snprintf(text, sizeof text, "has not returned within the time-out of %g s. It may still be running.",
           (double)p->call.function->timeout_ms / 1000);
  end(p, XLA_FFI_Error_Code_DEADLINE_EXCEEDED, text);
}

/* -- time-outs --------------------------------------------------------------------------------------------------- */

/* A thread of its own, and not Python's, which a host function may keep from running. */
static void *timer(void *_) {
  pthread_mutex_lock(&calls.mutex);
  for (;;) {
    int64_t now = now_ns(), next = NEVER;
    pending *late = NULL;
    for (pending *p = calls.open; p && !late; p = p->next) {
      if (p->state == ANSWERING) continue;
      if (p->deadline <= now) late = p;
      else if (p->deadline < next) next = p->deadline;
    }
    if (late) {
      end_late(late);
      continue;
    }
    calls.alarm_at = next;
    wait_until(&calls.alarm, next);
  }
  return NULL;
}

/* The lock is held. 0: there can be no timer. */
static int set_alarm(int64_t deadline) {
  if (!calls.timer_runs) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for Python's main thread */
    pthread_t thread;
    calls.timer_runs = pthread_create(&thread, NULL, timer, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (calls.timer_runs) pthread_detach(thread);
  } else if (deadline < calls.alarm_at) {
    pthread_cond_signal(&calls.alarm);
  }
  return calls.timer_runs;
}

/* Whether the end of the process ends the call. It does not when a thread of Python's waits: at the end, that is a
 * daemon, and one that leaves XLA's code when the interpreter has gone brings the process down. */
static int must_end(const pending *p) { return p->call.on_pool || !p->future; }

/* Sets the deadline; the lock is held. 0: there can be no timer. */
static int set_deadline(pending *p, int64_t now) {
  int64_t timeout_ms = p->call.function->timeout_ms;
  p->deadline = timeout_ms < 0 || calls.patience_ns == 0 ? NEVER : now + timeout_ms * 1000000;
  if (calls.patience_ns >= 0 && must_end(p) && now + calls.patience_ns < p->deadline) {
    p->deadline = now + calls.patience_ns;
    p->closing = 1;
  }
  return p->deadline == NEVER || set_alarm(p->deadline);
}

void ct_call_close(int64_t patience_ms) {
  pthread_mutex_lock(&calls.mutex);
  calls.patience_ns = patience_ms * 1000000;
  int64_t deadline = now_ns() + calls.patience_ns;
  for (pending *p = calls.open; p; p = p->next) {
    if (deadline >= p->deadline || !must_end(p)) continue;
    p->deadline = deadline;
    p->closing = 1;
    set_alarm(deadline);
  }
  if (patience_ms == 0) {
    /* Here and now: the timer might come too late. */
    for (pending *p = calls.open; p;) {
      if (p->state == ANSWERING || !must_end(p)) {
        p = p->next;
        continue;
      }
      end_late(p);
      p = calls.open;
    }
    for (pending *p = calls.open; p; p = p->next) {
      p->deadline = NEVER;
      if (p->state != ANSWERING) count_lost(p);
    }
    pthread_cond_broadcast(&calls.queued);
  }
  pthread_mutex_unlock(&calls.mutex);
}

uint64_t ct_call_lost(char *name, size_t size) {
  pthread_mutex_lock(&calls.mutex);
  uint64_t lost = calls.lost;
  snprintf(name, size, "%s", calls.lost_name);
  pthread_mutex_unlock(&calls.mutex);
  return lost;
}

/* -- Python's side ----------------------------------------------------------------------------------------------- */

ct_call *ct_call_take(int *alone) {
  pthread_mutex_lock(&calls.mutex);
  while (!calls.head && calls.patience_ns != 0) {
    calls.takers++;
    int rc = wait_until(&calls.queued, now_ns() + INT64_C(1000000) * IDLE_MS);
    calls.takers--;
    if (rc == ETIMEDOUT && !calls.head && calls.takers >= SPARE_THREADS) break;
  }
  pending *p = calls.head;
  if (p) {
    calls.head = p->next_queued;
    if (!calls.head) calls.tail = &calls.head;
    p->state = RUNNING;
  }
  *alone = calls.takers == 0;
  pthread_mutex_unlock(&calls.mutex);
  return p ? &p->call : NULL;
}

void *ct_call_take_bytes(ct_call *call) {
  void *bytes = call->bytes;
  call->bytes = NULL;
  return bytes;
}

void ct_call_free_bytes(void *bytes) { free(bytes); }

static int begin_answer(pending *p) {
  pthread_mutex_lock(&calls.mutex);
  int waited_for = p->state == RUNNING;
  if (waited_for) p->state = ANSWERING;
  pthread_mutex_unlock(&calls.mutex);
  return waited_for;
}

static void end_answer(pending *p, XLA_FFI_Error *error) {
  pthread_mutex_lock(&calls.mutex);
  close_call(p);
  pthread_mutex_unlock(&calls.mutex);
  tell(p, error);
}

static void copy_result(const result *to, const unsigned char *from) {
  if (to->bits >= 8) {
    if (to->count) memcpy(to->data, from, to->count * to->bits / 8);
    return;
  }
  unsigned char *bytes = to->data, mask = (1u << to->bits) - 1;
  memset(bytes, 0, (to->count * to->bits + 7) / 8);
  for (uint64_t i = 0; i < to->count; i++) bytes[i * to->bits / 8] |= (from[i] & mask) << (i * to->bits % 8);
}

int ct_call_finish(ct_call *call, int num_results, const void **data, const uint64_t *sizes) {
  pending *p = (pending *)call;
  int waited_for = begin_answer(p);
  if (waited_for) {
    int fits = num_results == p->num_results;
    for (int i = 0; i < num_results && fits; i++)
      fits = sizes[i] == p->results[i].count * (p->results[i].bits < 8 ? 1 : p->results[i].bits / 8);
    for (int i = 0; i < num_results && fits; i++) copy_result(&p->results[i], data[i]);
    end_answer(p, fits ? NULL
                       : ct_ffi_error(p->api, XLA_FFI_Error_Code_INTERNAL,
                                      "ceedtap: the results of a host function have other sizes than the program's"));
  }
  release(p);
  return waited_for;
}

int ct_call_fail(ct_call *call, const char *message) {
  pending *p = (pending *)call;
  int waited_for = begin_answer(p);
  if (waited_for) end_answer(p, ct_ffi_error(p->api, XLA_FFI_Error_Code_INTERNAL, message));
  release(p);
  return waited_for;
}

/* -- signals ----------------------------------------------------------------------------------------------------- */

/* Waits for the answer in the handler, on Python's main thread. */
static XLA_FFI_Error *wait_here(pending *p) {
  pthread_mutex_lock(&calls.mutex);
  while (!p->future) {
    if (wait_until(&p->answered, now_ns() + INT64_C(1000000) * CT_SIGNAL_POLL_MS) != ETIMEDOUT || p->future) continue;
    pthread_mutex_unlock(&calls.mutex);
    int stop = ct_run_signal_handlers();
    pthread_mutex_lock(&calls.mutex);
    if (stop) end(p, XLA_FFI_Error_Code_CANCELLED, "was interrupted by a signal. It may still be running.");
  }
  XLA_FFI_Error *error = p->error;
  pthread_mutex_unlock(&calls.mutex);
  release(p);
  return error;
}

/* -- the handler ------------------------------------------------------------------------------------------------- */

/* The state of the handler is the function itself; an executable holds one reference to it for each call. */
static void state_free(void *object) { ct_registry_unref(ct_functions(), ((ct_function *)object)->id); }

static XLA_FFI_TypeId type_id = {0};
static XLA_FFI_TypeInfo type_info = {XLA_FFI_TypeInfo_STRUCT_SIZE, NULL, state_free};
void *ct_call_type_id(void) { return &type_id; }
void *ct_call_type_info(void) { return &type_info; }

static XLA_FFI_Error *bad_header(const XLA_FFI_CallFrame *frame) {
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                      "ceedtap: a call without a header of version 2; was this program made by another ceedtap?");
}

static XLA_FFI_Error *no_memory(const XLA_FFI_CallFrame *frame) {
  return ct_ffi_error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "ceedtap: no memory to call a host function");
}

static XLA_FFI_Error *instantiate(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, &type_id)) return NULL;
  const XLA_FFI_Array *header = ct_frame_header(frame);
  if (!header) return bad_header(frame);
  uint64_t id = ct_frame_id(header);
  if (!ct_registry_ref(ct_functions(), id))
    return ct_ffi_error(frame->api, XLA_FFI_Error_Code_FAILED_PRECONDITION,
                        "ceedtap: the program calls a host function that this process does not have. The program was "
                        "compiled in another process; trace it here.");
  return ct_ffi_set_state(frame, &type_id, ct_registry_payload(ct_functions(), id));
}

static int num_results(const XLA_FFI_CallFrame *frame) {
  int n = 0;
  for (int64_t i = 0; i < frame->rets.size; i++) {
    const XLA_FFI_Buffer *ret = frame->rets.rets[i];
    n += ret->dtype != XLA_FFI_DataType_TOKEN;
  }
  return n;
}

/* A call with a copy of the operands. NULL: there is no memory. */
static pending *call_new(const XLA_FFI_CallFrame *frame, const XLA_FFI_Array *header, ct_function *function) {
  int n = num_results(frame);
  pending *p = calloc(1, sizeof *p + n * sizeof *p->results);
  if (!p) return NULL;
  void *bytes = NULL;
  p->call.size = ct_frame_size(frame, header);
  if (posix_memalign(&bytes, 64, p->call.size)) {
    free(p);
    return NULL;
  }
  ct_frame_fill(bytes, frame, header);
  p->call.bytes = bytes;
  p->call.function = function;
  p->call.device = ct_ffi_device(frame);
  p->call.on_pool = on_pool || !PyGILState_GetThisThreadState();
  p->api = frame->api;
  cond_init(&p->answered);
  for (int64_t i = 0; i < frame->rets.size; i++) {
    const XLA_FFI_Buffer *ret = frame->rets.rets[i];
    if (ret->dtype == XLA_FFI_DataType_TOKEN) continue;
    uint64_t count = ct_ffi_num_elements(ret);
    p->results[p->num_results++] = (result){.data = ret->data, .count = count, .bits = ct_ffi_num_bits(ret->dtype)};
  }
  ct_registry_ref(ct_functions(), function->id); /* for as long as the host function runs, whatever the program does */
  p->refs = 1;
  return p;
}

static XLA_FFI_Error *execute(XLA_FFI_CallFrame *frame) {
  if (ct_ffi_metadata(frame, NULL)) return NULL;
  const XLA_FFI_Array *header = ct_frame_header(frame);
  if (!header) return bad_header(frame);
  void *function;
  XLA_FFI_Error *error = ct_ffi_get_state(frame, &type_id, &function);
  if (error) return error;
  pending *p = call_new(frame, header, function);
  if (!p) return no_memory(frame);
  int waits = ct_on_main_thread();
  if (!waits) {
    XLA_FFI_Future_Create_Args args = {XLA_FFI_Future_Create_Args_STRUCT_SIZE, NULL, NULL};
    error = frame->api->XLA_FFI_Future_Create(&args);
    if (error) {
      release(p);
      return error;
    }
    p->future = args.future;
  }
  p->refs += waits;
  XLA_FFI_Future *future = p->future; /* once the lock is released, the call may be over */

  pthread_mutex_lock(&calls.mutex);
  p->next = calls.open;
  if (p->next) p->next->prev = p;
  calls.open = p;
  *calls.tail = p;
  calls.tail = &p->next_queued;
  if (calls.patience_ns == 0 && must_end(p)) p->closing = 1, end_late(p);
  else if (!set_deadline(p, now_ns())) end(p, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "has a time-out, but no timer");
  else if (calls.takers) pthread_cond_signal(&calls.queued);
  pthread_mutex_unlock(&calls.mutex);

  if (waits) return wait_here(p);
  frame->future = future;
  return NULL;
}

void *ct_call_instantiate_address(void) { return (void *)instantiate; }
void *ct_call_execute_address(void) { return (void *)execute; }
