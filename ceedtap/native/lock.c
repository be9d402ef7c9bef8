/* A recursive lock that survives fork: what a thread of the parent held is lost in the child, and taking it is an error
 * there, not a wait for a thread that does not exist. */
#include "ceedtap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

struct ct_lock {
  pthread_mutex_t mutex; /* not recursive: that kind knows its owner by a number that is another one in the child */
  void *_Atomic owner;   /* address of `self` in the thread that has it, which stays the same in the child */
  int depth;             /* of the owner */
  atomic_int refs;
  bool lost; /* a thread of the parent had it at the fork */
  ct_lock *previous, *next;
};

const char ct_lock_lost[] =
    "ceedtap: this process was forked while another thread was inside of libCEED with this Ceed, whose objects may be "
    "half changed here. Make a new Ceed in the child, or start processes by spawn or forkserver";

static _Thread_local char self;
static ct_lock *all; /* for fork */
static pthread_mutex_t all_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&all_mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&all_mutex); }

static void after_fork_in_child(void) {
  pthread_mutex_init(&all_mutex, NULL);
  for (ct_lock *lock = all; lock; lock = lock->next) {
    if (atomic_load(&lock->owner) == &self) continue; /* by this thread, which lives on */
    if (pthread_mutex_trylock(&lock->mutex) == 0) pthread_mutex_unlock(&lock->mutex);
    else lock->lost = true;
  }
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); }

ct_lock *ct_lock_new(void) {
  ct_lock *lock = calloc(1, sizeof *lock);
  if (!lock) return NULL;
  pthread_mutex_init(&lock->mutex, NULL);
  atomic_init(&lock->refs, 1);
  pthread_once(&once, watch_forks);
  pthread_mutex_lock(&all_mutex);
  lock->next = all;
  if (all) all->previous = lock;
  all = lock;
  pthread_mutex_unlock(&all_mutex);
  return lock;
}

void ct_lock_ref(ct_lock *lock) { atomic_fetch_add_explicit(&lock->refs, 1, memory_order_relaxed); }

void ct_lock_unref(ct_lock *lock) {
  /* acq_rel: the thread that frees sees everything that the other owners did. */
  if (atomic_fetch_sub_explicit(&lock->refs, 1, memory_order_acq_rel) != 1) return;
  pthread_mutex_lock(&all_mutex);
  if (lock->previous) lock->previous->next = lock->next;
  else all = lock->next;
  if (lock->next) lock->next->previous = lock->previous;
  pthread_mutex_unlock(&all_mutex);
  pthread_mutex_destroy(&lock->mutex);
  free(lock);
}

static int mine(ct_lock *lock) {
  if (atomic_load_explicit(&lock->owner, memory_order_relaxed) != &self) return 0;
  lock->depth++;
  return 1;
}

static int take(ct_lock *lock) {
  atomic_store_explicit(&lock->owner, &self, memory_order_relaxed);
  lock->depth = 1;
  return 1;
}

int ct_lock_acquire(ct_lock *lock) {
  if (mine(lock)) return 1;
  if (lock->lost) return 0;
  pthread_mutex_lock(&lock->mutex);
  return take(lock);
}

int ct_lock_try_acquire(ct_lock *lock) {
  if (mine(lock)) return 1;
  return !lock->lost && pthread_mutex_trylock(&lock->mutex) == 0 && take(lock);
}

void ct_lock_release(ct_lock *lock) {
  if (--lock->depth) return;
  atomic_store_explicit(&lock->owner, NULL, memory_order_relaxed);
  pthread_mutex_unlock(&lock->mutex);
}
