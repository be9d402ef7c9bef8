#include "ceedtap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct ct_lock {
  pthread_mutex_t mutex;
  atomic_int refs;
};

ct_lock *ct_lock_new(void) {
  ct_lock *lock = malloc(sizeof *lock);
  if (!lock) return NULL;
  pthread_mutexattr_t attr;
  pthread_mutexattr_init(&attr);
  pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&lock->mutex, &attr);
  pthread_mutexattr_destroy(&attr);
  atomic_init(&lock->refs, 1);
  return lock;
}

void ct_lock_ref(ct_lock *lock) { atomic_fetch_add_explicit(&lock->refs, 1, memory_order_relaxed); }

void ct_lock_unref(ct_lock *lock) {
  /* acq_rel: the thread that frees sees everything that the other owners did. */
  if (atomic_fetch_sub_explicit(&lock->refs, 1, memory_order_acq_rel) != 1) return;
  pthread_mutex_destroy(&lock->mutex);
  free(lock);
}

void ct_lock_acquire(ct_lock *lock) { pthread_mutex_lock(&lock->mutex); }
int ct_lock_try_acquire(ct_lock *lock) { return pthread_mutex_trylock(&lock->mutex) == 0; }
void ct_lock_release(ct_lock *lock) { pthread_mutex_unlock(&lock->mutex); }
